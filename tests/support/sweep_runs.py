"""Runs of a sweep and the same runs alone, on the tiny policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from groupwise import GRPOConfig, GRPOTrainer, Sweep
from support import runs
from support.engine_runs import ENGINE, policy

#: Logged values that depend on the clock and the memory of the process.
MEASURED = ("time/", "memory/", "step_time", "tokens_per_second", "_runtime", "_per_second")
#: Runs with vLLM that differ in settings, seed and rank.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.5, "learning_rate": 3e-2, "beta": 0.1, "seed": 7},
}
ADAPTERS = {
    "plain": LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    "hot": LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"]),
}


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


def history(state: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in log.items() if not any(part in key for part in MEASURED)}
        for log in state.log_history
    ]


def assert_equal(run: Any, solo: GRPOTrainer) -> None:
    ours, theirs = history(run.state), history(solo.state)
    assert len(ours) == len(theirs) > 0
    for log in ours[-1], theirs[-1]:
        log.pop("train_loss", None)  # of the steps since a resume
    for log, other in zip(ours, theirs, strict=True):
        assert log == pytest.approx(other, rel=1e-6, abs=1e-6, nan_ok=True)
    weights = dict(solo.model.named_parameters())
    for name, parameter in run.trainer.model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-6, atol=1e-6)


def with_vllm(directory: Path, name: str, **given: Any) -> GRPOConfig:
    settings = {"use_vllm": True, "max_steps": 3, "vllm_engine_kwargs": ENGINE, **SETTINGS[name], **given}
    return config(directory / name, **settings)


def sweep(directory: Path, model: str | None = None, **given: Any) -> Sweep:
    made = {name: with_vllm(directory, name, **given) for name in SETTINGS}
    return Sweep(
        model or policy(),
        runs.count_reward,
        made,
        runs.prompts(),
        processing_class=runs.tokenizer(),
        peft_config=ADAPTERS,
    )


def alone(directory: Path, name: str, model: str | None = None, **given: Any) -> GRPOTrainer:
    make_backend = given.pop("make_backend", lambda config: None)
    own = with_vllm(directory / "alone", name, **given)
    run = GRPOTrainer(
        model or policy(),
        runs.count_reward,
        own,
        runs.prompts(),
        processing_class=runs.tokenizer(),
        peft_config=ADAPTERS[name],
        backend=make_backend(own),
    )
    run.train()
    run.backend.close()
    return run


def assert_equal_samples(run: Any, solo: GRPOTrainer) -> None:
    """Compare all values, those from an engine's log-probs with the rounding of its kernels."""
    ours, theirs = history(run.state), history(solo.state)
    assert run.status == "finished" and len(ours) == len(theirs) > 0
    for log, other in zip(ours, theirs, strict=True):
        assert log.keys() == other.keys()
        for key in log:
            tolerance = 1e-3 if key.startswith("sampling/") else 2e-5
            assert log[key] == pytest.approx(other[key], rel=tolerance, abs=tolerance, nan_ok=True), key
