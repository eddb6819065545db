"""Recorded runs in ``docs/recipes.md``, ``docs/lora.md`` and ``docs/agents.md``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from record_runs import ADAPTERS, TRANSCRIPT

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
        "![Share of right answers in the training batch over optimizer steps, by recipe](images/recipes.svg)",
        "",
        "| recipe | settings beside those of the script | seeds | right answers in training, steps 11 to 15 "
        "| held-out answers right, after 15 steps | processor s per step |",
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
        "![Right answers in the training batch over optimizer steps, LoRA and all weights](images/lora.svg)",
        "",
        "| trained | seed | `learning_rate` | trained parameters | held-out answers right, after "
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
        "([`adapters.json`](../benchmarks/results/adapters.json)). One seed shows that both learn,",
        "and does not rank them. Other learning rates of the adapter were not tried. The adapter saves",
        "memory, not time of a CPU.",
    ]
    return "\n".join(lines)


def transcript() -> str:
    """Return a recorded conversation of the first and one of the last step of ``examples/tools.py``."""
    run = json.loads(TRANSCRIPT.read_text())
    first, last = run["completions"]
    means = [fmean(row["right_price"] for row in rows) for rows in (first, last)]
    lines = [
        "[`tools.py`](../examples/tools.py) is such a script for SmolLM2-135M-Instruct, whose prompts begin",
        f"with an example of a call. A run of {run['max_steps']} steps of {len(first)} completions: the",
        f"first completion of the first step (mean reward {means[0]:.2f}),",
        f"and that of the last one ({means[1]:.2f}):",
        "",
    ]
    for rows in (first, last):
        row = rows[0]
        question = {"role": "user", "content": row["prompt"][-1]["content"]}
        lines += ["```text", f"step {row['step'] + 1}, reward {row['right_price']:g}"]
        lines += [_turn(message) for message in [question, *row["completion"]]]
        lines += ["```", ""]
    lines += [
        "The reward pays for the right look-up and for nothing after it. Written by",
        "`scripts/record_runs.py transcript`",
        "([`tool_transcript.json`](../benchmarks/results/tool_transcript.json)).",
    ]
    return "\n".join(lines)


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
