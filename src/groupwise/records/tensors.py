"""Token ids, log-probs and weights of the sequences of this rank, as padded tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from groupwise.compat.trl import WithoutKeys
from groupwise.core.metrics import Mean, Metrics
from groupwise.records.images import ImageInputs
from groupwise.records.rollout import RoutedExperts, SamplerSettings
from groupwise.records.sampling_mask import SamplingMask

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Axis:
    """Second axis of a field with one entry per row.

    side: "prompt" tensors are padded on the left, "completion" tensors on the right; "row" tensors have one
        value per row and are never padded; "list" fields are tuples.
    fill: value of padding, and of every element of a field that one of several concatenated batches lacks.
    """

    side: str
    fill: Any = 0

    def padded(self, tensor: torch.Tensor, width: int) -> torch.Tensor:
        """Pad the second axis of a tensor to ``width``; one of this width is not copied."""
        gap = width - tensor.shape[1]
        sides = (gap, 0) if self.side == "prompt" else (0, gap)
        return F.pad(tensor, sides, value=self.fill) if gap else tensor


_PROMPT = {"axis": _Axis("prompt")}
_COMPLETION = {"axis": _Axis("completion")}
_COMPLETION_NAN = {"axis": _Axis("completion", fill=math.nan)}
_ROW = {"axis": _Axis("row")}
_FLAG = {"axis": _Axis("row", fill=False)}
_LIST = {"axis": _Axis("list", fill=None)}


def _axes(record: Any) -> dict[str, _Axis]:
    """Return the axis metadata of the fields with one entry per row, of a record or record class, by name."""
    return {f.name: f.metadata["axis"] for f in fields(record) if "axis" in f.metadata}


@dataclass(frozen=True, kw_only=True)
class TokenBatch(WithoutKeys):
    """Token ids and masks of B sequences on the training device.

    Example: prompts ``[5, 6]`` and ``[7]``, completions ``[8, 2]`` and ``[9]``::

        prompt_ids_BL     = [[5, 6], [0, 7]]    prompt_mask_BL     = [[1, 1], [0, 1]]
        completion_ids_BT = [[8, 2], [9, 0]]    completion_mask_BT = [[1, 1], [1, 0]]
        loss_mask_BT      = [[1, 1], [1, 0]]    group_ids_B        = [0, 1]
        old_logps_BT      = [[nan, nan], [nan, nan]]    # sampled by the current policy

    prompt_ids_BL, prompt_mask_BL: left-padded prompts; the mask is 1 on real tokens.
    completion_ids_BT, completion_mask_BT: right-padded completions.
    loss_mask_BT: 1 on tokens with loss: sampled by the policy, in a completion that is not masked.
    group_ids_B: number of the prompt that a row belongs to, the same for its G completions on all ranks.
    old_logps_BT: float32 log-probs under the behaviour policy; NaN where that is the current policy.
    sampler_logps_BT: float32 log-probs that the sampler reported, NaN where it reported none; None: there is
        no separate sampler.
    sampler: sampler settings of the generation; its temperature is that of all log-probs.
    images: image inputs per row; None without a processor.
    sampling_mask: tokens that truncated sampling kept, per row one entry for each completion token, in host
        memory (``SamplingMask`` has the cost); a row of None, and None for all rows: the whole vocabulary.
    weight_digests: per row, digests of the weights that sampled it (``Completion.weight_digest``).
    metric_values: per row, its value of ``metrics_by`` or its source; None: no row has one.
    contexts: per row, where its tokens follow other ids than the prompt (``Completion.contexts``); None: no
        row has such tokens.
    dropped_B: True for a dropped completion, which counts in no normalizer; None: no row is dropped.
    routed_experts: per row, experts to which a log-prob pass routes its tokens (``router_replay``), in host
        memory; a row of None, and None for all rows: the model's own choice.
    """

    prompt_ids_BL: torch.Tensor = field(metadata=_PROMPT)
    prompt_mask_BL: torch.Tensor = field(metadata=_PROMPT)
    completion_ids_BT: torch.Tensor = field(metadata=_COMPLETION)
    completion_mask_BT: torch.Tensor = field(metadata=_COMPLETION)
    loss_mask_BT: torch.Tensor = field(metadata=_COMPLETION)
    group_ids_B: torch.Tensor = field(metadata=_ROW)
    old_logps_BT: torch.Tensor = field(metadata=_COMPLETION_NAN)
    sampler_logps_BT: torch.Tensor | None = field(default=None, metadata=_COMPLETION_NAN)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    images: tuple[ImageInputs, ...] | None = field(default=None, metadata=_LIST)
    sampling_mask: tuple[SamplingMask | None, ...] | None = field(default=None, metadata=_LIST)
    weight_digests: tuple[str | None, ...] | None = field(default=None, metadata=_LIST)
    metric_values: tuple[Any, ...] | None = field(default=None, metadata=_LIST)
    contexts: tuple[tuple[tuple[int, list[int]], ...] | None, ...] | None = field(
        default=None, metadata=_LIST
    )
    dropped_B: torch.Tensor | None = field(default=None, metadata=_FLAG)
    routed_experts: tuple[RoutedExperts | None, ...] | None = field(default=None, metadata=_LIST)

    def __len__(self) -> int:
        return self.completion_ids_BT.shape[0]

    @property
    def kept_B(self) -> torch.Tensor:
        """(B,) bool, False for dropped rows."""
        none = torch.zeros_like(self.group_ids_B, dtype=torch.bool)
        return ~(none if self.dropped_B is None else self.dropped_B)

    def row_fields(self) -> dict[str, Any]:
        """Return the fields with one entry per row that are not None, by name."""
        return {name: value for name in _axes(self) if (value := getattr(self, name)) is not None}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are not None, by name."""
        return {n: value for n, value in self.row_fields().items() if isinstance(value, torch.Tensor)}

    def sequences(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and mask (B, L + T) of prompts with their completions."""
        ids = torch.cat([self.prompt_ids_BL, self.completion_ids_BT], dim=1)
        return ids, torch.cat([self.prompt_mask_BL, self.completion_mask_BT], dim=1)

    def num_tokens(self) -> int:
        """Return the number of input tokens of the padded layout, padding included."""
        return self.prompt_ids_BL.numel() + self.completion_ids_BT.numel() + sum(self.context_tokens())

    def context_tokens(self) -> list[int]:
        """Return per row the number of tokens of ``contexts``; [] if no row has any."""
        return [sum(len(ids) for _, ids in row or ()) for row in self.contexts or ()]

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def split(self, rows: int) -> list[Self]:
        """Split into batches of ``rows`` sequences (the last may be smaller), without all-padding columns."""
        starts = range(0, len(self), rows)
        return self.regroup([self], [range(start, min(start + rows, len(self))) for start in starts])

    def select(self, rows: Sequence[int]) -> Self:
        """Select rows, without all-padding columns."""
        return self.regroup([self], [rows])[0]

    def with_fields(self, names: Collection[str]) -> Self:
        """Set those of these fields that are None to their fill value."""
        filled: dict[str, Any] = {}
        for name in set(names) - self.row_fields().keys():
            axis, ids_BT = _axes(self)[name], self.completion_ids_BT
            if axis.side == "list":
                filled[name] = (axis.fill,) * len(self)
            elif axis.side == "row":
                filled[name] = torch.full_like(self.group_ids_B, axis.fill, dtype=torch.bool)  # (B,)
            else:
                filled[name] = torch.full_like(ids_BT, axis.fill, dtype=torch.float32)  # (B, T)
        return self._replace(**filled)

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Return the rows of batches as one batch; see :meth:`regroup`."""
        return cls.regroup(batches, [range(sum(map(len, batches)))])[0]

    @classmethod
    def regroup(cls, batches: Sequence[Self], groups: Sequence[Sequence[int]]) -> list[Self]:
        """Return a batch of each group of rows, counted through all batches, without all-padding columns.

        A field that some batches lack gets its fill value there (sampling mask: the whole vocabulary);
        advantages per sequence are expanded to tokens beside token-wise ones. Fields that are one tensor stay
        one. Memory holds the result and one field of all rows, not another copy of the rows.
        """
        names = {name for batch in batches for name in batch.row_fields()}
        batches = [batch.with_fields(names) for batch in batches]
        masks = [[b.prompt_mask_BL for b in batches], [b.completion_mask_BT for b in batches]]
        lengths = torch.stack([torch.cat([mask.sum(-1) for mask in side]) for side in masks])  # (2, B)
        widths = (  # of the prompts and of the completions of each group: one read
            [max([1, *(of_rows[row] for row in rows)]) for rows in groups] for of_rows in lengths.tolist()
        )
        indexes = [torch.tensor(list(rows), dtype=torch.long, device=lengths.device) for rows in groups]
        of_groups = list(zip(groups, indexes, *widths, strict=True))
        keys = {n: (_axes(cls)[n], *(id(getattr(batch, n)) for batch in batches)) for n in names}
        different = {key: name for name, key in keys.items()}  # fields that are not one tensor
        made = {key: _regrouped(batches, name, of_groups) for key, name in different.items()}
        parts = [{name: made[key][i] for name, key in keys.items()} for i in range(len(groups))]
        return [batches[0]._replace(**part) for part in parts]

    def _replace(self, **changes: Any) -> Self:
        return replace(self, **changes)


def _regrouped(batches: Sequence[TokenBatch], name: str, groups: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return a field of each group: rows, their index, and longest prompt and completion."""
    parts, axis = [getattr(batch, name) for batch in batches], _axes(batches[0])[name]
    if axis.side == "list":
        entries = [entry for part in parts for entry in part]
        first = SamplingMask.first if name == "sampling_mask" else lambda entry, width: entry
        return [
            tuple(None if entries[row] is None else first(entries[row], width) for row in rows)
            for rows, _, _, width in groups
        ]
    if axis.side == "completion" and any(part.shape[1] > 1 for part in parts):
        pairs = zip(parts, batches, strict=True)  # one value per sequence becomes one per token
        parts = [part.expand(batch.completion_ids_BT.shape) for part, batch in pairs]
    if axis.side != "row":
        width = max(part.shape[1] for part in parts)
        parts = [axis.padded(part, width) for part in parts]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    # Views, so that columns of padding are not copied.
    if axis.side == "prompt":
        return [whole[:, -width:][index] for _, index, width, _ in groups]
    return [(whole if axis.side == "row" else whole[:, :width])[index] for _, index, _, width in groups]


@dataclass(frozen=True)
class Shape:
    """Lengths of the sequences of a micro-batch, on the host.

    prompts, completions: number of tokens of each row.
    repeats: True for rows with the same prompt as the row before.
    """

    prompts: list[int]
    completions: list[int]
    repeats: list[bool]

    def groups(self, *, shared: bool = True) -> list[list[int]]:
        """Return runs of consecutive rows with the same prompt; every row alone unless ``shared``."""
        runs: list[list[int]] = []
        for row, repeats in enumerate(self.repeats):
            if repeats and shared:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    def group_tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of rows that share a prompt, which counts once."""
        return self.prompts[rows[0]] + sum(self.completions[row] for row in rows)

    def groups_of(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the runs of ``rows`` with the same prompt."""
        kept = set(rows)  # other rows of a group are in other micro-batches
        groups = ([row for row in group if row in kept] for group in self.groups())
        return [group for group in groups if group]


def shape_of(batch: TokenBatch) -> Shape:
    """Return lengths and repeated prompts of ``batch``, in a single transfer from the device."""
    ids, mask = batch.prompt_ids_BL, batch.prompt_mask_BL
    same = ((ids[1:] == ids[:-1]) & (mask[1:] == mask[:-1])).all(-1)  # (B - 1,), padding compares equal too
    if batch.images is not None:  # rows of one text may have other images
        equal = [one.has_same_arrays(other) for one, other in pairwise(batch.images)]
        same &= torch.tensor(equal, dtype=torch.bool, device=same.device)
    repeats = F.pad(same, (1, 0))  # (B,), False for the first row
    # (3, B): one transfer to the host, not three.
    columns = torch.stack([mask.sum(-1), batch.completion_mask_BT.sum(-1), repeats.long()])
    prompts, completions, flags = columns.tolist()
    if batch.contexts is not None:  # of a rollout of several rows: tokens of no other rollout
        completions = [sum(counts) for counts in zip(completions, batch.context_tokens(), strict=True)]
    return Shape(prompts, completions, [bool(flag) for flag in flags])


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
        routed = logps.routed_experts or tokens.routed_experts
        values = {**vars(tokens), **logps._asdict(), "routed_experts": routed}
        return cls(**values, advantages_BX=advantages_BX)


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
    routed_experts: per row, the routing of the pass for old log-probs, if the loss replays it.
    """

    old_logps_BT: torch.Tensor
    ref_logps_BT: torch.Tensor | None
    routed_experts: tuple[RoutedExperts | None, ...] | None = None


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
    rows_B: positions of the rows in the window of all ranks; None in a batch that is in no window.
    packed: the same sequences without padding, if the layout prepared it; derived, never saved or moved.
    """

    token_weights_BT: torch.Tensor = field(metadata=_COMPLETION)
    entropy_mask_BT: torch.Tensor = field(metadata=_COMPLETION)
    sequence_weight_B1: torch.Tensor = field(metadata=_ROW)
    entropy_weights_BT: torch.Tensor | None = field(default=None, metadata=_COMPLETION)
    correction_BX: torch.Tensor | None = field(default=None, metadata=_COMPLETION)
    rows_B: torch.Tensor | None = field(default=None, metadata=_ROW)
    packed: PackedSequences | None = field(default=None, metadata={"saved": False})

    def row_numbers(self) -> list[int]:
        """Return the positions of the rows in the window of all ranks."""
        return [] if self.rows_B is None else self.rows_B.tolist()

    def num_tokens(self) -> int:
        """Return the number of input tokens in the layout of the run, padding included."""
        return super().num_tokens() if self.packed is None else self.packed.num_tokens()

    def _replace(self, **changes: Any) -> Self:
        return replace(self, **{"packed": None, **changes})


class PackedSequences(Protocol):
    """Sequences of a micro-batch in a layout without prompts computed twice, such as one row of S tokens."""

    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class LogprobOutput:
    """Log-probs of the completion tokens of a :class:`TokenBatch` at the sampling temperature.

    logps_BT: float32.
    entropy_BT: float32 entropy of each token's distribution, in nats; None unless requested.
    aux_loss: balancing loss of a mixture-of-experts model, a scalar; None unless requested.
    routing: ``BatchRouting`` of a pass that replays or records experts.
    """

    logps_BT: torch.Tensor
    entropy_BT: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    routing: Any = None


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch: the losses of a window add up.

    bonus_entropy: entropy of the tokens an entropy bonus acts on; None without a bonus.
    """

    loss: torch.Tensor
    bonus_entropy: Mean | None = None
    metrics: Metrics = field(default_factory=dict)
