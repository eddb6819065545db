"""Log-probs out of a causal language model's own forward, whose logits are then never made.

While `score_at_head` is active the model's head module scores the hidden states it receives. Its hooks run
as always, so frameworks that shard, gather, move or cast the head's weights see an ordinary call.

Axes: B sequences, K scored positions per sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from groupwise.errors import ConfigError
from groupwise.policy.heads.weights import HeadWeights, output_head

Head = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]

_PROBE = 8.0  # large enough to tell one softcap or scale from another, also in bfloat16
_ACTIVE = "_groupwise_scoring"
#: Head modules whose model was seen to transform its logits as described, by scale and softcap.
_checked: WeakKeyDictionary[torch.nn.Module, tuple[float, float | None]] = WeakKeyDictionary()


@dataclass
class CapturedScores:
    """What the head computed during the forward; filled once the model has run.

    Attributes:
        logps: (B, K) log-probs of the targets, float32.
        entropy: (B, K) entropy, float32, or None when it was not asked for.
    """

    head: HeadWeights
    module: torch.nn.Module
    logps: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def read(self, model_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores, with their gradients routed through what the model returned.

        Wrappers that act on a model's outputs (FSDP registers its backward there) need the loss to depend on
        them. The values are those the head computed, bit for bit, whatever the model did to its "logits".
        What it did is compared with the head's description at the first reading of a model only: a comparison
        waits for the device.

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
        described = (self.head.scale, self.head.softcap)
        if not model_logits.numel() or _checked.get(self.module) == described:
            return
        zero_logp, zero_entropy, probe = model_logits.detach()[0, 0].double().tolist()
        expected = self.head.shape_logits(torch.tensor(_PROBE, dtype=torch.float64)).item()
        rounding = 16 * torch.finfo(model_logits.dtype).eps
        if zero_logp or zero_entropy or abs(probe - expected) > rounding * abs(expected):
            raise ConfigError(
                f"the model's forward turns a head output of {_PROBE} into {probe:.6g} and "
                f"0 into {zero_logp:.6g}, while the head is described by scale={self.head.scale}, "
                f"softcap={self.head.softcap} ({expected:.6g} and 0): log-probs would not be the model's; "
                f"set logit_scale (or logits_scaling) and final_logit_softcapping of its config accordingly."
            )
        _checked[self.module] = described


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

    The head scores every position the model passes to it: `targets_BK[:, k]` is the token that follows kept
    position k. For the last C tokens of a sequence call the model with `logits_to_keep=C + 1`, give targets
    of width C + 1 whose last column is any valid id (nothing follows the last token), and drop that column:

        targets = torch.cat([ids[:, -C:], ids[:, -1:]], dim=1)
        with score_at_head(model, chunked_head, head_weights(model), targets) as captured:
            output = wrapped_model(input_ids=ids, attention_mask=mask, logits_to_keep=C + 1, use_cache=False)
        logps, entropy = captured.read(output.logits)
        logps = logps[:, :-1]

    Weight and bias are read from the module at the call, since sharding frameworks exchange them; `head`
    gives the scale, the softcap and the precision. Of several forwards inside one block the last one counts.

    Args:
        model: the unwrapped transformers model (or PEFT model) whose head is taken over; calling a wrapper
            around it (DDP, FSDP, an engine) inside the block is fine.
        head_fn: `dense_head` or `chunked_head`.
        head: from `head_weights(model)`.
        targets_BK: token ids in [0, V), one per kept position.
        temperature: positive divisor of the logits.
        with_entropy: also compute the entropy.

    Raises:
        RuntimeError: the model is already being scored; the context does not nest.
    """
    module = output_head(model)
    if _ACTIVE in vars(module):
        raise RuntimeError("score_at_head is already active on this model; leave that block first")
    captured = CapturedScores(head, module)

    @torch.compiler.disable  # called as it is by a compiled model: what it writes down has to stay visible
    def forward(hidden_BKH: torch.Tensor) -> torch.Tensor:
        given, wanted = tuple(hidden_BKH.shape[:-1]), tuple(targets_BK.shape)
        assert given == wanted, f"the head received positions {given} for targets {wanted}"
        live = replace(head, weight_VH=module.weight, bias_V=getattr(module, "bias", None))
        rows = hidden_BKH.flatten(0, -2), live, targets_BK.flatten(), temperature
        logps_N, entropy_N = head_fn(*rows, with_entropy=with_entropy)
        captured.logps = logps_N.view(wanted)
        captured.entropy = None if entropy_N is None else entropy_N.view(wanted)
        return _carrier(captured.logps, captured.entropy)

    with _forward_replaced(module, forward):
        yield captured


@contextmanager
def _forward_replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    # accelerate's device hooks replace `forward` by a wrapper and keep the original beside it.
    slot = "_old_forward" if "_old_forward" in vars(module) else "forward"
    before = vars(module).get(slot)
    vars(module).update({_ACTIVE: True, slot: forward})
    try:
        yield
    finally:
        del vars(module)[_ACTIVE]
        if before is None:
            del vars(module)[slot]
        else:
            vars(module)[slot] = before


def _carrier(logps_BK: torch.Tensor, entropy_BK: torch.Tensor | None) -> torch.Tensor:
    """(B, K, 3): zeros that pass gradients to log-probs and entropy, and a constant that shows the transform.

    At zero, a scale followed by a softcap gives zero with slope `scale`, so the model's processing of its
    output loses no digit of the scores and is undone by a division.
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
