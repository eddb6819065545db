"""Log-prob computation in the sequence layout of the run.

The layout is chosen once and compared with the padded layout on the first rows. If they differ, the run uses
the padded layout; if ``sequence_layout`` names the layout, it ends with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from groupwise.compat.accelerate import is_out_of_memory
from groupwise.errors import ConfigError
from groupwise.policy.attention import supports_packing
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.introspection import base_model
from groupwise.policy.layouts.packed import (
    PackedSequences,
    compute_packed_logprobs,
    pack_sequences,
)
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.records import LogprobOutput, MicroBatch, TokenBatch
from groupwise.records.fast_paths import FastPath
from groupwise.records.images import has_images

logger = logging.getLogger(__name__)


def forked_layout() -> ModuleType:
    """Import the layout of models with states: most runs do not need it."""
    from groupwise.policy.layouts import forked

    return forked


def model_rows(batch: TokenBatch) -> Any:
    """Return the rows that the model computes for rollouts of several rows."""
    from groupwise.policy.layouts.contexts import ModelRows, split_contexts

    packed = batch.packed if isinstance(batch, MicroBatch) else None
    return packed if isinstance(packed, ModelRows) else split_contexts(batch)


class LogprobComputer:
    """Compute log-probs of completions in the layout of the run.

    Args:
        any_rank: returns True if its argument is true on a rank; called once per check, by all ranks.
        largest: returns the largest of the arguments of all ranks, which call it before the passes of a
            micro-batch to run as many; None: ranks need not run as many.
        sharded: parameters are sharded (FSDP, DeepSpeed); the check then calls the wrapped model and compares
            no gradients.
        mixed_precision: dtype of matrix products under autocast; None: that of the weights.
        explicit: the user chose the layout by its name: a failed check is an error, not a fallback.
        varlen: packed attention runs in a varlen kernel; if the check fails, in blocks.

    Attributes:
        paths: states of layout and head.
        fell_back: the check has failed, so that "auto" became "padded" during the run.
    """

    def __init__(
        self,
        layout: str,
        head: LogprobHead,
        any_rank: Callable[[bool], bool] = bool,
        largest: Callable[[int], int] | None = None,
        *,
        sharded: bool = False,
        mixed_precision: torch.dtype | None = None,
        explicit: bool = False,
        varlen: bool = False,
    ) -> None:
        self.layout = layout
        self.head = head
        self.any_rank, self.largest = any_rank, largest
        self.sharded = sharded
        self.mixed_precision = mixed_precision
        self.explicit = explicit
        self.fell_back, self.varlen = False, varlen
        self.checked = self.checked_images = layout == "padded"
        self.paths = [FastPath("layout", layout), FastPath("head", head.name)]

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """Pack the batch if the layout needs it; its log-probs are then computed without a device sync."""
        if batch.contexts is not None:
            parts = model_rows(batch)
            packed = None if self.layout == "padded" else self._pack(parts.rows, parts)
            return replace(batch, packed=replace(parts, packed=packed))
        return batch if self.layout == "padded" else replace(batch, packed=self._pack(batch))

    def _pack(self, batch: TokenBatch, parts: Any = None) -> Any:
        """Return the rows of ``batch`` in the layout; ``parts``, if given, are those of rollouts."""
        packed = getattr(batch if parts is None else parts, "packed", None)
        if isinstance(packed, PackedSequences) and not self.varlen:  # packed before the check failed
            packed = replace(packed, attention=replace(packed.attention, varlen=None))
        if packed is not None:
            return packed
        if self.layout == "forked":
            return forked_layout().fork_sequences(batch)
        if parts is not None and self.layout == "shared_prefix":
            return parts.pack_tree(varlen=self.varlen)
        return pack_sequences(batch, shared=self.layout == "shared_prefix", varlen=self.varlen)

    def _compute(
        self, model: nn.Module, batch: TokenBatch, *, with_entropy: bool, parts: Any = None
    ) -> LogprobOutput:
        """Compute log-probs in a layout other than "padded"."""
        packed, head = self._pack(batch, parts), self.head
        if self.layout != "forked":
            return compute_packed_logprobs(model, batch, packed, head, with_entropy=with_entropy)
        passes = self.largest(packed.num_passes()) if self.largest is not None else 0
        compute = forked_layout().compute_forked_logprobs
        output: LogprobOutput = compute(
            model, batch, packed, head, with_entropy=with_entropy, num_passes=passes
        )
        return output

    def _supports(self, model: nn.Module) -> bool:
        """Return True if ``model`` takes the layout of the run; installs the attention hook if it is needed.

        Other models are created later, such as a reference; those that do not take it are padded.
        """
        if self.layout == "forked":
            return forked_layout().cannot_fork(model) is None
        shared = self.layout == "shared_prefix"
        return self.layout != "padded" and supports_packing(base_model(model), shared=shared)

    def __call__(
        self, model: nn.Module, batch: TokenBatch, *, with_entropy: bool, with_aux_loss: bool = False
    ) -> LogprobOutput:
        """Compute log-probs (and entropies) of the completion tokens under ``model``.

        The first call with a layout other than "padded" compares it with the padded layout.

        Args:
            with_aux_loss: also return the balancing loss; only with the padded layout.

        Returns:
            log-probs and entropies (B, T), float32.

        Raises:
            ConfigError: an explicit layout fails its check.
        """
        parts = None if batch.contexts is None else model_rows(batch)  # of rollouts of several rows
        batch = batch if parts is None else parts.rows
        can_pack, with_images = self._supports(model), has_images(batch.images)
        if can_pack and not (self.checked and (self.checked_images or not with_images)):
            self._check(model, batch)
            # Not earlier: after an out-of-memory error the other ranks still wait in `any_rank`.
            self.checked, self.checked_images = True, with_images or self.layout == "padded"
        if self.layout == "padded" or not can_pack:
            output = compute_padded_logprobs(
                model, batch, self.head, with_entropy=with_entropy, with_aux_loss=with_aux_loss
            )
        else:
            output = self._compute(model, batch, with_entropy=with_entropy, parts=parts)
        return output if parts is None else parts.join(output)

    def _check(self, model: nn.Module, batch: TokenBatch) -> None:
        """Compare the layout with the padded layout on a few rows; fall back to it, or raise ConfigError."""
        from groupwise.policy.layouts.check import check_layout  # once in a run

        cause: Exception | None = None
        dtype = self.mixed_precision or next(model.parameters()).dtype

        def compute(model: nn.Module, rows: TokenBatch) -> torch.Tensor:
            return self._compute(model, rows, with_entropy=False).logps_BT

        try:
            check = check_layout(model, batch, self.head, compute, dtype=dtype, sharded=self.sharded)
            passed, message = check.passed, f"does not reproduce this model's log-probs: {check}"
        except Exception as error:  # the layout's forward of an unknown model, in any way
            if isinstance(error, ConfigError) or (
                isinstance(error, RuntimeError) and is_out_of_memory(error)
            ):
                raise
            passed, message, cause = False, f"cannot be checked: {type(error).__name__}: {error}", error
        # Images of other ranks may come earlier than the first ones here: no collective then.
        if passed if self.checked else not self.any_rank(not passed):
            return
        message = f"{self.layout!r} {'fails its check on another rank' if passed else message}"
        if self.varlen:
            logger.warning("varlen attention of sequence_layout=%s; attention is computed in blocks", message)
            self.varlen, self.paths[2:] = False, [FastPath("attention", "blocks", message, True)]
            return self._check(model, batch)
        if self.explicit or self.checked:
            auto = "" if self.checked else ", or 'auto', which falls back to it with a warning"
            raise ConfigError(f"sequence_layout={message}; use 'padded'{auto}") from cause
        logger.warning("sequence_layout=%s; using sequence_layout='padded'", message)
        self.layout, self.paths[0] = "padded", FastPath("layout", "padded", message, True)
        self.fell_back = True
