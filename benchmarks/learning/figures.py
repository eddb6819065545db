"""Tables and figures of the files that ``run.py`` wrote.

    python benchmarks/learning/figures.py benchmarks/results/learning

Prints a Markdown table of accuracy in and out of the trained tasks, mean ± 95 % interval over seeds
(Student), and writes ``curves.png`` (reward over steps) and ``samples.png`` (Pass@K and Maj@K before and
after) beside the files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tasks

#: 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Results = dict[str, list[dict[str, Any]]]


def load(directory: Path) -> Results:
    """Return the finished runs of every cell, by seed."""
    found: Results = {}
    for path in sorted(directory.glob("*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["cell"], []).append(result)
    return {cell: sorted(runs, key=lambda run: run["seed"]) for cell, runs in found.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half-width of the 95 % interval over seeds; NaN for a single seed.

    Raises:
        ValueError: no value, or more than ten.
    """
    if not 1 <= len(values) <= len(STUDENT) + 1:
        raise ValueError(f"{len(values)} seeds; allowed: 1 to {len(STUDENT) + 1}")
    count, mean = len(values), math.fsum(values) / len(values)
    if count == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, STUDENT[count - 2] * math.sqrt(variance / count)


def score(metrics: Mapping[str, float], names: Sequence[str], metric: str) -> float:
    """Return the mean of ``metric`` over tasks that were evaluated; NaN if none was."""
    found = [metrics[key] for name in names if (key := f"eval_{name}_{metric}") in metrics]
    return math.fsum(found) / len(found) if found else math.nan


def last_k(run: Mapping[str, Any]) -> int:
    """Return the largest k of the evaluation."""
    return max(int(k) for name in run["after"] for k in re.findall(r"_pass@(\d+)$", name))


def table(results: Results) -> str:
    """Return accuracy (pass@1), Maj@K and Pass@K after training, in and out of the trained tasks."""
    k = last_k(next(iter(results.values()))[0])
    columns = [(where, metric) for where in ("in", "out") for metric in ("pass@1", f"maj@{k}", f"pass@{k}")]
    names = {"in": tasks.TRAINED, "out": tuple(tasks.UNSEEN)}
    lines = [
        "| cell | seeds | " + " | ".join(f"{metric}, {where}" for where, metric in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for cell, runs in results.items():
        shown = [
            _shown(interval([score(run["after"], names[where], metric) for run in runs]))
            for where, metric in columns
        ]
        lines.append(f"| {cell} | {len(runs)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(given: tuple[float, float]) -> str:
    mean, half = given
    if math.isnan(mean):
        return "-"
    return f"{mean:.1%}" if math.isnan(half) else f"{mean:.1%} ± {half:.1%}"


def draw_curves(results: Results, path: Path) -> None:
    """Draw the training reward over steps, one line per run and one colour per cell."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for number, (cell, runs) in enumerate(results.items()):
        for run in runs:
            points = [(log["step"], log["reward"]) for log in run.get("history", []) if "reward" in log]
            if points:
                label = cell if run is runs[0] else None
                axes.plot(*zip(*points, strict=True), color=f"C{number % 10}", label=label)
    axes.set(xlabel="optimizer step", ylabel="mean reward of the batch")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def draw_samples(results: Results, path: Path) -> None:
    """Draw Pass@K and Maj@K over K on held-out questions of the trained tasks, before and after."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    first = next(iter(results.values()))  # all cells start from the same model
    lines = [("before training", "before", "black", first)]
    lines += [(cell, "after", f"C{number % 10}", runs) for number, (cell, runs) in enumerate(results.items())]
    for axes, kind in zip(panels, ("pass", "maj"), strict=True):
        ks = sorted({int(k) for name in first[0]["after"] for k in re.findall(rf"_{kind}@(\d+)$", name)})
        for label, when, colour, runs in lines:
            means = [
                interval([score(run[when], tasks.TRAINED, f"{kind}@{k}") for run in runs])[0] for k in ks
            ]
            axes.plot(ks, means, marker="o", color=colour, label=label)
        axes.set(xlabel="K", ylabel=f"{kind.capitalize()}@K", xscale="log")
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
    panels[1].legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(arguments)
    results = load(options.directory)
    if not results:
        raise SystemExit(f"{options.directory} has no finished run; run benchmarks/learning/run.py first")
    draw_curves(results, options.directory / "curves.png")
    draw_samples(results, options.directory / "samples.png")
    shown = table(results)
    print(shown)
    return shown


if __name__ == "__main__":
    main()
