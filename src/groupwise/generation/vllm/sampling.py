"""What vLLM is asked for: sampling fields from the configuration, and seeds that make a run repeatable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.config.sampling import SAMPLING_FIELDS

#: Fields of the configuration that vLLM calls the same.
_SAME_NAME = ("temperature", "top_p", "top_k", "repetition_penalty")


@dataclass(frozen=True)
class Request:
    """Samples of one prompt.

    rows: which rows of the call they are for.
    seed: of the first sample; vLLM counts up from it for the others.
    """

    prompt: Sequence[int]
    rows: Sequence[int]
    seed: int
    max_tokens: int

    def samples(self, temperature: float) -> int:
        """How many of them vLLM is asked for: it refuses to give the most probable tokens more than once."""
        return 1 if temperature == 0 else len(self.rows)

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal for requests with equal answers under the same weights."""
        return self.seed, len(self.rows), self.max_tokens


def sampling_fields(config: Any, end_tokens: Iterable[int], never: Iterable[int] = ()) -> dict[str, Any]:
    """Fields of vLLM's ``SamplingParams`` that all requests of a run share.

    Args:
        config: a ``GRPOConfig``; its ``generation_kwargs`` are passed on and override.
        end_tokens: what ends a completion.
        never: tokens that are not sampled.
    """
    fields: dict[str, Any] = {name: getattr(config, name) for name in _SAME_NAME}
    fields["min_p"] = config.min_p or 0.0
    fields["stop_token_ids"] = sorted(end_tokens)
    if config.vllm_structured_outputs_regex is not None:
        fields["structured_outputs"] = {"regex": config.vllm_structured_outputs_regex}
    own = config.generation_kwargs or {}
    fields.update({name: value for name, value in own.items() if name not in SAMPLING_FIELDS})
    if never := list(never):
        fields["logit_bias"] = {**fields.get("logit_bias", {}), **dict.fromkeys(never, -100.0)}
    fields["detokenize"] = bool(fields.get("stop"))  # strings are looked for in the text
    return fields


def group_requests(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    seed: int,
    step: int,
    rank: int,
    before: dict[int, int] | None = None,
) -> list[Request]:
    """Rows next to each other with the same prompt and limit as one request.

    A sample's seed depends on the run's seed, the step, the rank, the prompt and how many samples of that
    prompt stand before it: not on what else is sampled, on the order of requests or on the server.

    Args:
        before: how many samples of each prompt, by the seed of its first, the step has had; kept up to date.
    """
    requests: list[Request] = []
    before = {} if before is None else before
    row = 0
    while row < len(prompts):
        end = row + 1
        while end < len(prompts) and prompts[end] == prompts[row] and limits[end] == limits[row]:
            end += 1
        key = f"{seed} {step} {rank} {list(prompts[row])}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        base = int.from_bytes(digest, "big") >> 2  # leaves room to count up within 63 bits
        first = before.get(base, 0)
        requests.append(Request(prompts[row], range(row, end), base + first, limits[row]))
        before[base] = first + end - row
        row = end
    return requests
