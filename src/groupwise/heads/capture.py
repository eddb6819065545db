"""Log-probs out of a causal language model's own forward, whose logits are then never made.

While `score_at_head` is active the model's head module scores the hidden states it receives. Its hooks run as always,
so frameworks that shard, gather, move or cast the head's weights see an ordinary call.

Axes: B sequences, K scored positions per sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from groupwise.errors import ConfigError
from groupwise.heads.weights import HeadWeights, output_head

Head = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]

_PROBE = 8.0  # large enough to tell one softcap or scale from another, also in bfloat16
_ACTIVE = "_groupwise_scoring"


@dataclass
class CapturedScores:
    """What the head computed during the forward; filled once the model has run.

    Attributes:
        logps: (B, K) log-probs of the targets, float32.
        entropy: (B, K) entropy, float32, or None when it was not asked for.
    """

    head: HeadWeights
    logps: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def read(self, model_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores, with their gradients routed through what the model returned.

        Wrappers that act on a model's outputs (FSDP registers its backward there) need the loss to depend on them.
        The values are those the head computed, bit for bit, whatever the model did to its "logits" afterwards.

        Args:
            model_logits: `outputs.logits` of the forward that ran inside the context.

        Returns:
            `logps` and `entropy`, shape (B, K).

        Raises:
            ConfigError: the model transforms its logits in a way `HeadWeights` does not describe, so that the
                log-probs would not be the model's.
        """
        assert self.logps is not None, "the model's forward did not run inside score_at_head"
        carried = model_logits.to(self.logps.dtype) / self.head.scale
        self._check_transform(model_logits)
        # The carried columns are exactly zero: adding them changes no value and ties the graph to the output.
        logps = self.logps.detach() + carried[..., 0]
        return logps, None if self.entropy is None else self.entropy.detach() + carried[..., 1]

    def _check_transform(self, model_logits: torch.Tensor) -> None:
        if not model_logits.numel():
            return
        zero_logp, zero_entropy, probe = model_logits.detach()[0, 0].double().tolist()
        expected = self.head.shape_logits(torch.tensor(_PROBE, dtype=torch.float64)).item()
        rounding = 4 * torch.finfo(model_logits.dtype).eps
        if zero_logp or zero_entropy or abs(probe - expected) > rounding * abs(expected):
            raise ConfigError(
                f"the model's forward turns a head output of {_PROBE} into {probe:.6g} and 0 into {zero_logp:.6g}, "
                f"while its config says scale={self.head.scale}, softcap={self.head.softcap} ({expected:.6g} and 0): "
                f'it changes its logits in a way log-prob heads do not know; pass logprob_head="dense" with the '
                f"model's own logits, or set the scale and the softcap in its config."
            )


@contextmanager
def score_at_head(
    model: Any,
    head_fn: Head,
    head: HeadWeights,
    targets_BK: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> Iterator[CapturedScores]:
    """Make the model's head return scores of `targets_BK` in place of logits, inside the `with` block.

    The head scores every position the model passes to it, so `targets_BK[:, k]` is the token that follows kept position
    k. For the last C tokens of a sequence call the model with `logits_to_keep=C + 1`, give targets of width C + 1 whose
    last column is any valid id (nothing follows the last token), and drop the last column of the result:

        targets = torch.cat([ids[:, -C:], ids[:, -1:]], dim=1)
        with score_at_head(model, chunked_head, head_weights(model), targets) as captured:
            output = wrapped_model(input_ids=ids, attention_mask=mask, logits_to_keep=C + 1, use_cache=False)
        logps, entropy = captured.read(output.logits)
        logps = logps[:, :-1]

    Weight and bias are read from the module at the call, since sharding frameworks exchange them; `head` gives the
    scale, the softcap and the precision. Several forwards may run inside one block; the last one counts.

    Args:
        model: the unwrapped transformers model (or PEFT model) whose head is taken over; calling a wrapper around it
            (DDP, FSDP, an engine) inside the block is fine.
        head_fn: `dense_head` or `chunked_head`.
        head: from `head_weights(model)`.
        targets_BK: token ids in [0, V), one per kept position.
        temperature: positive divisor of the logits.
        with_entropy: also compute the entropy.

    Raises:
        RuntimeError: the model is already being scored; the context does not nest.
    """
    module = output_head(model)
    if _ACTIVE in module.__dict__:
        raise RuntimeError("score_at_head is already active on this model; leave its block before entering another")
    captured = CapturedScores(head)

    def forward(hidden_BKH: torch.Tensor) -> torch.Tensor:
        assert hidden_BKH.shape[:-1] == targets_BK.shape, (
            f"the head received positions {tuple(hidden_BKH.shape[:-1])} for targets {tuple(targets_BK.shape)}"
        )
        live = replace(head, weight_VH=module.weight, bias_V=getattr(module, "bias", None))
        logps_N, entropy_N = head_fn(
            hidden_BKH.flatten(0, -2), live, targets_BK.flatten(), temperature, with_entropy=with_entropy
        )
        captured.logps = logps_N.view(targets_BK.shape)
        captured.entropy = None if entropy_N is None else entropy_N.view(targets_BK.shape)
        return _carrier(captured.logps, captured.entropy)

    # accelerate's device hooks replace `forward` by a wrapper and keep the original beside it.
    slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    missing = object()
    before = module.__dict__.get(slot, missing)
    object.__setattr__(module, _ACTIVE, True)
    object.__setattr__(module, slot, forward)
    try:
        yield captured
    finally:
        _restore(module, slot, None if before is missing else before)


def _restore(module: nn.Module, slot: str, before: Any) -> None:
    module.__dict__.pop(_ACTIVE)
    if before is None:
        module.__dict__.pop(slot)
    else:
        object.__setattr__(module, slot, before)


def _carrier(logps_BK: torch.Tensor, entropy_BK: torch.Tensor | None) -> torch.Tensor:
    """(B, K, 3): zeros that pass gradients to the log-probs and the entropy, and a constant that shows the transform.

    At zero, a scale followed by a softcap gives zero with slope `scale`, so the model's processing of its output
    loses no digit of the scores and is undone by a division.
    """
    zero_logps = _ZeroWithGradient.apply(logps_BK)
    zero_entropy = torch.zeros_like(logps_BK) if entropy_BK is None else _ZeroWithGradient.apply(entropy_BK)
    return torch.stack([zero_logps, zero_entropy, torch.full_like(logps_BK, _PROBE)], dim=-1)


class _ZeroWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
