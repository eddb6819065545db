"""Check of a sequence layout on a few rows, against the model's own forward on each of them alone.

The reference is what a user of the model would compute: one row without padding, the model's own positions,
attention and head, no cache, no gradient checkpoints. Errors are those against a float32 computation, so that
the rounding of half precision counts as rounding and not as a difference of the layouts.

Axes: B rows, S tokens of a row, T completion tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from groupwise.compat.accelerate import is_out_of_memory
from groupwise.core.padding import length_mask, pad_sequences
from groupwise.errors import ConfigError
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.introspection import base_model, evaluation_mode, plain_logps, unwrapped
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.records import ImageInputs, TokenBatch
from groupwise.records.fast_paths import FastPath
from groupwise.records.images import has_images, join_images
from groupwise.records.tensors import shape_of
from groupwise.tokenization.images import image_token_id

logger = logging.getLogger(__name__)

#: Log-probs (B, T) under a model in some layout, or its balancing loss, a scalar; differentiable.
Compute = Callable[[nn.Module, TokenBatch], torch.Tensor]

_TOKENS = 32  # of a prompt and of a completion
_FACTOR = 2.0  # allowed error of the layout in errors of the model's own forward
_HALF_PRECISION = (torch.float16, torch.bfloat16)


#: Errors against a float32 computation: mean |error| of log-probs in nats; error of a gradient relative to
#: its norm, 0 if none was computed.
Errors = tuple[float, float]
#: Errors that are allowed beyond those of the model's own forward, by dtype of the matrix products.
_ALLOWED: dict[torch.dtype, Errors] = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (2e-4, 2e-3),
    torch.float16: (2e-3, 1e-2),
    torch.bfloat16: (5e-3, 2e-2),
}


class RowsAlone:
    """Log-probs of a few rows by the model's own forward, with which layouts are compared.

    Args:
        model: the policy; gradients of its parameters are not changed.
        batch: rows of the run.
        dtype: dtype of the matrix products; the float32 computation is skipped if it is not half precision.
        sharded: parameters are sharded: the wrapped model is called, equally often on every rank, and
            gradients are not compared.
        evaluation: compare in evaluation mode alone, without gradient checkpoints; as many forwards on every
            rank.
        longer: tokens that some compared rows exceed, as of a sliding window; 0: all are short.
        with_aux_loss: compare the balancing loss of a mixture of experts, too.

    Attributes:
        moved: mean change in nats of the log-probs before the last token of a row if that token is another
            one, for a causal model no more than rounding.
        noise: largest difference in nats of two forwards in training mode.
        random: layouts are compared in evaluation mode, because the forward of training is another one.
        balancing_loss: of the padded model on these rows; None if it is not compared, or there is none.

    Raises:
        RuntimeError: the model does not run in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: TokenBatch,
        *,
        dtype: torch.dtype,
        sharded: bool,
        evaluation: bool = False,
        longer: int = 0,
        with_aux_loss: bool = False,
    ) -> None:
        # 3 rows of 32 + 32 tokens, more with images; the first is a neighbour of those that are compared.
        self.rows = probe_rows(batch, image_token_id(base_model(model).config), longer)
        self.model, self.dtype = model, dtype
        # Below DDP: it expects a backward pass after each of its forward passes with gradients.
        self.inner = model if sharded else unwrapped(model)
        # Two weights near the input, whose gradients pass all layers, and the vectors of every layer (norms,
        # biases). Not an embedding: five tensors of its size may take more memory than a micro-batch.
        tables = {id(module.weight) for module in self.inner.modules() if isinstance(module, nn.Embedding)}
        trained = [p for p in self.inner.parameters() if p.requires_grad and id(p) not in tables]
        vectors = [parameter for parameter in trained[2:] if parameter.dim() == 1]
        self.probes = [] if sharded else [*trained[:2], *vectors]
        self.num_tokens = int(self.rows.loss_mask_BT.sum())
        # In reverse, so that what a model keeps of earlier rows (RoPE of type "dynamic") is not the same.
        each = [self.rows.select([row]) for row in (2, 1)]
        with evaluation_mode(model):
            plain = self._measure(_alone, each)  # (B, T), and a gradient
            # A further forward only where rounding is large.
            exact = self._measure(_in_float32, each) if dtype in _HALF_PRECISION else plain
        # (3, T), zeros for the neighbour.
        self.exact, own = ((F.pad(of[0].flip(0), (0, 0, 1, 0)), of[1]) for of in (exact, plain))
        self.alone = self._errors(own)
        self.balancing_loss: Any = None
        if with_aux_loss:
            options: Any = {"with_entropy": False, "with_aux_loss": True}
            with evaluation_mode(model), torch.no_grad():  # routers may add noise in training
                padded = compute_padded_logprobs(self.inner, self.rows, LogprobHead("dense"), **options)
            self.balancing_loss = padded.aux_loss
        trained_1T, again_1T, evaluated_1T = self._with_another_end(each[1])
        plain_1T = plain[0][1:, : trained_1T.shape[1]]
        self.moved = (evaluated_1T - plain_1T).abs().mean().item()
        self.noise = (trained_1T - again_1T).abs().max().item()
        # Dropout of an adapter that adds 0 yet is in its gradient alone.
        parts = self.inner.modules()
        dropout = any("Dropout" in type(part).__name__ and getattr(part, "p", 0) for part in parts)
        same = (trained_1T - plain_1T).abs().mean().item() <= _ALLOWED[dtype][0]
        self.random = evaluation or sharded or dropout or not same

    def _with_another_end(self, row: TokenBatch) -> list[torch.Tensor]:
        """Compute the log-probs (1, T - 1) before the last token of a row if that is another one.

        Returns:
            those of two forwards in training mode and of one in evaluation mode, whatever the rows.
        """
        last_1 = row.completion_ids_BT[:, -1]
        others = row.completion_ids_BT[0]
        other = others[(others != last_1).long().argmax()]  # the same one where all tokens are equal
        changed = replace(
            row, completion_ids_BT=torch.cat([row.completion_ids_BT[:, :-1], other.view(1, 1)], 1)
        )
        logps: list[torch.Tensor] = []
        for training, times in ((True, 2), (False, 1)):
            with _mode(self.model, training), torch.no_grad():
                logps += [_alone(self.inner, changed)[:, :-1] for _ in range(times)]
        return logps

    def problem(self, compute: Compute) -> str:
        """Return the errors of ``compute`` if one is larger than allowed; "": it computes the rows alone.

        They are compared in the mode that trains, with its gradient checkpoints.
        """
        images = has_images(self.rows.images)  # whole prompts: the activations of a pair of rows at a time
        pairs = [self.rows.select([0, 1]), self.rows.select([2])]
        with _mode(self.model, training=not self.random):
            errors = self._errors(self._measure(compute, pairs if images else [self.rows]))
        allowed = [
            _FACTOR * own + beyond for own, beyond in zip(self.alone, _ALLOWED[self.dtype], strict=True)
        ]
        if all(error <= most for error, most in zip(errors, allowed, strict=True)):  # False for NaN
            return ""
        logps, gradient = (
            f"{error:.2g} (rows alone: {theirs:.2g}, allowed: {most:.2g})"
            for error, theirs, most in zip(errors, self.alone, allowed, strict=True)
        )
        found = f"their mean error in nats is {logps}, and the relative error of a gradient {gradient}"
        tokens = f"on {self.num_tokens} tokens in {self.dtype}"
        return f"does not reproduce this model's log-probs: {tokens} {found}"

    @torch.no_grad()
    def balancing_problem(self, compute: Compute) -> str:
        """Return the error of the balancing loss ``compute`` if it is larger than allowed; "": it is not."""
        with evaluation_mode(self.model):
            error = (compute(self.inner, self.rows) / self.balancing_loss - 1).abs().item()
        allowed = 1e-4 if self.dtype.itemsize >= 4 else 5e-2  # in half precision a few tokens choose others
        if error <= allowed:  # False for NaN
            return ""
        return (
            f"does not reproduce this model's balancing loss: its error is {error:.2g} (allowed: {allowed:g})"
        )

    def _measure(self, compute: Compute, parts: list[TokenBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs (B, T), zero on padding, and the gradient of their sum to the probes, flat."""
        logps, gradient = [], torch.zeros(())
        for part in parts:
            with torch.set_grad_enabled(bool(self.probes)):
                logps_BT = compute(self.inner, part) * part.loss_mask_BT  # padding holds any value
                total = logps_BT.sum()
            logps.append(F.pad(logps_BT.detach(), (0, _TOKENS - logps_BT.shape[1])))
            if total.requires_grad:  # not that of a text, if the vision tower alone is trained
                of_part = torch.autograd.grad(total, self.probes, materialize_grads=True)
                gradient = gradient.to(logps_BT) + torch.cat([each.flatten().float() for each in of_part])
        return torch.cat(logps), gradient

    def _errors(self, given: tuple[torch.Tensor, torch.Tensor]) -> Errors:
        (logps_BT, gradient), (true_logps_BT, true_gradient) = given, self.exact
        norm = true_gradient.norm().clamp(min=1e-12)  # 0 for a frozen model
        of_logps = (logps_BT - true_logps_BT).abs().sum() / self.num_tokens
        return of_logps.item(), ((gradient - true_gradient).norm() / norm).item()


def check_forward(rows: RowsAlone, *, has_dropout: bool, with_aux_loss: bool = False) -> None:
    """Refuse a model whose later tokens change earlier log-probs, and random numbers besides dropout.

    Args:
        has_dropout: False: ``disable_dropout`` must leave nothing random.
        with_aux_loss: its forward must return a balancing loss.

    Raises:
        ConfigError: the message has the change.
    """
    name = type(base_model(rows.model)).__name__
    if not rows.moved <= _ALLOWED[rows.dtype][0]:  # NaN exceeds every number
        raise ConfigError(
            f"the last token of a row changes the log-probs before it by {rows.moved:.2g} nats: "
            f"{name} does not attend causally, so that a completion is not "
            "sampled from the log-probs that it is trained with; use a causal language model"
        )
    if not has_dropout and rows.noise > 1e-4:  # less is the order in which a device adds
        raise ConfigError(
            f"disable_dropout=True, but log-probs of two forward passes in training mode differ by "
            f"{rows.noise:.2g} nats: a part of {name} draws random numbers, as the routers of PhiMoE do; "
            "set its probability to 0 in the model's config, or disable_dropout=False"
        )
    if with_aux_loss and rows.balancing_loss is None:
        raise ConfigError(
            f"the forward of {name} accepts output_router_logits and returns no balancing loss (aux_loss): "
            "its experts would be trained without one; set router_aux_loss_coef=0.0"
        )


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Context manager of training or evaluation mode that keeps the mode and the random state."""
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices), evaluation_mode(model):
        model.train(training)
        yield


def _alone(model: nn.Module, row: TokenBatch) -> torch.Tensor:
    """Compute log-probs (1, T) of one row as ``model`` computes a sequence by itself."""
    (ids_1S, _), num_tokens = row.sequences(), row.completion_ids_BT.shape[1]
    length = ids_1S.shape[1]
    images = {} if row.images is None else join_images(row.images, [0], length, ids_1S.device)
    predicting_T = torch.arange(length - num_tokens - 1, length - 1, device=ids_1S.device)
    return plain_logps(model, ids_1S, predicting_T, images, row.sampler.temperature).unsqueeze(0)


def _in_float32(model: nn.Module, row: TokenBatch) -> torch.Tensor:
    with float32_computation(row.prompt_ids_BL.device.type):
        return _alone(model, row)


def probe_rows(batch: TokenBatch, image_token: int | None = None, longer: int = 0) -> TokenBatch:
    """Return three rows, shortened, their completions continued with tokens of these rows.

    Completions of a few tokens would leave the decision to their rounding. The lengths differ by row. Prompts
    with images come first and stay whole; rows with images in their completion are left out, or lose them.

    Args:
        longer: number of tokens that the second row passes in its completion; 0: all are short.
    """
    shape, device = shape_of(batch), batch.completion_ids_BT.device
    inputs = batch.images or (ImageInputs(),) * len(batch)
    whole = [row for row in range(len(batch)) if inputs[row].end < shape.prompts[row]]
    order = sorted(whole or range(len(batch)), key=lambda row: not inputs[row].arrays)
    rows = [order[0], order[min(1, len(order) - 1)], order[-1]]  # of one row three: equally many forwards
    images = tuple(inputs[row] for row in rows) if whole and batch.images is not None else None
    most = batch.prompt_ids_BL.shape[1] if has_images(images) else _TOKENS
    prompts = [batch.prompt_ids_BL[row, -min(shape.prompts[row], most) :].tolist() for row in rows]
    completions = [batch.completion_ids_BT[row, :_TOKENS][: shape.completions[row]].tolist() for row in rows]
    found = [token for ids in (*prompts, *completions) for token in ids if token != image_token]
    for row, ids in enumerate(completions):  # continued in another order in every row
        ids += [found[(step * (2 * row + 1) + row) % len(found)] for step in range(len(ids), _TOKENS)]
    mask_BT = length_mask([_TOKENS, _TOKENS - 3, _TOKENS - 6], _TOKENS, device=device)  # (B, T), T = 32
    groups = batch.group_ids_B[rows]
    if not has_images(images):
        # The last prompt loses a quarter, from the left: whatever the batch, some row is padded.
        prompts[-1] = prompts[-1][len(prompts[-1]) // 4 :]
        groups = 2 * groups + torch.tensor([0, 0, 1], device=device)
        # The completion of the second row, which is compared, passes this length, as does that of its
        # neighbour before it; the last row stays short. Rows of one group keep one prompt.
        more = [found[i % len(found)] for i in range(longer - _TOKENS // 4 - len(prompts[1]))]
        prompts[:2] = [more + ids for ids in prompts[:2]]
    prompt_ids_BL = pad_sequences(prompts, found[0], left=True, device=device)
    return TokenBatch(
        prompt_ids_BL=prompt_ids_BL,
        prompt_mask_BL=length_mask([*map(len, prompts)], prompt_ids_BL.shape[1], left=True, device=device),
        completion_ids_BT=torch.tensor(completions, device=device),
        completion_mask_BT=mask_BT,
        loss_mask_BT=mask_BT * torch.tensor([[0], [1], [1]], device=device),
        group_ids_B=groups,
        old_logps_BT=torch.full(mask_BT.shape, torch.nan, device=device),
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


class Way(NamedTuple):
    """Parts of a log-prob computation: layout, head, and if packed attention runs in a varlen kernel."""

    layout: str  # "shared_prefix", "forked", "packed", "padded" or "equal_length"
    head: str  # "chunked" or "dense"
    varlen: bool = False  # a kernel of half precision; blocks otherwise


def choose_way(computer: Any, model: nn.Module, batch: TokenBatch) -> None:
    """Compare layout and head of a ``LogprobComputer`` with rows alone, and take the first to pass.

    After its first check, only those that were chosen may pass.

    Raises:
        ConfigError: none passes.
    """
    dtype, alone, cause, reason = computer.mixed_precision or next(model.parameters()).dtype, None, None, ""
    fixed, with_aux_loss = computer.sharded or computer.reentrant, computer.with_aux_loss
    options: Any = {"dtype": dtype, "sharded": computer.sharded, "evaluation": fixed}
    options |= {"longer": computer.longer(batch.prompt_ids_BL.shape[1]), "with_aux_loss": with_aux_loss}
    try:
        alone = RowsAlone(model, batch, **options)
    except Exception as error:  # a model that does not run in float32, or not on a row alone
        cause = _unless_out_of_memory(error)
    else:
        check_forward(alone, has_dropout=computer.has_dropout, with_aux_loss=with_aux_loss)
    first = Way(computer.layout, computer.head.name, computer.varlen)
    pairs = product((first.layout, *computer.other_layouts), (first.head, *computer.other_heads))
    # The chosen layout with its kernel, then without; then the others, each with every head.
    ways = [first] * first.varlen + [Way(*pair) for pair in pairs]
    for way in ways[:1] if computer.checked else ways:
        _use(computer, way)
        message, cause = _failure(computer, alone, cause)
        # Images of other ranks may come earlier than the first ones here: no collective then.
        if not (message if computer.checked else computer.any_rank(bool(message))):
            break
        reason = reason or f"{first.layout!r} {message or 'fails its check on another rank'}"
    else:
        _use(computer, first)  # messages and a caller that goes on see what the settings chose
        if computer.other_layouts and not computer.checked:
            name = type(base_model(model)).__name__
            raise ConfigError(
                f"no sequence layout reproduces the log-probs of {name} on a row alone ({reason}): "
                "its rows depend on others, as with rotary embeddings of type 'dynamic'"
            ) from cause
        advice = "'auto', which tries all layouts" if not computer.checked else "'padded'"
        raise ConfigError(f"sequence_layout={reason}; use {advice}") from cause
    if reason:
        _report(computer, first, way, reason)
    elif alone is not None and alone.random and not computer.paths[0].reason:
        mode = "its forward in training is random" if not fixed else "its checkpoints or shards need it"
        computer.paths[0] = computer.paths[0]._replace(reason=f"compared in evaluation mode: {mode}")


def _use(computer: Any, way: Way) -> None:
    computer.layout, computer.varlen = way.layout, way.varlen
    computer.head = replace(computer.head, name=way.head)


def _failure(computer: Any, alone: Any, cause: Exception | None) -> tuple[str, Exception | None]:
    """Return how the present layout and head fail their check, and the error; "": they pass."""
    try:
        if alone is None:  # nothing to compare with: padded sequences are what every model takes
            assert computer.layout == "padded", cause
            return "", None
        compute = partial(computer.compute, with_entropy=False)
        problem = alone.problem(lambda m, rows: compute(m, rows).logps_BT)
        if alone.balancing_loss is not None:
            of_loss = partial(compute, with_aux_loss=True)
            # Also after a problem: all ranks of a sharded model run as many forwards.
            other = alone.balancing_problem(lambda m, rows: computer.balanced(of_loss(m, rows)).aux_loss)
            problem = problem or other
    except Exception as error:  # the layout's forward of an unknown model, in any way
        cause = cause or _unless_out_of_memory(error)
        return f"cannot be checked: {type(cause).__name__}: {cause}", cause
    return problem, None


def _report(computer: Any, first: Way, way: Way, reason: str) -> None:
    """Show what the run computes with instead of ``first``, and why."""
    changed = {}
    for index, setting in enumerate(("sequence_layout", "logprob_head")):
        if way[index] != first[index]:
            changed[setting] = way[index]
            name = computer.paths[index].name
            computer.paths[index] = FastPath(name, str(way[index]), reason, True)
    if first.varlen:  # its path is listed third, after layout and head
        computer.paths[2:] = [FastPath("attention", "blocks", reason, True)]
    now = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    logger.warning(
        "sequence_layout=%s; %s", reason, f"using {now}" if now else "attention is computed in blocks"
    )
    computer.fell_back = "sequence_layout" in changed


def _unless_out_of_memory(error: Exception) -> Exception:
    if is_out_of_memory(error):
        raise error
    return error
