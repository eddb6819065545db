"""One rank of a run with saved rollouts, and of its replay.

    torchrun --nproc_per_node 2 replay_worker.py OUTPUT_DIR MODEL

Each rank leaves its comparison in OUTPUT_DIR/found_RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from groupwise.commands.replay.replay import replay
from support.runs import trainer


def main(directory: Path, model: str) -> None:
    torch.set_num_threads(1)
    settings = {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.1}
    run = trainer(
        directory / "run",
        model=model,
        save_rollouts=True,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=2,
        **settings,
    )
    run.train()
    found = replay(directory / "run", 2)
    values = {
        "equal": found.equals_record and all(step.budget == 0 for step in found.steps),
        "weights": found.weights,
    }
    (directory / f"found_{torch.distributed.get_rank()}.json").write_text(json.dumps(values))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
