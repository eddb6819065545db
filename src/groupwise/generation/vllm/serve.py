"""Command line of ``vllm serve`` for training."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from groupwise.compat.vllm import serve_program
from groupwise.errors import ConfigError

#: Names of the number of experts in configs.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MONITORING = ("/health", "/ping", "/metrics")


class RequireKey:
    """ASGI middleware: the server's API key is needed for all routes but those that monitor it.

    vLLM asks for the key on some routes, which those that replace weights and call its workers are not.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        is_open = scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in _MONITORING
        settings = None if is_open else getattr(scope["app"].state, "args", None)
        keys = getattr(settings, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        given = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")[2]
        allowed = [key for key in keys if key and not is_open]
        if allowed and not any(secrets.compare_digest(given, key.encode()) for key in allowed):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await self.app(scope, receive, send)


def serve_command(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cuda",
    dtype: str = "auto",
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    max_model_length: int | None = None,
    weight_transfer: str | None = None,
    extra: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment variables of ``vllm serve`` that training needs.

    Args:
        model: hub id or directory of the trainer's model.
        host: without an API key (``VLLM_API_KEY``), other addresses than 127.0.0.1 need a network that only
            the trainer can reach.
        device: "cuda" or "cpu".
        dtype: of the server's weights; "auto" is float32 on a CPU.
        max_model_length: maximum number of prompt and completion tokens; None: the model's own limit.
        weight_transfer: name of vLLM's weight-transfer engine, such as "ipc" if policy and server share a
            GPU; None: "nccl" on CUDA, "groupwise" on a CPU.
        extra: further arguments of ``vllm serve``; the last one of a name wins.

    Returns:
        command, and environment variables to set for it.
    """
    transfer = weight_transfer or ("nccl" if device == "cuda" else "groupwise")
    command = [*serve_program(), model, "--host", host, "--port", str(port)]
    command += ["--weight-transfer-config", json.dumps({"backend": transfer})]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    command += ["--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}"]
    command += ["--dtype", "float32" if device == "cpu" and dtype == "auto" else dtype]
    for flag, size in (("tensor", tensor_parallel_size), ("data", data_parallel_size)):
        if size > 1:
            command += [f"--{flag}-parallel-size", str(size)]
    if max_model_length is not None:
        command += ["--max-model-len", str(max_model_length)]
    # vLLM has the pause and weight routes in this mode only.
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if transfer == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles are pickled
    if "--enable-lora" in extra:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the routes that load adapters
    if device == "cpu":
        # With chunked prefill, vLLM's CPU build crashes on requests with a seed.
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        environment["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GB
    return [*command, *extra], environment


def check_tensor_parallel(
    config: PretrainedConfig, size: int, setting: str, *, splits_experts: bool = True
) -> None:
    """Check that heads and experts divide over the GPUs of a copy of the model, as vLLM does late.

    Heads of keys and values may also be fewer than the GPUs, each on several of them.

    Args:
        config: the model's.
        setting: name of ``size`` for the message.
        splits_experts: every GPU has a part of every expert; False with vLLM's expert parallelism.

    Raises:
        ConfigError: they do not; the message has the sizes that do.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):  # by layer, or a model without attention
        return
    of_keys = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 0)
    if not (splits_experts and isinstance(width, int) and any(getattr(text, name, 0) for name in EXPERTS)):
        width = 0  # no experts, or widths by layer

    def fits(parts: int) -> bool:
        return heads % parts == width % parts == 0 and (of_keys % parts == 0 or parts % of_keys == 0)

    if not fits(size):
        allowed = ", ".join(str(parts) for parts in range(1, heads + 1) if fits(parts))
        experts = f", or its experts of width {width}" if width else ""
        raise ConfigError(
            f"{setting}={size} does not divide the {heads} attention heads ({of_keys} of keys and values) of "
            f"the model{experts}; allowed: {allowed}. More GPUs serve more copies of it (data parallel)"
        )


def as_shell_line(command: Sequence[str], environment: dict[str, str]) -> str:
    """Return a command line for a shell."""
    return " ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(command)])
