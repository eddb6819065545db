"""Tables and figures of the files that ``run.py`` wrote.

    python benchmarks/learning/figures.py benchmarks/results/learning --images docs/images/learning

Prints the Markdown blocks of docs/learning.md, and with ``--page`` writes them into it: accuracy in and out
of the trained tasks, gains over the initial model of every run and decided by ``rule.py``, steps and times of
both libraries, ablations, and reports of the literature beside them. Writes ``curves.png`` (reward by step),
``against_trl.png`` (over steps and minutes with both libraries) and ``samples.png`` (Pass@K and Maj@K of the
initial and of the trained model) to ``--images``, by default beside the files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import rule
import tasks
from rule import Difference, Noise, interval
from run import ABLATIONS, AGENTS, SAMPLING_SEEDS

#: Runs that differ from ``resampled`` only in the seed of sampling, by its key in ``Results``.
OTHER_SAMPLES = "other samples"

#: Runs of ``grpo_outcome`` of a second family of sampling seeds, likewise.
OTHER_OUTCOME = "grpo_outcome, other samples"

#: Cells whose reward is not the policy's share of right answers, but that of stored completions or of lines.
OTHER_REWARD = ("sft", "rft", "dpo", "grpo_process", "grpo_process_solution")

#: Folder of runs with 64 samples per held-out question, and the end of their keys in ``Results``.
MANY_SAMPLES = "samples_64"

#: Folder of runs that were made at the same time on one machine, for their times; likewise.
ONE_MACHINE = "one_machine"

TASKS = (*tasks.TRAINED, *tasks.UNSEEN)

STALE = [f"stale_{age}" for age in range(1, 5)]

#: Report of the literature, the cells that test it, and the sign of the difference that it predicts.
REPORTS = (
    ("old samples slow learning down (asynchronous RL)", STALE, -1),
    (
        "correcting for the sampler's policy repairs that (TRL's importance sampling)",
        [f"{cell}_corrected" for cell in STALE],
        1,
    ),
    ("a KL term (β = 0.04) slows learning down (DAPO, arXiv 2503.14476)", ["beta_0.04"], -1),
    ("replacing groups without variance teaches more per step (DAPO)", ["dynamic_sampling"], 1),
    ("a second update by the same samples learns more from them", ["iterations_2"], 1),
    ("a higher upper clip bound then helps (DAPO)", ["iterations_2_clip_higher"], 1),
    ("larger groups estimate the baseline better", ["group_16"], 1),
    (
        "no division by a group's standard deviation removes a bias (Dr. GRPO, arXiv 2503.20783)",
        ["scale_none", "scale_batch"],
        1,
    ),
    (
        "losses over tokens (DAPO, Dr. GRPO), CISPO (arXiv 2506.13585), GSPO (arXiv 2507.18071)",
        ["loss_dapo", "loss_dr_grpo", "loss_cispo", "loss_gspo"],
        1,
    ),
)

#: Cells that are compared with another one instead of unchanged runs.
REFERENCES = {
    **{f"{cell}_corrected": cell for cell in STALE},
    "iterations_2_clip_higher": "iterations_2",
}

Results = dict[str, list[dict[str, Any]]]


def load(directory: Path) -> Results:
    """Return the finished runs of every cell by seed, and those of other sampling seeds and more samples."""
    found: Results = {}
    for path in sorted(directory.glob("*-*.json")):  # of run.py; same_step.json is another comparison
        result = json.loads(path.read_text())
        found.setdefault(result["cell"], []).append(result)
    for cell, key in (("resampled", OTHER_SAMPLES), ("grpo_outcome", OTHER_OUTCOME)):
        for path in sorted((directory / SAMPLING_SEEDS).glob(f"{cell}-*.json")):
            found.setdefault(key, []).append(json.loads(path.read_text()))
    for folder in (MANY_SAMPLES, ONE_MACHINE):
        for path in sorted((directory / folder).glob("*-*.json")):
            result = json.loads(path.read_text())
            found.setdefault(f"{result['cell']} {folder}", []).append(result)
    return {cell: sorted(runs, key=lambda run: run["seed"]) for cell, runs in found.items()}


def with_many_samples(cell: str) -> str:
    """Return the key of a cell whose evaluation has 64 samples per question."""
    return f"{cell} {MANY_SAMPLES}"


def score(metrics: Mapping[str, float], names: Sequence[str], metric: str) -> float:
    """Return the mean of ``metric`` over tasks that were evaluated; NaN if none was."""
    found = [metrics[key] for name in names if (key := f"eval_{name}_{metric}") in metrics]
    return math.fsum(found) / len(found) if found else math.nan


def last_k(run: Mapping[str, Any]) -> int:
    """Return the largest k of the evaluation."""
    return max(int(k) for name in run["evaluation"] for k in re.findall(r"_pass@(\d+)$", name))


def table(results: Results) -> str:
    """Return accuracy (pass@1), Maj@K and Pass@K of every cell, in and out of the trained tasks."""
    k = min(last_k(runs[0]) for runs in results.values())
    columns = [(where, metric) for where in ("in", "out") for metric in ("pass@1", f"maj@{k}", f"pass@{k}")]
    names = {"in": tasks.TRAINED, "out": tasks.UNSEEN}
    lines = [
        "| run | seeds | " + " | ".join(f"{metric}, {where}" for where, metric in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for cell, runs in results.items():
        shown = [
            _shown(interval([score(run["evaluation"], names[where], metric) for run in runs]))
            for where, metric in columns
        ]
        lines.append(f"| {cell} | {len(runs)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def initial_model(results: Results) -> dict[str, Any] | None:
    """Return the initial model with 64 samples per question: the baseline of all gains, if it was run."""
    return next(iter(results.get(with_many_samples("instruct"), [])), None)


def over_initial(
    runs: Sequence[dict[str, Any]], initial: Mapping[str, Any] | None
) -> list[dict[str, dict[str, Any]]]:
    """Return the runs with gains over one baseline, in place of those over the model's few samples of a seed.

    The half-widths of the gains remain: those over few samples, which are rather too wide.
    """
    if initial is None:
        return list(runs)
    changed = []
    for run in runs:
        metrics = dict(run["evaluation"])
        for key in [key for key in metrics if key.endswith("_gain")]:
            name = key.removesuffix("_gain")
            if name in initial["evaluation"]:
                metrics[key] = metrics[name] - initial["evaluation"][name]
        changed.append({**run, "evaluation": metrics})
    return changed


def gains(results: Results) -> str:
    """Return the gain in accuracy over the initial model by task, of every run.

    The intervals are 95 % confidence sequences over the questions of one run: valid after every evaluation.
    """
    keys = {name: f"eval_{name}_pass@1_gain" for name in TASKS}
    lines = ["| run | seed | " + " | ".join(keys) + " |", "|---" * (len(keys) + 2) + "|"]
    for cell, runs in results.items():
        if not any(key in run["evaluation"] for key in keys.values() for run in runs):
            continue  # the initial model
        for run in runs:
            shown = [_gain(run, key) for key in keys.values()]
            lines.append(f"| {cell} | {run['seed']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _gain(run: Mapping[str, Any], key: str) -> str:
    if key not in run["evaluation"]:
        return "-"
    low, high = _bounds(run, key)
    return f"{run['evaluation'][key]:+.1%} ({low:+.1%} to {high:+.1%})"


def _bounds(run: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Return the confidence sequence of a gain, also for files of versions that computed another one."""
    metrics = run["evaluation"]
    return rule.run_bounds(metrics[key], metrics[f"{key}_ci95"], run["scale"]["test_questions"])


def decided_gains(results: Results, metric: str = "pass@1") -> dict[tuple[str, str], Difference]:
    """Return the gain of every method in every task, (cell, task), decided by ``rule.gain``."""
    found = {}
    for cell, runs in results.items():
        for task in TASKS:
            key = f"eval_{task}_{metric}_gain"
            evaluated = [run for run in runs if key in run["evaluation"]]
            if evaluated:
                found[cell, task] = rule.gain(
                    [run["evaluation"][key] for run in evaluated],
                    [run["evaluation"][f"{key}_ci95"] for run in evaluated],
                    [_bounds(run, key) for run in evaluated],
                )
    return found


def verdicts(results: Results) -> str:
    """Return the gain of every method in every task with its half-width and verdict."""
    found = decided_gains(results)
    lines = ["| run | " + " | ".join(TASKS) + " |", "|---" * (len(TASKS) + 1) + "|"]
    for cell in dict.fromkeys(cell for cell, _ in found):
        gains_ = [found.get((cell, task)) for task in TASKS]
        shown = [f"{one}: **{one.verdict()}**" if one else "-" for one in gains_]
        lines.append(f"| {cell} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(given: tuple[float, float], spec: str = ".1%", sign: str = "") -> str:
    mean, half = given
    if math.isnan(mean):
        return "-"
    return f"{mean:{sign}{spec}}" + ("" if math.isnan(half) else f" ± {half:{spec}}")


def blocks(results: Results) -> dict[str, str]:
    """Return the generated blocks of the page that ``results`` suffice for, by name."""
    methods, initial = without_ablations(results), initial_model(results)
    # Half as long as grpo_outcome, and as long as the runs of TRL; then the headline again, of other samples.
    others = ("resampled", OTHER_OUTCOME)
    decided = {**methods, **{cell: results[cell] for cell in others if cell in results}}
    decided = {cell: over_initial(runs, initial) for cell, runs in decided.items()}
    if initial is not None:
        methods["instruct"] = [initial]
    found = {
        "accuracy": table(methods),
        "verdicts": verdicts(decided),
        "sentences": "\n".join(f"- {sentence}" for sentence in sentences(decided)),
        "gains": gains(decided),
    }
    if unchanged_steps(results):
        found |= {
            "noise": noise_table(results),
            "ablations": ablations(results),
            "reported": reported(results),
        }
        if "trl" in results:
            found |= {"trl": against_trl(results), "same_reward": same_reward(results)}
        if {"grpo_iterative", "grpo_beta_0.04"} <= results.keys():
            found["refresh"] = refresh(results)
    if all(cell in results for cell in AGENTS):
        found["agents"] = agents(results)
    if with_many_samples("grpo_outcome") in results:
        found["figure_7"] = figure_7(results)
    if f"trl {ONE_MACHINE}" in results:
        found["micro_batches"] = equal_micro_batches(results)
    return found


def with_blocks(page: str, found: Mapping[str, str]) -> str:
    """Return ``page`` with the text between ``<!-- name -->`` and ``<!-- end -->`` replaced.

    Raises:
        ValueError: the page has no place for a block.
    """
    for name, text in found.items():
        start = f"<!-- {name} -->\n\n"
        before, marker, rest = page.partition(start)
        if not marker:
            raise ValueError(f"the page has no line <!-- {name} -->, followed by an empty line")
        page = before + start + text + "\n\n" + rest[rest.index("<!-- end -->") :]
    return page


def without_ablations(results: Results) -> Results:
    """Return the results of the methods."""
    others = (*ABLATIONS, *AGENTS, OTHER_SAMPLES, OTHER_OUTCOME)
    return {
        cell: runs
        for cell, runs in results.items()
        if cell not in others and not cell.endswith((MANY_SAMPLES, ONE_MACHINE))
    }


def sentences(results: Results) -> list[str]:
    """Return the sentences of the page that follow from the rule."""
    found = decided_gains(results)
    unseen = {task: [one for (_, name), one in found.items() if name == task] for task in tasks.UNSEEN}
    lines = []
    for task, gains_ in unseen.items():
        if gains_ and not any(one.is_seen or one.seen_runs for one in gains_):
            bound = max(one.bound for one in gains_)
            lines.append(f"In `{task}` no change was seen; none above {bound} points could have been missed.")
    for task in (*tasks.TRAINED, *tasks.UNSEEN):
        cells = [cell for (cell, name), one in found.items() if name == task and one.is_seen and one.mean > 0]
        if cells:
            names = ", ".join(f"`{cell}`" for cell in cells)
            lines.append(f"In `{task}` a gain was seen after {names}.")
    for metric in ("pass@4", "maj@4"):
        one = decided_gains(results, metric).get(("grpo_outcome", "chains"))
        if one is not None:
            kind = metric[:-2].capitalize()
            lines.append(f"`grpo_outcome` changes {kind}@4 of `chains` by {one}: {one.verdict()}.")
    return lines


def unchanged_steps(results: Results) -> dict[int, list[dict[str, Any]]]:
    """Return the unchanged runs by seed, that is by order of questions: only their samples differ.

    These are the first steps of ``grpo_outcome``, ``resampled``, and the runs of other sampling seeds.
    """
    cells = ("resampled", "grpo_outcome", OTHER_SAMPLES, OTHER_OUTCOME)
    seeds = [run["seed"] for run in results.get("resampled", [])]
    found = {seed: [run for cell in cells for run in _of(results, cell, seed)] for seed in seeds}
    return found if any(len(runs) > 1 for runs in found.values()) else {}


def _of(results: Results, cell: str, seed: int) -> list[dict[str, Any]]:
    return [run for run in results.get(cell, []) if run["seed"] == seed]


@dataclass(frozen=True)
class Unchanged:
    """Reward and accuracy of the unchanged runs by order of questions, and the noise between them."""

    rewards: dict[int, list[float]]
    accuracies: dict[int, list[float]]
    steps: int

    @property
    def reward_noise(self) -> Noise:
        return rule.noise(list(self.rewards.values()))

    @property
    def accuracy_noise(self) -> Noise | None:
        """None if no order of questions has two runs that were evaluated after these steps."""
        values = list(self.accuracies.values())
        return rule.noise(values) if any(len(one) > 1 for one in values) else None


def unchanged(results: Results) -> Unchanged:
    """Return the mean reward over the steps of ``resampled``, and accuracy after them, of unchanged runs."""
    runs = unchanged_steps(results)
    steps = min(len(rewards(run, 1)) for run in results["resampled"])
    accuracy = "eval_chains_pass@1"
    return Unchanged(
        rewards={seed: [fmean(rewards(run, 1)[:steps]) for run in found] for seed, found in runs.items()},
        accuracies={
            seed: [run["evaluation"][accuracy] for run in found if len(rewards(run, 1)) == steps]
            for seed, found in runs.items()
        },
        steps=steps,
    )


def noise_table(results: Results) -> str:
    """Return the unchanged runs by order of questions, and the standard deviation between them."""
    base = unchanged(results)
    lines = [
        f"| order of questions | mean reward of {base.steps} steps | pass@1 of chains afterwards |",
        "|---|---|---|",
    ]
    for seed, values in base.rewards.items():
        shown = [", ".join(f"{value:.1%}" for value in row) for row in (values, base.accuracies[seed])]
        lines.append(f"| {seed} | {shown[0]} | {shown[1]} |")
    reward, accuracy = base.reward_noise, base.accuracy_noise
    shown = [
        f"{one.deviation:.1%} ({one.freedom} degrees of freedom)" if one else "-"
        for one in (reward, accuracy)
    ]
    lines.append(f"| standard deviation | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Decided:
    """Differences of an ablation: mean reward over all steps of the cell, and accuracy afterwards."""

    reward: Difference
    accuracy: Difference | None


def decided_ablations(results: Results, references: Mapping[str, str] | None = None) -> dict[str, Decided]:
    """Return the differences of every ablation from unchanged runs, or from its cell in ``references``."""
    base, found = unchanged(results), {}
    for cell in ABLATIONS:
        reference = (references or {}).get(cell)
        runs = {run["seed"]: run for run in results.get(cell, []) if run["seed"] in base.rewards}
        others_reward, others_accuracy = base.rewards, base.accuracies
        if reference is not None:
            theirs = {run["seed"]: run for run in results.get(reference, [])}
            runs = {seed: run for seed, run in runs.items() if seed in theirs}
            others_reward = {seed: [_mean_reward(run)] for seed, run in theirs.items()}
            others_accuracy = {seed: [_accuracy(run)] for seed, run in theirs.items()}
        if cell == "resampled" or not runs:
            continue
        noise, accuracy = base.accuracy_noise, None
        if noise is not None:
            accuracies = [_accuracy(run) for run in runs.values()]
            accuracy = rule.comparison(accuracies, [others_accuracy[seed] for seed in runs], noise)
        means = [_mean_reward(run) for run in runs.values()]
        reward = rule.comparison(means, [others_reward[seed] for seed in runs], base.reward_noise)
        found[cell] = Decided(reward, accuracy)
    return found


def _mean_reward(run: Mapping[str, Any]) -> float:
    return fmean(rewards(run, 1))


def _accuracy(run: Mapping[str, Any]) -> float:
    return float(run["evaluation"]["eval_chains_pass@1"])


def ablations(results: Results) -> str:
    """Return reward and accuracy of the ablations, and their differences from the unchanged runs."""
    lines = ["| run | seeds | mean reward | difference | pass@1, chains | difference | pass@1, out |"]
    lines.append("|---" * 7 + "|")
    for cell, decided in decided_ablations(results).items():
        runs = results[cell]
        reward, accuracy = fmean(map(_mean_reward, runs)), fmean(map(_accuracy, runs))
        out = fmean(score(run["evaluation"], tasks.UNSEEN, "pass@1") for run in runs)
        differences = _decided(decided.reward), _decided(decided.accuracy)
        lines.append(
            f"| {cell} | {len(runs)} | {reward:.1%} | {differences[0]} "
            f"| {accuracy:.1%} | {differences[1]} | {_shown((out, math.nan))} |"
        )
    return "\n".join(lines)


def _decided(difference: Difference | None) -> str:
    """Return the difference, bold if the rule counts it as seen."""
    if difference is None:
        return "-"
    return f"**{difference}**" if difference.is_seen else str(difference)


def reported(results: Results) -> str:
    """Return the reports of the literature beside the rule's decisions about the cells that test them."""
    found = decided_ablations(results, REFERENCES)
    lines = ["| reported | seen here | not seen here |", "|---|---|---|"]
    for report, cells, sign in REPORTS:
        seen, not_seen = [], []
        for cell in cells:
            if cell not in found:
                continue
            for what, difference in (("reward", found[cell].reward), ("pass@1", found[cell].accuracy)):
                if difference is None:
                    continue
                agrees = difference.is_seen and sign * difference.mean > 0
                opposite = " (seen in the opposite direction)" if difference.is_seen and not agrees else ""
                (seen if agrees else not_seen).append(f"`{cell}` {what} {difference}{opposite}")
        lines.append(f"| {report} | {'; '.join(seen) or '-'} | {'; '.join(not_seen) or '-'} |")
    return "\n".join(lines)


def refresh(results: Results) -> str:
    """Return the differences of iterative GRPO from the same run without a refreshed reference."""
    base, theirs = unchanged(results), {run["seed"]: run for run in results["grpo_beta_0.04"]}
    runs = [run for run in results["grpo_iterative"] if run["seed"] in theirs]
    lines = ["| | grpo_iterative | grpo_beta_0.04 | difference |", "|---|---|---|---|"]
    for name, value, noise in (
        ("mean reward", _mean_reward, base.reward_noise),
        ("pass@1, chains", _accuracy, base.accuracy_noise),
    ):
        if noise is not None:
            ours, others = [value(run) for run in runs], [value(theirs[run["seed"]]) for run in runs]
            one = rule.comparison(ours, [[other] for other in others], noise)
            lines.append(f"| {name} | {fmean(ours):.1%} | {fmean(others):.1%} | {one}: {one.verdict()} |")
    return "\n".join(lines)


def agents(results: Results) -> str:
    """Return the gain of both forms of an agent over the initial model by the same turns.

    Beside them their difference, between runs of one seed, with the noise floor of the unchanged runs.
    """
    found = {cell: rule.gain(
        [run["evaluation"]["eval_chains_pass@1_gain"] for run in results[cell]],
        [run["evaluation"]["eval_chains_pass@1_gain_ci95"] for run in results[cell]],
        [_bounds(run, "eval_chains_pass@1_gain") for run in results[cell]],
    ) for cell in AGENTS}  # fmt: skip
    lines = [
        "| run | seeds | rows per rollout | mean reward | pass@1, initial | trained | gain |",
        "|---" * 7 + "|",
    ]
    for cell, one in found.items():
        runs = results[cell]
        rows = fmean(run["evaluation"].get("eval_chains_rollouts/rows", 1.0) for run in runs)
        before, after = (
            _shown(interval([run[part]["eval_chains_pass@1"] for run in runs]))
            for part in ("initial", "evaluation")
        )
        mean = _shown(interval([_mean_reward(run) for run in runs]))
        shown = " | ".join((mean, before, after, f"{one}: **{one.verdict()}**"))
        lines.append(f"| {cell} | {len(runs)} | {rows:.0f} | {shown} |")
    base = unchanged(results) if unchanged_steps(results) else None
    for name, value, noise in (
        ("mean reward", _mean_reward, base and base.reward_noise),
        ("pass@1 afterwards", _accuracy, base and base.accuracy_noise),
    ):
        split, whole = ({run["seed"]: value(run) for run in results[cell]} for cell in AGENTS)
        seeds = sorted(split.keys() & whole.keys())
        if noise and seeds:
            one = rule.comparison([split[seed] for seed in seeds], [[whole[seed]] for seed in seeds], noise)
            lines.append(f"| difference | {len(seeds)} | | {name} | | | {one}: **{one.verdict()}** |")
    forms = " and ".join(f"`{cell}` ({one.verdict()})" for cell, one in found.items())
    lines += ["", f"Over the initial model by the same turns: {forms}."]
    return "\n".join(lines)


def figure_7(results: Results) -> str:
    """Return Pass@K and Maj@K on chains of the initial and of the trained model, 64 samples per question."""
    initial, trained = (results[with_many_samples(cell)][0] for cell in ("instruct", "grpo_outcome"))
    lines = [
        "| K | Pass@K, initial | trained | difference | Maj@K, initial | trained | difference |",
        "|---" * 7 + "|",
    ]
    for k in (2**n for n in range(7)):
        shown = [str(k)]
        for metric in (f"pass@{k}", f"maj@{k}"):
            key = f"eval_chains_{metric}"
            if f"{key}_gain" not in trained["evaluation"]:
                shown += ["-"] * 3  # the majority of one sample is the sample
                continue
            one = decided_gains({"trained": [trained]}, metric)["trained", "chains"]
            shown += [f"{run['evaluation'][key]:.1%}" for run in (initial, trained)]
            shown.append(f"{one}: {one.verdict()}")
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def against_trl(results: Results) -> str:
    """Return reward, accuracy and processor seconds of the steps that both libraries took, by seed.

    All unchanged runs of groupwise are beside TRL's run of the same order of questions. The seconds are those
    of ``grpo_outcome``: medians of a process's own time, which other processes do not lengthen.
    """
    base, seeds = unchanged(results), []
    lines = [
        "| seed | runs, groupwise | mean reward, groupwise | TRL | pass@1 afterwards, groupwise | TRL "
        "| processor s per step, groupwise | TRL | ratio |",
        "|---" * 9 + "|",
    ]
    compared = []
    for run, other in paired(results):
        if (seed := run["seed"]) not in base.rewards:
            continue
        count = min(len(step_seconds(run)), len(step_seconds(other)), base.steps)
        reward, accuracy = fmean(rewards(other, 1)[:count]), other["evaluation"]["eval_chains_pass@1"]
        own, its = (median(step_seconds(one)[:count]) for one in (run, other))
        ours = fmean(base.rewards[seed]), fmean(base.accuracies[seed])
        seeds.append(seed)
        compared.append((ours[0], reward, ours[1], accuracy, own, its, its / own))
        shown = " | ".join(f"{value:.1%}" for value in (ours[0], reward, ours[1], accuracy))
        runs = len(base.rewards[seed])
        lines.append(f"| {seed} | {runs} | {shown} | {own:.1f} | {its:.1f} | {its / own:.1f} |")
    columns = list(zip(*compared, strict=True))
    means = [fmean(column) for column in columns]
    shown = " | ".join(f"{value:.1%}" for value in means[:4])
    ratio = _shown(interval(columns[6]), ".1f")
    lines.append(f"| mean | | {shown} | {means[4]:.1f} | {means[5]:.1f} | {ratio} |")
    differences = []
    for column, unchanged_, noise in (
        (columns[1], base.rewards, base.reward_noise),
        (columns[3], base.accuracies, base.accuracy_noise),
    ):
        if noise is None:
            differences.append("-")
        else:
            theirs = rule.comparison(column, [unchanged_[seed] for seed in seeds], noise)
            differences.append(_decided(Difference(-theirs.mean, theirs.half)))
    lines.append(f"| difference | | {differences[0]} | | {differences[1]} | | | | |")
    return "\n".join(lines)


def equal_micro_batches(results: Results) -> str:
    """Return the processor seconds of runs on one machine, of which two have the same micro-batches."""
    lines = ["| run | micro-batches | processor s of 15 steps | TRL's divided by it |", "|---" * 4 + "|"]
    total = results[f"trl {ONE_MACHINE}"][0]["step_processor_seconds"][14]
    for cell in ("resampled", "micro_batches_4", "trl"):
        run = results[f"{cell} {ONE_MACHINE}"][0]
        rows, parts = (
            run["settings"][name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        )
        own = run["step_processor_seconds"][14]
        lines.append(f"| {cell} | {parts} of {rows} rows | {own:.0f} | {total / own:.1f} |")
    return "\n".join(lines)


def same_reward(results: Results, window: int = 5) -> str:
    """Return the processor minutes until the reward of both libraries' runs reached the same level.

    The level is the lower one of the two runs' highest means of ``window`` steps, so that both reach it. Runs
    of other sampling seeds are left out: they were made on another machine.
    """
    lines = [
        "| seed | run | level | steps, groupwise | TRL | processor minutes, groupwise | TRL | ratio |",
        "|---" * 8 + "|",
    ]
    steps = unchanged(results).steps
    for other in results["trl"]:
        for cell in ("grpo_outcome", "resampled"):
            for run in _of(results, cell, other["seed"]):
                curves = [rewards(one, window)[: steps - window + 1] for one in (run, other)]
                level = min(max(curve) for curve in curves)
                reached = [
                    window + next(i for i, value in enumerate(curve) if value >= level - 1e-9)
                    for curve in curves
                ]
                minutes = [
                    one["step_processor_seconds"][step - 1] / 60
                    for one, step in zip((run, other), reached, strict=True)
                ]
                lines.append(
                    f"| {other['seed']} | {cell} | {level:.1%} | {reached[0]} | {reached[1]} "
                    f"| {minutes[0]:.1f} | {minutes[1]:.1f} | {minutes[1] / minutes[0]:.1f} |"
                )
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
    """Draw Pass@K and Maj@K over K on held-out questions of the trained task; the initial model is black.

    The initial and the trained model have 64 samples per question, if they were run; otherwise all methods
    are drawn as far as their samples go.
    """
    import matplotlib.pyplot as plt

    many = {cell: results.get(with_many_samples(cell)) for cell in ("instruct", "grpo_outcome")}
    drawn = {cell: runs for cell, runs in many.items() if runs} if all(many.values()) else None
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axes, kind in zip(panels, ("pass", "maj"), strict=True):
        for number, (cell, runs) in enumerate((drawn or without_ablations(results)).items()):
            names = runs[0]["evaluation"]
            ks = sorted({int(k) for name in names for k in re.findall(rf"_{kind}@(\d+)$", name)})
            means = [
                interval([score(run["evaluation"], tasks.TRAINED, f"{kind}@{k}") for run in runs])[0]
                for k in ks
            ]
            colour = "black" if cell == "instruct" else f"C{number % 10}"
            axes.plot(ks, means, marker="o", color=colour, label=cell)
            axes.set_xscale("log")
            axes.set_xticks(ks, [str(k) for k in ks])
        axes.set(xlabel="K", ylabel=f"{kind.capitalize()}@K")
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
    parser.add_argument("--page", type=Path, help="page whose blocks are replaced: docs/learning.md")
    parser.add_argument("--window", type=int, default=5, help="steps that curves are averaged over")
    options = parser.parse_args(arguments)
    results = load(options.directory)
    if not results:
        raise SystemExit(f"{options.directory} has no finished run; run benchmarks/learning/run.py first")
    images = options.images or options.directory
    images.mkdir(parents=True, exist_ok=True)
    draw_curves(without_ablations(results), images / "curves.png", options.window)
    draw_against_trl(results, images / "against_trl.png", options.window)
    draw_samples(results, images / "samples.png")
    found = blocks(results)
    if options.page is not None:
        options.page.write_text(with_blocks(options.page.read_text(), found))
    shown = "\n\n".join(found.values())
    print(shown)
    return shown


if __name__ == "__main__":
    main()
