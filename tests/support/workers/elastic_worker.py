"""Process of runs that stop and go on with another number of processes.

    run_ranks(elastic_worker.py, OUTPUT_DIR, LAST_STEP, ENGINE, CASE..., world_size=N)

ENGINE is that of ``sharding_worker``. Each case resumes in OUTPUT_DIR/CASE if that has a checkpoint, and
stops after LAST_STEP. The first process writes weights-LAST_STEP.pt and log-LAST_STEP.json there, and
loaded-STEP.pt with the weights of a resumed run before its first step; rows.txt has ATTEMPT (of the
environment), step and prompt of every reward.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from support.workers import sharding_worker
from support.workers.distributed_worker import LETTERS, make_trainer, policy, prompts

PATIENCE = 200
_END = 1
__all__ = ["CASES", "policy"]

# 6 prompts with 4 completions: a rank of four has one group and a half. An optimizer step has 8 completions.
BATCHES: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 2,
    "generation_batch_size": 24,
}
CASES: dict[str, dict[str, Any]] = {
    "sampled": {"sampled": True},  # a generation is trained on in three optimizer steps
    # In two, each on all of it, against a reference that follows the policy.
    "stream": {
        **{"stream": True, "num_iterations": 2, "completions_per_step": 24, "sequence_layout": "packed"},
        **{"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2},
    },
    "faults": {
        **{"sampled": True, "learning_rate": 1e-3, "logging_steps": 1, "save_total_limit": 2},
        "max_steps": 10_000,
    },
    "dynamic": {"dynamic_sampling": True, "loss_type": "grpo"},
    # From the second of three generations on, prompts are skipped by their rates; 1 and 4 never.
    "chosen": {
        **{"mixed": True, "dataset_weights": {"odd": 1, "even": 2}, "loss_type": "grpo"},
        "prompt_filter": {"min": 0.49, "max": 0.51, "again_after": 4},
    },
    "LoRA": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "beta": 0.1},
    "bf16": {"bf16": True, **sharding_worker.UNCLIPPED},
}


def fixed(texts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the prompt and on the place in its group."""
    first, encode = trainer.accelerator.process_index * len(texts), trainer.processing_class
    completions = []
    for row, text in enumerate(texts, start=first):
        draw = random.Random(f"{text} {row % 4}")
        completions.append([*(draw.randrange(3, len(LETTERS) + 3) for _ in range(draw.randint(1, 7))), _END])
    return {"prompt_ids": [encode(text)["input_ids"] for text in texts], "completion_ids": completions}


class Stop(TrainerCallback):
    """Stop after a step, and note what the first process does in progress.txt: "save N" or "step N"."""

    def __init__(self, step: int, progress: Path) -> None:
        self.step, self.progress = step, progress

    def note(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            with open(self.progress, "a") as file:
                file.write(f"{text}\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(f"step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(f"save {state.global_step}")
        control.should_training_stop = state.global_step >= self.step


class Loaded(TrainerCallback):
    """Write the weights with which a resumed run begins."""

    def __init__(self, trainer: Any, directory: Path) -> None:
        self.trainer, self.directory = trainer, directory

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = sharding_worker.whole_weights(self.trainer)
        if state.is_world_process_zero:
            torch.save(weights, self.directory / f"loaded-{state.global_step}.pt")


def make(directory: Path, last_step: int, **case: Any) -> Any:
    """Return the trainer of a case on the present number of processes."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    attempt, rows = os.environ.get("ATTEMPT", "0"), directory / "rows.txt"

    def reward(prompts: list[str], completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        with open(rows, "a") as file:
            lines = (f"{attempt} {trainer_state.global_step} {prompt}\n" for prompt in prompts)
            file.write("".join(lines))  # at once
        draws = [random.Random(str(list(ids))).random() for ids in completion_ids]
        flat = [prompt.endswith(("1", "4")) for prompt in prompts]
        return [0.5 if same else draw for same, draw in zip(flat, draws, strict=True)]

    of_step, data = case.pop("completions_per_step", 8), prompts(36)
    if case.pop("mixed", False):
        data = {"odd": data.select([1, 3]), "even": data.select([0, 2, 4, 6])}  # an epoch of 9 rows
    data = data.to_iterable_dataset(2) if case.pop("stream", False) else data
    trainer = make_trainer(
        directory,
        reward_funcs=reward,
        train_dataset=data,
        rollout_func=None if case.pop("sampled", False) else fixed,
        **{
            "gradient_accumulation_steps": max(of_step // (2 * processes), 1),
            **{"max_steps": 12, "logging_steps": 3, "save_strategy": "steps", "save_steps": 1},
            **{"learning_rate": 1e-2, "adam_epsilon": 1e-3, "lr_scheduler_type": "constant"},
            **BATCHES,
            **case,
        },
    )
    trainer.add_callback(Stop(last_step, directory / "progress.txt"))
    return trainer


def main(output_dir: Path, last_step: int, engine: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    sharding = sharding_worker.start(engine)
    for name in cases:
        directory = output_dir / name
        directory.mkdir(exist_ok=True)
        trainer = make(directory, last_step, **CASES[name], **sharding)
        resumes = any(directory.glob("checkpoint-*"))
        if resumes:
            trainer.add_callback(Loaded(trainer, directory))
        trainer.train(resume_from_checkpoint=resumes or None)
        if engine.startswith("zero"):  # a later load, as of the best model, is of the engine's own form
            assert not trainer.model_wrapped.load_universal_checkpoint()
        weights = sharding_worker.whole_weights(trainer)
        if trainer.is_world_process_zero():
            torch.save(weights, directory / f"weights-{last_step}.pt")
            (directory / f"log-{last_step}.json").write_text(json.dumps(trainer.state.log_history))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4], sys.argv[4:])
