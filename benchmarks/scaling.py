"""Measure the growth of time and peak memory of the training phase with rows, lengths and vocabulary.

A small random Llama, one accumulation window of one micro-batch; from a base point one axis at a time is
doubled. groupwise as it is, and as the alternative padded rows with the dense head. Each point is a process
of its own, and the two take turns.

A fitted exponent e says y ~ x^e over the points of an axis: time over distinct tokens (each prompt once) is
to be about 1, memory over the vocabulary about 0. Memory is the peak of a window without weights, which were
there before, and without their gradients, which any trainer has. A vocabulary narrower than a tile of the
chunked head makes the tile smaller: at the base point it is wider.

    OMP_NUM_THREADS=2 python benchmarks/scaling.py
    python benchmarks/scaling.py --axes vocabulary --doublings 1
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from common import add_precision, write_results
from train_phase import run_worker
from training_work import Spec, make_work

METHODS = ("auto", "padded_dense")
AXES = ("rows", "prompt", "completion", "vocabulary")


def point(options: argparse.Namespace, axis: str, factor: int) -> tuple[int, Spec]:
    """Return the value on the axis and the work to measure there."""
    *shape, vocabulary = options.model.removeprefix("random:").split(",")
    base = Spec(
        model=options.model,
        device=options.device,
        precision=options.precision,
        accumulation=1,
        prompt_tokens=options.prompt_tokens,
        completion_tokens=options.completion_tokens,
        windows=options.windows,
    )
    value, changed = {
        "rows": (base.rows * factor, replace(base, groups=factor)),
        "prompt": (base.prompt_tokens * factor, replace(base, prompt_tokens=base.prompt_tokens * factor)),
        "completion": (
            base.completion_tokens * factor,
            replace(base, completion_tokens=base.completion_tokens * factor),
        ),
        "vocabulary": (
            int(vocabulary) * factor,
            replace(base, model=f"random:{','.join([*shape, str(int(vocabulary) * factor)])}"),
        ),
    }[axis]
    return value, changed


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the slope of log y over log x (least squares); None if x is constant or y is not positive."""
    if min(ys) <= 0 or len(set(xs)) < 2:
        return None
    slope, _ = statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys])
    return round(slope, 3)


@cache  # the base point is on every axis
def measure(spec: Spec, repeats: int) -> dict[str, Any]:
    """Return the best time and lowest peak of every method over the repeats."""
    work = make_work(spec, 3)  # only the number of tokens is used
    measured: dict[str, Any] = {"tokens": work.tokens, "distinct_tokens": work.distinct_tokens}
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for repeat in range(repeats):
        for method in METHODS if repeat % 2 == 0 else METHODS[::-1]:
            runs[method].append(run_worker(method, spec))
    for method in METHODS:
        gradient_bytes = runs[method][0]["gradient_bytes"]
        measured[method] = {
            "layout": runs[method][0]["layout"],
            "seconds": [s for run in runs[method] for s in run["seconds"]],
            "best_seconds": min(s for run in runs[method] for s in run["seconds"]),
            "gradient_bytes": gradient_bytes,
            "activation_bytes": min(run["peak_bytes"] for run in runs[method]) - gradient_bytes,
        }
    return measured


def fits(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the exponents of every method: time over distinct tokens, time and memory over the axis."""
    xs, tokens = ([p[name] for p in points] for name in ("value", "distinct_tokens"))
    result = {}
    for method in METHODS:
        seconds, memory = ([p[method][name] for p in points] for name in ("best_seconds", "activation_bytes"))
        result[method] = {
            "time_over_tokens": exponent(tokens, seconds),
            "time_over_axis": exponent(xs, seconds),
            "memory_over_axis": exponent(xs, memory),
        }
    return result


def print_axis(axis: str, points: list[dict[str, Any]], fitted: dict[str, Any]) -> None:
    print(
        f"\n{axis:>12} {'tokens':>8} {'distinct':>8}"
        + "".join(f" {m + ' s':>15} {'MiB':>8}" for m in METHODS)
    )
    for p in points:
        line = f"{p['value']:12} {p['tokens']:8} {p['distinct_tokens']:8}"
        for method in METHODS:
            own = p[method]
            line += f" {own['best_seconds']:15.3f} {own['activation_bytes'] / 2**20:8.0f}"
        print(line)
    for method, values in fitted.items():
        print(f"  {method}: " + ", ".join(f"{name} ^{value}" for name, value in values.items()), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="random:4,256,4,2,768,16384", help="at the base point")
    parser.add_argument("--device", default="cpu")
    add_precision(parser)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--completion_tokens", type=int, default=128)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--doublings", type=int, default=3, help="points of an axis beyond the base point")
    parser.add_argument("--repeats", type=int, default=2, help="processes a point and method")
    parser.add_argument("--windows", type=int, default=3, help="timed windows of a process")
    parser.add_argument("--output", default=None, help="name of the results file, or none")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    axes: dict[str, Any] = {}
    output = options.output or f"scaling_{options.precision}"
    for axis in options.axes:
        points = []
        for doubling in range(options.doublings + 1):
            value, spec = point(options, axis, 2**doubling)
            points.append({"axis": axis, "value": value, **measure(spec, options.repeats)})
            axes[axis] = {"points": points, "exponents": fits(points)}
            if output != "none":  # after each, so that a later failure loses nothing
                write_results(output, {"settings": vars(options), "axes": axes})
        print_axis(axis, points, axes[axis]["exponents"])


if __name__ == "__main__":
    main()
