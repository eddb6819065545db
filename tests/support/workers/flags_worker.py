"""One of two processes whose callbacks, or whose disk, act on one of them.

    torchrun --nproc_per_node 2 flags_worker.py OUTPUT_DIR

Each process leaves ``RANK.json``: what its trainer did by case, and the error of the last run.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from support import runs

PATIENCE = 100  # seconds, after which a process that hangs prints its stack


class Sets(TrainerCallback):
    """Set a flag of the control at an event of an optimizer step, on one rank."""

    def __init__(self, rank: int, event: str, step: int, flag: str) -> None:
        def call(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step and args.process_index == rank:
                setattr(control, flag, True)

        setattr(self, event, call)


#: Rank, event, number of completed steps and flag, of every callback.
CASES: dict[str, list[tuple[int, str, int, str]]] = {
    "stop at the end of a step": [(1, "on_step_end", 1, "should_training_stop")],
    # The first of two micro-batches is computed: the second step is left, as it is on one process.
    "stop at the beginning of a step": [(1, "on_step_begin", 1, "should_training_stop")],
    "stop within a step": [(0, "on_substep_end", 1, "should_training_stop")],
    "save, evaluate after a log, stop after an evaluation": [
        (0, "on_step_end", 1, "should_save"),
        (1, "on_log", 2, "should_evaluate"),
        (0, "on_evaluate", 2, "should_training_stop"),
    ],
    "save after a log, stop after a save": [
        (1, "on_log", 1, "should_save"),
        (0, "on_save", 1, "should_training_stop"),
    ],
}


def make(directory: Path, callbacks: list[TrainerCallback], **settings: Any) -> Any:
    return runs.trainer(
        directory,
        train_dataset=runs.prompts(16),
        eval_dataset=runs.prompts(2),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        callbacks=callbacks,
        **settings,
    )


def run(directory: Path, case: str) -> list[Any]:
    """Return the saved steps, the evaluated steps and the last one."""
    trainer = make(directory, [Sets(*given) for given in CASES[case]])
    trainer.train()
    evaluated = [log["step"] for log in trainer.state.log_history if "eval_reward" in log]
    trainer.accelerator.wait_for_everyone()
    saved = sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("checkpoint-*"))
    return [saved, evaluated, trainer.state.global_step]


class LogsALoss(TrainerCallback):
    """Log a loss of its own at the end of every step, on the first rank."""

    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 0:
            self.trainer.log({"loss": 7.0})


def log_on_one_rank(directory: Path) -> list[int]:
    """Return the steps whose log has metrics of the trainer."""
    caller = LogsALoss()
    caller.trainer = make(directory, [caller])
    caller.trainer.train()
    return [log["step"] for log in caller.trainer.state.log_history if {"loss", "reward"} <= log.keys()]


def fail_to_save(directory: Path, trainer_rank: int) -> str:
    """Train with a disk that is full on one rank; return the error of this one."""
    trainer = make(directory, [], save_strategy="steps", save_steps=1)
    rank, save = trainer.args.process_index, torch.save

    def full(*given: Any, **options: Any) -> None:
        if rank == trainer_rank and trainer.run_directory.is_staging:
            raise RuntimeError("the disk is full")
        save(*given, **options)

    torch.save = full
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.save = save
    return "none"


def main(output_dir: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    results: dict[str, Any] = {case: run(output_dir / case, case) for case in CASES}
    results["logs"] = log_on_one_rank(output_dir / "logs")
    results["errors"] = [fail_to_save(output_dir / f"full-{rank}", rank) for rank in (0, 1)]
    rank = torch.distributed.get_rank()
    (output_dir / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
