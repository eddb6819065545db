"""Attributes that a callback sets on the trainer, and the last log of a run, against TRL's own trainer.

Files: ``config/changes.py``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity_runs import (
    Policy,
    Setting,
    assert_same_log,
    assert_same_update,
    largest_difference,
    train_groupwise,
    train_trl,
)
from transformers import TrainerCallback

from groupwise.config.changes import SettingAttribute, TrainerAttributes
from groupwise.trainer import GRPOTrainer

trl = pytest.importorskip("trl", minversion="1.16.0")
pytestmark = pytest.mark.parity


def long_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


class Assign(TrainerCallback):
    """Set attributes of the trainer at the end of the second optimizer step."""

    def __init__(self, trainer: Any, values: dict[str, Any]) -> None:
        self.trainer, self.values = trainer, values

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            for name, value in self.values.items():
                setattr(self.trainer, name, value)


#: Settings of the run, and the attributes that change after its second step.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beta": ({"beta": 0.04}, {"beta": 0.5}),
    "beta to 0": ({"beta": 0.5}, {"beta": 0.0}),
    "clip range": (
        {"num_iterations": 2, "epsilon": 0.2, "learning_rate": 0.03},
        {"epsilon_low": 0.005, "epsilon_high": 0.01},
    ),
    "loss_type": ({"loss_type": "grpo"}, {"loss_type": "dr_grpo"}),
    "scale_rewards and weights": ({}, {"scale_rewards": "none", "reward_weights": torch.tensor([2.0])}),
    "importance_sampling_level": (
        {"num_iterations": 2, "learning_rate": 0.03, "epsilon": 0.01},
        {"importance_sampling_level": "sequence"},
    ),
    "mask_truncated_completions": ({}, {"mask_truncated_completions": True}),
    "entropy_coef": ({"entropy_coef": 0.01}, {"entropy_coef": 0.3}),
    "rewards": ({}, {"reward_funcs": [long_reward], "reward_func_names": ["length"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_assigned_attributes(name: str, policy: Policy, tmp_path: Path) -> None:
    """Both trainers follow the assignment from the third step on, and it makes a difference."""
    options, values = CHANGES[name]
    setting = Setting(options)

    def assign(trainer: Any) -> None:
        trainer.add_callback(Assign(trainer, values))

    ours = train_groupwise(policy, setting, tmp_path / "ours", assign)
    theirs = train_trl(policy, setting, tmp_path / "theirs", assign)
    assert_same_update(ours, theirs, policy)
    # While beta is 0, TRL does not compute the KL.
    assert_same_log(ours, theirs, but=frozenset({"kl"} if name == "beta to 0" else ()))
    without = train_groupwise(policy, setting, tmp_path / "without")
    assert largest_difference(ours.parameters, without.parameters) > 1e-5


class Schedule(TrainerCallback):
    """Set values at the beginning of every optimizer step, from the number of completed steps."""

    def __init__(self, trainer: Any, assign: Callable[[Any, int], None]) -> None:
        self.trainer, self.assign = trainer, assign

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.assign(self.trainer, state.global_step)


def _schedule_clip_range(trainer: Any, step: int) -> None:
    trainer.epsilon_low, trainer.epsilon_high = 0.02 / (step + 1), 0.04 / (step + 1)


def _schedule_args(trainer: Any, step: int) -> None:
    trainer.args.sapo_temperature_neg = 1.0 + 3 * step


def _schedule_reward(trainer: Any, step: int) -> None:
    trainer.reward_weights = torch.tensor([1.0 + step])


#: Settings of the run, and what changes with every step.
SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[Any, int], None]]] = {
    "beta": ({"beta": 0.1}, lambda trainer, step: setattr(trainer, "beta", 0.3 * step)),
    "clip range": ({"num_iterations": 2, "learning_rate": 0.03}, _schedule_clip_range),
    "args": ({"loss_type": "sapo"}, _schedule_args),
    "reward_weights": ({"scale_rewards": "none"}, _schedule_reward),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_in_on_step_begin(name: str, policy: Policy, tmp_path: Path) -> None:
    """A value that is set when a step begins acts in that step, also in the first one."""
    options, schedule = SCHEDULES[name]
    setting = Setting(options)
    ours, theirs = (
        train(policy, setting, tmp_path / library, lambda run: run.add_callback(Schedule(run, schedule)))
        for library, train in (("ours", train_groupwise), ("theirs", train_trl))
    )
    assert_same_update(ours, theirs, policy)
    # While beta is 0, TRL does not compute the KL.
    assert_same_log(ours, theirs, but=frozenset({"kl"} if name == "beta" else ()))


def _attributes_from_settings() -> set[str]:
    """Public attributes that the constructor of TRL's trainer sets from an argument ``args.…``."""
    (constructor,) = ast.parse(textwrap.dedent(inspect.getsource(trl.GRPOTrainer.__init__))).body
    return {
        target.attr
        for node in ast.walk(constructor)
        if isinstance(node, ast.Assign) and "args." in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Attribute) and not target.attr.startswith("_")
    }


def test_every_attribute_of_a_setting_exists() -> None:
    """The names are TRL's: all that its constructor sets from a setting, and no others."""
    theirs = _attributes_from_settings()
    assert len(theirs) > 30
    ours = {
        name
        for name, value in (vars(TrainerAttributes) | vars(GRPOTrainer)).items()
        if isinstance(value, SettingAttribute | property)
    }
    # Set from settings by TRL's constructor, but not settings of the loss, the sampler or the logs.
    others = {"commit_scheduler", "gradient_checkpointing_kwargs", "vllm_generation", "reward_weights"}
    assert theirs - ours == others
    assert ours - theirs == {"ref_model", "environments", "micro_batch_budget"}


def test_no_public_attribute_of_trl_is_assigned_in_silence() -> None:
    """The others are of TRL's event loop and uploads, or are compared with the newest at every step."""
    (constructor,) = ast.parse(textwrap.dedent(inspect.getsource(trl.GRPOTrainer.__init__))).body
    theirs = {
        node.attr
        for node in ast.walk(constructor)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr[0] != "_"
        if ast.unparse(node.value) == "self"
    }
    plain = {
        name for name in theirs if not hasattr(inspect.getattr_static(GRPOTrainer, name, None), "__set__")
    }
    watched = {"reward_funcs", "reward_func_names", "reward_processing_classes", "reward_weights"}
    internal = {"async_loop", "async_loop_thread", "async_loop_ready_event", "commit_scheduler"}
    assert len(theirs) > 50 and plain == watched | internal | {"rollout_func"}


@pytest.mark.parametrize("logging_steps", [2, 3, 100])
def test_last_log(logging_steps: int, policy: Policy, tmp_path: Path) -> None:
    """The last entry has the metrics of the steps that were not logged before, under TRL's names."""
    setting = Setting({"logging_steps": logging_steps, "entropy_coef": 0.01, "beta": 0.04})
    ours = train_groupwise(policy, setting, tmp_path / "ours").log
    theirs = train_trl(policy, setting, tmp_path / "theirs").log
    assert len(ours) == len(theirs)
    last, wanted = ours[-1], theirs[-1]
    # Ours omits metrics without an observation and names the tools only where there are any.
    assert {name for name, value in wanted.items() if value is not None} - last.keys() == set()
    assert ("reward" in last) == (logging_steps != 2) and "loss" not in last
    # Over several steps, means of ours are weighted by tokens.
    for name in {"reward", "train_loss", "epoch"} & wanted.keys():
        assert last[name] == pytest.approx(wanted[name], rel=1e-4, abs=2e-5), name
    for name in {"entropy", "kl", "policy_loss"} & wanted.keys():
        assert last[name] == pytest.approx(wanted[name], rel=1e-4 if logging_steps == 3 else 0.2), name
