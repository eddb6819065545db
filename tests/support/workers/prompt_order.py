"""Prompts that reach the reward, of runs of TRL and of both trainers of groupwise; also as one of two ranks.

    prompt_order.py POLICY_DIRECTORY OUTPUT_DIR

Each rank leaves ``RANK.pt``: by case, the prompts by the trainer that saw them.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import AutoTokenizer

from groupwise import GRPOTrainer, trl_hooks
from support.parity_runs import PROMPTS, Policy, Setting, prompt_text, train_groupwise, train_trl

#: Numbers of the prompts of this rank's completions, one list per generation batch.
Seen = list[list[int]]

NUMBERS = {prompt_text(number): number for number in range(PROMPTS)}

GROUP = 4
SHUFFLED: dict[str, Any] = {"num_generations": GROUP, "shuffle_dataset": True, "seed": 5}


def reuses(rows: int, *, accumulation: int, per_generation: int, iterations: int = 1) -> dict[str, Any]:
    """Options of a run with ``rows`` completions per micro-batch of a rank."""
    return {
        **SHUFFLED,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation,
        "num_iterations": iterations,
    }


#: 16 prompts an epoch; of the first cases 3 and 6 prompts a generation batch on one and two ranks, so that
#: prompts are left over.
CASES: dict[str, dict[str, Any]] = {
    "windows of a generation": {**reuses(4, accumulation=3, per_generation=3), "num_train_epochs": 3},
    "read by a worker": {
        **reuses(4, accumulation=3, per_generation=3),
        "num_train_epochs": 2,
        "dataloader_num_workers": 1,
    },
    "a window is half a generation": {
        **reuses(8, accumulation=1, per_generation=2, iterations=2),
        "num_train_epochs": 2,
    },
    "a window is two generations": {
        **reuses(8, accumulation=4, per_generation=2),
        "num_train_epochs": 3,
    },
}


class FollowsRewards(Sampler[int]):
    """Prompts that depend on the number of generations rewarded when their batch is read."""

    def __init__(self, args: Any, seen: Seen) -> None:
        self.seen = seen
        self.prompts = args.generation_batch_size // GROUP
        self.repeats = args.steps_per_generation * args.num_iterations

    def __len__(self) -> int:
        return PROMPTS // self.prompts * self.prompts * GROUP * self.repeats

    def __iter__(self) -> Iterator[int]:
        for batch in range(PROMPTS // self.prompts):
            chunk = [(7 * len(self.seen) + batch + 3 * i) % PROMPTS for i in range(self.prompts)]
            for _ in range(self.repeats):
                yield from [index for index in chunk for _ in range(GROUP)]


def resampling(base: type) -> type:
    """A subclass that replaces all prompts but the first by those of a loader that it iterates itself."""

    class Trainer(base):  # type: ignore[misc]
        more: Iterator[Any] | None = None

        def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
            self.more = self.more or iter(self.get_train_dataloader())
            return super()._generate_and_score_completions([*inputs[:GROUP], *next(self.more)[GROUP:]])

    return Trainer


def setting(
    options: dict[str, Any],
    seen: Seen,
    *,
    follows_rewards: bool = False,
    make_subclass: Callable[[type], type] = lambda base: base,
) -> Setting:
    """A comparison whose reward adds the prompts of every generation to ``seen``."""

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append([NUMBERS[prompt] for prompt in prompts])
        return [float(len(ids)) for ids in completion_ids]

    def subclass(base: type) -> type:
        class Trainer(base):  # type: ignore[misc]
            def _get_train_sampler(self, *_: Any, **__: Any) -> FollowsRewards:
                return FollowsRewards(self.args, seen)

        return Trainer if follows_rewards else make_subclass(base)

    given = {"max_steps": -1, "logging_strategy": "no", **options}
    return Setting(given, rewards=(reward,), subclass=subclass)


def compare(policy: Policy, directory: Path, options: dict[str, Any], **given: Any) -> dict[str, Seen]:
    """Train with TRL and with both trainers of groupwise."""
    found: dict[str, Seen] = {"trl": [], "plain": [], "hooks": []}
    train_trl(policy, setting(options, found["trl"], **given), directory)
    for name, base in {"plain": GRPOTrainer, "hooks": trl_hooks.GRPOTrainer}.items():
        train_groupwise(policy, setting(options, found[name], **given), directory, base=base)
    return found


def resample(policy: Policy, directory: Path, options: dict[str, Any]) -> dict[str, Seen]:
    """Train :func:`resampling` with TRL and with groupwise."""
    found: dict[str, Seen] = {"trl": [], "hooks": []}
    given = {"make_subclass": resampling}
    train_trl(policy, setting(options, found["trl"], **given), directory)
    ours = setting(options, found["hooks"], **given)
    train_groupwise(policy, ours, directory, base=trl_hooks.GRPOTrainer)
    return found


def items(policy: Policy, directory: Path, options: dict[str, Any]) -> dict[str, Seen]:
    """Iterate the train dataloader twice and a half, and return the prompts of its items."""

    def iterate(trainer: Any) -> None:
        loader = trainer.get_train_dataloader()
        for count in (len(loader) // 2, None, None):
            for item in islice(loader, count):
                seen.append([NUMBERS[row["prompt"]] for row in item])
                item[0].clear()  # the rows of the caller

    found: dict[str, Seen] = {}
    options = {**options, "max_steps": 1}
    seen = found["trl"] = []
    train_trl(policy, setting(options, seen), directory, iterate)
    for name, base in {"plain": GRPOTrainer, "hooks": trl_hooks.GRPOTrainer}.items():
        seen = found[name] = []
        train_groupwise(policy, setting(options, seen), directory, iterate, base)
    return found


def resumed(policy: Policy, directory: Path, options: dict[str, Any], step: int) -> dict[str, Seen]:
    """Train with both trainers of groupwise to the end, and again from the checkpoint at ``step``."""
    found: dict[str, Seen] = {}
    for name, base in {"plain": GRPOTrainer, "hooks": trl_hooks.GRPOTrainer}.items():
        found[name], found[f"{name} resumed"] = [], []
        saving = {**options, "save_strategy": "steps", "save_steps": step}
        train_groupwise(policy, setting(saving, found[name]), directory / name, base=base)
        checkpoint = str(directory / name / f"checkpoint-{step}")

        def resume(trainer: Any, checkpoint: str = checkpoint) -> None:
            train = trainer.train
            trainer.train = lambda: train(resume_from_checkpoint=checkpoint)

        again = setting(options, found[f"{name} resumed"])
        train_groupwise(policy, again, directory / "again", prepare=resume, base=base)
    return found


def main(policy_directory: Path, output_dir: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    policy = Policy(policy_directory, AutoTokenizer.from_pretrained(policy_directory))
    case = CASES["windows of a generation"]
    results = {
        "shuffled": compare(policy, output_dir, case),
        "follows rewards": compare(policy, output_dir, case, follows_rewards=True),
    }
    torch.save(results, output_dir / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
