"""Token ids, loss mask and log-probs of one rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

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
        parts: number of tokens of each part of ``token_ids``, and the turn whose beginning they are; None for
            tokens of tools, environments or the chat template.
        truncated: a limit ended the rollout.
        contexts: index of the first token after each fork, and the history that it follows.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    context_length: int | None = None
    token_ids: list[int] = field(default_factory=list)
    parts: list[tuple[int, Completion | None]] = field(default_factory=list)
    truncated: bool = False
    contexts: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def context_ids(self) -> list[int]:
        """Token ids of the present history: the input of the next turn."""
        start, context = self._last_context
        return context + self.token_ids[start:]

    @property
    def _last_context(self) -> tuple[int, list[int]]:
        return self.contexts[-1] if self.contexts else (0, self.prompt_ids)

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be appended."""
        start, context = self._last_context
        return self._remaining(context, len(self.token_ids) - start)

    def _remaining(self, context: list[int], num_tokens: int = 0) -> int:
        # What follows the prompt counts as completion; a history with another beginning is all prompt.
        is_continuation = context[: len(self.prompt_ids)] == self.prompt_ids
        limit = self.max_new_tokens + len(self.prompt_ids if is_continuation else context)
        if self.context_length is not None:
            limit = min(limit, self.context_length)
        return limit - len(context) - num_tokens

    @property
    def turns(self) -> tuple[Span, ...]:
        """Spans of the turns in ``token_ids``, one for each call of :meth:`append_sampled`."""
        spans = pairwise(accumulate((count for count, _ in self.parts), initial=0))
        return tuple(span for span, (_, sample) in zip(spans, self.parts, strict=True) if sample is not None)

    def append_sampled(self, completion: Completion) -> list[int]:
        """Append a turn of the policy, truncated to ``remaining_tokens``; return its tokens."""
        tokens = completion.token_ids[: self.remaining_tokens]
        self.token_ids += tokens
        self.parts.append((len(tokens), completion))
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
        self.token_ids += tokens
        self.parts.append((len(tokens), None))
        return True

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
        if self._remaining(history) < 1:
            self.truncated = True
            return False
        self.contexts.append((len(self.token_ids), history))
        return True

    def completion(self) -> Completion:
        """Return the completion as a record.

        Tokens that were not sampled have NaN as log-prob, the version of those before them, and the whole
        vocabulary as sampling mask.
        """
        logps: list[float] = []
        versions: list[int] = []
        masks: list[SamplingMask] = []
        for count, sample in self.parts:
            known = Completion([]) if sample is None else sample
            logps += (known.logps or [math.nan] * count)[:count]
            versions += (known.versions or (versions[-1:] or [0]) * count)[:count]
            kept = known.sampling_mask
            masks.append(SamplingMask.whole_vocabulary(count) if kept is None else kept.first(count))
        samples = [sample for _, sample in self.parts if sample is not None]
        digests = [each for sample in samples for each in (sample.weight_digest or "").split("+") if each]
        has_masks = any(sample.sampling_mask is not None for sample in samples)
        contexts = tuple(context for context in self.contexts if context[0] < len(self.token_ids))
        return Completion(
            token_ids=self.token_ids,
            logps=logps if any(sample.logps is not None for sample in samples) else None,
            loss_mask=[int(sample is not None) for count, sample in self.parts for _ in range(count)],
            truncated=self.truncated,
            versions=versions if any(sample.versions is not None for sample in samples) else None,
            weight_digest="+".join(dict.fromkeys(digests)) or None,
            sampling_mask=SamplingMask.concatenate(masks) if has_masks else None,
            contexts=contexts,
            last_row=(contexts[-1][0], len(self.token_ids)) if contexts else None,
            turns=self.turns,
        )
