"""Records that travel through a step; the type says how far the data have come.

    RolloutRequest -generate_rollouts-> RolloutBatch -collate-> TokenBatch -> Experience -> MicroBatch
                                        RolloutBatch -compute_rewards-> RewardBatch -compute_advantages-> (N,)
                                        MicroBatch -compute_policy_loss-> LossOutput

Axis suffixes: B sequences of this rank, N of all ranks, L prompt tokens, T completion tokens, X is T or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from groupwise.core.advantages import GroupRewards, StepRewards
from groupwise.core.images import ImageInputs
from groupwise.core.kept_tokens import KeptTokens
from groupwise.core.metrics import Mean, Metrics

if TYPE_CHECKING:
    from typing_extensions import Self

#: The way out for a subclass that reads TRL's dictionaries and rows.
_TRL = (
    "a subclass written for TRL runs as it is with 'from groupwise.trl_hooks import GRPOConfig, GRPOTrainer'"
)

#: A dataset row: ``prompt`` and the columns that reward functions receive.
Row = dict[str, Any]
Mode = Literal["train", "eval"]


def copied(value: Any) -> Any:
    """Copy lists and dictionaries at any depth; other values, such as images, are shared."""
    if type(value) is list:
        return [copied(entry) for entry in value]
    return {key: copied(entry) for key, entry in value.items()} if type(value) is dict else value


@dataclass(frozen=True)
class Completion:
    """One sampled completion of C tokens.

    Example: two sampled tokens and one token of a tool result, from an engine that reports log-probs::

        Completion([19, 7, 2], logps=[-0.1, nan, -0.3], loss_mask=[1, 0, 1], versions=[4, 4, 4])

    token_ids: tokens after the prompt, with the end token if there is one.
    logps: log-probs under the sampling distribution, NaN for a token without one; None: the sampler is the
        policy itself, or reported none.
    loss_mask: 1 for sampled tokens, 0 for tokens of tools and environments; None: all sampled.
    truncated: the length limit ended the completion, not an end token.
    old_logps: log-probs under the policy that sampled the tokens; None: that is the current policy.
    versions: optimizer step of the weights that sampled each token; None: the sampler is the policy itself.
    kept_tokens: token sets that truncated sampling kept, C positions; None: the whole vocabulary, or unknown.
    dropped: the rollout failed (``rollout_on_error``): the completion has no reward and no loss, and its
        group consists of the others.
    """

    token_ids: list[int]
    logps: list[float] | None = None
    loss_mask: list[int] | None = None
    truncated: bool = False
    old_logps: list[float] | None = None
    versions: list[int] | None = None
    kept_tokens: KeptTokens | None = None
    dropped: bool = False

    def sampled_at(self, step: int) -> bool:
        """Return True if the weights of optimizer step ``step`` sampled every token."""
        return self.old_logps is None and all(version == step for version in self.versions or ())

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        kept = self.kept_tokens
        return {**vars(self), "kept_tokens": None if kept is None else kept.state_dict()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Completion:
        kept = state.get("kept_tokens")
        return cls(**{**state, "kept_tokens": None if kept is None else KeptTokens(**kept)})


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
    """

    max_tokens: Sequence[int] | None = None
    images: Sequence[ImageInputs] | None = None
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_finished: Callable[[Sequence[int], list[Completion]], None] | None = None


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
    generation_kwargs: sampler settings that replace the run's (``eval_generation_kwargs``).
    on_partial_rollout: called with the finished prompts while the sampler still generates the others; None:
        rewards are computed when the rollout is complete.
    """

    rows: list[Row]
    num_generations: int
    num_valid: int | None = None
    mode: Mode = "train"
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_partial_rollout: Callable[[RolloutBatch], None] | None = None


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

    def __post_init__(self) -> None:
        if not self.row_ids:
            object.__setattr__(self, "row_ids", range(len(self.completions)))

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """Select rows; groups may become incomplete."""

        def chosen(columns: Mapping[str, Any]) -> dict[str, Any]:
            return {name: [values[row] for row in rows] for name, values in columns.items()}

        names = _COLUMNS if self.images is None else (*_COLUMNS, "images")
        return replace(self, **chosen({n: getattr(self, n) for n in names}), extra=chosen(self.extra))

    @classmethod
    def concatenate(cls, parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Concatenate rows of text, without further columns: the finished prompts of a rollout."""
        columns: dict[str, Any] = {n: [v for part in parts for v in getattr(part, n)] for n in _COLUMNS}
        return cls(**columns)


@dataclass(frozen=True)
class RewardBatch:
    """Rewards of all ranks, and the position of this rank's completions in them.

    Example: rank 1 of 2, one completion each, one reward function::

        RewardBatch(rewards=GroupRewards(tensor([[1.0], [0.0]]), tensor([1.0]), 2), local=slice(1, 2))

    rewards: (N, F) for all N completions in rank order, so that groups are contiguous.
    local: rows of ``rewards`` that belong to this rank, padding rows of an evaluation batch included.
    columns: columns that reward functions logged for the completions table, B entries each.
    metrics: statistics of the rewards.
    """

    rewards: GroupRewards
    local: slice
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    @property
    def num_valid(self) -> int:
        """Number of completions of this rank that count; later ones pad an evaluation batch."""
        return len(self.rewards.rewards_NF[self.local])

    def without(self, dropped_N: torch.Tensor | None) -> RewardBatch:
        """Remove the rewards of dropped completions, a boolean per completion of all ranks; None: of none."""
        if dropped_N is None or not dropped_N.any():
            return self
        table, dropped = self.rewards, dropped_N.tolist()
        steps: dict[int, StepRewards] = {
            column: [[] if gone else list(row) for row, gone in zip(rows, dropped, strict=True)]
            for column, rows in table.step_rewards.items()
        }
        rewards_NF = table.rewards_NF.masked_fill(dropped_N.to(table.rewards_NF.device)[:, None], math.nan)
        return replace(self, rewards=replace(table, rewards_NF=rewards_NF, step_rewards=steps))

    def local_rows(self, values_N: torch.Tensor) -> torch.Tensor:
        """Select this rank's rows of a tensor of all ranks; padding rows of an evaluation batch are zero."""
        rows = values_N[self.local]
        missing = self.local.stop - self.local.start - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


@dataclass(frozen=True)
class _Axis:
    """Padding of a tensor field along its second axis.

    side: "prompt" fields are padded on the left, "completion" fields on the right; "row" fields have one
        value per row and are never padded.
    fill: value of padding, and of every element where one of several concatenated batches lacks the field.
    """

    side: str
    fill: float = 0


_PROMPT = {"axis": _Axis("prompt")}
_COMPLETION = {"axis": _Axis("completion")}
_COMPLETION_NAN = {"axis": _Axis("completion", fill=math.nan)}
_ROW = {"axis": _Axis("row")}


def axes(record: Any) -> dict[str, _Axis]:
    """Return the axis metadata of the tensor fields of a record or record class, by field name."""
    return {f.name: f.metadata["axis"] for f in fields(record) if "axis" in f.metadata}


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Token ids and masks of B sequences on the training device.

    Example: prompts ``[5, 6]`` and ``[7]``, completions ``[8, 2]`` and ``[9]``::

        prompt_ids_BL     = [[5, 6], [0, 7]]    prompt_mask_BL     = [[1, 1], [0, 1]]
        completion_ids_BT = [[8, 2], [9, 0]]    completion_mask_BT = [[1, 1], [1, 0]]
        loss_mask_BT      = [[1, 1], [1, 0]]    group_ids_B        = [0, 1]
        old_logps_BT      = [[nan, nan], [nan, nan]]    # sampled by the current policy

    prompt_ids_BL, prompt_mask_BL: left-padded prompts; the mask is 1 on real tokens.
    completion_ids_BT, completion_mask_BT: right-padded completions.
    loss_mask_BT: 1 on tokens with loss: sampled by the policy, in a completion that is not masked.
    group_ids_B: number of the prompt that a row belongs to, the same for its G completions on all ranks;
        negative for a dropped completion, which counts in no normalizer.
    old_logps_BT: float32 log-probs under the behaviour policy; NaN where that is the current policy.
    sampler_logps_BT: float32 log-probs that the sampler reported, NaN where it reported none; None: there is
        no separate sampler.
    images: image inputs per row; None without a processor.
    kept_tokens: token sets that truncated sampling kept, per row one entry for each completion token, in host
        memory (see ``KeptTokens`` for the cost); a row of None, and None for all rows: the whole vocabulary.
    """

    prompt_ids_BL: torch.Tensor = field(metadata=_PROMPT)
    prompt_mask_BL: torch.Tensor = field(metadata=_PROMPT)
    completion_ids_BT: torch.Tensor = field(metadata=_COMPLETION)
    completion_mask_BT: torch.Tensor = field(metadata=_COMPLETION)
    loss_mask_BT: torch.Tensor = field(metadata=_COMPLETION)
    group_ids_B: torch.Tensor = field(metadata=_ROW)
    old_logps_BT: torch.Tensor = field(metadata=_COMPLETION_NAN)
    sampler_logps_BT: torch.Tensor | None = field(default=None, metadata=_COMPLETION_NAN)
    images: tuple[ImageInputs, ...] | None = None
    kept_tokens: tuple[KeptTokens | None, ...] | None = None

    def __len__(self) -> int:
        return self.completion_ids_BT.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensor fields that are not None, by name."""
        return {name: value for name in axes(self) if (value := getattr(self, name)) is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return host tensors and plain containers; rows that share image inputs go on sharing them."""
        state: dict[str, Any] = {name: tensor.cpu() for name, tensor in self.tensors().items()}
        if self.images is not None:
            distinct = {id(row): row.state_dict() for row in self.images}
            state["images"] = [distinct[id(row)] for row in self.images]
        if self.kept_tokens is not None:
            state["kept_tokens"] = [None if row is None else row.state_dict() for row in self.kept_tokens]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        changed: dict[str, Any] = {}
        if "images" in state:
            distinct = {id(row): ImageInputs(**row) for row in state["images"]}
            changed["images"] = tuple(distinct[id(row)] for row in state["images"])
        if "kept_tokens" in state:
            rows = state["kept_tokens"]
            changed["kept_tokens"] = tuple(None if row is None else KeptTokens(**row) for row in rows)
        return cls(**{**state, **changed})

    def num_tokens(self) -> int:
        """Return the number of input tokens of the padded layout, padding included."""
        return self.prompt_ids_BL.numel() + self.completion_ids_BT.numel()

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def split(self, rows: int) -> list[Self]:
        """Split into batches of ``rows`` sequences (the last may be smaller), without all-padding columns."""
        return [
            self.select(range(start, min(start + rows, len(self)))) for start in range(0, len(self), rows)
        ]

    def select(self, rows: Sequence[int]) -> Self:
        """Select rows, without all-padding columns."""
        index = torch.tensor(list(rows), device=self.completion_ids_BT.device)
        part: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors().items()}
        if self.images is not None:
            part["images"] = tuple(self.images[row] for row in rows)
        if self.kept_tokens is not None:
            part["kept_tokens"] = tuple(self.kept_tokens[row] for row in rows)
        return self._replace(**part).trimmed()

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the rows of batches, padded to common widths.

        A field that some batches lack gets its fill value there (kept tokens: the whole vocabulary);
        advantages per sequence are expanded to tokens beside token-wise ones.
        """
        joined: dict[str, Any] = {}
        for name, axis in axes(cls).items():
            parts = [getattr(batch, name) for batch in batches]
            if all(part is None for part in parts):
                continue
            parts = [
                _filled_like(batch, axis) if p is None else p for p, batch in zip(parts, batches, strict=True)
            ]
            joined[name] = torch.cat(_padded_to_common_width(parts, batches, axis))
        if batches[0].images is not None:
            joined["images"] = tuple(row for batch in batches for row in batch.images or ())
        if any(batch.kept_tokens is not None for batch in batches):
            joined["kept_tokens"] = tuple(
                row for batch in batches for row in batch.kept_tokens or (None,) * len(batch)
            )
        return batches[0]._replace(**joined)

    def trimmed(self) -> Self:
        """Drop leading prompt columns and trailing completion columns in which every row is padding."""
        prompt_width = max(int(self.prompt_mask_BL.sum(-1).max()), 1)
        width = max(int(self.completion_mask_BT.sum(-1).max()), 1)
        return self.shortened(prompt_width, width)

    def shortened(self, prompt_tokens: int, completion_tokens: int) -> Self:
        """Keep the last columns of the prompts and the first columns of the completions."""
        part: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            side = axes(self)[name].side
            if side == "prompt":
                part[name] = tensor[:, -prompt_tokens:]
            elif side == "completion":
                part[name] = tensor[:, :completion_tokens]
        if self.kept_tokens is not None:
            part["kept_tokens"] = tuple(
                None if row is None else row.first(completion_tokens) for row in self.kept_tokens
            )
        return self._replace(**part)

    def _replace(self, **changes: Any) -> Self:
        return replace(self, **changes)


def _filled_like(batch: TokenBatch, axis: _Axis) -> torch.Tensor:
    like = batch.completion_ids_BT
    return torch.full(like.shape, axis.fill, dtype=torch.float32, device=like.device)


def _padded_to_common_width(
    parts: list[torch.Tensor], batches: Sequence[TokenBatch], axis: _Axis
) -> list[torch.Tensor]:
    if axis.side == "row":
        return parts
    if axis.side == "completion" and any(part.shape[1] > 1 for part in parts):
        # One value per sequence becomes one per token.
        parts = [
            part.expand(-1, batch.completion_ids_BT.shape[1]) if part.shape[1] == 1 else part
            for part, batch in zip(parts, batches, strict=True)
        ]
    width = max(part.shape[1] for part in parts)
    gaps = [width - part.shape[1] for part in parts]
    return [
        F.pad(part, (gap, 0) if axis.side == "prompt" else (0, gap), value=axis.fill)
        for part, gap in zip(parts, gaps, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Experience(TokenBatch):
    """A TokenBatch with advantages and log-probs; the buffer and checkpoints hold these.

    Example: the two rows of :class:`TokenBatch`, the first better than its group, no reference model::

        advantages_BX = [[0.7], [-0.7]]    ref_logps_BT = None
        old_logps_BT  = [[nan, nan], [nan, nan]]    # on-policy: the loss reads logps.detach() there

    advantages_BX: (B, 1), or (B, T) with process rewards.
    ref_logps_BT: float32 log-probs under the reference model; None without one.
    """

    advantages_BX: torch.Tensor = field(metadata=_COMPLETION)
    ref_logps_BT: torch.Tensor | None = field(default=None, metadata=_COMPLETION)

    @classmethod
    def from_tokens(cls, tokens: TokenBatch, advantages: torch.Tensor, logps: OldAndRefLogps) -> Experience:
        """Add advantages, (B,) or (B, T'), and log-probs to tokens."""
        advantages_BX = align_advantages(advantages, tokens).to(tokens.loss_mask_BT.device)
        return cls(**{**vars(tokens), **logps._asdict()}, advantages_BX=advantages_BX)


def align_advantages(advantages: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """Return advantages (B,) as (B, 1), and (B, T') as (B, T): T' is the longest completion of all ranks."""
    if advantages.dim() == 1:
        return advantages.unsqueeze(1)
    width = tokens.completion_ids_BT.shape[1]
    return F.pad(advantages[:, :width], (0, max(width - advantages.shape[1], 0)))


class OldAndRefLogps(NamedTuple):
    """Log-probs (B, T) of completion tokens that the loss compares with.

    old_logps_BT: under the behaviour policy; NaN where that is the current policy.
    ref_logps_BT: under the reference model; None without one.
    """

    old_logps_BT: torch.Tensor
    ref_logps_BT: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Experience):
    """An Experience with the weights of its tokens in the accumulation window: ready for the loss.

    Example: the two rows of :class:`TokenBatch` alone in their window, token mean, no entropy quantile::

        token_weights_BT = [[1/3, 1/3], [1/3, 0]]    entropy_mask_BT = loss_mask_BT
        sequence_weight_B1 = [[0.5], [0.5]]          entropy_weights_BT = None

    token_weights_BT: weight of each token's loss (``groupwise.core.weights``).
    entropy_mask_BT: loss tokens in the top entropy quantile; all loss tokens without a quantile.
    sequence_weight_B1: share of each row in the window, for terms with one number per row; times the number
        of ranks, because gradients are averaged over ranks.
    entropy_weights_BT: weights of the entropy bonus, coefficient included; None without a bonus.
    correction_BX: sampler correction that was computed before, (B, 1) or (B, T); None: the loss computes it.
    packed: the same sequences without padding, if the layout prepared it; derived, never saved or moved.
    """

    token_weights_BT: torch.Tensor = field(metadata=_COMPLETION)
    entropy_mask_BT: torch.Tensor = field(metadata=_COMPLETION)
    sequence_weight_B1: torch.Tensor = field(metadata=_ROW)
    entropy_weights_BT: torch.Tensor | None = field(default=None, metadata=_COMPLETION)
    correction_BX: torch.Tensor | None = field(default=None, metadata=_COMPLETION)
    packed: PackedSequences | None = None

    def __getitem__(self, key: object) -> Any:
        """Refuse to be read as TRL's dictionary.

        Raises:
            TypeError: always, with the field and the way out.
        """
        names = ", ".join(item.name for item in fields(self))
        raise TypeError(f"inputs[{key!r}]: a MicroBatch has fields, not keys: {names}; {_TRL}")

    def num_tokens(self) -> int:
        """Return the number of input tokens in the layout of the run, padding included."""
        return super().num_tokens() if self.packed is None else self.packed.token_ids_1S.numel()

    def _replace(self, **changes: Any) -> Self:
        return replace(self, **{"packed": None, **changes})


@dataclass(eq=False)
class WindowEntry:
    """Entry of an accumulation window, which ``Trainer`` hands to ``training_step`` without reading it.

    batch: the micro-batch; None before the window is made, and where rebalancing needs fewer micro-batches.
    """

    batch: MicroBatch | None = None

    def __getitem__(self, key: object) -> Any:
        """Refuse to be read as the rows of TRL's loader.

        Raises:
            TypeError: always, with the way out.
        """
        raise TypeError(
            f"inputs[{key!r}]: training_step makes the micro-batch; override compute_loss(model, batch) or "
            f"compute_policy_loss(batch, logprobs), which receive it; {_TRL}"
        )


class PackedSequences(Protocol):
    """Sequences of a micro-batch as one row of S tokens (``groupwise.policy.layouts.packed``)."""

    @property
    def token_ids_1S(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class LogprobOutput:
    """Log-probs of the completion tokens of a :class:`TokenBatch` at the sampling temperature.

    logps_BT: float32.
    entropy_BT: float32 entropy of each token's distribution, in nats; None unless requested.
    aux_loss: balancing loss of a mixture-of-experts model, a scalar; None unless requested.
    """

    logps_BT: torch.Tensor
    entropy_BT: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch: the losses of a window add up.

    bonus_entropy: entropy of the tokens an entropy bonus acts on; None without a bonus.
    """

    loss: torch.Tensor
    bonus_entropy: Mean | None = None
    metrics: Metrics = field(default_factory=dict)


class RewardFunction(Protocol):
    """Reward callable: one float (or None) per completion; may be ``async``.

    Keyword arguments are ``prompts``, ``completions``, ``completion_ids``, every other dataset column,
    ``trainer_state``, ``log_extra(column, values)`` and ``log_metric(name, value)``.
    """

    def __call__(self, **kwargs: Any) -> Sequence[float | None]: ...


#: ``rollout_func(prompts, trainer)``: replaces generation.
RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]
