"""Compare runs with and without ``prompt_filter``: completions and processor time until an accuracy.

SmolLM2-135M-Instruct learns the task of ``examples/quickstart.py`` from few reviews, which repeat. Both arms
of a seed have the same reviews in the same order; the arms take turns. Differences are decided by the
interval over seeds of ``learning/rule.py``. A call makes ``--runs`` of the runs that are missing, and resumes
one that ``--seconds`` ended:

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/prompt_filter.py --runs 6
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_results
from quickstart import correct, reviews
from smollm2 import local_model
from transformers import TrainerCallback

from groupwise import ConfigError, GRPOConfig, GRPOTrainer

sys.path.append(str(Path(__file__).parent / "learning"))
from rule import Difference, interval

#: Without and with the filter; a prompt outside the range rests for two epochs of eight steps.
ARMS: dict[str, dict[str, Any] | None] = {
    "all": None,
    "filter": {"min": 0.05, "max": 0.95, "again_after": 16},
}
#: Held-out accuracies whose first crossing is compared.
ACCURACIES = (0.6, 0.7, 0.8, 0.9)
NAME = "prompt_filter"
REVIEWS, HELD_OUT = 64, 200


def settings(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the settings of a run: those of the quickstart, with a constant learning rate."""
    return {
        "prompt_filter": ARMS[arm],
        "max_steps": steps,
        "seed": seed,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "num_generations": 8,
        "per_device_train_batch_size": 64,  # 8 prompts
        "max_completion_length": 8,
        "per_device_eval_batch_size": 100,
        "num_generations_eval": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "eval_on_start": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class RewardEvaluator(GRPOTrainer):
    """Evaluation of rewards alone: the loss of an evaluation takes as long as its samples."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs) if model.training else torch.zeros(())


class Clock(TrainerCallback):
    """Record processor seconds of steps; end the run at the last accuracy, or after ``seconds`` to resume."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        used = {"step": state.global_step, "processor_seconds": round(time.process_time() - self.begun, 3)}
        state.log_history.append(used)  # which checkpoints have
        if time.monotonic() > self.end:
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        control.should_training_stop |= metrics["eval_reward"] >= ACCURACIES[-1]


def run(arm: str, seed: int, steps: int, seconds: float) -> dict[str, Any] | None:
    """Train one arm; returns series by step, and the held-out accuracies by the steps before them.

    None: the time is over; the next call resumes from the checkpoint.
    """
    directory, ended = Path(tempfile.gettempdir(), f"groupwise-{NAME}-{arm}-{seed}"), ""
    trainer = RewardEvaluator(
        str(local_model()),
        correct,
        GRPOConfig(str(directory), **settings(arm, seed, steps)),
        reviews(REVIEWS, seed, words=slice(12)),
        reviews(HELD_OUT, seed=-1, words=slice(12, None)),
        callbacks=[Clock(seconds)],
    )
    try:
        trainer.train(resume_from_checkpoint=any(directory.glob("checkpoint-*")))
    except ConfigError as error:
        if "prompts is left" not in str(error):
            raise
        ended = str(error)
    log = trainer.state.log_history
    accuracy = {entry["step"]: entry["eval_reward"] for entry in log if "eval_reward" in entry}
    if trainer.state.global_step < steps and max(accuracy.values()) < ACCURACIES[-1] and not ended:
        return None
    shutil.rmtree(directory, ignore_errors=True)
    names = ("reward", "frac_reward_zero_std", "prompts/skipped_share", "prompts/never_sampled")
    return {
        "ended": ended,
        "accuracy": accuracy,
        **{name: [entry[name] for entry in log if name in entry] for name in ("processor_seconds", *names)},
    }


def crossing(accuracy: dict[str, float], level: float) -> float:
    """Return the steps until an accuracy, by linear interpolation; NaN if the run did not reach it."""
    points = sorted((int(step), value) for step, value in accuracy.items())
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= level:
            return before + (after - before) * max(level - low, 0.0) / (high - low) if high > low else before
    return math.nan


def until(found: dict[str, Any], level: float) -> dict[str, float]:
    """Return completions, processor minutes and share of groups without variance until an accuracy."""
    steps = crossing(found["accuracy"], level)
    if math.isnan(steps):
        return dict.fromkeys(("completions", "processor_minutes", "groups_without_variance"), math.nan)
    whole = max(math.ceil(steps), 1)
    zero = found["frac_reward_zero_std"][:whole]
    return {
        "completions": steps * 64,
        "processor_minutes": sum(found["processor_seconds"][:whole]) / 60 * steps / whole,
        "groups_without_variance": sum(zero) / len(zero),
    }


def decisions(
    runs: dict[str, dict[str, Any]], seeds: Sequence[int], levels: Sequence[float]
) -> dict[str, Any]:
    """Compare the arms of each seed: relative differences with their interval over the seeds."""
    decided: dict[str, Any] = {}
    for level in levels:
        by_arm = {arm: [until(runs[f"{arm}-{seed}"], level) for seed in seeds] for arm in ARMS}
        decided[str(level)] = {"means": {}, "differences": {}}
        for name in by_arm["all"][0]:
            plain, filtered = ([each[name] for each in by_arm[arm]] for arm in ARMS)
            is_share = name == "groups_without_variance"
            changes = [b - a if is_share else b / a - 1 for a, b in zip(plain, filtered, strict=True)]
            difference = Difference(*interval(changes))
            means = {arm: interval([each[name] for each in by_arm[arm]])[0] for arm in ARMS}
            decided[str(level)]["means"][name] = {
                arm: None if math.isnan(mean) else round(mean, 4) for arm, mean in means.items()
            }
            verdict = "seen" if difference.is_seen else "not seen"
            decided[str(level)]["differences"][name] = f"{difference}: {verdict}"
    return decided


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=32)
    parser.add_argument("--runs", type=int, default=1, help="missing runs that this call makes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which a call ends")
    options = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    keys = [(arm, seed) for seed in options.seeds for arm in ARMS]
    missing = [each for each in keys if "{}-{}".format(*each) not in runs]
    results = {"settings": settings("filter", 0, options.max_steps), "seeds": options.seeds}
    end = time.monotonic() + options.seconds
    for arm, seed in missing[: options.runs]:
        key, found = f"{arm}-{seed}", run(arm, seed, options.max_steps, end - time.monotonic())
        if found is None:
            return
        runs[key] = found
        print(f"{key}: {found['accuracy']} {found['ended']}", flush=True)
        write_results(NAME, {**results, "runs": runs})
    if len(missing) <= options.runs:
        results["decisions"] = decisions(runs, options.seeds, ACCURACIES)
        write_results(NAME, {**results, "runs": runs})
        print(json.dumps(results["decisions"], indent=1))


if __name__ == "__main__":
    main()
