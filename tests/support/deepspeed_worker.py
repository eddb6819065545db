"""What each process of a DeepSpeed run does; the first one leaves its results in OUTPUT_DIR.

torchrun --nproc_per_node 2 deepspeed_worker.py STAGE OUTPUT_DIR
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch

from support import distributed_worker as worker

LAYOUTS = ("padded", "shared_prefix")
CASE: dict[str, Any] = {"beta": 0.5, "loss_type": "dapo"}
PATIENCE = 280


def zero(stage: int) -> dict[str, Any]:
    """Everything is partitioned, however small; the loss is scaled by nobody but us."""
    partition = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "zero_optimization": {**partition, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    parameters = dict(trainer.model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: weight.detach().clone() for name, weight in parameters.items()}


def main(stage: int, output_dir: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone, which needs no compiler
    deepspeed.init_distributed("gloo")
    results = {}
    for layout in LAYOUTS:
        settings = {"deepspeed": zero(stage), "sequence_layout": layout, **CASE}
        results[layout] = worker.update(
            output_dir / "run", rows=6, micro_batches=2, read_weights=whole_weights, **settings
        )
    whole = _sampled(output_dir / "whole", stage)
    whole.train()
    resumed = _sampled(output_dir / "resumed", stage)
    resumed.train(resume_from_checkpoint=str(output_dir / "whole" / "checkpoint-2"))
    results["whole"], results["resumed"] = whole_weights(whole), whole_weights(resumed)
    resumed.save_model(str(output_dir / "saved"))
    if torch.distributed.get_rank() == 0:
        torch.save(results, output_dir / "results.pt")
    torch.distributed.destroy_process_group()


def _sampled(output_dir: Path, stage: int) -> Any:
    """A run that generates, with a checkpoint in the middle of a generation's use."""
    return worker.make_trainer(
        output_dir,
        per_device_train_batch_size=4,
        num_generations=2,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        optim="sgd",
        learning_rate=0.1,
        deepspeed=zero(stage),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
