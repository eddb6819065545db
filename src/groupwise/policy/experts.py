"""Mixtures of experts: the balancing loss in every layout, and replay of their routing (R2, R3).

The balancing loss of transformers is a product of two means over the tokens of a padded batch::

    loss = E · Σ_e (c_e / R) · (p_e / R)    c_e: choices of expert e; p_e: sum of its router probabilities;
                                            R: tokens, once per layer

A layout computes a shared token once, and may need several passes. So the function of the model's forward is
replaced for the call by one that returns c, p and R, each token weighted by the number of rows that contain
it. Sums add up over passes, and are multiplied at the end: value and gradient are those of padded sequences.

Routing is the result of one top-k over E experts per layer, in the order of the layers. It is recorded, or
replaced by recorded experts with the present router's scores, in a mode of torch functions around the call of
the model; a checkpoint that recomputes a layer enters the mode again, from its own first router on.

Axes: S tokens of a pass, E experts, K experts of a token, M routers of the model, B rows, W = L + T columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.overrides import TorchFunctionMode

from groupwise.compat.transformers import BALANCING_LOSS, balancing_scope, wrapped_checkpoints
from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import ConfigError
from groupwise.policy.introspection import base_model, experts_of, has_prompt_learning
from groupwise.records import LogprobOutput, MicroBatch, RoutedExperts, TokenBatch
from groupwise.records.tensors import shape_of

_weights: list[torch.Tensor] = []  # (S,) of the running pass: rows that contain each token


@contextmanager
def balancing_sums(model: nn.Module, weight_S: torch.Tensor) -> Iterator[None]:
    """Context manager in which the ``aux_loss`` of the model's forward are sums, for :func:`balancing_loss`.

    As an output of the forward they pass through wrappers (DDP, FSDP) with their gradient.

    Args:
        weight_S: number of rows that contain each token of the pass, 0 for padding.
    """
    scope: Any = balancing_scope(base_model(model))
    own = scope[BALANCING_LOSS]
    scope[BALANCING_LOSS] = _router_sums
    _weights.append(weight_S)
    try:
        yield
    finally:
        _weights.pop()
        scope[BALANCING_LOSS] = own


@torch.compiler.disable  # a compiled forward calls the same function in every pass, with other weights
def _router_sums(
    gate_logits: tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return c (E,), p (E,) and R of all layers as one tensor (2E + 1,), at least float32."""
    weight_S = _weights[-1]
    device, dtype = weight_S.device, torch.promote_types(gate_logits[0].dtype, torch.float32)
    weight_S = weight_S.to(dtype)
    counts_E, probs_E = torch.zeros(2, num_experts, device=device, dtype=dtype)
    for logits_SE in gate_logits:  # by layer: no tensor of all layers' choices
        probs_SE = logits_SE.flatten(0, -2).to(device, dtype).softmax(-1)
        chosen_SK = probs_SE.topk(top_k, -1).indices
        counts_E = counts_E.index_add(0, chosen_SK.flatten(), weight_S.repeat_interleave(top_k))
        probs_E = probs_E + (weight_S.unsqueeze(1) * probs_SE).sum(0)  # no matmul: autocast would round it
    return torch.cat([counts_E, probs_E, (weight_S.sum() * len(gate_logits)).unsqueeze(0)])


def balancing_loss(sums: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """Return the balancing loss of sums (2E + 1,) over all passes of a micro-batch.

    Args:
        total: sums of all micro-batches and ranks of an update, without gradient: c and R are theirs, so that
            the losses of the micro-batches add up to that of the update, however it is split (Qiu et al.,
            arXiv 2501.11873, section 3). None: those of ``sums``.
    """
    total = sums if total is None else total
    (counts_E, _), probs_E = total[:-1].chunk(2), sums[:-1].chunk(2)[1]
    return len(counts_E) * (counts_E / total[-1] * (probs_E / total[-1])).sum()


@torch.no_grad()
def balance_update(
    computer: Any,
    compute_logprobs: Callable[[MicroBatch], LogprobOutput],
    batches: Iterable[MicroBatch | None],
    accelerator: Accelerator,
) -> None:
    """Sum the routers' choices over the micro-batches of all ranks, for ``router_aux_loss_scope``.

    One more forward pass of each micro-batch; the balancing losses of the update read its sums.

    Args:
        computer: ``LogprobComputer`` of the run, through which ``compute_logprobs`` computes.
    """
    computer.balance = lambda sums: sums
    try:  # (2E + 1,) each: c (E,), p (E,) and R; every rank has a micro-batch
        losses = [compute_logprobs(batch).aux_loss for batch in batches if batch is not None]
    finally:
        computer.balance = None
    total = accelerator.reduce(reduce(torch.add, cast("list[torch.Tensor]", losses)), "sum")
    computer.balance = partial(balancing_loss, total=total)


class _Routers(TorchFunctionMode):
    """Record the experts of each router in ``seen``, in the order of the layers, or replay ``wanted_SMK``."""

    def __init__(self, size: tuple[int, int], wanted_SMK: torch.Tensor | None = None, first: int = 0) -> None:
        super().__init__()
        self.size, self.wanted_SMK, self.first = size, wanted_SMK, first  # size: (E, K)
        self.seen: list[torch.Tensor] = []  # own choices (…, K)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, number = func(*args, **(kwargs or {})), self.first + len(self.seen)
        # A balancing loss selects from all layers again, after the last router.
        is_last = self.wanted_SMK is not None and number >= self.wanted_SMK.shape[1]
        if getattr(func, "__name__", "") != "topk" or is_last:
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        if (scores.shape[-1], out[1].shape[-1]) != self.size:
            return out
        self.seen.append(out[1].detach())
        if self.wanted_SMK is None:
            return out
        wanted = self.wanted_SMK[:, number].reshape(out[1].shape).long()  # -1: not recorded, the own choice
        index = torch.where(wanted < 0, out[1], wanted)
        return torch.return_types.topk((scores.gather(-1, index), index))

    def take_SMK(self) -> torch.Tensor:
        """Return what was seen as (S, M, K), int16, and forget it."""
        seen, self.seen = self.seen, []
        if not seen:
            raise ConfigError(
                "router_replay: this model's routers select no experts by top-k; set 'disabled'"
            )
        return torch.stack([each.flatten(0, -2) for each in seen], 1).short()

    def on_host(self, table: torch.Tensor) -> torch.Tensor:
        return table.to("cpu", torch.uint8 if self.size[0] <= 256 else torch.int16)


class RouterReplay:
    """Routing of a run with ``router_replay``: "R2": of old log-probs; "R3": of the sampler.

    Attributes:
        recorded: routing of each row of each pass in order, None for rollouts of several rows; or None: it is
            not recorded.
    """

    def __init__(self, model: nn.Module, mode: str) -> None:
        config = base_model(model).config.get_text_config()
        size, method = experts_of(model), getattr(config, "topk_method", "")
        reasons = {
            "has no experts": size is None,
            "has an adapter of virtual tokens": has_prompt_learning(model),
            f"sets scores outside its groups to 0 (topk_method={method!r})": method == "group_limited_greedy",
        }
        for reason, holds in reasons.items():
            if holds:
                name = type(base_model(model)).__name__
                raise ConfigError(f"router_replay={mode!r}, but {name} {reason}; allowed: 'disabled'")
        self.size: tuple[int, int] = size or (0, 0)
        self.recorded: list[RoutedExperts | None] | None = None

    def of_batch(self, batch: TokenBatch) -> BatchRouting | None:
        """Return the routing of a batch to replay or to record; None: neither."""
        none = batch.routed_experts is None and self.recorded is None
        return None if none else BatchRouting(batch, self.size)


class BatchRouting:
    """Routing of the sequences (B, W) of a batch: experts that its passes replay, or those that they see."""

    def __init__(self, batch: TokenBatch, size: tuple[int, int]) -> None:
        self.size, self.shape, self.start = size, shape_of(batch), batch.prompt_ids_BL.shape[1]
        self.real = batch.sequences()[1].flatten()  # (B · W,)
        self.width = len(self.real) // len(batch)
        self.table: torch.Tensor | None = None  # (B · W, M, K), -1: not recorded
        self.replays, self.counts = batch.routed_experts is not None, list[torch.Tensor]()
        for row, recorded in enumerate(batch.routed_experts or ()):
            if recorded is not None and len(recorded[0]) == self.shape.prompts[row]:
                prompt, completion = recorded[0], recorded[1][: self.shape.completions[row]]
                table, begin = self._table(prompt.shape[1]), row * self.width + self.start
                table[begin - len(prompt) : begin] = prompt
                table[begin : begin + len(completion)] = completion
        self.table = None if self.table is None else self.table.to(self.real.device)

    def _table(self, num_routers: int) -> torch.Tensor:
        if self.table is None:
            self.table = torch.full((len(self.real), num_routers, self.size[1]), -1, dtype=torch.int16)
        return self.table

    def index(self, rows_R: torch.Tensor, before: int, columns: int) -> torch.Tensor:
        """Return the places (R · columns,) of tokens of rows, ``before`` of them of the prompt's end.

        Padding may be beyond the last column.
        """
        column_T = torch.arange(columns, device=rows_R.device) + self.start - before
        return (rows_R.unsqueeze(1) * self.width + column_T.clamp(max=self.width - 1)).flatten()

    @contextmanager
    def in_pass(self, model: nn.Module, index_S: torch.Tensor) -> Iterator[None]:
        """Context manager around a forward pass over the tokens at these places."""
        if self.replays and self.table is None:  # nothing was recorded for any row
            yield
            return
        wanted_SMK = None if self.table is None or not self.replays else self.table[index_S]
        mode = _Routers(self.size, wanted_SMK)

        def checkpointed(own: Callable[..., Any], function: Any, *args: Any) -> Any:
            # Keywords stay keywords: recomputation reads the number of tokens of a cache there.
            given, keywords = (getattr(function, "func", function), getattr(function, "keywords", {}))
            first, runs = len(mode.seen), 0

            def again(*args: Any, **kwargs: Any) -> Any:
                nonlocal runs
                runs += 1
                with _Routers(self.size, wanted_SMK, first) if runs > 1 else nullcontext():
                    return given(*args, **kwargs)

            return own(partial(again, **keywords), *args)

        with wrapped_checkpoints(model, checkpointed) if self.replays else nullcontext(), mode:
            yield
        seen_SMK = mode.take_SMK()
        if wanted_SMK is None:
            self.table = self._table(seen_SMK.shape[1]).to(seen_SMK.device)
            self.table[index_S] = seen_SMK
            return
        known_SM = wanted_SMK[..., 0] >= 0
        differs_SM = known_SM & (seen_SMK.sort(-1).values != wanted_SMK.sort(-1).values).any(-1)
        of_tokens = differs_SM.any(1).sum(), known_SM.any(1).sum(), self.real[index_S].sum()
        self.counts.append(torch.stack([differs_SM.sum(), known_SM.sum(), *of_tokens]))

    def metrics(self) -> Metrics:
        """Return the shares of routings and tokens that the present router would choose otherwise."""
        if not self.counts:
            return {"routing/replayed_share": Mean(0.0)} if self.replays else {}
        routings, of_routings, tokens, of_tokens, real = torch.stack(self.counts).sum(0).float()
        return {
            "routing/differing_share": Mean(routings, of_routings),
            "routing/differing_tokens": Mean(tokens, of_tokens),
            "routing/replayed_share": Mean(of_tokens, real),
        }

    def rows(self) -> list[RoutedExperts]:
        """Return the recorded routing of each row, in host memory; a group shares that of its prompt."""
        assert self.table is not None
        kept, start = _Routers(self.size).on_host(self.table).unflatten(0, (-1, self.width)), self.start
        routed = []
        for group in self.shape.groups():  # the prompt is computed with the first row
            prompt = kept[group[0], start - self.shape.prompts[group[0]] : start].clone()
            ends = [start + max(self.shape.completions[row] - 1, 0) for row in group]  # the last is no input
            routed += [(prompt, kept[row, start:end].clone()) for row, end in zip(group, ends, strict=True)]
        return routed


class SampledRouting(_Routers):
    """Routing of the tokens of groupwise's own decoding loop: P prompts, then R rows token by token."""

    def begin(self, rows_R: torch.Tensor) -> None:
        """Take the routing of the prompts, which completions continue from ``rows_R``."""
        self.prompt_R, self.prompts_SMK = rows_R.tolist(), self.on_host(self.take_SMK())
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # completions (R,), experts (R, M, K)

    def record(self, index_R: torch.Tensor) -> None:
        """Take the routing of the last token of completions ``index_R``."""
        if self.seen:
            self.steps.append((index_R, self.take_SMK()))

    def completions(self, prompts: Sequence[int], lengths: Sequence[int]) -> list[RoutedExperts]:
        """Return the routing of completions of these lengths after P prompts, padded on the left."""
        padded = self.prompts_SMK.chunk(len(prompts))
        of_prompts = [
            each[len(each) - length :].clone() for each, length in zip(padded, prompts, strict=True)
        ]
        parts: list[list[torch.Tensor]] = [[padded[0][:0]] for _ in lengths]
        for index_R, routes_RMK in self.steps:
            for row, route_1MK in zip(index_R.tolist(), self.on_host(routes_RMK).split(1), strict=True):
                parts[row].append(route_1MK)
        joined = [torch.cat(part)[:length] for part, length in zip(parts, lengths, strict=True)]
        return [(of_prompts[i], routes) for i, routes in zip(self.prompt_R, joined, strict=True)]
