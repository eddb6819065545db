"""Token ids, loss mask and log-probs of one rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from groupwise.records import Completion
from groupwise.records.rollout import Span
from groupwise.records.sampling_mask import SamplingMask


@dataclass
class Trajectory:
    """Prompt and completion of a rollout; sampled tokens are appended as they are, never tokenized again.

    A completion of two turns with one tool result between them::

        token_ids   [ call  <end> | tool  result | answer <end> ]
        loss_mask   [  1      1   |  0      0    |   1      1   ]
        logps       [-0.3   -0.1  | nan    nan   | -0.7   -0.1  ]

    A history that is rewritten does not cost what was sampled: the rollout forks, and its later tokens follow
    a context of their own (``Completion.contexts``).

    Attributes:
        max_new_tokens: limit of the completion, tool results included; after a fork, of what follows the
            prompt in the present history.
        context_length: limit of prompt and completion; None: unlimited.
        loss_mask: 1 for sampled tokens, 0 for others.
        logps: sampler log-probs; NaN for tokens that were not sampled or have none.
        versions: optimizer step of the weights that sampled each token; other tokens repeat the one before.
        sampling_mask: token sets that truncated sampling kept; the whole vocabulary for tokens without a set.
        weight_digests: digests of the weights that sampled each turn, without those that are not known.
        truncated: a limit ended the rollout.
        num_forks: number of times that the history was rewritten.
        contexts: index of the first token after each fork, and the history that it follows.
        turns: spans of the turns in ``token_ids``, one for each call of :meth:`append_sampled`.
        prompt_tokens: tokens of the present history that do not count as completion.
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
    contexts: list[tuple[int, list[int]]] = field(default_factory=list)
    turns: list[Span] = field(default_factory=list)
    prompt_tokens: int = 0
    has_logps: bool = False
    has_versions: bool = False
    has_sampling_mask: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.prompt_ids)

    @property
    def context_ids(self) -> list[int]:
        """Token ids of the present history: the input of the next turn."""
        start, context = self.contexts[-1] if self.contexts else (0, self.prompt_ids)
        return context + self.token_ids[start:]

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be appended."""
        return self._remaining(self.context_ids, self.prompt_tokens)

    def _remaining(self, history: list[int], prompt_tokens: int) -> int:
        remaining = self.max_new_tokens - (len(history) - prompt_tokens)
        return (
            remaining if self.context_length is None else min(remaining, self.context_length - len(history))
        )

    def append_sampled(self, completion: Completion) -> list[int]:
        """Append a turn of the policy, truncated to ``remaining_tokens``; return its tokens."""
        tokens = completion.token_ids[: self.remaining_tokens]
        self.has_logps |= completion.logps is not None
        self.has_versions |= completion.versions is not None
        self.has_sampling_mask |= completion.sampling_mask is not None
        self._append(tokens, 1, completion.logps, completion.versions, completion.sampling_mask)
        self.turns.append((len(self.token_ids) - len(tokens), len(self.token_ids)))
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

        If ``context_ids`` extend the present history, the additional tokens are appended without loss.
        Otherwise the rollout forks: what was sampled keeps its loss after the history in which it was
        sampled, and later tokens follow ``context_ids``, which carry none.

        Returns:
            False if no token would remain for the next turn; then the rollout is truncated, and unchanged.
        """
        own_ids, history = self.context_ids, list(context_ids)
        if history[: len(own_ids)] == own_ids:
            return self.append_observed(history[len(own_ids) :])
        # What follows the prompt counts as completion; a history with another beginning is all prompt.
        num_prompt = len(self.prompt_ids)
        prompt_tokens = num_prompt if history[:num_prompt] == self.prompt_ids else len(history)
        if self._remaining(history, prompt_tokens) < 1:
            self.truncated = True
            return False
        self.num_forks, self.prompt_tokens = self.num_forks + 1, prompt_tokens
        self.contexts.append((len(self.token_ids), history))
        return True

    def completion(self) -> Completion:
        """Return the completion as a record."""
        contexts = tuple(context for context in self.contexts if context[0] < len(self.token_ids))
        return Completion(
            token_ids=self.token_ids,
            logps=self.logps if self.has_logps else None,
            loss_mask=self.loss_mask,
            truncated=self.truncated,
            versions=self.versions if self.has_versions else None,
            weight_digest="+".join(dict.fromkeys(self.weight_digests)) or None,
            sampling_mask=SamplingMask.concatenate(self.sampling_mask) if self.has_sampling_mask else None,
            contexts=contexts,
            last_row=(contexts[-1][0], len(self.token_ids)) if contexts else None,
            turns=tuple(self.turns),
        )
