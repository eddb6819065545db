"""Rollouts of this rank and the rewards of all ranks, as lists and plain values; no tensors of tokens yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from groupwise.core.metrics import Metrics
from groupwise.records.images import ImageInputs
from groupwise.records.sampling_mask import SamplingMask

#: Experts of the tokens of a prompt and of a completion (tokens, routers, K), in host memory; uint8 up to 256
#: experts. Later tokens of the completion have none recorded. Rows of a group share that of their prompt.
RoutedExperts = tuple[torch.Tensor, torch.Tensor]

#: A dataset row: ``prompt`` and the columns that reward functions receive.
Row = dict[str, Any]
Mode = Literal["train", "eval"]
#: Start and end of consecutive tokens, such as a turn of the policy.
Span = tuple[int, int]


def copied(value: Any) -> Any:
    """Copy lists and dictionaries at any depth; other values, such as images, are shared."""
    if type(value) is list:
        return [copied(entry) for entry in value]
    return {key: copied(entry) for key, entry in value.items()} if type(value) is dict else value


def runs_of_ones(mask: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of ones: [1, 1, 0, 1] -> (0, 2), (3, 4)."""
    edges = [i for i, (before, after) in enumerate(pairwise([0, *mask, 0])) if before != after]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


class _Numbers:
    """Field that reads as a list of numbers, and keeps a tensor that it was given: 4 bytes each, not 32."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        value = None if record is None else vars(record)[self.name]  # None: the default of the field
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def __set__(self, record: Any, value: Any) -> None:
        vars(record)[self.name] = value


@dataclass(frozen=True)
class Completion:
    """One sampled completion of C tokens.

    Example: two sampled tokens and one token of a tool result, from an engine that reports log-probs::

        Completion([19, 7, 2], logps=[-0.1, nan, -0.3], loss_mask=[1, 0, 1], versions=[4, 4, 4])

    token_ids: tokens after the prompt, with the end token if there is one.
    logps: log-probs under the sampling distribution, NaN for a token without one; None: the sampler is the
        policy itself, or reported none. As ``versions`` a new list each time if a tensor was given.
    loss_mask: 1 for sampled tokens, 0 for tokens of tools and environments; None: all sampled.
    truncated: the length limit ended the completion, not an end token.
    versions: optimizer step of the weights that sampled each token; None: the sampler is the policy itself.
    weight_digest: digest of all weights that sampled the tokens; those of several steps are joined by "+".
        None: they were not compared (``vllm_weight_check``), or the sampler is the policy itself.
    sampling_mask: tokens that truncated sampling kept, C positions; None: the whole vocabulary, or unknown.
    dropped: the rollout failed (``rollout_on_error``), or the row pads the last evaluation batch: the
        completion has no reward and no loss, and its group consists of the others.
    contexts: of a rollout that called the policy on several histories (``rollout_ids``): pairs of an index
        and token ids. The tokens from that index on, up to the next one, follow these ids and not the prompt.
    last_row: start and end in ``token_ids`` of what the last call sampled; None: all tokens.
    routed_experts: experts that the sampler routed the prompt and the completion to (``router_replay="R3"``).
    turns: spans in ``token_ids`` of the policy's turns, in the order of time. None: the runs of 1 in
        ``loss_mask``.
    """

    token_ids: list[int]
    logps: list[float] | None = _Numbers()  # type: ignore[assignment]
    loss_mask: list[int] | None = None
    truncated: bool = False
    versions: list[int] | None = _Numbers()  # type: ignore[assignment]
    weight_digest: str | None = None
    sampling_mask: SamplingMask | None = None
    dropped: bool = False
    contexts: tuple[tuple[int, list[int]], ...] = ()
    last_row: tuple[int, int] | None = None
    routed_experts: RoutedExperts | None = None
    turns: tuple[Span, ...] | None = None

    @property
    def turn_spans(self) -> tuple[Span, ...]:
        """Spans of the policy's turns in the order of time; () without ``turns`` and mask: it is one turn."""
        return runs_of_ones(self.loss_mask or ()) if self.turns is None else self.turns

    @property
    def reward_ids(self) -> list[int]:
        """Token ids that reward functions receive as ``completion_ids``: those of the last call."""
        return self.token_ids if self.last_row is None else self.token_ids[slice(*self.last_row)]

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens of the histories beside the prompt."""
        return sum(len(ids) for _, ids in self.contexts)

    def sampled_at(self, step: int) -> bool:
        """Return True if the weights of optimizer step ``step`` sampled every token."""
        return all(version == step for version in self.versions or ())


@dataclass(frozen=True)
class SamplerSettings:
    """Sampler settings of a generation, which its records carry to the log-probs and into checkpoints.

    temperature: divisor of the logits, of the sampler and of the trainer's log-probs.
    top_p: kept share of the probability; 1: all.
    top_k: number of kept tokens; 0: all.
    min_p: least probability relative to the most probable token; 0: all.
    repetition_penalty: as in transformers; 1: none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class SamplingOptions:
    """Settings of one ``generate`` call; the defaults are the settings of the run.

    Attributes:
        max_tokens: maximum completion length per row, B; None: the run's for all rows.
        images: image inputs per row, B; None for prompts of text.
        generation_kwargs: sampler settings that replace the run's: temperature, top_p, top_k, min_p,
            repetition_penalty. Evaluation passes ``eval_generation_kwargs``.
        on_finished: a backend that has the completions of some prompts before the others may call it, with
            their row indices and completions; it starts the ``per_sample_reward`` functions on them. None:
            there are none.
        seeds: seed of each row's random numbers, consecutive for the rows of a group; None: the backend
            chooses. A backend that ignores them samples other completions on another number of ranks.
    """

    max_tokens: Sequence[int] | None = None
    images: Sequence[ImageInputs] | None = None
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_finished: Callable[[Sequence[int], list[Completion]], None] | None = None
    seeds: Sequence[int] | None = None


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts to roll out, with everything that a rollout needs to know about them.

    Example: two completions of one prompt on this rank::

        RolloutRequest(rows=[{"prompt": "2+2="}, {"prompt": "2+2="}], num_generations=2)

    rows: dataset rows of this rank, B; the G rows of a prompt are adjacent.
    num_generations: completions per prompt, G.
    num_valid: rows of the global batch that count; later ones are padding of the last evaluation batch. None:
        all.
    mode: "train" or "eval"; selects the metrics that the rollout is recorded in.
    generation_kwargs: sampler settings of this request, those of ``eval_generation_kwargs`` included.
    on_partial_rollout: called with the finished prompts while the sampler still generates the others; None:
        rewards are computed when the rollout is complete.
    sampler: sampler settings of training; log-probs have its temperature, in an evaluation too.
    seeds: see :class:`SamplingOptions`.
    """

    rows: list[Row]
    num_generations: int
    num_valid: int | None = None
    mode: Mode = "train"
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_partial_rollout: Callable[[RolloutBatch], None] | None = None
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    seeds: Sequence[int] | None = None

    def kept_fields(self) -> dict[str, Any]:
        """Return the fields that the rollouts of the request have, too, beside its rows."""
        return {name: getattr(self, name) for name in ("num_generations", "num_valid", "mode", "sampler")}


#: Lists of a RolloutBatch with one entry per row.
_COLUMNS = ("rows", "prompts", "prompt_ids", "completions", "texts", "row_ids")


@dataclass(frozen=True)
class RolloutBatch:
    """Completions of this rank; every list has B entries, the G completions of a prompt are adjacent.

    Example: two completions of one prompt::

        RolloutBatch(
            rows=[{"prompt": "2+2=", "answer": "4"}] * 2,
            prompts=["2+2="] * 2,
            prompt_ids=[[17, 10, 17, 28]] * 2,
            completions=[Completion([19, 2]), Completion([20, 20], truncated=True)],
            texts=["4", "55"],
            num_generations=2,
        )

    rows: dataset rows.
    prompts: prompts as the dataset gave them.
    prompt_ids: token ids of the prompts, without padding.
    completions: the sampler's output.
    texts: completions as reward functions receive them: strings, or message lists for chat prompts.
    num_generations: G.
    num_valid: rows of the global batch that count; None: all.
    mode: "train" or "eval".
    extra: further columns for the reward functions, B entries each.
    metrics: statistics of the rollout.
    images: output of the image processor per row; None without a processor.
    row_ids: position of each row in the request, by which partial rewards are matched.
    sampler: sampler settings of the request.
    """

    rows: list[Row]
    prompts: list[Any]
    prompt_ids: list[list[int]]
    completions: list[Completion]
    texts: list[Any]
    num_generations: int = 1
    num_valid: int | None = None
    mode: Mode = "train"
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    images: Sequence[ImageInputs] | None = None
    row_ids: Sequence[int] = ()
    sampler: SamplerSettings = field(default_factory=SamplerSettings)

    def __post_init__(self) -> None:
        if not self.row_ids:
            object.__setattr__(self, "row_ids", list(range(len(self.completions))))

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """Select rows; groups may become incomplete."""
        names = _COLUMNS if self.images is None else (*_COLUMNS, "images")
        lists = _select({name: getattr(self, name) for name in names}, rows)
        return replace(self, **lists, extra=_select(self.extra, rows))

    def drop_from(self, row: int) -> RolloutBatch:
        """Drop the completions from ``row`` to the last one."""
        dropped = [replace(completion, dropped=True) for completion in self.completions[row:]]
        return replace(self, completions=[*self.completions[:row], *dropped])

    @classmethod
    def concatenate(cls, parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Concatenate rows, without metrics; an extra column that some batches lack is None there."""
        columns: dict[str, Any] = {n: [v for part in parts for v in getattr(part, n)] for n in _COLUMNS}
        return cls(
            **columns,
            num_generations=parts[-1].num_generations,
            mode=parts[-1].mode,
            sampler=parts[-1].sampler,
            extra=_concatenate([part.extra for part in parts], [len(part) for part in parts]),
            images=[row for part in parts for row in part.images or ()] or None,
        )


#: Step rewards of N completions: lists of (index of the step's last token, reward).
StepRewards = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class GroupRewards:
    """Rewards of all ranks; the G completions of a prompt are adjacent.

    rewards_NF: one column per reward function; NaN where a function returned None.
    weights_F: weight of each function.
    num_generations: G; N is a multiple of it.
    step_rewards: step rewards of process-supervised functions by column, which is NaN in ``rewards_NF``.
    num_tokens: T, width of a token-wise advantage.
    penalty_N: subtracted from the aggregated reward of each completion (KL in the reward); None: no penalty.
    turns: spans of the policy's turns in the order of time, N entries; () where there are no steps, or one
        turn. Step rewards of several turns are credited in this order.
    """

    rewards_NF: torch.Tensor
    weights_F: torch.Tensor
    num_generations: int
    step_rewards: dict[int, StepRewards] = field(default_factory=dict)
    num_tokens: int = 0
    penalty_N: torch.Tensor | None = None
    turns: Sequence[Sequence[Span]] = ()

    def with_step_sums(self) -> GroupRewards:
        """Return outcome rewards alone: a completion's step rewards are their sum, NaN without steps.

        For metrics, evaluation and logs; advantages have the rewards of the steps.
        """
        rewards_NF = self.rewards_NF.clone()  # (N, F); the caller keeps its NaN columns
        for column, steps_N in self.step_rewards.items():
            sums = [math.fsum(r for _, r in steps) if steps else math.nan for steps in steps_N]
            rewards_NF[:, column] = torch.tensor(sums).to(rewards_NF)  # (N,), NaN without steps
        return replace(self, rewards_NF=rewards_NF, step_rewards={})

    def steps_vary(self) -> torch.Tensor:
        """Return which groups have step rewards that differ (P,); functions of weight 0 do not count."""
        size = self.num_generations
        weighted = [steps_N for column, steps_N in self.step_rewards.items() if self.weights_F[column] != 0]
        values = [  # by group: of each function the values of all steps; with one, they are equally good
            [{reward for steps in steps_N[i : i + size] for _, reward in steps} for steps_N in weighted]
            for i in range(0, len(self.rewards_NF), size)
        ]
        return torch.tensor([any(len(each) > 1 for each in group) for group in values], dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class RewardBatch(GroupRewards):
    """Rewards of all ranks, N completions in rank order, and the position of this rank's among them.

    Example: rank 1 of 2, one completion each, one reward function::

        RewardBatch(tensor([[1.0], [0.0]]), tensor([1.0]), 2, local=slice(1, 2))

    local: rows of ``rewards_NF`` that belong to this rank, padding rows of an evaluation batch included.
    columns: columns that reward functions logged for the completions table, B entries each.
    metrics: statistics of the rewards.
    """

    local: slice
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    @property
    def num_valid(self) -> int:
        """Number of completions of this rank that count; later ones pad an evaluation batch."""
        return len(self.rewards_NF[self.local])

    def without(self, dropped_N: torch.Tensor | None) -> RewardBatch:
        """Remove the rewards of dropped completions, a boolean per completion of all ranks; None: of none."""
        if dropped_N is None or not dropped_N.any():
            return self
        steps: dict[int, StepRewards] = {
            column: [[] if gone else list(row) for row, gone in zip(rows, dropped_N.tolist(), strict=True)]
            for column, rows in self.step_rewards.items()
        }
        rewards_NF = self.rewards_NF.masked_fill(dropped_N.to(self.rewards_NF.device)[:, None], math.nan)
        return replace(self, rewards_NF=rewards_NF, step_rewards=steps)

    def select(self, rows: Sequence[int]) -> RewardBatch:
        """Select completions of a batch of which this rank has all."""
        return replace(
            self,
            rewards_NF=self.rewards_NF[list(rows)],
            step_rewards=_select(self.step_rewards, rows),
            turns=[self.turns[row] for row in rows] if self.turns else (),
            local=slice(0, len(rows)),
            columns=_select(self.columns, rows),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[RewardBatch]) -> RewardBatch:
        """Concatenate batches of which this rank has all: weights of the last one, no metrics."""
        lengths = [len(part.rewards_NF) for part in parts]
        return replace(
            parts[-1],
            rewards_NF=torch.cat([part.rewards_NF for part in parts]),
            step_rewards=_concatenate([part.step_rewards for part in parts], lengths, fill=()),
            turns=[t for part, n in zip(parts, lengths, strict=True) for t in part.turns or [()] * n],
            num_tokens=max(part.num_tokens for part in parts),
            local=slice(0, sum(lengths)),
            columns=_concatenate([part.columns for part in parts], lengths),
            metrics={},
        )

    def local_part(self) -> RewardBatch:
        """Return the completions of this rank as a batch of which it has all."""
        rows = range(len(self.rewards_NF))[self.local]
        whole = replace(self, columns={})
        return replace(whole.select(rows), columns=self.columns)

    def of_rank(self, local: slice) -> RewardBatch:
        """Return a batch, of which this rank has all, as it is on the rank with the rows ``local``."""
        return replace(
            self, local=local, columns={name: values[local] for name, values in self.columns.items()}
        )

    def local_rows(self, values_N: torch.Tensor) -> torch.Tensor:
        """Select this rank's rows of a tensor of all ranks; padding rows of an evaluation batch are zero."""
        rows = values_N[self.local]
        missing = self.local.stop - self.local.start - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _select(columns: Mapping[Any, Sequence[Any]], rows: Sequence[int]) -> dict[Any, Any]:
    return {name: [values[row] for row in rows] for name, values in columns.items()}


def _concatenate(
    parts: Sequence[Mapping[Any, Sequence[Any]]], lengths: Sequence[int], fill: Any = None
) -> dict[Any, Any]:
    """Join columns of ``lengths`` rows; a column that a part lacks is ``fill`` there."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: [
            value
            for part, length in zip(parts, lengths, strict=True)
            for value in part.get(name, [fill] * length)
        ]
        for name in names
    }


class RewardFunction(Protocol):
    """Reward callable: one float (or None) per completion; may be ``async``.

    Keyword arguments are ``prompts``, ``completions``, ``completion_ids``, every other dataset column,
    ``trainer_state``, ``log_extra(column, values)`` and ``log_metric(name, value)``.
    """

    def __call__(self, **kwargs: Any) -> Sequence[float | None]: ...


#: ``rollout_func(prompts, trainer)``: replaces generation.
RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]
