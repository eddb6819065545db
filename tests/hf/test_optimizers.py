"""Optimizers: of what is trained, with two sets of weights, with weights in half precision.

Files: ``hf/arguments.py``, ``hf/base.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.configs import messages
from support.fakes.fake_backend import EchoBackend
from support.runs import count_reward, policy, prompts, trainer
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from groupwise import ConfigError, GRPOTrainer, trl_hooks


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


class At(TrainerCallback):
    """Call ``action(model)`` before an optimizer step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.action(kwargs["model"])


# What an optimizer holds.


def test_an_optimizer_of_other_parameters_is_refused_at_construction(tmp_path):
    model = policy()
    before_the_adapter = AdamW(model.parameters(), 1e-2)
    with pytest.raises(ConfigError, match=r"lacks 4 of 4 trained parameters, such as .*lora_A.*after the ad"):
        trainer(tmp_path, model=model, peft_config=lora(), optimizers=(before_the_adapter, None))
    of_a_copy = AdamW(policy().parameters(), 1e-2)
    with pytest.raises(ConfigError, match="lacks 21 of 21 trained parameters"):
        trainer(tmp_path, model=policy(), optimizers=(of_a_copy, None))


def test_a_scheduler_of_another_optimizer_is_refused(tmp_path):
    model = policy()
    trained, other = AdamW(model.parameters(), 1e-2), AdamW(model.parameters(), 1e-2)
    for optimizer in (trained, None):
        with pytest.raises(ConfigError, match="scheduler of optimizers belongs to an optimizer"):
            trainer(tmp_path, model=model, optimizers=(optimizer, LambdaLR(other, lambda step: 1.0)))
    trainer(tmp_path, model=model, optimizers=(trained, LambdaLR(trained, lambda step: 1.0))).train()


def test_parameters_that_an_optimizer_lacks_are_named(tmp_path, caplog):
    model = policy()
    made = trainer(tmp_path, model=model, optimizers=(SGD(model.model.layers.parameters(), 0.1), None))
    made.train()
    (found,) = [message for message in messages(caplog) if "the optimizer lacks" in message]
    assert "lacks 3 of 21 trained parameters, such as model.embed_tokens.weight, which would not" in found
    start = dict(policy().named_parameters())
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if ".layers." in name}


def test_parameters_that_a_callback_unfreezes_are_named(tmp_path, caplog):
    model = policy()
    model.model.layers[0].requires_grad_(False)
    unfreeze = At(2, lambda model: model.model.layers[0].mlp.requires_grad_(True))
    trainer(tmp_path, model=model, callbacks=[unfreeze]).train()
    (found,) = [message for message in messages(caplog) if "the optimizer lacks" in message]
    assert "lacks 3 of 15 trained parameters, such as model.layers.0.mlp" in found


@pytest.mark.parametrize("hooks", [False, True], ids=["trainer", "trl_hooks"])
def test_an_adapter_that_a_callback_activates_is_refused_before_sampling(tmp_path, hooks):
    def activate(model):
        model.add_adapter("second", lora())
        model.set_adapter("second")

    calls = []

    def reward(completion_ids, **_):
        calls.append(1)
        return count_reward(completion_ids)

    kind = {"kind": trl_hooks.GRPOTrainer} if hooks else {}
    made = trainer(tmp_path, reward, peft_config=lora(), callbacks=[At(2, activate)], **kind)
    with pytest.raises(ConfigError, match=r"lacks 4 of 4 trained parameters, such as .*second"):
        made.train()
    assert len(calls) == 1


# Two sets of weights.


class Averaging(SGD):
    """SGD whose evaluation weights are halfway between those of training and the start."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.mode = "train"
        self.start = [value.detach().clone() for group in self.param_groups for value in group["params"]]
        self.modes: list[str] = []

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        if mode != self.mode:
            values = [value for group in self.param_groups for value in group["params"]]
            if mode == "eval":
                self.trained = [value.clone() for value in values]
            for value, start, other in zip(values, self.start, self.trained, strict=True):
                value.copy_((other + start) / 2 if mode == "eval" else other)
            self.mode = mode

    def train(self) -> None:
        self._switch("train")

    def eval(self) -> None:
        self._switch("eval")


class Recorded(EchoBackend):
    """Records with which weights a generation samples, and in which mode model and optimizer are."""

    def __init__(self, optimizer: Averaging, model: torch.nn.Module) -> None:
        super().__init__()
        self.optimizer, self.model, self.seen = optimizer, model, []

    def sync_weights(self, source, *, step):
        if self.version != step:
            self.weights = self.model.lm_head.weight.detach().clone()
        super().sync_weights(source, step=step)

    def generate(self, prompts, *sampling):
        current = torch.equal(self.weights, self.model.lm_head.weight)
        self.seen.append((self.optimizer.mode, self.model.training, current))
        return super().generate(prompts, *sampling)


@pytest.mark.parametrize("hooks", [False, True], ids=["trainer", "trl_hooks"])
def test_training_samples_from_the_weights_that_are_trained(tmp_path, hooks):
    """After an evaluation too; the result of the run are the other weights, and so is what is saved."""
    model = policy()
    optimizer = Averaging(model.parameters())
    backend = Recorded(optimizer, model)
    made = trainer(
        tmp_path,
        kind=trl_hooks.GRPOTrainer if hooks else GRPOTrainer,
        model=model,
        optimizers=(optimizer, None),
        backend=backend,
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        max_steps=3,
    )
    made.train()
    training, evaluation = ("train", True, True), ("eval", False, True)
    assert backend.seen == [training, evaluation] * 3
    assert optimizer.mode == "eval"
    assert (optimizer.trained[0] != optimizer.start[0]).any()
    averages = [(one + other) / 2 for one, other in zip(optimizer.trained, optimizer.start, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), averages, strict=True))


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd"])
def test_schedule_free_optimizers(tmp_path, name):
    pytest.importorskip("schedulefree")
    modes = []

    def reward(completion_ids, trainer_state, **_):
        modes.append(made.optimizer.param_groups[0]["train_mode"])
        return count_reward(completion_ids)

    settings = {"optim": name, "lr_scheduler_type": "constant", "learning_rate": 0.1, "warmup_steps": 1}
    evaluated = {"eval_dataset": prompts(1), "eval_strategy": "steps", "eval_steps": 1}
    made = trainer(tmp_path, reward, **settings, **evaluated, per_device_eval_batch_size=4, max_steps=3)
    made.train()
    assert modes == [True, False] * 3


# Half precision.


@pytest.mark.parametrize(
    ("dtype", "fraction", "eps"),
    [(torch.bfloat16, "1/512", False), (torch.float16, "1/4096", True)],
    ids=["bfloat16", "float16"],
)
def test_trained_weights_in_half_precision_are_reported(tmp_path, caplog, dtype, fraction, eps):
    model = policy().to(dtype)
    made = trainer(tmp_path, model=model, backend=EchoBackend(), max_steps=1, learning_rate=1e-6)
    made.train()
    (found,) = [message for message in messages(caplog) if "without a copy in float32" in message]
    assert f"less than {fraction} of a weight" in found
    assert ("eps=1e-08 of the optimizer is 0" in found) == eps
    # Of every weight: none of a step's updates, of 1e-6 each, is as large as that of the smallest weights.
    weights = torch.linspace(1, 2, 1001).to(dtype).double()
    largest_lost = 1 / (float(fraction[2:]) + 1)
    assert torch.equal((weights * (1 + largest_lost)).to(dtype).double(), weights)


def test_weights_with_a_precise_copy_are_not_reported(tmp_path, caplog):
    trainer(tmp_path, max_steps=1).train()
    adapter = trainer(
        tmp_path, model=policy().bfloat16(), peft_config=lora(), backend=EchoBackend(), max_steps=1
    )
    adapter.train()  # PEFT makes the adapter float32
    assert not [message for message in messages(caplog) if "without a copy in float32" in message]
