"""Base class of the colocated engine and of vLLM servers: requests, seeds, limits, order of a weight sync."""

from __future__ import annotations

import base64
import io
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, TypeAlias

import numpy as np
import torch

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import json_dict, sampler_settings
from groupwise.errors import BackendError, ConfigError
from groupwise.generation.base import RUN_SETTINGS, GenerationBackend
from groupwise.policy.heads.weights import changes_head, is_tied
from groupwise.policy.introspection import CausalLM, adapters_of, has_adapter, is_quantized
from groupwise.policy.quantization import check_quantized
from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.random_state import derived_seed
from groupwise.records import Completion, SamplingOptions
from groupwise.records.fast_paths import FastPath
from groupwise.records.images import ImageInputs
from groupwise.records.sampling_mask import SamplingMask
from groupwise.tokenization.images import as_rgb

#: Most tokens per position whose log-probs vLLM reports, unless ``--max-logprobs`` raises it.
DEFAULT_MAX_LOGPROBS = 20

NO_LOGPROB = -9999.0  # a server's placeholder for a missing log-prob; an engine reports -inf
_ROUNDING = 1e-3  # of the log-prob of a token whose probability is 1
_NO_TOP_K = 2**31 - 1  # of int32; vLLM takes the size of the vocabulary instead

#: One object per token id: a list of ids has 8 bytes per token, not 36.
_IDS: dict[int, int] = {}

#: (seed, number of samples, max_tokens, optimizer step that takes them); requests with equal keys have equal
#: results under the same weights.
RequestKey: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class Request:
    """Samples of one prompt.

    Attributes:
        prompt: token ids.
        rows: indices of the samples in the ``generate`` call.
        seed: seed of the first sample; vLLM adds 1 per further sample.
        max_tokens: maximum completion length.
        images: images of the prompt; empty for text.
        step: optimizer step that takes the samples.
    """

    prompt: Sequence[int]
    rows: Sequence[int]
    seed: int
    max_tokens: int
    images: ImageInputs = field(default_factory=ImageInputs)
    step: int = 0

    def by_row(self, samples: Sequence[Completion]) -> list[Completion]:
        """Return one sample per row; greedy decoding makes a single one."""
        return [samples[row % len(samples)] for row in range(len(self.rows))]

    def params(self, sampling: Mapping[str, Any], max_logprobs: int | None) -> dict[str, Any]:
        """Return the fields of vLLM's ``SamplingParams``.

        ``n`` is the number of samples, but 1 for greedy decoding, of which vLLM refuses more.

        Args:
            sampling: fields that all requests share.
            max_logprobs: most tokens per position whose log-probs vLLM reports; it refuses more. None: it
                reports sampling masks, and refuses requests that are greedy or without top_k.
        """
        greedy, wanted = sampling.get("temperature", 1.0) == 0, num_logprobs(sampling)
        fields = {
            **sampling,
            "n": 1 if greedy else len(self.rows),
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "logprobs": wanted if wanted <= (max_logprobs or 0) else 0,
        }
        if max_logprobs is None:
            if greedy:
                fields |= {"temperature": 1.0, "top_k": 1}
            elif wanted == 0 and (sampling.get("top_p", 1.0) < 1 or sampling.get("min_p")):
                fields["top_k"] = _NO_TOP_K
        return fields

    @property
    def key(self) -> RequestKey:
        return self.seed, len(self.rows), self.max_tokens, self.step


def sampling_fields(
    config: GRPOConfig, end_tokens: Iterable[int], suppress_tokens: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` that all requests of a run share.

    Temperature, top_p, top_k, min_p and repetition_penalty are not among them: they come with each request.

    Args:
        config: its ``generation_kwargs`` are added and win.
        end_tokens: token ids that end a completion.
        suppress_tokens: token ids that are not sampled.
    """
    fields: dict[str, Any] = {"stop_token_ids": sorted(end_tokens)}
    if config.vllm_structured_outputs_regex is not None:
        fields["structured_outputs"] = {"regex": config.vllm_structured_outputs_regex}
    fields.update(json_dict(config.generation_kwargs))
    if suppress_tokens:
        fields["logit_bias"] = {**fields.get("logit_bias", {}), **dict.fromkeys(suppress_tokens, -100.0)}
    fields["detokenize"] = bool(fields.get("stop"))  # stop strings are searched in the text
    return fields


def num_logprobs(sampling: Mapping[str, Any]) -> int:
    """Return vLLM's ``logprobs``: the number of tokens per position whose log-probs it reports.

    With top_k these include the whole sampling mask, of which top_p and min_p keep a part. Otherwise only the
    log-prob of the sampled token is requested (0): top_p and min_p alone may keep any number of tokens.
    """
    return 0 if sampling.get("temperature", 1.0) == 0 else max(sampling.get("top_k") or 0, 0)


def make_completion(
    token_ids: Sequence[int],
    logps: Sequence[float],
    finish_reason: str,
    versions: Sequence[tuple[int, int]],
    sampling_mask: SamplingMask | None,
) -> Completion:
    """Return the record of a sample, from processed log-probs.

    Args:
        token_ids, logps: one entry per sampled token.
        versions: optimizer steps of the weights, each with the number of tokens that they sampled in a row.
        finish_reason: "length" if the limit ended the sample, else "stop".
        sampling_mask: of its positions; None: not requested.
    """
    logps_T = torch.from_numpy(np.array(logps, dtype=np.float32))  # as vLLM computes them
    steps, lengths = torch.tensor(versions, dtype=torch.int32).T
    # Weights of one step, the usual case, are one number however many tokens they sampled.
    versions_T = steps.expand(int(lengths)) if len(steps) == 1 else steps.repeat_interleave(lengths)
    return Completion(
        [*map(_IDS.setdefault, token_ids, token_ids)][:],  # a copy has no room for more
        logps=logps_T.masked_fill_(logps_T <= NO_LOGPROB, math.nan),  # type: ignore[arg-type]
        truncated=finish_reason == "length",
        versions=versions_T,  # type: ignore[arg-type]
        sampling_mask=sampling_mask,
    )


def check_sample(
    token_ids: Sequence[int],
    logps: Sequence[float],
    mask: SamplingMask | None,
    max_tokens: int,
    vocab_size: int,
) -> None:
    """Check a sample that another process made; a position without log-prob, or with all tokens, may lack it.

    Raises:
        ValueError: the sample is none of at most ``max_tokens`` tokens; the message says why.
    """
    ids_T, logps_T = np.asarray(token_ids), np.asarray(logps)
    kept, counts_T = (np.zeros(0, int),) * 2 if mask is None else (mask.ids.numpy(), mask.counts.numpy())

    def has_sampled_T() -> Any:
        position = np.repeat(np.arange(len(ids_T)), counts_T)  # of each kept token
        return np.bincount(position[kept == ids_T[position]], minlength=len(ids_T)) > 0

    checks = {
        f"{len(token_ids)} tokens, where 1 to {max_tokens} were asked for": (
            not 1 <= len(token_ids) <= max_tokens
        ),
        f"token ids outside of 0 to {vocab_size - 1}": any(
            len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size for ids in (ids_T, kept)
        ),
        # NaN, too.
        "log-probs that are not at most 0": not (logps_T <= _ROUNDING).all(),
        "a sampling mask without the sampled tokens": mask is not None
        and not (
            len(counts_T) == len(ids_T)
            and (has_sampled_T() | (counts_T == 0) | (logps_T <= NO_LOGPROB)).all()
        ),
    }
    if problems := [problem for problem, applies in checks.items() if applies]:
        raise ValueError(f"a sample has {', '.join(problems)}")


def group_requests(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    seed: int,
    step: int,
    rank: int,
    num_samples: dict[int, int] | None = None,
    images: Sequence[ImageInputs] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Request]:
    """Merge adjacent rows with equal prompt, images and limit, and consecutive seeds, into one request each.

    Without ``seeds``, as with agents and in evaluations, that of a sample is derived from the run's seed, the
    step, the rank, the prompt with its images, and the number of earlier samples of that prompt. It does not
    depend on other prompts, the order of requests or the servers.

    Args:
        prompts: B token lists.
        limits: maximum completion length per prompt, B.
        num_samples: samples per prompt so far in this step, by base seed; updated in place.
        images: image inputs per row, B; None for prompts of text.
        seeds: of the rows, B.
    """
    requests: list[Request] = []
    num_samples = {} if num_samples is None else num_samples
    inputs = [ImageInputs()] * len(prompts) if images is None else images

    def content(row: int) -> tuple[tuple[int, ...], int, str, int]:
        return tuple(prompts[row]), limits[row], inputs[row].digest, seeds[row] - row if seeds else 0

    for (prompt, limit, of_images, _), group in groupby(range(len(prompts)), content):
        rows = list(group)
        base_seed = derived_seed(seed, step, rank, f"{list(prompt)}{of_images}")
        first = num_samples.get(base_seed, 0)
        own = seeds[rows[0]] if seeds else base_seed + first
        requests.append(Request(prompts[rows[0]], rows, own, limit, inputs[rows[0]], step))
        num_samples[base_seed] = first + len(rows)
    return requests


def engine_prompt(request: Request) -> dict[str, Any]:
    """Return the prompt of a request for ``LLM.generate``: one token per image, which vLLM expands."""
    images = [as_rgb(image) for image in request.images.images]
    prompt: dict[str, Any] = {"prompt_token_ids": request.images.unexpanded(request.prompt)}
    return {**prompt, "multi_modal_data": {"image": images}} if images else prompt


def server_prompt(request: Request) -> dict[str, Any]:
    """Return the fields of a prompt in the body of ``/inference/v1/generate``; images are lossless PNG."""
    parts = []
    for image in request.images.images:
        file = io.BytesIO()
        as_rgb(image).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "url": url})
    prompt: dict[str, Any] = {"token_ids": request.images.unexpanded(request.prompt)}
    return {**prompt, "content_parts": parts, "return_token_ids": True} if parts else prompt


def check_expanded(request: Request, prompt_ids: Sequence[int] | None, where: str) -> None:
    """Compare the prompt that vLLM sampled from with the trainer's.

    Args:
        prompt_ids: token ids after vLLM expanded the image tokens.
        where: "the engine" or the server's address, for the message.

    Raises:
        BackendError: the prompts differ.
    """
    found, num_images = list(prompt_ids or ()), len(request.images.images)
    if num_images == 0 or found == list(request.prompt):
        return
    raise BackendError(
        f"{where} expanded a prompt with {num_images} image(s) to {len(found)} tokens, "
        f"which are not the {len(request.prompt)} of the trainer's processor, so it sampled from another "
        "prompt; give it the trainer's processor (preprocessor_config.json and chat template of the served "
        "model, or --mm-processor-kwargs)"
    )


class VLLMBackend(GenerationBackend):
    """Base class of backends that sample with vLLM. Subclasses implement ``complete`` and ``load_weights``.

    Args:
        config: seed, rank and length limit of the run, and the sampler settings that a request leaves out.
        end_tokens: token ids that end a completion.
        suppress_tokens: token ids that are not sampled.

    Attributes:
        sampling: fields of ``SamplingParams`` that are the same for all requests of the run.
        only_adapter: a sync sends the LoRA adapter alone; None: the flags of the servers decide.
        max_logprobs: most tokens per position whose log-probs vLLM reports; None: it reports sampling masks.
        context_limit: name of the limit ``context_length`` and the way out, for an error message.
    """

    only_adapter: bool | None = None
    max_logprobs: int | None = DEFAULT_MAX_LOGPROBS
    context_limit = "the server's --max-model-len {}; raise that"

    def __init__(
        self, config: GRPOConfig, end_tokens: frozenset[int], suppress_tokens: Sequence[int] = ()
    ) -> None:
        self.config, self.end_tokens = config, end_tokens
        self.sampling = sampling_fields(config, end_tokens, suppress_tokens)
        self._num_samples: tuple[int | None, dict[int, int]] = (None, {})  # step, samples by base seed
        self.weight_digests: dict[int, str] = {}  # of all tensors, by step

    @abstractmethod
    def complete(self, requests: list[Request], sampling: SamplingOptions) -> list[list[Completion]]:
        """Return the samples of each request."""

    @abstractmethod
    def load_weights(self, source: PolicyWeights, step: int) -> str | None:
        """Load the weights of optimizer step ``step``; returns their digest if they were compared."""

    def fast_paths(self, policy: Any) -> list[FastPath]:
        """See :meth:`GenerationBackend.fast_paths`."""
        paths = [FastPath("decoding", "vLLM")]
        if has_adapter(policy):
            sync = FastPath("weight sync", "merged weights", "vllm_engine_kwargs has no enable_lora")
            sync = FastPath("weight sync", "adapter alone") if self.only_adapter else sync
            by_flag = FastPath("weight sync", "adapter alone with --enable-lora of the server")
            paths.append(by_flag if self.only_adapter is None else sync)
        return paths

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return True if vLLM reports masks, or log-probs of all top_k tokens: at most ``max_logprobs``."""
        limit = self.max_logprobs
        return limit is None or 0 < num_logprobs(self.shared_params(generation_kwargs)) <= limit

    def shared_params(self, generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that all requests of a ``generate`` call share."""
        return {**self.sampling, **vars(sampler_settings(self.config)), **generation_kwargs}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        """Sample one completion per prompt; adjacent equal prompts are the samples of one request.

        Raises:
            BackendError: vLLM has no weights, refuses a request, or a prompt leaves no room for a completion;
                also a ConnectionError if a server does not respond within ``vllm_server_timeout``. All ranks
                raise if one does.
        """
        if self.version is None:
            raise BackendError("vLLM has no weights of the policy; call sync_weights before generate")
        step, num_samples = self._num_samples[0], dict(self._num_samples[1])
        requests = self.make_requests(prompts, sampling, self.version, num_samples)
        samples = self.complete(requests, sampling)
        self._num_samples = step, num_samples  # only now: a failed call is repeated with the same seeds
        return [self.with_digest(completion) for completion in chain.from_iterable(samples)]

    def with_digest(self, completion: Completion) -> Completion:
        """Return a completion with the digests of the weights that sampled it, if all are known."""
        digests = [self.weight_digests.get(one, "") for one in dict.fromkeys(completion.versions or ())]
        whole = ("+".join(digests) if all(digests) else "") or None
        return Completion(**{**vars(completion), "weight_digest": whole})  # arrays stay arrays

    def make_requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingOptions,
        step: int,
        num_samples: dict[int, int],
    ) -> list[Request]:
        """Return the requests of a ``generate`` call, in the order of its rows and within vLLM's context.

        Args:
            num_samples: see :func:`group_requests`.
        """
        limits = list(sampling.max_tokens or [self.config.max_completion_length] * len(prompts))
        if self.context_length is not None:
            room = [self.context_length - len(prompt) for prompt in prompts]
            limits = [min(pair) for pair in zip(limits, room, strict=True)]
            if min(room, default=1) < 1:
                raise BackendError(
                    f"a prompt of {max(map(len, prompts))} tokens leaves no room for a completion within "
                    f"{self.context_limit.format(self.context_length)}, or set max_prompt_length"
                )
        seed, run = self.config.seed, vars(sampler_settings(self.config))
        other = sorted(item for item in sampling.generation_kwargs.items() if item not in run.items())
        if other:  # requests with different settings must not share a key
            seed ^= zlib.crc32(repr(other).encode())
        rank = self.config.process_index
        given = sampling.images, sampling.seeds
        return group_requests(prompts, limits, seed, step, rank, num_samples, *given)

    def sync_weights(self, source: PolicyWeights, *, step: int) -> None:
        """Load the weights of optimizer step ``step``; a no-op if vLLM has them."""
        if self.version == step:
            return
        self.version = None  # a failed load leaves no usable weights
        if self._num_samples[0] != step:
            self._num_samples = step, {}
        self.record_digest(step, self.load_weights(source, step))
        self.version = step

    def record_digest(self, step: int, digest: str | None) -> None:
        """Keep the digest of the weights of ``step``, and of the steps before it that may still sample."""
        known = {**self.weight_digests, step: digest or ""}
        self.weight_digests = dict(sorted(known.items())[-2 - self.config.rollout_staleness :])

    def snapshot(self) -> dict[str, Any]:
        """Return what continues the sequence of seeds, samples per prompt in this step, and the digests."""
        return {"num_samples": self._num_samples, "weight_digests": self.weight_digests}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        self._num_samples, self.weight_digests = tuple(snapshot["num_samples"]), snapshot["weight_digests"]


def check_policy(model: CausalLM) -> None:
    """Raise ConfigError for a policy whose weights a vLLM engine cannot load."""
    adapters = adapters_of(model)
    if is_quantized(model):
        check_quantized(model.config.quantization_config, adapters, use_vllm=True)
    if any(config.is_prompt_learning for config in adapters):
        raise ConfigError(
            "the adapter adds virtual tokens to prompts, which cannot be merged into weights; use LoRA or "
            "another adapter of weights, or set use_vllm=False"
        )
    configs = model.config, model.config.get_text_config()  # vision-language models have it in the first
    tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    if tied and adapters and not is_tied(model):
        raise ConfigError(
            "the adapter changes either the embeddings or the output layer of a model that ties them, by "
            "target_modules or modules_to_save, or both with parameters of their own: vLLM ties them, too, "
            "and would compute with other weights; train both with trainable_token_indices, or with "
            "modules_to_save and ensure_weight_tying=True, set tie_word_embeddings=False in the model's "
            "config, or use_vllm=False"
        )


def lora_rank(model: CausalLM) -> int:
    """Return the largest rank of a LoRA adapter that vLLM can load beside the base weights.

    Raises:
        ConfigError: the policy does not train a plain LoRA adapter.
    """
    lora = model.peft_config[model.active_adapter] if hasattr(model, "active_adapter") else None
    if lora is None or lora.peft_type != "LORA":
        raise ConfigError(
            "vllm_engine_kwargs['enable_lora'] sends only the LoRA adapter, but the policy has none; leave "
            "it out"
        )
    unsupported = [
        name
        for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
        if getattr(lora, name, None)
    ]
    unsupported += ["bias"] if lora.bias != "none" else []
    unsupported += ["a layer on the output layer"] if changes_head(model) else []
    if unsupported:
        raise ConfigError(
            f"the adapter has {', '.join(unsupported)}, which vLLM does not support in an adapter; "
            "set vllm_engine_kwargs['enable_lora'] to False to send merged weights"
        )
    return max([lora.r, *lora.rank_pattern.values()])
