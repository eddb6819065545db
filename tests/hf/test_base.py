"""Hooks of ``transformers.Trainer``: the table in ``BaseTrainer``, its window loss and its checks."""

from __future__ import annotations

import re

import pytest
import torch
from support.runs import trainer
from transformers import Trainer

from groupwise.errors import TrainingError
from groupwise.hf.base import BaseTrainer


def test_the_docstring_lists_every_hook_that_the_class_overrides():
    listed = re.findall(r"^ +``(\w+)`` +\d", BaseTrainer.__doc__ or "", flags=re.MULTILINE)
    overridden = {name for name in vars(BaseTrainer) if hasattr(Trainer, name) and not name.startswith("__")}
    assert len(listed) == len(set(listed)) and set(listed) == overridden


@pytest.fixture
def made(tmp_path):
    return trainer(tmp_path)


def test_trainer_adds_up_one_loss_per_window(made):
    total = torch.tensor(0.0)
    for loss, last in [(0.25, False), (0.5, True), (1.0, False), (2.0, True)]:
        returned = made.loss_to_log(torch.tensor(loss), last=last)
        assert returned.device == total.device
        total += returned
        assert type(total) is torch.Tensor
    assert total.item() == 0.75 + 3.0


def test_the_loss_inside_a_window_is_not_read_by_the_nan_filter(made):
    zero = made.loss_to_log(torch.tensor(float("nan")), last=False)
    assert torch.isnan(zero) is False and torch.isinf(zero) is False
    window_loss = made.loss_to_log(torch.tensor(1.0), last=True)
    assert torch.isnan(window_loss).item()


def test_a_new_run_drops_the_loss_and_the_size_limit_of_an_interrupted_one(tmp_path):
    made = trainer(tmp_path, max_steps=1)
    made.loss_to_log(torch.tensor(1000.0), last=False)
    made.splitter.max_tokens = 1
    made.train()
    assert made.splitter.max_tokens is None
    assert abs(made.state.log_history[-1]["train_loss"]) < 100


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_gradient_norm_that_is_not_finite_ends_the_run(made, norm):
    model = torch.nn.Linear(1, 1)
    assert made._get_grad_norm(model, torch.tensor(2.0)) == 2.0
    with pytest.raises(TrainingError, match=f"the gradient norm of step 1 is {norm}; training ends before"):
        made._get_grad_norm(model, torch.tensor(norm))
