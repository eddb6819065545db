"""Tables and figures of the files that ``run.py`` wrote.

    python benchmarks/learning/figures.py benchmarks/results/learning --images docs/images/learning

Prints Markdown tables of accuracy in and out of the trained tasks, mean ± 95 % interval over seeds (Student),
of the gain over the initial model with intervals over questions, of the steps of both libraries, and of the
ablations. Writes ``curves.png`` (reward over steps), ``against_trl.png`` (over steps and minutes with both
libraries) and ``samples.png`` (Pass@K and Maj@K of the initial model and of every cell) to ``--images``, by
default beside the files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tasks
from run import ABLATIONS

#: 97.5 % quantiles of Student's t for 2, 3, … degrees of freedom.
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

#: Cells whose reward is not the policy's share of right answers, but that of stored completions or of lines.
OTHER_REWARD = ("sft", "rft", "dpo", "grpo_process")

Results = dict[str, list[dict[str, Any]]]


def load(directory: Path) -> Results:
    """Return the finished runs of every cell, by seed."""
    found: Results = {}
    for path in sorted(directory.glob("*-*.json")):  # of run.py; same_step.json is another comparison
        result = json.loads(path.read_text())
        found.setdefault(result["cell"], []).append(result)
    return {cell: sorted(runs, key=lambda run: run["seed"]) for cell, runs in found.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half-width of the 95 % interval over seeds; NaN below three seeds.

    Raises:
        ValueError: no value, or more than ten.
    """
    if not 1 <= len(values) <= len(STUDENT) + 2:
        raise ValueError(f"{len(values)} seeds; allowed: 1 to {len(STUDENT) + 2}")
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 3:  # that of two would be ± six times their difference
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, STUDENT[count - 3] * math.sqrt(variance / count)


def score(metrics: Mapping[str, float], names: Sequence[str], metric: str) -> float:
    """Return the mean of ``metric`` over tasks that were evaluated; NaN if none was."""
    found = [metrics[key] for name in names if (key := f"eval_{name}_{metric}") in metrics]
    return math.fsum(found) / len(found) if found else math.nan


def last_k(run: Mapping[str, Any]) -> int:
    """Return the largest k of the evaluation."""
    return max(int(k) for name in run["evaluation"] for k in re.findall(r"_pass@(\d+)$", name))


def table(results: Results) -> str:
    """Return accuracy (pass@1), Maj@K and Pass@K of every cell, in and out of the trained tasks."""
    k = last_k(next(iter(results.values()))[0])
    columns = [(where, metric) for where in ("in", "out") for metric in ("pass@1", f"maj@{k}", f"pass@{k}")]
    names = {"in": tasks.TRAINED, "out": tasks.UNSEEN}
    lines = [
        "| cell | seeds | " + " | ".join(f"{metric}, {where}" for where, metric in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for cell, runs in results.items():
        shown = [
            _shown(interval([score(run["evaluation"], names[where], metric) for run in runs]))
            for where, metric in columns
        ]
        lines.append(f"| {cell} | {len(runs)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def gains(results: Results) -> str:
    """Return the gain in accuracy over the initial model by task, of every seed and on average.

    The intervals of a seed are 95 % confidence sequences over the questions of one run: valid after every
    evaluation. Those of the mean are Student's over seeds.
    """
    names = [*tasks.TRAINED, *tasks.UNSEEN]
    keys = [f"eval_{name}_pass@1_gain" for name in names]
    lines = ["| cell | seed | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for cell, runs in results.items():
        if not any(key in run["evaluation"] for key in keys for run in runs):
            continue  # the initial model
        for run in runs:
            shown = [_gain(run["evaluation"], key) for key in keys]
            lines.append(f"| {cell} | {run['seed']} | " + " | ".join(shown) + " |")
        if len(runs) > 2:
            means = [interval([run["evaluation"].get(key, math.nan) for run in runs]) for key in keys]
            lines.append(f"| {cell} | mean | " + " | ".join(_shown(mean, sign="+") for mean in means) + " |")
    return "\n".join(lines)


def _gain(metrics: Mapping[str, float], key: str) -> str:
    if key not in metrics:
        return "-"
    low, high = metrics[f"{key}_low"], metrics[f"{key}_high"]
    return f"{metrics[key]:+.1%} ({low:+.1%} to {high:+.1%})"


def _shown(given: tuple[float, float], spec: str = ".1%", sign: str = "") -> str:
    mean, half = given
    if math.isnan(mean):
        return "-"
    return f"{mean:{sign}{spec}}" + ("" if math.isnan(half) else f" ± {half:{spec}}")


def tables(results: Results) -> list[str]:
    """Return the tables of methods and of their gains, of the steps of both libraries, and of ablations."""
    methods = without_ablations(results)
    return [table(methods), gains(methods), against_trl(results), ablations(results)]


def without_ablations(results: Results) -> Results:
    """Return the results of the methods."""
    return {cell: runs for cell, runs in results.items() if cell not in ABLATIONS}


def ablations(results: Results) -> str:
    """Return the mean reward of the ablations, its difference from that of ``resampled``, and accuracy.

    Differences are of runs with the same seed, which have the same questions. The row of ``grpo_outcome`` has
    as many of its first steps: its difference is chance, only the samples are others.
    """
    base = {one["seed"]: rewards(one, 1) for one in results.get("resampled", [])}
    lines = [
        "| cell | seeds | mean reward | difference from resampled | pass@1, in | pass@1, out |",
        "|---" * 6 + "|",
    ]
    for cell in ["grpo_outcome", *ABLATIONS]:
        runs = [one for one in results.get(cell, []) if one["seed"] in base]
        if not runs:
            continue
        means = [fmean(rewards(one, 1)[: len(base[one["seed"]])]) for one in runs]
        differences = [mean - fmean(base[one["seed"]]) for mean, one in zip(means, runs, strict=True)]
        shown = [_shown(interval(means)), _shown(interval(differences), sign="+")]
        for names in (tasks.TRAINED, tasks.UNSEEN):
            accuracy = interval([score(one["evaluation"], names, "pass@1") for one in runs])
            shown.append(_shown(accuracy) if cell in ABLATIONS else "-")  # grpo_outcome went on
        lines.append(f"| {cell} | {len(runs)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def against_trl(results: Results) -> str:
    """Return reward and processor seconds of the steps that both libraries took, by seed and on average.

    The seconds are medians of a process's own time, which other processes on the machine do not lengthen.
    Difference and ratio of one seed's two runs are paired; their intervals over seeds are Student's.
    """
    lines = [
        "| seed | steps | mean reward, groupwise | TRL | difference "
        "| processor s per step, groupwise | TRL | ratio |",
        "|---" * 8 + "|",
    ]
    compared = []
    for run, other in paired(results):
        count = min(len(step_seconds(run)), len(step_seconds(other)))
        ours, theirs = (math.fsum(rewards(one, 1)[:count]) / count for one in (run, other))
        own, its = (median(step_seconds(one)[:count]) for one in (run, other))
        compared.append((ours, theirs, ours - theirs, own, its, its / own))
        cells = f"{ours:.1%} | {theirs:.1%} | {ours - theirs:+.1%} | {own:.1f} | {its:.1f} | {its / own:.1f}"
        lines.append(f"| {run['seed']} | {count} | {cells} |")
    if len(compared) > 1:
        ours, theirs, difference, own, its, ratio = map(interval, zip(*compared, strict=True))
        percents = f"{ours[0]:.1%} | {theirs[0]:.1%} | {_shown(difference, '.1%', sign='+')}"
        lines.append(f"| mean | | {percents} | {own[0]:.1f} | {its[0]:.1f} | {_shown(ratio, '.1f')} |")
    return "\n".join(lines)


def paired(results: Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the runs of ``grpo_outcome`` and ``trl`` with the same seed."""
    others = {run["seed"]: run for run in results.get("trl", [])}
    return [(run, others[run["seed"]]) for run in results.get("grpo_outcome", []) if run["seed"] in others]


def step_seconds(run: Mapping[str, Any]) -> list[float]:
    """Return the processor seconds of every step."""
    ends = [0.0, *run["step_processor_seconds"]]
    return [end - start for start, end in pairwise(ends)]


def rewards(run: Mapping[str, Any], window: int) -> list[float]:
    """Return the mean reward of the last ``window`` steps, by step from step ``window`` on."""
    logged = [log["reward"] for log in run.get("history", []) if "reward" in log]
    return [math.fsum(logged[end - window : end]) / window for end in range(window, len(logged) + 1)]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over seeds by step, as far as the shortest curve."""
    return [math.fsum(values) / len(values) for values in zip(*curves, strict=False)]


def draw_curves(results: Results, path: Path, window: int) -> None:
    """Draw the training reward over steps, mean over seeds, one line per cell whose reward is accuracy."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for number, (cell, runs) in enumerate(results.items()):
        curve = mean_curve([rewards(run, window) for run in runs])
        if curve and cell not in OTHER_REWARD:
            steps = range(window, window + len(curve))
            axes.plot(steps, curve, color=f"C{number % 10}", label=f"{cell} ({len(runs)})")
    axes.set(xlabel="optimizer step", ylabel=f"reward, mean of {window} steps and of all seeds")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="cell (seeds)", fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def draw_against_trl(results: Results, path: Path, window: int) -> None:
    """Draw the training reward of GRPO with both libraries, over steps and over processor minutes.

    Thin lines are seeds that both libraries ran, thick ones their mean, as far as the shortest.
    """
    import matplotlib.pyplot as plt

    figure, (by_step, by_minute) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    runs = list(zip(*paired(results), strict=True)) or [(), ()]
    for colour, label, seeds in zip(("C0", "C1"), ("groupwise", "TRL"), runs, strict=True):
        curves = [rewards(run, window) for run in seeds]
        minutes = [[seconds / 60 for seconds in run["step_processor_seconds"][window - 1 :]] for run in seeds]
        for times, curve in zip(minutes, curves, strict=True):
            by_step.plot(range(window, window + len(curve)), curve, color=colour, alpha=0.35, linewidth=1)
            by_minute.plot(times, curve[: len(times)], color=colour, alpha=0.35, linewidth=1)
        mean = mean_curve(curves)
        by_step.plot(range(window, window + len(mean)), mean, color=colour, linewidth=2.5, label=label)
        by_minute.plot(mean_curve(minutes)[: len(mean)], mean, color=colour, linewidth=2.5, label=label)
    by_step.set(xlabel="optimizer step", ylabel=f"reward, mean of {window} steps")
    by_minute.set(xlabel="processor minutes of training")
    by_step.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def draw_samples(results: Results, path: Path) -> None:
    """Draw Pass@K and Maj@K over K on held-out questions of the trained tasks; the initial model is black."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    names = next(iter(results.values()))[0]["evaluation"]
    for axes, kind in zip(panels, ("pass", "maj"), strict=True):
        ks = sorted({int(k) for name in names for k in re.findall(rf"_{kind}@(\d+)$", name)})
        for number, (cell, runs) in enumerate(results.items()):
            means = [
                interval([score(run["evaluation"], tasks.TRAINED, f"{kind}@{k}") for run in runs])[0]
                for k in ks
            ]
            colour = "black" if cell == "instruct" else f"C{number % 10}"
            axes.plot(ks, means, marker="o", color=colour, label=cell)
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
    parser.add_argument("--images", type=Path, help="folder of the figures; default: that of the files")
    parser.add_argument("--window", type=int, default=5, help="steps that curves are averaged over")
    options = parser.parse_args(arguments)
    results = load(options.directory)
    if not results:
        raise SystemExit(f"{options.directory} has no finished run; run benchmarks/learning/run.py first")
    images = options.images or options.directory
    images.mkdir(parents=True, exist_ok=True)
    draw_curves(without_ablations(results), images / "curves.png", options.window)
    draw_against_trl(results, images / "against_trl.png", options.window)
    draw_samples(without_ablations(results), images / "samples.png")
    shown = "\n\n".join(tables(results))
    print(shown)
    return shown


if __name__ == "__main__":
    main()
