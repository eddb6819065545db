"""Process of a DeepSpeed run; the first one writes its results to OUTPUT_DIR.

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
import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import safe_get_full_fp32_param

from groupwise.records import SamplingOptions
from support.workers import distributed_worker as worker

LAYOUTS = ("padded", "shared_prefix")
CASE: dict[str, Any] = {"beta": 0.5, "loss_type": "dapo"}
PATIENCE = 280


def zero(stage: int) -> dict[str, Any]:
    """Everything is partitioned, however small; only groupwise scales the loss."""
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
    """Gather the parameters; in bf16 those that the optimizer updates, in float32, where it has them."""
    parameters = dict(trainer.model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        weights = {name: weight.detach().clone() for name, weight in parameters.items()}
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            weights[name] = safe_get_full_fp32_param(parameter).clone()
    return weights


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
    assert whole.backend.gather_weights == (stage == 3)
    if stage == 3:
        compare_generations(whole)
        sharded = _sampled(output_dir / "sharded", stage, ds3_gather_for_generation=False)
        assert not sharded.backend.gather_weights
        sharded.train()
        assert sharded.state.global_step == 4
    resumed.save_model(str(output_dir / "saved"))
    if torch.distributed.get_rank() == 0:
        torch.save(results, output_dir / "results.pt")
    torch.distributed.destroy_process_group()


def compare_generations(trainer: Any) -> None:
    """Whole weights are gathered once per generation, or by every layer; the completions are the same."""
    gathered, fetched = [], []
    enter, fetch = (
        deepspeed.zero.GatheredParameters.__enter__,
        PartitionedParameterCoordinator.fetch_sub_module,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            deepspeed.zero.GatheredParameters, "__enter__", lambda self: gathered.append(1) or enter(self)
        )
        patch.setattr(
            PartitionedParameterCoordinator,
            "fetch_sub_module",
            lambda self, *given, **kwargs: fetched.append(1) or fetch(self, *given, **kwargs),
        )
        prompts = [[4 + torch.distributed.get_rank(), 5, 6]] * 2 + [[7, 8]] * 2
        completions, trainer.backend.compares = {}, False  # a plain forward of a row gathers again
        for gather in (True, False, True):
            trainer.backend.gather_weights = gather
            found = trainer.backend.generate(prompts, SamplingOptions(generation_kwargs={"temperature": 0}))
            ids = [completion.token_ids for completion in found]
            assert completions.setdefault(gather, ids) == ids  # the partitions are the same as before
            assert (len(gathered), bool(fetched)) == (int(gather), not gather)
            assert sum(parameter.numel() for parameter in trainer.model.parameters()) == 0
            gathered.clear()
            fetched.clear()
    assert completions[True] == completions[False]


def _sampled(output_dir: Path, stage: int, **settings: Any) -> Any:
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
        **settings,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
