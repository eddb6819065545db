"""Runs of a sweep have the history of their run alone, and are stopped and resumed without a trace."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import runs

from groupwise import ConfigError, GRPOConfig, GRPOTrainer, Sweep

#: Configurations that differ in everything that a run may choose.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.5, "learning_rate": 3e-2, "loss_type": "grpo"},
    "masked": {"top_p": 0.7, "beta": 0.1, "num_generations": 2, "max_completion_length": 9},
    "late": {"num_iterations": 2, "gradient_accumulation_steps": 2, "repetition_penalty": 1.3, "seed": 7},
}
ADAPTERS = {
    "plain": {"r": 2},
    "hot": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]},
    "masked": {"r": 3, "use_rslora": True, "target_modules": "all-linear"},
    "late": {"r": 2, "lora_dropout": 0.2},
}
#: Logged values that depend on the clock and the memory of the process.
MEASURED = ("time/", "memory/", "step_time", "tokens_per_second", "_runtime", "_per_second")


def policy() -> Any:
    return runs.policy(hidden_size=128, intermediate_size=128)  # layers that oneDNN computes


def config(directory: Path, **given: Any) -> GRPOConfig:
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return GRPOConfig(str(directory), **{**settings, **given})


def adapters(names: Any) -> dict[str, LoraConfig]:
    return {name: LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]) for name in names}


def sweep(directory: Path, names: Any, model: Any = None, changes: Any = None, **given: Any) -> Sweep:
    made = {name: config(directory / name, **{**SETTINGS[name], **(changes or {})}) for name in names}
    arguments = {"train_dataset": runs.prompts(), "processing_class": runs.tokenizer(), **given}
    arguments.setdefault("peft_config", adapters(names))
    return Sweep(policy() if model is None else model, runs.count_reward, made, **arguments)


def alone(directory: Path, name: str, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(
        policy(),
        runs.count_reward,
        config(directory / "alone" / name, **{**SETTINGS[name], **changes}),
        runs.prompts(),
        runs.prompts(3),
        processing_class=runs.tokenizer(),
        peft_config=adapters([name])[name],
    )


def history(state: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in log.items() if not any(part in key for part in MEASURED)}
        for log in state.log_history
    ]


def assert_equal(run: Any, solo: GRPOTrainer) -> None:
    ours, theirs = history(run.state), history(solo.state)
    assert len(ours) == len(theirs) > 0
    for log, other in zip(ours, theirs, strict=True):
        assert log == pytest.approx(other, rel=1e-6, abs=1e-6, nan_ok=True)
    weights = dict(solo.model.named_parameters())
    for name, parameter in run.trainer.model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("names", [("plain", "hot"), tuple(SETTINGS)], ids=["two", "four"])
def test_each_history_is_that_of_the_run_alone(names, tmp_path):
    found = sweep(tmp_path, names).run()
    for name in names:
        solo = alone(tmp_path, name)
        solo.train()
        assert found[name].status == "finished" and found[name].state.global_step == 4
        assert_equal(found[name], solo)
