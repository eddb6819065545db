"""Experience to micro-batches of an accumulation window."""

from __future__ import annotations

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.budget import MicroBatchBudget, micro_batch_budget
from groupwise.data.exchange import all_to_all_objects
from groupwise.data.rebalancing import WindowStats, rebalance, rows_needing_logps
from groupwise.policy.reference import Reference
from groupwise.records import MicroBatch, TokenBatch, align_advantages


class BatchingMixin:
    """Split the rows of an accumulation window over micro-batches and ranks."""

    args: GRPOConfig
    accelerator: Accelerator
    reference: Reference
    aux_loss_enabled: bool

    @property
    def micro_batch_budget(self) -> MicroBatchBudget:
        """Limits of a micro-batch, and which rows may be skipped, under the present settings."""
        return micro_batch_budget(
            self, self.args, aux_loss=self.aux_loss_enabled, has_reference=self.reference.exists
        )

    def rebalance_micro_batches(
        self, window: list[MicroBatch], layout: str
    ) -> tuple[list[MicroBatch | None], WindowStats]:
        """Skip rows without gradient and balance the others over micro-batches and ranks; same update.

        Args:
            window: this rank's micro-batches of one optimizer step, with token weights.
            layout: ``padded``, ``packed`` or ``shared_prefix``.

        Returns:
            as many entries as before, None first where fewer micro-batches suffice; and the work saved.
        """
        # Every rank receives the lengths of all rows, then only the rows that it trains on: the plan is the
        # same on every rank, and follows from lengths and gradients alone.
        all_to_all = partial(all_to_all_objects, device=self.accelerator.device)
        return rebalance(window, layout, self.micro_batch_budget, gather_object, all_to_all)

    def select_rows_for_logprobs(
        self, tokens: TokenBatch, advantages: torch.Tensor, micro_batch_size: int
    ) -> list[int]:
        """Return the rows that need old and reference log-probs: those that rebalancing will keep."""
        # (B,) -> (B, 1); (B, T') with process rewards -> (B, T)
        advantages_BX = align_advantages(advantages, tokens).to(tokens.loss_mask_BT.device)
        # A row that rebalancing will skip has no loss to compare with: 2 forwards per row are saved.
        return rows_needing_logps(tokens, advantages_BX, self.micro_batch_budget, micro_batch_size)
