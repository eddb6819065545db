"""The records that travel between the stages of a step.

    rows -generate_rollouts-> RolloutBatch -score-> RewardBatch -compute_advantages-> (N,) or (N, T)
         -annotate-> MicroBatch -compute_policy_loss-> LossOutput

Axis suffixes: B sequences at hand, P prompt tokens, C completion tokens, X is C or 1, N sequences of all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from groupwise.core.advantages import GroupRewards
from groupwise.core.images import ImageInputs
from groupwise.core.metrics import Mean, Metrics


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    token_ids: the tokens after the prompt, the end token included when there is one.
    logps: log-probability of each token under the sampling distribution; None when the sampler is the policy
        itself or did not report them; NaN for a token it could not score.
    loss_mask: 1 for tokens the policy chose, 0 for tokens of tools and environments; None means all chosen.
    truncated: the length limit ended it, not an end token.
    old_logps: log-probability of each token under the policy that sampled it, where that is no longer the
        current one.
    versions: the optimizer step whose weights sampled each token; None when the sampler is the policy itself.
    """

    token_ids: list[int]
    logps: list[float] | None = None
    loss_mask: list[int] | None = None
    truncated: bool = False
    old_logps: list[float] | None = None
    versions: list[int] | None = None

    def sampled_at(self, step: int) -> bool:
        """Whether the weights of optimizer step ``step`` sampled all of it."""
        return self.old_logps is None and all(version == step for version in self.versions or ())


@dataclass(frozen=True)
class SamplingOptions:
    """What a single call of a backend asks for beside the settings of the run.

    max_tokens: the most tokens of each completion, by row; None is the configured limit for all.
    images: what stands in the prompts beside tokens, by row; None for prompts of text.
    overrides: sampler settings in place of the run's: temperature, top_p, top_k, min_p, repetition_penalty.
    finished: called with rows and their completions when these are there and others are not, by a sampler
        that does not need the caller's thread meanwhile.
    """

    max_tokens: Sequence[int] | None = None
    images: Sequence[ImageInputs] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    finished: Callable[[Sequence[int], list[Completion]], None] | None = None


@dataclass(frozen=True)
class RolloutBatch:
    """What was sampled on this rank, one entry per completion, the completions of a prompt next to each
    other.

    rows: the dataset rows.
    prompts: the prompts as the dataset gave them.
    prompt_ids: their tokens, without padding.
    completions: what the sampler returned.
    texts: the completions as reward functions see them: strings, or message lists for chat prompts.
    extra: further per-completion columns that reach the reward functions.
    images: what a processor made of the images of each sequence; None without a processor.
    """

    rows: list[dict[str, Any]]
    prompts: list[Any]
    prompt_ids: list[list[int]]
    completions: list[Completion]
    texts: list[Any]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    images: Sequence[ImageInputs] | None = None

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class RewardBatch:
    """Rewards of the global batch, and where this rank's completions lie in it.

    rewards: all ranks, in rank order, so that groups are contiguous.
    local: the rows of ``rewards`` that belong to ``rollout``.
    columns: extra columns that reward functions logged for the completions table.
    """

    rollout: RolloutBatch
    rewards: GroupRewards
    local: slice
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    @property
    def num_valid(self) -> int:
        """Completions of this rank that count; later ones only fill up an evaluation batch."""
        return len(self.rewards.rewards_NF[self.local])


@dataclass(frozen=True)
class MicroBatch:
    """Sequences ready for the loss.

    prompt_ids_BL, prompt_mask_BL: left-padded prompts; the mask is 1 on real tokens.
    completion_ids_BT, completion_mask_BT: right-padded completions.
    loss_mask_BT: tokens that carry loss: policy tokens of completions that are not masked as truncated.
    advantages_BX: (B, 1) or (B, C).
    old_logps_BT: log-probs of the policy that generated; None when that is the current policy.
    ref_logps_BT, sampler_logps_BT: None when there is no reference, or no separate sampler.
    token_weights_BT: token weights of the window (see ``groupwise.core.weights``).
    entropy_mask_BT: tokens kept by the entropy quantile; None keeps all.
    entropy_weights_BT: weights of the entropy bonus, coefficient included; None is no bonus.
    sequence_weight_B1: the share of each row in the window, for terms that are one number per micro-batch.
    stream: the same sequences without padding (``policy.layouts.packed``), if the layout prepared it.
    images: what the model takes beside tokens, one entry per row; None without a processor.
    """

    prompt_ids_BL: torch.Tensor
    prompt_mask_BL: torch.Tensor
    completion_ids_BT: torch.Tensor
    completion_mask_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    advantages_BX: torch.Tensor | None = None
    old_logps_BT: torch.Tensor | None = None
    ref_logps_BT: torch.Tensor | None = None
    sampler_logps_BT: torch.Tensor | None = None
    token_weights_BT: torch.Tensor | None = None
    entropy_mask_BT: torch.Tensor | None = None
    entropy_weights_BT: torch.Tensor | None = None
    sequence_weight_B1: torch.Tensor | None = None
    stream: Any = None
    images: tuple[ImageInputs, ...] | None = None

    def __len__(self) -> int:
        return self.completion_ids_BT.shape[0]

    def tensors(self) -> dict[str, Any]:
        """The tensors that are set, by field name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in named if isinstance(value, torch.Tensor)}

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the host, and plain containers of such; what rows share stays shared."""
        state: dict[str, Any] = {name: tensor.cpu() for name, tensor in self.tensors().items()}
        if self.images is not None:
            distinct = {id(row): row.state_dict() for row in self.images}
            state["images"] = [distinct[id(row)] for row in self.images]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> MicroBatch:
        if "images" not in state:
            return cls(**state)
        distinct = {id(row): ImageInputs(**row) for row in state["images"]}
        return cls(**{**state, "images": tuple(distinct[id(row)] for row in state["images"])})

    def computed_tokens(self) -> int:
        """Tokens of the model's input, padding included."""
        padded = self.prompt_ids_BL.numel() + self.completion_ids_BT.numel()
        return padded if self.stream is None else self.stream.token_ids_1T.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def split(self, rows: int) -> Iterator[MicroBatch]:
        """Micro-batches of ``rows`` sequences (the last may be smaller), without all-padding columns."""
        for start in range(0, len(self), rows):
            yield self.select(range(start, min(start + rows, len(self))))

    def select(self, rows: Sequence[int]) -> MicroBatch:
        """The given rows, without all-padding columns."""
        index = torch.tensor(list(rows), device=self.completion_ids_BT.device)
        part: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors().items()}
        if self.images is not None:
            part["images"] = tuple(self.images[row] for row in rows)
        return replace(self, **part, stream=None).trimmed()

    @staticmethod
    def concatenate(batches: Sequence[MicroBatch]) -> MicroBatch:
        """All rows of batches that have the same fields."""
        widths = {
            name: max(batch.tensors()[name].shape[1] for batch in batches) for name in batches[0].tensors()
        }
        joined: dict[str, Any] = {}
        for name, width in widths.items():
            parts = [batch.tensors()[name] for batch in batches]
            gaps = [width - part.shape[1] for part in parts]
            sides = [(gap, 0) if name.endswith("_BL") else (0, gap) for gap in gaps]
            joined[name] = torch.cat([F.pad(p, side) for p, side in zip(parts, sides, strict=True)])
        if batches[0].images is not None:
            joined["images"] = tuple(row for batch in batches for row in batch.images or ())
        return replace(batches[0], **joined, stream=None)

    def trimmed(self) -> MicroBatch:
        """Drop leading prompt columns and trailing completion columns in which every row is padding."""
        prompt_width = max(int(self.prompt_mask_BL.sum(-1).max()), 1)
        width = max(int(self.completion_mask_BT.sum(-1).max()), 1)
        cut = {}
        for name, tensor in self.tensors().items():
            if name.endswith("_BL"):
                cut[name] = tensor[:, tensor.shape[1] - prompt_width :]
            elif tensor.shape[1] > 1:
                cut[name] = tensor[:, :width]
        return replace(self, **cut, stream=None)


@dataclass(frozen=True)
class LogprobOutput:
    """A policy's view of the completion tokens of a :class:`MicroBatch`, at the sampling temperature.

    logps_BT, entropy_BT: float32; the entropy is None when nobody asked for it.
    aux_loss: balancing loss of a mixture-of-experts model, a scalar.
    fused: the loss without that one, where it was computed in place of log-probs, which are None then.
    """

    logps_BT: torch.Tensor | None
    entropy_BT: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    fused: LossOutput | None = None


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
