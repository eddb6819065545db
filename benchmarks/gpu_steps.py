"""Measure training phase, whole step and output head on one GPU: random weights of real shapes.

Needs no network: models and tokenizer are made on the spot (Llama layers in the sizes of Qwen2.5). Every
measurement is a process of its own and alternatives take turns; results are written after each. What no
longer fits in `--minutes` is left out, and that is said.

    benchmarks/gpu.sh
    python benchmarks/gpu_steps.py --device cpu --tiny --output none   # smoke test
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from common import add_precision, format_ratio, measure_in_process, print_result, ratio_summary, write_results
from head_memory import scoring_function
from train_phase import METHODS, available_methods, print_summary, run_worker, summarise
from training_work import FIRST_WORD, Spec, make_trainer

LENGTHS: dict[str, Any] = {"prompt_tokens": 512, "completion_tokens": 512, "accumulation": 2, "windows": 3}
GPU: dict[str, Any] = {"device": "cuda", **LENGTHS}
TRAINING = {
    "1.5B": Spec("random:28,1536,12,2,8960,151936", tied=True, groups=2, **GPU),
    "0.5B": Spec("random:24,896,14,2,4864,151936", tied=True, groups=4, **GPU),
    "7B-lora": Spec("random:28,3584,28,4,18944,152064", lora=True, groups=1, **GPU),
}
STEP = replace(TRAINING["1.5B"], groups=4, accumulation=1, completion_tokens=128, windows=2)
HEAD = {"tokens": 8192, "hidden": 1536, "vocabulary": 151936}
TINY = Spec("random:2,32,2,1,64,64", prompt_tokens=16, completion_tokens=16, windows=1)
HEADS = ("dense", "chunked", "trl")


class Budget:
    """Remaining time, and the measurements that failed or were skipped."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.longest: dict[str, float] = {}
        self.missing: list[str] = []

    def attempt(self, kind: str, name: str, measure: Callable[[float], Any]) -> Any:
        """Return `measure(seconds left)`, or None if it fails or an earlier one of its kind took longer."""
        left = self.end - time.monotonic()
        if left < max(self.longest.get(kind, 0.0), 1.0):
            self.missing.append(f"{name}: out of time")
            print(self.missing[-1], flush=True)
            return None
        start = time.monotonic()
        try:
            result = measure(left)
        except RuntimeError as error:  # the other measurements are kept
            self.missing.append(f"{name}: {error}")
            print(self.missing[-1], flush=True)
            return None
        self.longest[kind] = max(self.longest.get(kind, 0.0), time.monotonic() - start)
        print(f"{name}: {result}", flush=True)
        return result


def worker(kind: str, name: str, settings: dict[str, Any]) -> Callable[[float], Any]:
    """Return a function that runs one measurement in its own process, within the given seconds."""
    return lambda left: measure_in_process(__file__, kind, name, json.dumps(settings), timeout=left)


def measure_step(library: str, spec: Spec) -> dict[str, Any]:
    """Return seconds between ends of steps, sampling included; every completion has the full length."""
    import torch
    from transformers import TrainerCallback

    marks: list[float] = []

    class StepClock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if spec.device != "cpu":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        full = {"min_new_tokens": spec.completion_tokens}
        trainer = make_trainer(library, spec, directory, sampled=True, generation_kwargs=full)
        trainer.add_callback(StepClock())
        trainer.train()
    seconds = [after - before for before, after in pairwise(marks)]
    peak = 0 if spec.device == "cpu" else torch.cuda.max_memory_allocated()
    return {"seconds": seconds, "peak_bytes": peak}


def measure_head(name: str, sizes: dict[str, Any]) -> dict[str, float]:
    """Time the forward and backward pass of one head; the first of four is a warm-up."""
    import torch

    cuda = sizes["device"] != "cpu"
    tokens, hidden, vocabulary = sizes["tokens"], sizes["hidden"], sizes["vocabulary"]
    score = scoring_function(name)
    torch.manual_seed(0)
    options = {"device": sizes["device"], "dtype": getattr(torch, sizes["dtype"])}
    hidden_NH = torch.randn(tokens, hidden, **options).requires_grad_()
    weight_VH = torch.randn(vocabulary, hidden, **options).mul_(hidden**-0.5).requires_grad_()
    targets_N = torch.randint(FIRST_WORD, vocabulary, (tokens,), device=sizes["device"])
    seconds = []
    for _ in range(4):
        hidden_NH.grad = weight_VH.grad = None
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() if cuda else 0
        start = time.perf_counter()
        logps_N, entropy_N = score(hidden_NH, weight_VH, targets_N)
        (-logps_N.mean() + 0.1 * entropy_N.mean()).backward()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": min(seconds[1:]),
        "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else 0,
    }


def compare(results: dict[str, list[dict[str, Any]]], own: str) -> dict[str, Any]:
    """Return ratios of `own` to the others, over common rounds."""
    ratios = {}
    for name, runs in results.items():
        pairs = [(a, b) for a, b in zip(results[own], runs, strict=True) if a is not None and b is not None]
        if name == own or not pairs:
            continue
        for quantity in ("seconds", "peak_bytes"):
            values = [[_least(side[quantity]) for side in pair] for pair in pairs]
            if all(min(value) > 0 for value in values):
                one, other = zip(*values, strict=True)
                ratios[f"{own}/{name} {quantity}"] = ratio_summary(one, other)
                print(f"  {own}/{name} {quantity}: {format_ratio(ratios[f'{own}/{name} {quantity}'])}")
    return ratios


def _least(value: Any) -> float:
    return min(value) if isinstance(value, list) else value


def run_all(options: argparse.Namespace) -> None:
    budget = Budget(options.minutes)
    dtype = "bfloat16" if options.precision == "bf16" else "float32"  # of the weights; nothing is cast
    device = "cpu" if options.tiny else options.device
    chosen: dict[str, Any] = {"device": device, "dtype": dtype, "precision": "float32"}
    tiny = {name: replace(TINY, lora=spec.lora) for name, spec in TRAINING.items()}
    training = {n: replace(s, **chosen) for n, s in (tiny if options.tiny else TRAINING).items()}
    step_spec = replace(TINY if options.tiny else STEP, **chosen)
    sizes = {"tokens": 64, "hidden": 32, "vocabulary": 64} if options.tiny else HEAD
    head = {**sizes, "device": device, "dtype": dtype}
    output = options.output or f"gpu_{options.precision}"
    libraries = ["groupwise", *(["trl"] if find_spec("trl") else [])]
    results: dict[str, Any] = {"training_phase": {}, "missing": budget.missing}

    def keep() -> None:
        if output != "none":
            write_results(output, results)

    heads: dict[str, list[Any]] = {name: [] for name in HEADS if name != "trl" or "trl" in libraries}
    for name in heads:
        heads[name].append(budget.attempt("head", f"head {name}", worker("head", name, head)))
    results["head"] = {"sizes": head, "runs": heads, "ratios": compare(heads, "chunked")}
    keep()
    methods = available_methods(list(METHODS))
    steps: dict[str, list[Any]] = {library: [] for library in libraries}
    for name, spec in training.items():
        if spec.lora and find_spec("peft") is None:
            budget.missing.append(f"{name}: peft is not installed")
            print(budget.missing[-1], flush=True)
            continue
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for method in methods:
            measured = budget.attempt(name, f"{name} {method}", partial(run_worker, method, spec))
            runs[method] += [measured] if measured else []
            results["training_phase"][name] = summarise(spec, runs)
            keep()
        print_summary(results["training_phase"][name])
        if not steps["groupwise"]:  # after the first model: the most important results come early
            for library in libraries:
                run = worker("step", library, asdict(step_spec))
                steps[library].append(budget.attempt("step", f"step {library}", run))
            results["step"] = {
                "spec": asdict(step_spec),
                "runs": steps,
                "ratios": compare(steps, "groupwise"),
            }
            keep()


def require_gpu(device: str) -> None:
    """Exit if the device is missing."""
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(
            f"no GPU: torch {torch.__version__} (CUDA {torch.version.cuda}) sees none. This benchmark needs "
            "one; --device cpu --tiny only shows that it runs."
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--minutes", type=float, default=7.5)
    add_precision(parser)
    parser.add_argument("--output", default=None, help="name of the results file, or none")
    parser.add_argument("--worker", nargs=3, metavar=("KIND", "NAME", "SETTINGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, name, settings = options.worker[0], options.worker[1], json.loads(options.worker[2])
        measured = measure_head(name, settings) if kind == "head" else measure_step(name, Spec(**settings))
        print_result(measured)
        return
    require_gpu("cpu" if options.tiny else options.device)
    run_all(options)


if __name__ == "__main__":
    main()
