"""Compare the training phase: forward and backward passes of a window with given completions.

Alternatives: groupwise in the layout it chooses (`auto`) and padded, TRL's `training_step` on the same
completions, padded, and a floor. The floor is what no trainer can avoid with this model: forward and backward
of the bare model over each prompt once and each completion once, without padding, with scores at the
completion tokens only. Its rows are cut to the length at which plain causal attention has as many scores to
compute as the groups have. Both layouts of groupwise can be measured with every layer recomputed, with every
second one, and with none, too.

Counted is everything between getting the window's completions and its last gradient, cutting and weighing
included; generation, rewards, advantages and the optimizer are not. All alternatives checkpoint activations,
unless their name ends in "none". Each measurement is a process of its own, and the alternatives take turns.

    OMP_NUM_THREADS=2 python benchmarks/train_phase.py --rounds 3
    python benchmarks/train_phase.py --device cuda --model random:24,896,14,2,4864,151936
    python benchmarks/train_phase.py --model random:6,512,8,2,1536,4096 --group_size 2 --accumulation 1 \
        --windows 1 --prompt_tokens 6144 --completion_tokens 2048 --output long_context_8192 \
        --methods auto auto_every_layer auto_every_second auto_none \
        padded_every_layer padded_every_second padded_none
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import (
    add_precision,
    format_ratio,
    measure_in_process,
    prepare_precision,
    print_result,
    ratio_summary,
    write_results,
)
from head_memory import resident_bytes
from training_work import Spec, adapter_config, make_model, make_trainer, make_work

#: Layers that are computed again in the backward pass; without such a name, as few as memory demands.
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "every_layer": {"activation_memory_fraction": 0.0},
    "every_second": {
        "activation_memory_fraction": 0.0,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    "none": {"gradient_checkpointing": False},
}
#: Library and settings of every alternative that is a trainer.
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("groupwise", {}),
    "padded": ("groupwise", {"sequence_layout": "padded"}),
    "padded_dense": ("groupwise", {"sequence_layout": "padded", "logprob_head": "dense"}),
    "trl": ("trl", {}),
    **{f"auto_{name}": ("groupwise", settings) for name, settings in CHECKPOINTING.items()},
    **{
        f"padded_{name}": ("groupwise", {"sequence_layout": "padded", **settings})
        for name, settings in CHECKPOINTING.items()
    },
}
METHODS = ("auto", "padded", "trl", "floor")


class Meter:
    """Seconds and peak memory of each window; the first is a warm-up."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # processor time, which other programs do not change
        self.peaks: list[int] = []
        self.running = self.cpu_running = 0.0
        self.before = 0

    @contextmanager
    def clock(self, sign: int = 1) -> Iterator[None]:
        """Add the time of the block to the window's, or subtract it."""
        start, cpu_start = self._now(), time.process_time()
        yield
        self.running += sign * (self._now() - start)
        self.cpu_running += sign * (time.process_time() - cpu_start)

    def start_window(self) -> None:
        warm = len(self.seconds) == 1  # baseline: weights, libraries, thread pools
        self.running = self.cpu_running = 0.0
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() if warm else self.before
            return
        if warm:
            give_back_free_memory()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self.before = resident_bytes("VmRSS") if warm else self.before

    def end_window(self) -> None:
        self.seconds.append(self.running)
        self.cpu_seconds.append(self.cpu_running)
        if self.cuda:
            import torch

            self.peaks.append(torch.cuda.max_memory_allocated())
        else:
            self.peaks.append(resident_bytes("VmHWM"))

    def result(self) -> dict[str, Any]:
        """Return the windows without the warm-up; peaks are relative to the memory after it."""
        above = [peak - self.before for peak in self.peaks[1:]]
        return {
            "seconds": self.seconds[1:],
            "cpu_seconds": self.cpu_seconds[1:],
            "peak_bytes": max(above),
        }

    def _now(self) -> float:
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


def give_back_free_memory() -> None:
    """Return free pages of the C heap to the system: resident ones would hide the memory of the window."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def metered(trainer_class: Any, meter: Meter) -> Any:
    """Return the trainer class with the training phase of every window measured."""

    class Metered(trainer_class):
        def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
            meter.start_window()
            return super().get_batch_samples(*arguments, **named)

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            last = self.accelerator.sync_gradients
            with meter.clock():
                loss = super().training_step(*arguments, **named)
            if last:
                meter.end_window()
            return loss

    # Generation is inside the measured time: subtract it. groupwise refuses TRL's name for it.
    own = hasattr(trainer_class, "make_train_experience")
    generation = "make_train_experience" if own else "_prepare_inputs"

    def without_generation(self: Any, *arguments: Any, **named: Any) -> Any:
        with meter.clock(-1):
            return getattr(super(Metered, self), generation)(*arguments, **named)

    setattr(Metered, generation, without_generation)
    return Metered


def measure_trainer(method: str, spec: Spec) -> dict[str, Any]:
    library, settings = TRAINERS[method]
    meter = Meter(spec.device)
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(library, spec, directory, lambda base: metered(base, meter), **settings)
        trainer.train()
    layout = trainer.logprob_computer.layout if library == "groupwise" else "padded"
    trainable = [p for p in trainer.model.parameters() if p.requires_grad]
    return {**meter.result(), "layout": layout, **_sizes(trainable)}


def measure_floor(spec: Spec) -> dict[str, Any]:
    """Load the bare model; on a CPU with groupwise's linear layers."""
    import torch

    from groupwise.cpu.linear import replace_linears
    from groupwise.policy.heads.capture import LogprobHead, forward_logprobs

    model = prepare_precision(make_model(spec), spec.precision)
    work = make_work(spec, model.config.vocab_size)
    if spec.lora:
        from peft import get_peft_model

        model = get_peft_model(model, adapter_config())
    if spec.device == "cpu":
        replace_linears(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    meter = Meter(spec.device)
    vocabulary = model.config.vocab_size
    batches = []
    for start in range(0, len(work.prompts), spec.groups):
        part = slice(start, start + spec.groups)
        rows, width, keep = floor_shape(
            list(map(len, work.prompts[part])), [list(map(len, group)) for group in work.completions[part]]
        )
        batches.append((torch.randint(vocabulary, (rows, width), device=spec.device), keep))
    for _ in range(spec.windows + 1):
        meter.start_window()
        with meter.clock():
            for token_ids, keep in batches:
                inputs = {"input_ids": token_ids, "logits_to_keep": keep}
                targets = token_ids[:, -keep:]  # any ids
                logps, *_ = forward_logprobs(model, inputs, targets, LogprobHead(), with_entropy=False)
                (-logps.mean() / len(batches)).backward()
        meter.end_window()
        model.zero_grad()
    return {**meter.result(), "layout": "bare", **_sizes([p for p in model.parameters() if p.requires_grad])}


def floor_shape(prompts: list[int], completions: list[list[int]]) -> tuple[int, int, int]:
    """Return rows, width and scored positions of a row, from token counts of groups and completions.

    A prompt of P tokens has about P² / 2 attention scores, a completion of C after it C P + C² / 2; rows of
    width W with as many tokens in all have W / 2 a token.
    """
    groups = list(zip(prompts, completions, strict=True))
    scored = sum(map(sum, completions))
    tokens = sum(prompts) + scored
    attended = sum(p * p / 2 + sum(c * p + c * c / 2 for c in group) for p, group in groups)
    rows = max(round(tokens * tokens / (2 * attended)), 1)
    return rows, -(-tokens // rows), -(-scored // rows)


def _sizes(trainable: list[Any]) -> dict[str, int]:
    return {"gradient_bytes": sum(p.numel() * p.element_size() for p in trainable)}


def run_worker(method: str, spec: Spec, timeout: float | None = None) -> dict[str, Any]:
    """Measure in a separate process.

    Raises:
        RuntimeError: the process failed or took longer than `timeout` seconds.
    """
    return measure_in_process(__file__, method, "--spec", json.dumps(asdict(spec)), timeout=timeout)


def summarise(spec: Spec, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return rates, and ratios of groupwise's layout to every alternative with as many rounds."""
    work = make_work(spec, 3)  # only the number of tokens is used
    seconds, cpu_seconds = (
        {method: [s for run in runs[method] for s in run[key]] for method in runs}
        for key in ("seconds", "cpu_seconds")
    )
    peaks = {method: [run["peak_bytes"] for run in runs[method]] for method in runs}
    rates = {method: [round(work.tokens / s, 1) for s in seconds[method]] for method in runs}
    ratios = {}
    for method in runs:
        if method != "auto" and runs[method] and len(runs[method]) == len(runs.get("auto", [])):
            ratios[f"auto/{method}"] = {
                "time": ratio_summary(seconds["auto"], seconds[method]),
                "processor_time": ratio_summary(cpu_seconds["auto"], cpu_seconds[method]),
                "peak": ratio_summary(peaks["auto"], peaks[method]),
            }
    return {
        "spec": asdict(spec),
        "tokens": work.tokens,
        "distinct_tokens": work.distinct_tokens,
        "layouts": {method: runs[method][-1]["layout"] for method in runs if runs[method]},
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": rates,
        "peak_bytes": peaks,
        "ratios": ratios,
    }


def available_methods(wanted: list[str]) -> list[str]:
    """Return the methods; TRL is left out with a message if it is not installed."""
    if "trl" in wanted and find_spec("trl") is None:
        print("trl is not installed: measured without it", flush=True)
        return [method for method in wanted if method != "trl"]
    return wanted


def print_summary(summary: dict[str, Any]) -> None:
    for method, rates in summary["tokens_per_second"].items():
        print(f"  {method:12} {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s")
    for name, ratio in summary["ratios"].items():
        of = ", ".join(f"{key.replace('_', ' ')} {format_ratio(value)}" for key, value in ratio.items())
        print(f"  {name}: {of}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_precision(parser)
    for field in fields(Spec):
        if field.name == "precision":
            continue
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name}", action="store_true")
        else:
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=(*TRAINERS, "floor"), default=list(METHODS))
    parser.add_argument("--output", default=None, help="name of the results file, or none")
    parser.add_argument("--worker", choices=(*TRAINERS, "floor"), help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if options.worker:
        spec = Spec(**json.loads(options.spec))
        measured = measure_floor(spec) if options.worker == "floor" else measure_trainer(options.worker, spec)
        print_result(measured)
        return
    spec = replace(Spec(), **{field.name: getattr(options, field.name) for field in fields(Spec)})
    methods = available_methods(options.methods)
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for round_index in range(options.rounds):
        for place in range(len(methods)):  # a new order each time
            method = methods[(place + round_index) % len(methods)]
            runs[method].append(run_worker(method, spec))
            print(f"round {round_index + 1} {method}: {runs[method][-1]}", flush=True)
        summary = summarise(spec, runs)
        output = options.output or f"train_phase_{options.precision}"
        if output != "none":
            write_results(output, summary)
    print_summary(summary)


if __name__ == "__main__":
    main()
