"""The tokens of one rollout: what the policy chose, and what tools and environments put in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from groupwise.records import Completion


@dataclass
class Transcript:
    """Prompt and completion as they grow. Tokens are appended as they were sampled, never tokenised again.

    prompt_ids: the prompt's tokens.
    limit: the most tokens of the completion, those of tools included.
    context_length: the most tokens of prompt and completion; None where nothing bounds them.
    token_ids, loss_mask, logps, versions: of the completion so far; the mask is 1 where the policy chose, the
        log-probs are NaN where it did not or where the backend gave none, and the version of the weights is
        that of the turn before where nothing was sampled.
    truncated: the limit ended it.
    forks: how often it was continued from another history than the one it had.
    """

    prompt_ids: list[int]
    limit: int
    context_length: int | None = None
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False
    forks: int = 0
    has_logps: bool = False
    has_versions: bool = False

    @property
    def context(self) -> list[int]:
        """What the policy continues next."""
        return self.prompt_ids + self.token_ids

    @property
    def room(self) -> int:
        """Tokens that fit."""
        room = self.limit - len(self.token_ids)
        return room if self.context_length is None else min(room, self.context_length - len(self.context))

    def sampled(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        tokens = completion.token_ids[: self.room]
        self.has_logps |= completion.logps is not None
        self.token_ids += tokens
        self.loss_mask += [1] * len(tokens)
        self.logps += (completion.logps or [math.nan] * len(tokens))[: len(tokens)]
        self.has_versions |= completion.versions is not None
        self.versions += (completion.versions or [0] * len(tokens))[: len(tokens)]
        self.truncated = completion.truncated or len(tokens) < len(completion.token_ids)

    def observed(self, tokens: Sequence[int]) -> bool:
        """Append tokens that the policy did not choose.

        Returns:
            False, and nothing is appended, where no room would be left for an answer: the rollout ends as
            truncated then.
        """
        if len(tokens) >= self.room:
            self.truncated = True
            return False
        self.token_ids += tokens
        self.loss_mask += [0] * len(tokens)
        self.logps += [math.nan] * len(tokens)
        self.versions += self.versions[-1:] * len(tokens) or [0] * len(tokens)
        return True

    def follow(self, rendered: Sequence[int]) -> bool:
        """Let ``rendered`` be what the policy continues next.

        What extends the tokens so far is appended. Where the two differ, the rollout forks at the first
        mismatch: tokens before it stay as they are, and the rest is that of ``rendered``, without loss. A
        mismatch within the prompt makes all of ``rendered`` the prompt. Tokens that the policy chose after
        the mismatch belong to a history that nobody continues, and are dropped. A history that fills the
        model's context changes nothing: the rollout ends with the one that it has.

        Returns:
            as :meth:`observed`.
        """
        if self.context_length is not None and len(rendered) >= self.context_length:
            self.truncated = True
            return False
        mine = self.context
        common = next(
            (i for i, (own, other) in enumerate(zip(mine, rendered, strict=False)) if own != other),
            min(len(mine), len(rendered)),
        )
        if common < len(mine):
            self.forks += 1
            if common < len(self.prompt_ids):
                self.prompt_ids, common = list(rendered), len(rendered)
            kept = common - len(self.prompt_ids)
            for values in (self.token_ids, self.loss_mask, self.logps, self.versions):
                del values[kept:]
        return self.observed(rendered[common:])

    def completion(self) -> Completion:
        """The record that the rest of the step reads."""
        return Completion(
            token_ids=self.token_ids,
            logps=self.logps if self.has_logps else None,
            loss_mask=self.loss_mask,
            truncated=self.truncated,
            versions=self.versions if self.has_versions else None,
        )
