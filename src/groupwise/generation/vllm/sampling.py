"""Sampling fields of vLLM from the config, and request seeds that make a run reproducible."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import SAMPLING_FIELDS
from groupwise.generation.base import json_dict
from groupwise.records.images import ImageInputs
from groupwise.records.sampling_mask import SamplingMask

#: Fields of the config that have the same name in vLLM.
_SAME_NAME = ("temperature", "top_p", "top_k", "repetition_penalty")

#: Most tokens per position whose log-probs vLLM reports, unless ``--max-logprobs`` raises it.
DEFAULT_MAX_LOGPROBS = 20

#: (seed, number of samples, max_tokens); requests with equal keys have equal results under the same weights.
RequestKey: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Request:
    """Samples of one prompt.

    Attributes:
        prompt: token ids.
        rows: indices of the samples in the ``generate`` call.
        seed: seed of the first sample; vLLM adds 1 per further sample.
        max_tokens: maximum completion length.
        images: images of the prompt; None for text.
    """

    prompt: Sequence[int]
    rows: Sequence[int]
    seed: int
    max_tokens: int
    images: ImageInputs | None = None

    def num_samples(self, temperature: float) -> int:
        """Return ``n`` of vLLM's sampling parameters; it must be 1 for greedy decoding."""
        return 1 if temperature == 0 else len(self.rows)

    @property
    def key(self) -> RequestKey:
        return self.seed, len(self.rows), self.max_tokens


def sampling_fields(
    config: GRPOConfig, end_tokens: Iterable[int], suppress_tokens: Iterable[int] = ()
) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` that all requests of a run share.

    Args:
        config: its ``generation_kwargs`` are added and win.
        end_tokens: token ids that end a completion.
        suppress_tokens: token ids that are not sampled.
    """
    fields: dict[str, Any] = {name: getattr(config, name) for name in _SAME_NAME}
    fields["min_p"] = config.min_p or 0.0
    fields["stop_token_ids"] = sorted(end_tokens)
    if config.vllm_structured_outputs_regex is not None:
        fields["structured_outputs"] = {"regex": config.vllm_structured_outputs_regex}
    given = json_dict(config.generation_kwargs)
    fields.update({name: value for name, value in given.items() if name not in SAMPLING_FIELDS})
    if suppress_tokens := list(suppress_tokens):
        fields["logit_bias"] = {**fields.get("logit_bias", {}), **dict.fromkeys(suppress_tokens, -100.0)}
    fields["detokenize"] = bool(fields.get("stop"))  # stop strings are searched in the text
    return fields


def num_logprobs(sampling: Mapping[str, Any]) -> int:
    """Return vLLM's ``logprobs``: the number of tokens per position whose log-probs it reports.

    With top_k these include the whole sampling mask, of which top_p and min_p keep a part. Otherwise only the
    log-prob of the sampled token is requested (0): top_p and min_p alone may keep any number of tokens.
    """
    greedy = sampling.get("temperature", 1.0) == 0
    return 0 if greedy else max(sampling.get("top_k") or 0, 0)


def sampling_mask(positions: Iterable[Iterable[tuple[int, float]]], excluded: float) -> SamplingMask:
    """Return the sampling mask of a completion from processed log-probs.

    Args:
        positions: (token id, log-prob) of the sampled and the ``top_k`` most probable tokens, per position.
        excluded: log-prob of a token that was not kept.
    """
    return SamplingMask.from_lists(
        [[token for token, logp in position if logp > excluded] for position in positions]
    )


def group_requests(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    seed: int,
    step: int,
    rank: int,
    num_samples: dict[int, int] | None = None,
    images: Sequence[ImageInputs] | None = None,
) -> list[Request]:
    """Merge adjacent rows with equal prompt, images and limit into one request each.

    The seed of a sample is derived from the run's seed, the step, the rank, the prompt with its images, and
    the number of earlier samples of that prompt. It does not depend on other prompts, the order of requests
    or the servers.

    Args:
        prompts: B token lists.
        limits: maximum completion length per prompt, B.
        num_samples: samples per prompt so far in this step, by base seed; updated in place.
        images: image inputs per row, B; None for prompts of text.
    """
    requests: list[Request] = []
    num_samples = {} if num_samples is None else num_samples
    row = 0
    while row < len(prompts):
        end = row + 1
        while (
            end < len(prompts)
            and prompts[end] == prompts[row]
            and limits[end] == limits[row]
            and (images is None or images[end].digest == images[row].digest)
        ):
            end += 1
        pictures = "" if images is None else images[row].digest
        key = f"{seed} {step} {rank} {list(prompts[row])}{pictures}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        base_seed = (
            int.from_bytes(digest, "big") >> 2
        )  # 62 bits: base_seed + samples fits a signed 64-bit integer
        first = num_samples.get(base_seed, 0)
        own = None if images is None else images[row]
        requests.append(Request(prompts[row], range(row, end), base_seed + first, limits[row], own))
        num_samples[base_seed] = first + end - row
        row = end
    return requests
