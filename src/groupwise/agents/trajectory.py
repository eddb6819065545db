"""Token ids, loss mask and log-probs of one rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from groupwise.records import Completion
from groupwise.records.sampling_mask import SamplingMask


@dataclass
class Trajectory:
    """Prompt and completion of a rollout; sampled tokens are appended as they are, never tokenized again.

    A completion of two turns with one tool result between them::

        token_ids   [ call  <end> | tool  result | answer <end> ]
        loss_mask   [  1      1   |  0      0    |   1      1   ]
        logps       [-0.3   -0.1  | nan    nan   | -0.7   -0.1  ]

    Attributes:
        max_new_tokens: limit of the completion, tool results included.
        context_length: limit of prompt and completion; None: unlimited.
        loss_mask: 1 for sampled tokens, 0 for others.
        logps: sampler log-probs; NaN for tokens that were not sampled or have none.
        versions: optimizer step of the weights that sampled each token; other tokens repeat the one before.
        sampling_mask: token sets that truncated sampling kept; the whole vocabulary for tokens without a set.
        weight_digests: digests of the weights that sampled each turn, without those that are not known.
        truncated: a limit ended the rollout.
        num_forks: number of times that the history was rewritten.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    context_length: int | None = None
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampling_mask: list[SamplingMask] = field(default_factory=list)  # parts of the completion, in order
    weight_digests: list[str] = field(default_factory=list)
    truncated: bool = False
    num_forks: int = 0
    has_logps: bool = False
    has_versions: bool = False
    has_sampling_mask: bool = False

    @property
    def context_ids(self) -> list[int]:
        """Token ids of prompt and completion: the input of the next turn."""
        return self.prompt_ids + self.token_ids

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be appended."""
        remaining = self.max_new_tokens - len(self.token_ids)
        if self.context_length is None:
            return remaining
        return min(remaining, self.context_length - len(self.context_ids))

    def append_sampled(self, completion: Completion) -> list[int]:
        """Append a turn of the policy, truncated to ``remaining_tokens``; return its tokens."""
        tokens = completion.token_ids[: self.remaining_tokens]
        self.has_logps |= completion.logps is not None
        self.has_versions |= completion.versions is not None
        self.has_sampling_mask |= completion.sampling_mask is not None
        self._append(tokens, 1, completion.logps, completion.versions, completion.sampling_mask)
        self.weight_digests += completion.weight_digest.split("+") if completion.weight_digest else []
        self.truncated = completion.truncated or len(tokens) < len(completion.token_ids)
        return tokens

    def append_observed(self, tokens: Sequence[int]) -> bool:
        """Append tokens of tools, environments or the chat template, without loss.

        Returns:
            False if no token would remain for the next turn: nothing is appended, and the rollout is
            truncated.
        """
        if len(tokens) >= self.remaining_tokens:
            self.truncated = True
            return False
        self._append(tokens, 0, None, self.versions[-1:] * len(tokens), None)
        return True

    def _append(
        self,
        tokens: Sequence[int],
        mask: int,
        logps: list[float] | None,
        versions: list[int] | None,
        kept: SamplingMask | None,
    ) -> None:
        count = len(tokens)
        self.token_ids += tokens
        self.loss_mask += [mask] * count
        self.logps += (logps or [math.nan] * count)[:count]
        self.versions += (versions or [0] * count)[:count]
        self.sampling_mask.append(SamplingMask.whole_vocabulary(count) if kept is None else kept.first(count))

    def continue_from(self, context_ids: Sequence[int]) -> bool:
        """Append or fork so that the next turn continues ``context_ids``.

        If ``context_ids`` extend the present ones, the additional tokens are appended without loss. Otherwise
        the rollout forks: it keeps its tokens up to the first mismatch, drops the later ones (they belong to
        a history that is not continued), and appends the rest of ``context_ids`` without loss. After a
        mismatch within the prompt, ``context_ids`` become the prompt.

        Returns:
            False if no token would remain for the next turn; then the rollout is truncated, and unchanged if
            ``context_ids`` alone fill the context.
        """
        if self.context_length is not None and len(context_ids) >= self.context_length:
            self.truncated = True
            return False
        own_ids = self.context_ids
        common = next(
            (i for i, (own, other) in enumerate(zip(own_ids, context_ids, strict=False)) if own != other),
            min(len(own_ids), len(context_ids)),
        )
        if common < len(own_ids):
            self.num_forks += 1
            if common < len(self.prompt_ids):
                self.prompt_ids, common = list(context_ids), len(context_ids)
            kept = common - len(self.prompt_ids)
            for values in (self.token_ids, self.loss_mask, self.logps, self.versions):
                del values[kept:]
            if self.sampling_mask:
                self.sampling_mask = [SamplingMask.concatenate(self.sampling_mask).first(kept)]
        return self.append_observed(context_ids[common:])

    def completion(self) -> Completion:
        """Return the completion as a record."""
        return Completion(
            token_ids=self.token_ids,
            logps=self.logps if self.has_logps else None,
            loss_mask=self.loss_mask,
            truncated=self.truncated,
            versions=self.versions if self.has_versions else None,
            weight_digest="+".join(dict.fromkeys(self.weight_digests)) or None,
            sampling_mask=SamplingMask.concatenate(self.sampling_mask) if self.has_sampling_mask else None,
        )
