"""The layout of a run: chosen once, checked against the padded one on the first rows, then always used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from groupwise.errors import ConfigError
from groupwise.policy.layouts.forward import HeadSettings, base_model, unwrapped
from groupwise.policy.layouts.packed import Stream
from groupwise.policy.layouts.packed_forward import (
    compute_packed_logprobs,
    pack_sequences,
    supports_packing,
    unsupported,
)
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.records import LogprobOutput, MicroBatch, TokenBatch

logger = logging.getLogger(__name__)

#: Largest mean difference of log-probs, and relative difference of a gradient, that rounding explains.
_TOLERANCES = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (2e-4, 2e-3),
    torch.float16: (2e-2, 1e-1),
    torch.bfloat16: (5e-2, 2e-1),
}

_CHECKED = 32  # tokens of a prompt, and of a completion, that the check computes


def choose_layout(wanted: str, model: Any, *, group_size: int, with_aux_loss: bool) -> str:
    """The layout that ``wanted`` stands for with this model.

    Args:
        wanted: the setting ``sequence_layout``.
        group_size: completions per prompt.
        with_aux_loss: a balancing loss over all tokens is trained on; it counts a prompt once per completion.

    Raises:
        ConfigError: the layout was asked for by name and would not be right for this model.
    """
    if wanted == "padded":
        return wanted
    reason: str | None = "its balancing loss counts padded sequences"
    if not with_aux_loss:
        reason = unsupported(model, shared=wanted == "shared_prefix")
    if reason is None:
        best = (
            "shared_prefix"
            if group_size > 1 and supports_packing(base_model(model), shared=True)
            else "packed"
        )
        chosen = best if wanted == "auto" else wanted
        logger.info("sequence_layout: %s", chosen)
        return chosen
    if wanted != "auto":
        raise ConfigError(
            f"sequence_layout={wanted!r} is not possible with {type(model).__name__}: {reason}; "
            f"use 'padded', or 'auto', which takes what is possible"
        )
    logger.info("sequence_layout: padded, because of the model: %s", reason)
    return "padded"


class LogprobComputer:
    """Log-probs of completions, in the layout of the run.

    Args:
        layout: from :func:`choose_layout`.
        head: how hidden states become log-probs.
        agree: whether something is true on every rank; called once, by all ranks.
        sharded: parameters are spread over ranks, so that only a full step can have gradients.
        mixed_precision: dtype of the products where it is not that of the weights.
    """

    def __init__(
        self,
        layout: str,
        head: HeadSettings,
        agree: Callable[[bool], bool] = bool,
        *,
        sharded: bool = False,
        mixed_precision: torch.dtype | None = None,
    ) -> None:
        self.layout = layout
        self.head = head
        self.agree = agree
        self.sharded = sharded
        self.mixed_precision = mixed_precision
        self.checked = layout == "padded"

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """Pack the batch if the layout needs it; computing its log-probs then waits for nothing."""
        if self.layout == "padded" or batch.packed is not None:
            return batch
        return replace(batch, packed=self._pack(batch))

    def _pack(self, batch: TokenBatch) -> Stream:
        if isinstance(batch, MicroBatch) and isinstance(batch.packed, Stream):
            return batch.packed
        return pack_sequences(batch, shared=self.layout == "shared_prefix")

    def __call__(
        self, model: Any, batch: TokenBatch, *, with_entropy: bool, with_aux_loss: bool = False
    ) -> LogprobOutput:
        """Compute log-probs (and entropies), (B, T), of the completion tokens under ``model``."""
        # Hook the attention of a model that came later, such as a reference, before it is compared.
        shared = self.layout == "shared_prefix"
        opened = self.layout != "padded" and supports_packing(base_model(model), shared=shared)
        if opened and not self.checked:
            self._check(model, batch)
            self.checked = True  # not before: where memory ran out here, the other ranks still wait to agree
        if self.layout == "padded" or not opened:
            return compute_padded_logprobs(
                model, batch, self.head, with_entropy=with_entropy, with_aux_loss=with_aux_loss
            )
        return compute_packed_logprobs(model, batch, self._pack(batch), self.head, with_entropy=with_entropy)

    def _check(self, model: Any, batch: TokenBatch) -> None:
        """Compare the layout with the padded one on a few rows, and fall back to that where they differ."""
        last = len(batch) - 1
        few = batch.select(sorted({0, min(1, last), max(last - 1, 0), last})).shortened(_CHECKED, _CHECKED)
        gap, gradient_gap = self._gaps(model, few)
        dtype = self.mixed_precision or next(model.parameters()).dtype
        allowed, gradient_allowed = _TOLERANCES[dtype]
        fine = gap <= allowed and gradient_gap <= gradient_allowed  # false for NaN
        if self.agree(fine):
            return
        logger.warning(
            "sequence_layout=%s does not give this model's log-probs: on %d rows they differ from those of "
            "the padded layout by %.2g on average (allowed for %s: %.2g), a gradient by %.2g of its norm "
            "(allowed: %.2g); using sequence_layout='padded'",
            *(self.layout, len(few), gap, dtype, allowed, gradient_gap, gradient_allowed),
        )
        self.layout = "padded"

    def _gaps(self, model: Any, few: TokenBatch) -> tuple[float, float]:
        """Mean difference of the log-probs, and relative difference of the first parameters' gradients."""
        # Gradients are taken below DDP, which expects every one of its forwards to end in its backward.
        scored = model if self.sharded else unwrapped(model)
        probes = [] if self.sharded else [p for p in scored.parameters() if p.requires_grad][:2]
        was_training = model.training
        model.eval()
        try:
            with torch.set_grad_enabled(bool(probes)):
                padded = compute_padded_logprobs(scored, few, self.head, with_entropy=False).logps_BT
                streamed = compute_packed_logprobs(
                    scored, few, self._pack(few), self.head, with_entropy=False
                ).logps_BT
                mask = few.completion_mask_BT
                one, other = ((logps * mask).sum() for logps in (padded, streamed))
                gap = ((padded - streamed).abs() * mask).sum() / mask.sum().clamp(min=1)
                gradient_gap = _gradient_gap(one, other, probes)
        finally:
            model.train(was_training)
        return gap.item(), gradient_gap


def _gradient_gap(one: torch.Tensor, other: torch.Tensor, probes: list[torch.Tensor]) -> float:
    """Norm of the difference of two scalars' gradients, relative to the gradient of the first."""
    if not probes:
        return 0.0
    pair = [torch.autograd.grad(scalar, probes, allow_unused=True) for scalar in (one, other)]
    flat = [torch.cat([g.flatten().float() for g in grads if g is not None]) for grads in pair]
    return ((flat[0] - flat[1]).norm() / flat[0].norm().clamp(min=1e-12)).item()
