"""Compare both halves of an optimizer step with TRL's: samples of equal weights, updates by equal samples.

    python benchmarks/learning/same_step.py
    python benchmarks/learning/same_step.py --train_steps 0 --questions 8 --output results

The recipe is that of ``run.py``. Three parts, printed and written to ``same_step.json``:

- questions of each step: equal or not;
- three steps by the completions that TRL sampled: Euclidean norm of the difference of the weights, as a share
  of that of TRL's update;
- samples of both libraries, of the initial weights and of those after ``--train_steps`` steps: reward,
  length, and ``excess``, the mean of -log p minus the policy's entropy (0 on average for its own samples).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import methods
import run
import tasks
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from groupwise import GRPOTrainer
from groupwise.errors import RewardError

TRL = run.Cell(library="trl", micro_batches=4)
OURS = run.Cell()


class Sampled(Exception):
    """The samples that were asked for are there; training need not go on."""


class Recorder:
    """Reward function that keeps the prompts and completions (token ids) of every step.

    Raises:
        Sampled: after ``steps`` steps; None: never.
    """

    __name__ = "recorder"

    def __init__(self, steps: int | None = None) -> None:
        self.limit, self.steps, self.rewards = steps, [], []

    def __call__(
        self, prompts: list, completion_ids: list, completions: list, answer: list, **_: Any
    ) -> list:
        ids = [[int(token) for token in row] for row in completion_ids]
        self.steps.append(list(zip(prompts, ids, strict=True)))
        self.rewards += tasks.correct(completions=completions, answer=answer)
        if len(self.steps) == self.limit:
            raise Sampled
        # A random model gives no right answer; the lengths differ in some groups, which then have a gradient.
        return [float(len(ids) % 3) for ids in completion_ids]


def train(cell: run.Cell, model: Any, reward: Any, scale: run.Scale, seed: int, **common: Any) -> None:
    """Train ``model`` in place with the library of ``cell`` until the end, or until ``Sampled``."""
    set_seed(seed)
    with tempfile.TemporaryDirectory() as directory:
        common["train_dataset"] = run.train_rows(scale)
        try:
            if cell.library == "trl":
                run.train_trl(model, reward, run.settings(cell, scale, seed), directory, common)
            else:
                GRPOTrainer(model, reward, run.config(cell, scale, seed, directory), **common).train()
        except (Sampled, RewardError) as error:
            if not isinstance(error.__cause__ or error, Sampled):
                raise


def updates(model: Any, tokenizer: Any, scale: run.Scale, seed: int) -> dict[str, Any]:
    """Train three steps with TRL, and here by TRL's completions."""
    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    sampled, replayed = Recorder(), Recorder()
    train(TRL, theirs, sampled, scale, seed, processing_class=tokenizer)
    steps = iter(sampled.steps)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        left = list(next(steps))
        found = []
        for prompt in prompts:
            one = next((one for one in left if one[0] == prompt), None)
            if one is None:
                raise ValueError(f"TRL did not sample {prompt[-1]['content']!r} in this step")
            left.remove(one)
            found.append(one[1])
        return {"prompt_ids": methods.chat_ids(prompts, tokenizer), "completion_ids": found}

    train(OURS, ours, replayed, scale, seed, processing_class=tokenizer, rollout_func=rollout)
    questions = [
        [sorted(prompt[-1]["content"] for prompt, _ in step) for step in one.steps]
        for one in (sampled, replayed)
    ]
    return {
        "steps": len(sampled.steps),
        "same_questions": questions[0] == questions[1],
        "difference_of_updates": distance(ours, theirs) / distance(theirs, model),
    }


@torch.no_grad()
def distance(model: Any, other: Any) -> float:
    """Return the Euclidean norm of the difference of two models' weights."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return math.sqrt(math.fsum(float((one - two).square().sum()) for one, two in pairs))


def samples(cell: run.Cell, model: Any, tokenizer: Any, scale: run.Scale, seed: int) -> dict[str, Any]:
    """Sample a step's completions with the library of ``cell``; returns their statistics under ``model``.

    Standard errors are over completions.
    """
    recorder = Recorder(steps=1)
    train(cell, model, recorder, scale, seed, processing_class=tokenizer)
    # Rows of one question share its keys and values.
    rows = sorted(recorder.steps[0], key=lambda row: row[0][-1]["content"])
    prompts = methods.chat_ids([prompt for prompt, _ in rows], tokenizer)
    completions = [ids for _, ids in rows]
    excess = []
    for ids, logps_TV in zip(completions, methods.token_logprobs(model, prompts, completions), strict=True):
        entropy_T = -(logps_TV.exp() * logps_TV).sum(-1)
        excess.append(float((-logps_TV[torch.arange(len(ids)), ids] - entropy_T).sum()))
    tokens, count = sum(map(len, completions)), len(rows)
    accuracy = math.fsum(recorder.rewards) / count
    return {
        "library": cell.library,
        "completions": count,
        "reward": accuracy,
        "reward_error": math.sqrt(accuracy * (1 - accuracy) / count),
        "length": tokens / count,
        "excess": math.fsum(excess) / tokens,
        "excess_error": math.sqrt(math.fsum(one * one for one in excess)) / tokens,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=32, help="questions that are sampled")
    parser.add_argument("--train_steps", type=int, default=10, help="steps before the second samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=run.RESULTS)
    parser.add_argument("--tiny", action="store_true", help="random model")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        path = run.tiny_model(Path(directory)) if options.tiny else run.smollm2()
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: dict[str, Any] = updates(model, tokenizer, run.Scale(3, 4, 4, 16), options.seed)
    print(json.dumps(found), flush=True)
    found["samples"] = []
    one_step = run.Scale(1, options.questions)
    for steps in sorted({0, options.train_steps}):
        if steps:
            train(OURS, model, tasks.correct, run.Scale(steps), options.seed, processing_class=tokenizer)
        for cell in (OURS, TRL):
            found["samples"].append(
                {"train_steps": steps, **samples(cell, model, tokenizer, one_step, options.seed)}
            )
            print(json.dumps(found["samples"][-1]), flush=True)
    found["versions"] = run.versions()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "same_step.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
