"""Recorded runs in README and in ``docs/``: recipes, adapters, and the first run of a page."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from record_runs import ADAPTERS, FIRST

#: Cells of ``benchmarks/learning/run.py``.
CELLS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "learning"
#: Cell and settings of every recipe.
RECIPES = {
    "fresh samples": ("resampled", ""),
    "dynamic sampling": ("dynamic_sampling", "`dynamic_sampling=True`"),
    "samples four steps old": ("stale_4_corrected", "`rollout_staleness=4`"),
}


def recipe_cells() -> dict[str, list[dict[str, Any]]]:
    """Return the recorded cells of every recipe, by seed."""
    return {
        name: [json.loads(path.read_text()) for path in sorted(CELLS.glob(f"{cell}-[0-9].json"))]
        for name, (cell, _) in RECIPES.items()
    }


def recipe_table() -> str:
    """Return the picture and the results of the recipes."""
    lines = [
        "![Accuracy in the training batch over optimizer steps, by recipe](images/recipes.svg)",
        "",
        "| recipe | added to the script | seeds | accuracy in training, steps 11 to 15 "
        "| held-out accuracy after 15 steps | processor s per step |",
        "|---|---|---|---|---|---|",
    ]
    for name, cells in recipe_cells().items():
        rewards = [[log["reward"] for log in cell["history"] if "reward" in log] for cell in cells]
        training = fmean(fmean(run[10:15]) for run in rewards)
        held_out = ", ".join(f"{cell['evaluation']['eval_chains_pass@1']:.0%}" for cell in cells)
        seconds = fmean(
            cell["step_processor_seconds"][-1] / len(cell["step_processor_seconds"]) for cell in cells
        )
        row = (name, RECIPES[name][1], str(len(cells)), f"{training:.0%}", held_out, f"{seconds:.0f}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def adapter_table() -> str:
    """Return the picture and the results of an adapter beside all weights."""
    runs = json.loads(ADAPTERS.read_text())
    lines = [
        "![Accuracy in the training batch over optimizer steps, LoRA and all weights](images/lora.svg)",
        "",
        "| trained | seed | `learning_rate` | trained parameters | held-out accuracy "
        "| processor s per step |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = (
            {"full": "all weights", "lora": "LoRA, rank 16"}[run["recipe"]],
            str(run["seed"]),
            f"{run['settings']['learning_rate']:.0e}".replace("e-0", "e-"),
            f"{run['trainable_parameters'] / 1e6:.3g}e6",
            f"{run['accuracy']:.1%}",
            f"{run['processor_seconds'] / len(run['reward']):.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    first = runs[0]
    lines += [
        "",
        "The task of the [quickstart](getting_started.md#quickstart) with SmolLM2-135M-Instruct:",
        f"{len(first['reward'])} steps of 64 completions, one thread of an",
        f"{first['conditions']['processor']},",
        "written by `scripts/record_runs.py adapters`",
        "([`adapters.json`](../benchmarks/results/adapters.json)). With a learning rate of 1e-4 the",
        "adapter reached 55 to 65 % with the same seeds (not in the file). Other rates were tried for",
        "neither, so the two are not ranked. Later steps of the adapter take less time because groups with",
        "equal rewards are skipped: on a CPU, an adapter itself saves memory and no time.",
    ]
    return "\n".join(lines)


def first_runs(page: str) -> list[dict[str, Any]]:
    """Return the recorded runs of the first block of a page, by seed."""
    return [run for run in json.loads(FIRST.read_text()) if run["page"] == page]


def first_sentence(page: str) -> str:
    """Return one sentence: rewards of the first and of the last log, time and conditions."""
    runs = first_runs(page)
    first, last = ([run["reward"][index] for run in runs] for index in (0, -1))
    seconds = [run["processor_seconds"] for run in runs]
    steps = [number for line in runs[0]["lines"] if (number := line.split()[0]) != "step"]
    every = f"steps 1 to {steps[0]}" if steps[0] != "1" else "the first step"
    time = f"{min(seconds):.0f} to {max(seconds):.0f}" if len(runs) > 1 else f"{seconds[0]:.0f}"
    return (
        f"{_count(runs)}: mean reward {_list(first)} in {every} and {_list(last)} in the last log "
        f"of {steps[-1]} steps. A run takes {time} processor seconds ({runs[0]['conditions']['processor']})."
    )


def _count(runs: list[dict[str, Any]]) -> str:
    return {1: "One seed", 2: "Two seeds", 3: "Three seeds"}[len(runs)]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def first_run(page: str) -> str:
    """Return what the first run of a page prints, and its conditions."""
    run = first_runs(page)[0]
    times = run["lines"][0].index("generate")  # other processes used the machine: times are left out
    shown = dict.fromkeys(
        line[:times].rstrip() for line in run["lines"]
    )  # tables of completions repeat the head
    lines = ["```text", *shown, "```", "", first_sentence(page)]
    if page == "agents":
        lines += ["Recorded with SmolLM2-135M-Instruct and a chat template with tools, not the model above."]
    lines += [
        "Written by `scripts/record_runs.py first`",
        "([`first_runs.json`](../benchmarks/results/first_runs.json)), without the columns of times.",
    ]
    if page != "vlm":
        lines += ["The weights are [the copy of SmolLM2](../examples/smollm2.py) in the package index."]
    if page == "agents":
        lines += ["", "## A transcript", "", *transcript(run)]
    return "\n".join(lines)


def transcript(run: dict[str, Any]) -> list[str]:
    """Return the first conversation of the first log and that of the last one."""
    lines = ["The first completion of the first and of the last step:", ""]
    for row in run["completions"]:
        question = {"role": "user", "content": row["prompt"][-1]["content"]}
        lines += ["```text", f"step {row['step'] + 1}, reward {row['right_price']:g}"]
        lines += [_turn(message) for message in [question, *row["completion"]]]
        lines += ["```", ""]
    return [*lines, "Only an answer with the looked-up price is rewarded."]


def _turn(message: dict[str, Any]) -> str:
    """Return a message as one line: role, text, and tool calls as function calls."""
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if value is not None)
        calls.append(f"calls {call['function']['name']}({given})")
    text = " ".join(str(message.get("content") or "").split())
    return f"{message['role']:<10} " + "; ".join([*([text] if text else []), *calls])
