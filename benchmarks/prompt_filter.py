"""Compare runs with and without ``prompt_filter``: completions and processor time until an accuracy.

A random two-layer model learns to repeat the last of two words. Each seed has its own model and order of the
prompts, and both arms of a seed the same; the arms take turns. Differences are decided by the interval over
seeds of ``learning/rule.py``. A second call skips finished runs:

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/prompt_filter.py
    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/prompt_filter.py --unsolvable --max_steps 140
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_results
from datasets import Dataset, concatenate_datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from groupwise import ConfigError, GRPOConfig, GRPOTrainer

sys.path.append(str(Path(__file__).parent / "learning"))
from rule import Difference, interval

WORDS = [f"w{i}" for i in range(28)]
#: Without and with the filter; a prompt outside the range rests for four epochs.
ARMS: dict[str, dict[str, Any] | None] = {"all": None, "filter": {"min": 0.05, "max": 0.95}}
#: Held-out accuracies whose first crossing is compared.
ACCURACIES = (0.5, 0.8, 0.9)
NAME = "prompt_filter"


def rows(first: range, answer: str | None = None) -> Dataset:
    """Return prompts of two words: with each last word, several first words."""
    pairs = [(WORDS[(last * 5 + shift * 3) % 28], WORDS[last]) for last in range(28) for shift in first]
    return Dataset.from_list([{"prompt": f"{one} {two}", "answer": answer or two} for one, two in pairs])


#: Prompts for training, held-out ones, and some that have no right answer; no prompt is in two of them.
TRAIN, HELD_OUT, UNSOLVABLE = range(4), range(4, 7), range(7, 11)


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == word) for text, word in zip(completions, answer, strict=True)]


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<pad>", "<end>", *WORDS])}, "<pad>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS) + 2, **sizes, **ends))


def settings(arm: str, seed: int, steps: int, prompts: int = 112) -> dict[str, Any]:
    """Return the settings of a run; an epoch has ``prompts`` / 8 steps."""
    bounds = ARMS[arm]
    return {
        "prompt_filter": bounds and {**bounds, "again_after": 4 * prompts // 8},
        "max_steps": steps,
        "seed": seed,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "num_generations": 16,
        "per_device_train_batch_size": 128,  # 8 prompts
        "max_completion_length": 1,
        "per_device_eval_batch_size": 168,
        "num_generations_eval": 2,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "eval_on_start": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class Clock(TrainerCallback):
    """Processor seconds of the training steps, without evaluations."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.process_time() - self.begun)


def run(arm: str, seed: int, steps: int, unsolvable: bool) -> dict[str, Any]:
    """Train one arm; returns series by step, and the held-out accuracies by the steps before them."""
    clock = Clock()
    trained = [rows(TRAIN)] + [rows(UNSOLVABLE, answer="none")] * unsolvable
    policy = model(seed)
    with tempfile.TemporaryDirectory() as directory:
        if unsolvable:  # a policy that solves half of the others: it can tell them apart
            args = GRPOConfig(directory, **settings("all", seed, 80))
            GRPOTrainer(policy, correct, args, trained[0], rows(HELD_OUT), tokenizer()).train()
        trainer = GRPOTrainer(
            policy,
            correct,
            GRPOConfig(directory, **settings(arm, seed, steps, sum(map(len, trained)))),
            concatenate_datasets(trained),
            rows(HELD_OUT),
            tokenizer(),
            callbacks=[clock],
        )
        ended = ""
        try:
            trainer.train()
        except ConfigError as error:  # all prompts are solved
            ended = str(error)
    log = trainer.state.log_history
    logged = [entry for entry in log if "reward" in entry]
    names = ("reward", "frac_reward_zero_std", "prompts/skipped_share", "prompts/never_sampled")
    return {
        "ended": ended,
        "accuracy": {entry["step"]: entry["eval_reward"] for entry in log if "eval_reward" in entry},
        "processor_seconds": [round(seconds, 3) for seconds in clock.seconds],
        **{name: [entry[name] for entry in logged] for name in names if name in logged[0]},
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
        "completions": steps * 128,
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
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument(
        "--unsolvable",
        action="store_true",
        help="half of the training prompts have no answer, and 80 steps on the others come first",
    )
    options = parser.parse_args()
    name, prompts = NAME + "_unsolvable" * options.unsolvable, 112 * (1 + options.unsolvable)
    path = RESULTS / f"{name}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    for seed in options.seeds:
        for arm in ARMS:
            if (key := f"{arm}-{seed}") not in runs:
                runs[key] = run(arm, seed, options.max_steps, options.unsolvable)
                last = list(runs[key]["accuracy"].values())[-1]
                print(f"{key}: held-out accuracy {last:.1%} at the end. {runs[key]['ended']}", flush=True)
                write_results(
                    name, {"settings": settings("filter", seed, options.max_steps, prompts), "runs": runs}
                )
    runs = json.loads(path.read_text())["runs"]
    results = {"settings": settings("filter", 0, options.max_steps, prompts), "seeds": options.seeds}
    results |= {"decisions": decisions(runs, options.seeds, ACCURACIES[options.unsolvable :]), "runs": runs}
    write_results(name, results)
    print(json.dumps(results["decisions"], indent=1))


if __name__ == "__main__":
    main()
