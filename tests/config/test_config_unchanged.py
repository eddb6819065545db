"""Construction, training and evaluation change nothing in a configuration; assigned attributes do."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType
from peft import LoraConfig
from support import tiny_vlm
from support.architectures import RIGHT, build, build_vision
from support.configs import config_of
from support.runs import prompts, trainer
from support.workers.distributed_worker import with_unused_parameters

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.policy.loading import set_ddp_defaults

needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"
)


def plain(directory, **given: Any) -> GRPOTrainer:
    return trainer(
        directory, max_steps=2, eval_dataset=prompts(2), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=8, save_strategy="steps", save_steps=1, **given,
    )  # fmt: skip


CASES = {
    "plain": plain,
    "reference": lambda directory: plain(directory, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1),
    "lora": lambda directory: plain(directory, peft_config=LoraConfig(r=2, target_modules="all-linear")),
    "liger": lambda directory: plain(directory, use_liger_kernel=True, liger_kernel_config={"rope": True}),
    "vision": tiny_vlm.trainer,
}


def snapshot(config: GRPOConfig) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, dict | list) else value
        for name, value in vars(config).items()
    }


@pytest.mark.parametrize(
    "case", ["plain", "reference", "lora", pytest.param("liger", marks=needs_liger), "vision"]
)
def test_a_run_leaves_its_configuration_as_it_was(case, tmp_path, monkeypatch):
    built: list[dict[str, Any]] = []
    construct = GRPOTrainer.__init__

    def remember(self, model, reward_funcs, args, *rest, **given):
        built.append(snapshot(args))
        construct(self, model, reward_funcs, args, *rest, **given)

    monkeypatch.setattr(GRPOTrainer, "__init__", remember)
    run = CASES[case](tmp_path)
    assert snapshot(run.args) == built[0]
    run.beta = run.beta
    run.temperature = 0.9
    run.train()
    assert snapshot(run.args) == {**built[0], "temperature": 0.9}


def test_a_model_with_images_may_leave_its_vision_tower_without_gradient(tmp_path):
    run = tiny_vlm.trainer(tmp_path / "default")
    assert run.accelerator.ddp_handler.find_unused_parameters
    run = tiny_vlm.trainer(tmp_path / "given", ddp_find_unused_parameters=False)
    assert not run.accelerator.ddp_handler.find_unused_parameters
    run = tiny_vlm.trainer(tmp_path / "reentrant", gradient_checkpointing_kwargs={"use_reentrant": True})
    assert not run.accelerator.ddp_handler.find_unused_parameters


@pytest.mark.parametrize(
    ("make", "unused"),
    [
        (lambda: build(*RIGHT["llama"]), ""),
        (lambda: build_vision("gemma3_vl"), "vision_tower"),
        (with_unused_parameters, "indexer"),
    ],
)
def test_ddp_looks_for_parameters_that_a_text_does_not_use(make, unused, caplog):
    accelerator = SimpleNamespace(
        ddp_handler=None, num_processes=2, distributed_type=DistributedType.MULTI_CPU
    )
    accelerator.is_fsdp2 = False
    model, args = make(), config_of()
    set_ddp_defaults(accelerator, args, model, with_images=False)
    assert accelerator.ddp_handler.find_unused_parameters is bool(unused)
    assert (unused in caplog.text) if unused else not caplog.records
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training
    accelerator.ddp_handler, accelerator.num_processes = None, 1  # nothing is computed for one process
    set_ddp_defaults(accelerator, args, None, with_images=False)
    assert not accelerator.ddp_handler.find_unused_parameters
