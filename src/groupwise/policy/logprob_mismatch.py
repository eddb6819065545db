"""Comparison of the sampler's log-probs with the trainer's.

Axes: B sequences of this rank, T completion tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import nn

from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import BackendError
from groupwise.policy.introspection import evaluation_mode
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import TokenBatch

logger = logging.getLogger(__name__)

#: Largest mean |difference| of log-probs due to rounding, by dtype of the trainer's matrix products. As a
#: measure: autocast and bfloat16 weights of the same 135M-parameter model differ by 0.05.
TOLERANCES = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

#: Completions that are compared on every rank.
_NUM_ROWS = 4


class LogprobMismatchCheck:
    """Comparison of a few completions' log-probs under the trainer with those from the sampler.

    Checks the first generation, the second (after the first update, which detects missing weight syncs), and
    then every ``every`` generations.

    Args:
        computer: its head and precision are those of the compared log-probs.
        accelerator: of the trainer; all ranks compare rows, and their sum decides.
        action: "off", "warn" or "error".
        every: generations between two checks; the first two generations are always checked.
    """

    def __init__(
        self,
        computer: LogprobComputer,
        accelerator: Accelerator,
        action: str = "warn",
        every: int = 20,
    ) -> None:
        self.computer, self.accelerator = computer, accelerator
        self.action, self.every = action, every
        self.generations = 0

    def check(
        self, model: nn.Module, batch: TokenBatch, fresh: Sequence[bool], *, truncation: float = 0.0
    ) -> Metrics:
        """Compare one generation if it is due. All ranks call this for every generation.

        Args:
            fresh: B flags, True for rows sampled from the current weights; others are not compared.
            truncation: the most by which the sampler's log-prob of a token exceeds the trainer's because the
                sampler truncates its distribution without reporting the sampling mask; such differences do
                not count.

        Returns:
            ``sampling/logprob_mismatch``, the mean |difference| per token in nats; empty if nothing was
            compared.

        Raises:
            BackendError: the difference exceeds the tolerance, with ``action="error"``.
        """
        self.generations += 1
        due = self.generations <= 2 or self.generations % self.every == 0
        if self.action == "off" or not due:
            return {}
        batch = _some_rows(batch, fresh)
        sampler_BT = batch.sampler_logps_BT
        if sampler_BT is None:  # this rank has none, but other ranks may
            sampler_BT = torch.full_like(batch.old_logps_BT, torch.nan)
        # Rows with old log-probs come from an earlier policy.
        compared_BT = batch.loss_mask_BT * ~sampler_BT.isnan() * batch.old_logps_BT.isnan()
        tokens = self._total(compared_BT)
        if not tokens:
            return {}
        with evaluation_mode(model), torch.no_grad():
            trainer_BT = compute_padded_logprobs(
                model, batch, self.computer.head, with_entropy=False
            ).logps_BT
        excess_BT = sampler_BT.nan_to_num() - trainer_BT
        unexplained_BT = excess_BT - excess_BT.clamp(0.0, truncation)
        gap = self._total(unexplained_BT.abs() * compared_BT) / tokens
        tolerance = TOLERANCES[self.computer.mixed_precision or next(model.parameters()).dtype]
        if not gap <= tolerance:  # also for NaN
            self._report(gap, tolerance)
        return {"sampling/logprob_mismatch": Mean(gap)}

    def _report(self, gap: float, tolerance: float) -> None:
        message = (
            f"the sampler's log-probs differ from the trainer's by {gap:.2g} nats per token on average "
            f"(rounding accounts for at most {tolerance:.2g}). If it grows by the step, weights are not "
            "synced; otherwise give both sides one temperature (vLLM: --logprobs-mode "
            "processed_logprobs), top_p, top_k and min_p, chat template and dtype"
        )
        if self.action == "error":
            raise BackendError(f"{message} (logprob_mismatch_check='warn' continues training)")
        logger.warning("%s", message)

    def _total(self, values_BT: torch.Tensor) -> float:
        return self.accelerator.reduce(values_BT.sum(dtype=torch.float32), "sum").item()


def _some_rows(batch: TokenBatch, fresh: Sequence[bool]) -> TokenBatch:
    """Select ``_NUM_ROWS`` evenly spaced fresh rows, which then belong to different prompts."""
    found = [row for row, is_fresh in enumerate(fresh) if is_fresh]
    if not found:  # this rank joins the collectives with a row that is not compared
        return replace(batch.select([0]), sampler_logps_BT=None)
    places = {round(i * (len(found) - 1) / (_NUM_ROWS - 1)) for i in range(min(_NUM_ROWS, len(found)))}
    return batch.select([found[place] for place in sorted(places)])
