"""Check of a sequence layout on a few rows: its errors are compared with those of the padded layout.

Both are measured against the padded layout in float32, so that the rounding of half precision counts as
rounding and not as a difference of the layouts.

Axes: B rows, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.introspection import base_model, evaluation_mode, unwrapped
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.records import ImageInputs, TokenBatch
from groupwise.records.images import has_images
from groupwise.tokenization.images import image_token_id

#: Log-probs (B, T) under a model in some layout, differentiable.
ComputeLogps = Callable[[nn.Module, TokenBatch], torch.Tensor]

_TOKENS = 32  # of a prompt and of a completion
_FACTOR = 2.0  # allowed error of the layout in errors of the padded layout
_HALF_PRECISION = (torch.float16, torch.bfloat16)


#: Errors against a float32 computation: mean |error| of log-probs in nats; error of a gradient relative to
#: its norm, 0 if none was computed.
Errors = tuple[float, float]
#: Errors that are allowed beyond those of the padded layout, by dtype of the matrix products.
_ALLOWED: dict[torch.dtype, Errors] = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (2e-4, 2e-3),
    torch.float16: (2e-3, 1e-2),
    torch.bfloat16: (5e-3, 2e-2),
}


@dataclass(frozen=True)
class LayoutCheck:
    """Result of :func:`check_layout`.

    layout, padded: errors of the layout and of the padded layout.
    dtype: dtype of the matrix products.
    num_tokens: number of compared tokens.
    """

    layout: Errors
    padded: Errors
    dtype: torch.dtype
    num_tokens: int

    @property
    def allowed(self) -> list[float]:
        """Largest errors with which the layout passes."""
        pairs = zip(self.padded, _ALLOWED[self.dtype], strict=True)
        return [_FACTOR * error + beyond for error, beyond in pairs]

    def __str__(self) -> str:
        logps, gradient = (
            f"{mine:.2g} (padded layout: {theirs:.2g}, allowed: {allowed:.2g})"
            for mine, theirs, allowed in zip(self.layout, self.padded, self.allowed, strict=True)
        )
        return (
            f"on {self.num_tokens} tokens in {self.dtype} their mean error in nats is {logps}, and the "
            f"relative error of a gradient {gradient}"
        )

    @property
    def passed(self) -> bool:
        """True if no error exceeds the allowed one; NaN exceeds every number."""
        return all(error <= allowed for error, allowed in zip(self.layout, self.allowed, strict=True))


def check_layout(
    model: nn.Module,
    batch: TokenBatch,
    head: LogprobHead,
    compute: ComputeLogps,
    *,
    dtype: torch.dtype,
    sharded: bool,
) -> LayoutCheck:
    """Compare ``compute`` with the padded layout and with float32 on a few rows of ``batch``.

    Args:
        model: the policy; gradients of its parameters are not changed.
        dtype: dtype of the matrix products; the float32 computation is skipped if it is not half precision.
        sharded: parameters are sharded: the wrapped model is called, equally often on every rank, and
            gradients are not compared.

    Raises:
        RuntimeError: the model does not run in float32.
    """
    image_token = image_token_id(base_model(model).config)
    rows = probe_rows(batch, image_token)  # at most 4 rows of 32 + 32 tokens, more with images
    # Below DDP: it expects a backward pass after each of its forward passes with gradients.
    inner = model if sharded else unwrapped(model)
    # Two weights near the input: their gradients pass all layers. Not an embedding: five tensors of its size
    # may take more memory than a micro-batch.
    tables = {id(module.weight) for module in inner.modules() if isinstance(module, nn.Embedding)}
    trained = [p for p in inner.parameters() if p.requires_grad and id(p) not in tables]
    probes = [] if sharded else trained[:2]

    def padded(_model: nn.Module, _rows: TokenBatch, head: LogprobHead = head) -> torch.Tensor:
        return compute_padded_logprobs(_model, _rows, head, with_entropy=False).logps_BT

    def exact(_model: nn.Module, _rows: TokenBatch) -> torch.Tensor:
        with float32_computation(_rows.prompt_ids_BL.device.type):
            return padded(_model, _rows, replace(head, fp32=True))

    measure = partial(_measure, inner, probes)
    # Prompts with images are whole, and no layer is recomputed in evaluation mode: the activations of one
    # padded row at a time, beside those of the layout, which computes a prompt once.
    each = [rows.select([row]) for row in range(len(rows))] if has_images(rows.images) else [rows]
    with evaluation_mode(model):
        of_padded, of_layout = measure(padded, each), measure(compute, [rows])
        # A third forward only where rounding is large.
        true_logps_BT, true_gradient = measure(exact, each) if dtype in _HALF_PRECISION else of_padded
    num_tokens = int(rows.completion_mask_BT.sum())

    def errors(logps_BT: torch.Tensor, gradient: torch.Tensor) -> Errors:
        norm = true_gradient.norm().clamp(min=1e-12)  # 0 for a frozen model
        of_logps = (logps_BT - true_logps_BT).abs().sum() / num_tokens
        return of_logps.item(), ((gradient - true_gradient).norm() / norm).item()

    return LayoutCheck(errors(*of_layout), errors(*of_padded), dtype, num_tokens)


def _measure(
    model: nn.Module, probes: list[nn.Parameter], compute_logps: ComputeLogps, parts: list[TokenBatch]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs (B, T), zero on padding, and the gradient of their sum to the probes, flat."""
    logps, gradient = [], torch.zeros(())
    for part in parts:
        with torch.set_grad_enabled(bool(probes)):
            logps_BT = compute_logps(model, part) * part.completion_mask_BT  # padding holds any value
            total = logps_BT.sum()
        logps.append(F.pad(logps_BT.detach(), (0, _TOKENS - logps_BT.shape[1])))
        if total.requires_grad:  # not that of a text, if the vision tower alone is trained
            of_part = torch.autograd.grad(total, probes, materialize_grads=True)
            gradient = gradient.to(logps_BT) + torch.cat([each.flatten().float() for each in of_part])
    return torch.cat(logps), gradient


def probe_rows(batch: TokenBatch, image_token: int | None = None) -> TokenBatch:
    """Return at most four rows, shortened, their completions continued with tokens of these rows.

    Completions of a few tokens would leave the decision to their rounding. The lengths differ by row. Prompts
    with images come first and stay whole; rows with images in their completion are left out, or lose them.
    """
    inputs, whole = batch.images or (ImageInputs(),) * len(batch), list(range(len(batch)))
    if batch.images is not None:  # only then lengths are read: text does not wait for them
        lengths = batch.prompt_mask_BL.sum(-1).tolist()
        whole = [row for row, length in enumerate(lengths) if inputs[row].end < length]
    rows = sorted(whole or range(len(batch)), key=lambda row: not inputs[row].arrays)
    last = len(rows) - 1
    few = batch.select([rows[index] for index in sorted({0, min(1, last), max(last - 1, 0), last})])
    images = few.images if whole else None
    few = few.shortened(few.prompt_ids_BL.shape[1] if has_images(images) else _TOKENS, _TOKENS)
    prompt_mask_BL, mask_BT = few.prompt_mask_BL.bool(), few.completion_mask_BT.bool()
    # All real tokens of these rows, flat.
    found = torch.cat([few.prompt_ids_BL[prompt_mask_BL], few.completion_ids_BT[mask_BT]])
    found = found if image_token is None else found[found != image_token]
    step_T = torch.arange(_TOKENS, device=found.device)
    row_B1 = torch.arange(len(few), device=found.device).unsqueeze(1)
    filler_BT = found[(step_T * (2 * row_B1 + 1) + row_B1) % len(found)]  # in another order in every row
    missing = _TOKENS - mask_BT.shape[1]
    ids_BT = torch.where(F.pad(mask_BT, (0, missing)), F.pad(few.completion_ids_BT, (0, missing)), filler_BT)
    lengths_BT = (step_T < _TOKENS - 3 * row_B1).long()  # 32, 29, 26 and 23 tokens  # (B, T), T = 32
    return TokenBatch(
        prompt_ids_BL=few.prompt_ids_BL,
        prompt_mask_BL=few.prompt_mask_BL,
        completion_ids_BT=ids_BT,
        completion_mask_BT=lengths_BT,
        loss_mask_BT=lengths_BT,
        group_ids_B=few.group_ids_B,
        old_logps_BT=torch.full(ids_BT.shape, torch.nan, device=ids_BT.device),
        sampler=batch.sampler,
        images=images,
    )


@contextmanager
def float32_computation(device_type: str) -> Iterator[None]:
    """Context manager that computes a model of any precision in float32, without a copy of its weights.

    Gradients flow to the weights as usual; the backward pass may run outside.

    Args:
        device_type: device on which autocast is switched off.
    """
    mode = _Float32(device_type)
    hooks = torch.autograd.graph.saved_tensors_hooks(mode.pack, _unpack)
    with mode, hooks if torch.is_grad_enabled() else nullcontext():
        yield


#: Functions that need arguments of one dtype, or that autocast computes in half precision; by name, because
#: one operation has several functions. Arithmetic promotes to float32 by itself.
_CONVERTED = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"),
        *("grouped_mm", "_grouped_mm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
        *("layer_norm", "rms_norm", "group_norm", "multi_head_attention_forward"),
    }
)


class _Float32(TorchFunctionMode):
    """Conversion of half-precision arguments to float32, one function call at a time, without autocast."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        #: Weights of the running call, with their float32 copies.
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "embedding":  # the rows that it selects, not the whole table
            return self._convert(func(*args, **kwargs))
        if name not in _CONVERTED:
            return func(*args, **kwargs)
        args = [self._convert(value) for value in args]
        kwargs = {key: self._convert(value) for key, value in kwargs.items()}
        try:
            with torch.autocast(self.device_type, enabled=False):
                return func(*args, **kwargs)
        finally:
            self._weights = []

    def _convert(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in _HALF_PRECISION:
            return value
        copy = value.float()  # differentiable: the gradient reaches the half-precision weight
        if value.is_leaf:
            self._weights.append((value, copy))
        return copy

    def pack(self, saved: torch.Tensor) -> Any:
        """Save the weight instead of its float32 copy, with the view of it that the backward pass needs."""
        for weight, copy in self._weights:
            if saved.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr():
                return weight, saved.size(), saved.stride(), saved.storage_offset()
        return saved


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    weight, size, stride, offset = packed
    return weight.detach().float().as_strided(size, stride, offset)
