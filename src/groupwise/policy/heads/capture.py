"""Computation at the language-model head, inside the model's own forward pass: logits are never materialized.

In :func:`forward_at_head` the head module computes on the hidden states that it receives. Its hooks run as
usual, so frameworks that shard, gather, move or cast the head's weights keep working. What the head returns
instead of logits carries the gradients of its outputs through the rest of the model's forward, of which
wrappers (FSDP) see nothing unusual::

    hidden (B, K, H) ──> head module ──> carrier (B, K, n + 1) ──> model's own ──> output.logits (B, K, n + 1)
                             │             [0, …, 0, probe]      scale, softcap      │  column i: value 0,
                             │                                                       │  gradient of output i
                             └──> outputs: n tensors (B, K) or scalars ──> detach ──(+)──> loss ──> backward

The sum has the values of the outputs, since the columns are zero, and its gradient takes the way back through
the model's output, as the gradient of logits would. The last column shows what the model does to its logits.

Axes: B sequences, K positions that the model passes to its head, N = B · K, H hidden size, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from groupwise.compat.accelerate import forward_attribute
from groupwise.errors import ConfigError
from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.dense import logps_from_logits
from groupwise.policy.heads.weights import HeadWeights, head_weights, output_head
from groupwise.policy.introspection import configs_with_router_logits, unwrapped
from groupwise.records.sampling_mask import SamplingMask

#: Arguments of a causal LM's forward.
ModelInputs = dict[str, Any]
Outputs = tuple["torch.Tensor | None", ...]
#: ``(hidden_BKH, head with live weights)`` -> tensors (B, K) or scalars; None entries stay None.
HeadComputation = Callable[[torch.Tensor, HeadWeights], Outputs]

_PROBE = 8.0  # distinguishes softcaps and scales, also in bfloat16
#: Heads whose model passed the check of its logit transform, with the checked scale and softcap.
_checked: WeakKeyDictionary[nn.Module, tuple[float, float | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LogprobHead:
    """Kind and precision of the log-prob head of a run.

    name: "dense" uses the model's own logits, "chunked" replaces the output projection.
    fp32: project in float32.
    """

    name: str = "chunked"
    fp32: bool = False


def forward_logprobs(
    model: nn.Module,
    inputs: ModelInputs,
    targets_BK: torch.Tensor,
    head: LogprobHead,
    temperature: float = 1.0,
    *,
    with_entropy: bool,
    with_aux_loss: bool = False,
    router_weight_S: torch.Tensor | None = None,
    kept: SamplingMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute log-probs and entropies at the K positions that ``inputs["logits_to_keep"]`` selects.

    The model is called as a whole, so that wrappers (DDP, accelerate, DeepSpeed) see every forward pass.

    Args:
        inputs: arguments of its forward. An index of positions (K,) may repeat some, for a batch of one row.
        targets_BK: the token predicted at each kept position, int64.
        with_aux_loss: also return the balancing loss of a mixture-of-experts model.
        router_weight_S: return router sums instead, in which the S tokens of the pass have these weights.
        kept: tokens of the truncated distribution at the B · K positions; None: all tokens.

    Returns:
        log-probs (B, K) and entropies (B, K), float32, and the balancing loss, a scalar, or the router sums
        (2E + 1,) of ``policy.experts``; the latter two are None unless requested.
    """
    if head.name == "dense":
        # The model selects: on several CPU threads, gradients at a repeated position vary in the last bit.
        output, aux_loss = call_model(model, inputs, with_aux_loss, router_weight_S)
        logps, entropy = logps_from_logits(output.logits, targets_BK, temperature, with_entropy, kept)
        return logps, entropy, aux_loss
    to_keep = inputs.get("logits_to_keep")
    positions_K = to_keep if isinstance(to_keep, torch.Tensor) else None  # of the one row, with repetitions
    if positions_K is not None:
        # The head selects. The backward of the model's own indexing sums the gradients of a repeated position
        # (a shared prompt's last token) in the order in which threads of a CPU reach them.
        inputs = {**inputs, "logits_to_keep": 0}  # all S positions, without a copy

    def compute(hidden_BKH: torch.Tensor, weights: HeadWeights) -> Outputs:
        if positions_K is not None:
            # (1, S, H) to (1, K, H); the backward of an embedding sums in a fixed order.
            hidden_BKH = F.embedding(positions_K, hidden_BKH[0]).unsqueeze(0)
        given, wanted = tuple(hidden_BKH.shape[:-1]), tuple(targets_BK.shape)
        assert given == wanted, f"the head received positions {given} for targets {wanted}"
        rows = hidden_BKH.flatten(0, -2), weights, targets_BK.flatten(), temperature
        logps_N, entropy_N = chunked_head(*rows, with_entropy=with_entropy, kept=kept)
        return logps_N.view(wanted), None if entropy_N is None else entropy_N.view(wanted)

    options: Any = {"with_aux_loss": with_aux_loss, "router_weight_S": router_weight_S}
    outputs, aux_loss = forward_at_head(model, inputs, head, compute, **options)
    return cast(torch.Tensor, outputs[0]), outputs[1], aux_loss


def forward_at_head(
    model: nn.Module,
    inputs: ModelInputs,
    head: LogprobHead,
    compute: HeadComputation,
    *,
    with_aux_loss: bool = False,
    router_weight_S: torch.Tensor | None = None,
) -> tuple[Outputs, torch.Tensor | None]:
    """Run one forward pass in which the head runs ``compute`` instead of projecting to logits.

    Weight and bias are read from the module at its call, since sharding frameworks replace them, and the
    active adapters of the head are added to them in the graph, so that they get their gradients.

    Args:
        compute: function of the hidden states (B, K, H) of every position that the model passes to its head,
            and of the head's weights.

    Returns:
        outputs of ``compute``, bitwise, with their gradients routed through the output of the model: wrappers
        register hooks on it (FSDP its backward). And the balancing loss, router sums or None.

    Raises:
        ConfigError: the model's transform of its logits differs from ``HeadWeights``, so that log-probs would
            not be the model's. The first pass of a model compares it, which waits for the device.
    """
    inner = unwrapped(model)
    module, captured = output_head(inner), list[tuple[HeadWeights, Outputs]]()

    @torch.compiler.disable  # writes to `captured`, so a compiled model calls it eagerly
    def forward(hidden_BKH: torch.Tensor) -> torch.Tensor:
        weights = head_weights(inner, head.fp32)
        outputs = compute(hidden_BKH, weights)
        captured.append((weights, outputs))
        return _carrier(outputs, hidden_BKH.shape[:-1])

    name = forward_attribute(module)
    before = vars(module).get(name)  # an instance's own, such as accelerate's; None: that of the class
    vars(module)[name] = forward
    try:
        output, aux_loss = call_model(model, inputs, with_aux_loss, router_weight_S)
    finally:
        del vars(module)[name]
        if before is not None:
            vars(module)[name] = before
    assert captured, "the model's forward did not call its head"
    weights, outputs = captured[-1]
    _check_transform(module, weights, output.logits)
    # Columns of exact zeros: adding them changes no value and ties the graph to the model's output.
    columns = iter(output.logits.unbind(-1))
    routed = (None if each is None else _routed(each, next(columns), weights.scale) for each in outputs)
    return tuple(routed), aux_loss


def _routed(value: torch.Tensor, column_BK: torch.Tensor, scale: float) -> torch.Tensor:
    carried_BK = column_BK.to(value.dtype) / scale
    return value.detach() + (carried_BK if value.dim() else carried_BK.flatten()[0])


def _check_transform(module: nn.Module, weights: HeadWeights, model_logits: torch.Tensor) -> None:
    described = (weights.scale, weights.softcap)
    if not model_logits.numel() or _checked.get(module) == described:
        return
    *zeros, probe = model_logits.detach()[0, 0].tolist()
    expected = weights.shape_logits(torch.tensor(_PROBE, dtype=torch.float64)).item()
    rounding = 16 * torch.finfo(model_logits.dtype).eps
    if any(zeros) or abs(probe - expected) > rounding * abs(expected):
        raise ConfigError(
            f"the model's forward turns a head output of {_PROBE} into {probe:.6g} and "
            f"0 into {zeros[0]:.6g}, while the head is described by scale={weights.scale}, "
            f"softcap={weights.softcap} ({expected:.6g} and 0): log-probs would not be the model's; "
            f"set logit_scale (or logits_scaling) and final_logit_softcapping of its config accordingly."
        )
    _checked[module] = described


def call_model(
    model: nn.Module,
    inputs: ModelInputs,
    with_aux_loss: bool = False,
    router_weight_S: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor | None]:
    """Run one forward pass. Returns its output, and the balancing loss, router sums or None.

    ``inputs["routing"]``, if there, are a ``BatchRouting`` and the places of the tokens of the pass in it.
    """
    with_aux_loss |= router_weight_S is not None
    inputs = {**inputs}
    routing, index_S = inputs.pop("routing", (None, None))
    replayed: Any = nullcontext() if routing is None else routing.in_pass(model, index_S)
    chosen = with_aux_loss or configs_with_router_logits(model)  # only experts have the argument
    given = {**inputs, "use_cache": False, **({"output_router_logits": with_aux_loss} if chosen else {})}
    balanced: Any = nullcontext()
    if router_weight_S is not None:
        from groupwise.policy.experts import balancing_sums

        balanced = balancing_sums(model, router_weight_S)
    with replayed, balanced:
        output = model(**given)
    return output, getattr(output, "aux_loss", None) if with_aux_loss else None


def _carrier(outputs: Outputs, shape: torch.Size) -> torch.Tensor:
    """Build the head's output (B, K, n + 1): one column of zeros per output that carries its gradient.

    ``shape`` is (B, K) of scalar outputs.

    A scale followed by a softcap maps zero to zero with slope `scale`: the model's processing of its logits
    loses no digit of the outputs, and a division inverts it. The constant column measures the transform.
    """
    zeros = [_ZeroWithGradient.apply(value) for value in outputs if value is not None]
    zeros = [column if column.dim() else column.expand(shape) for column in zeros]
    return torch.stack([*zeros, torch.full_like(zeros[0], _PROBE)], dim=-1)


class _ZeroWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad
