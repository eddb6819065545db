"""Tables of the recorded runs in ``docs/recipes.md`` and ``docs/lora.md``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from record_runs import ADAPTERS

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
        "and does not rank them.",
    ]
    return "\n".join(lines)
