"""Worker of a two-rank run: train on rows with and without images.

    torchrun --nproc_per_node 2 vlm_worker.py OUTPUT_DIR FAMILY...

Rank 0 saves the weights in OUTPUT_DIR.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from groupwise.tokenization.images import encode_prompt
from support import tiny_vlm as tiny

#: One micro-batch of each rank has prompts with and without images, which the KL trains on as well.
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"rows": 4, "gradient_accumulation_steps": 1, "beta": 0.1}
}


def fixed_rollouts(texts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout_func whose completions depend on the step and the row's index in the global batch."""
    first = trainer.accelerator.process_index * len(texts)
    completions = []
    for row in range(first, first + len(texts)):
        draw = random.Random(1000 * trainer.state.global_step + row)
        completions.append([draw.randrange(len(tiny.SPECIAL), len(tiny.VOCABULARY)) for _ in range(4)])
    ids = [encode_prompt(trainer.processing_class, prompt)[0] for prompt in texts]
    return {"prompt_ids": ids, "completion_ids": completions}


def flat_in_every_other(completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
    """A reward without variance for two of four prompts: the other rows move between ranks."""
    pairs = zip(completion_ids, row, strict=True)
    return [float(sum(ids) % 7) * (index % 4 in (0, 2)) for ids, index in pairs]


def weights(output_dir: Path, family: str, *, rows: int, **settings: Any) -> dict[str, torch.Tensor]:
    """Return the weights after two optimizer steps with ``rows`` sequences per micro-batch and rank."""
    trainer = tiny.trainer(
        output_dir,
        family,
        rewards=flat_in_every_other,
        rollout_func=fixed_rollouts,
        train_dataset=Dataset.from_list(tiny.rows(8), features=tiny.FEATURES),
        per_device_train_batch_size=rows,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        shuffle_dataset=False,
        **{"gradient_accumulation_steps": 2, **settings},
    )
    trainer.train()
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def main(output_dir: Path, families: list[str]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(120, exit=True)  # prints the stacks of a rank that hangs
    results = {
        family: weights(output_dir / "run", family, **SETTINGS.get(family, {"rows": 2}))
        for family in families
    }
    if torch.distributed.get_rank() == 0:
        torch.save(results, output_dir / "weights.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
