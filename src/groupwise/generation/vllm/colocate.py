"""A vLLM engine inside the trainer's process.

It starts with the shape of the policy and none of its weights, which arrive before the first token and after
every optimizer step, tensor by tensor from this process's memory.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from groupwise.errors import BackendError, ConfigError
from groupwise.generation.transformers_generate import end_tokens as find_end_tokens
from groupwise.generation.vllm.engine import check_engine, engine_arguments, sampling_arguments
from groupwise.generation.vllm.isolation import own_classes, preserve_rng_state
from groupwise.generation.vllm.plugin import register
from groupwise.generation.vllm.sampling import Request, group_requests
from groupwise.generation.vllm.tensor_parallel import TensorParallelGroup
from groupwise.generation.vllm.weight_sync import FullWeightSync, LoRAWeightSync, adapter_arguments
from groupwise.records import Completion, SamplingOptions

_AS_CONFIGURED = SamplingOptions()


class ColocatedBackend:
    """Samples with an engine that shares process and device with the trainer.

    Args:
        engine: a ``vllm.LLM``.
        sampling: arguments of ``SamplingParams`` that all requests share.
        end_tokens: every token that ends a completion.
        max_tokens: the configured limit of completions.
        slice_: the processes that share one engine.
        carrier: brings the weights.
        seed, process_index: of the run; requests are seeded from them, the step and the prompt.
        sleeps: the engine gives its memory back while the trainer trains.
    """

    def __init__(
        self,
        engine: Any,
        sampling: dict[str, Any],
        end_tokens: frozenset[int],
        max_tokens: int,
        slice_: TensorParallelGroup,
        carrier: FullWeightSync | LoRAWeightSync,
        *,
        seed: int = 0,
        process_index: int = 0,
        sleeps: bool = False,
    ) -> None:
        self.engine, self.sampling, self.end_tokens = engine, sampling, end_tokens
        self.max_tokens, self.slice, self.carrier, self.sleeps = max_tokens, slice_, carrier, sleeps
        self.context_length: int = engine.model_config.max_model_len
        self.seed, self.process_index = seed, process_index
        self.version: int | None = None
        self._sampled: dict[int, int] = {}  # samples of each prompt at step _sampled_at
        self._sampled_at: int | None = None
        self.asleep: set[str] = set()
        self.release()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = _AS_CONFIGURED
    ) -> list[Completion]:
        """One completion per prompt, in order; equal neighbours are samples of one request.

        Raises:
            BackendError: a prompt leaves no room for a completion, or the weights never came.
        """
        if self.version is None:
            raise BackendError("the engine has no weights; call sync_weights before generate")
        self._wake("kv_cache")
        limits = self._limits(prompts, sampling)
        requests = group_requests(prompts, limits, self.seed, self.version, self.process_index, self._sampled)
        settings = {**self.sampling, **sampling.overrides}
        with preserve_rng_state():
            answers = self.slice.share(requests, lambda shared: self._answer(shared, settings))
        return [completion for answer in answers for completion in answer]

    def _limits(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions) -> list[int]:
        """The most tokens of each completion; no more than the engine has room for."""
        limits = sampling.max_tokens or [self.max_tokens] * len(prompts)
        rooms = [self.context_length - len(prompt) for prompt in prompts]
        if min(rooms, default=1) < 1:
            raise BackendError(
                f"a prompt has {max(map(len, prompts))} tokens, and the engine takes {self.context_length} "
                "for prompt and completion; set vllm_max_model_length higher, or max_prompt_length"
            )
        return [min(pair) for pair in zip(limits, rooms, strict=True)]

    def _answer(self, requests: list[Request], settings: dict[str, Any]) -> list[list[Completion]]:
        """The samples of each request."""
        from vllm.sampling_params import SamplingParams

        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        counts = [request.samples(settings["temperature"]) for request in requests]
        params = [
            SamplingParams(**settings, n=count, max_tokens=request.max_tokens, seed=request.seed)
            for request, count in zip(requests, counts, strict=True)
        ]
        outputs = self.engine.generate(prompts, params, use_tqdm=False, **self.carrier.request_arguments())
        return [
            [self._completion(output.outputs[row % count]) for row in range(len(request.rows))]
            for request, count, output in zip(requests, counts, outputs, strict=True)
        ]

    def _completion(self, sample: Any) -> Completion:
        tokens = list(sample.token_ids)
        logps = [entry[token].logprob for token, entry in zip(tokens, sample.logprobs, strict=True)]
        return Completion(
            tokens,
            logps=logps,
            truncated=sample.finish_reason == "length",
            versions=[self.version] * len(tokens),
        )

    def sync_weights(self, params: Iterator[tuple[str, torch.Tensor]], *, step: int) -> None:
        """Take over the weights of optimizer step ``step``, unless they are there; the caches start anew."""
        if self.version == step:
            return
        self._wake("weights")
        self.version = None  # what follows leaves no usable weights if it fails
        with preserve_rng_state():
            self.carrier.bring(params, step)
        self.engine.reset_prefix_cache()
        self.version = step
        if self._sampled_at != step:
            self._sampled_at, self._sampled = step, {}

    def release(self) -> None:
        """Give the memory back until the next sync; without sleep mode, keep it."""
        if self.sleeps and not self.asleep:
            self.engine.sleep(level=self.carrier.sleep_level)
            self.asleep = {"weights", "kv_cache"}
            self.version = None

    def _wake(self, part: str) -> None:
        if part in self.asleep:
            torch.cuda.empty_cache()  # what the trainer holds but does not use
            self.engine.wake_up(tags=[part])
            self.asleep.discard(part)

    def state_dict(self) -> dict[str, Any]:
        """What makes the samples of a prompt differ within a step."""
        return {"sampled": (self._sampled_at, dict(self._sampled))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self._sampled_at, self._sampled = state["sampled"]

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        self.carrier.close()
        if self.engine is not None:
            self.engine.llm_engine.engine_core.shutdown()
            self.engine = None


def check_settings(config: Any) -> None:
    """Refuse what an engine of this process cannot follow."""
    check_engine(config)


def make_backend(
    policy: Callable[[], PreTrainedModel], config: Any, processing_class: Any, never: Sequence[int] = ()
) -> ColocatedBackend:
    """Start the engine of this process.

    Args:
        never: tokens that are not sampled.
        config: a ``GRPOConfig`` that ``check_settings`` has seen.
    """
    model: Any = policy()
    check_policy(model, processing_class)
    from vllm import LLM

    register()
    end_tokens = find_end_tokens(model, getattr(processing_class, "tokenizer", processing_class))
    sampling = sampling_arguments(config, end_tokens, never)
    slice_ = TensorParallelGroup.of(config.vllm_tensor_parallel_size, config.world_size, config.process_index)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with tempfile.TemporaryDirectory(prefix="groupwise-") as directory, preserve_rng_state():
        described = copy.deepcopy(base.config)
        described.architectures = described.architectures or [type(base).__name__]  # a new model names none
        described.save_pretrained(directory)
        processing_class.save_pretrained(directory)
        arguments = engine_arguments(config, directory, _dtype(config, base))
        alone = bool(arguments.get("enable_lora"))
        if alone:
            arguments |= adapter_arguments(model, directory)
        with own_classes(base):
            engine = LLM(**arguments)
    return ColocatedBackend(
        engine,
        sampling,
        frozenset(end_tokens),
        config.max_completion_length,
        slice_,
        LoRAWeightSync(engine, policy) if alone else FullWeightSync(engine),
        seed=config.seed,
        process_index=config.process_index,
        sleeps=config.vllm_enable_sleep_mode,
    )


def check_policy(model: Any, processing_class: Any) -> None:
    """Refuse a policy that an engine cannot stand in for."""
    if hasattr(processing_class, "image_processor"):
        raise ConfigError(
            "use_vllm=True does not pass images on to the engine; set use_vllm=False, or pass the tokenizer "
            "alone as processing_class to train on text"
        )
    if getattr(model, "is_quantized", False):
        raise ConfigError(
            "the policy is quantised, and use_vllm=True would hand its weights to an engine that is not; set "
            "use_vllm=False, or leave quantization_config out"
        )
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ConfigError(
            "the adapter adds virtual tokens to prompts, which no weights of an engine can express; use LoRA "
            "or another adapter of weights, or set use_vllm=False"
        )


def _dtype(config: Any, model: PreTrainedModel) -> str:
    """What the trainer computes in, by its name."""
    if config.bf16 or config.fp16:
        return "bfloat16" if config.bf16 else "float16"
    return str(model.dtype).removeprefix("torch.")
