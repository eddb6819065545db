"""Gradient checkpointing of some layers, and its activations in host memory: the same training.

Files: ``compat/transformers.py``, ``commands/cli/trial.py``.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from support.runs import policy, trainer
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel, modeling_utils

from groupwise.commands.cli.trial import train_row
from groupwise.compat.transformers import enable_gradient_checkpointing

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_utils, "save_on_cpu"), reason="this transformers has neither argument"
)


@pytest.fixture
def offloaded(monkeypatch):
    """Bytes of the tensors that offloading moves to the host. Pinned memory needs an accelerator."""
    sizes = []

    @contextmanager
    def save_on_cpu(**_):
        with saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor):
            yield

    monkeypatch.setattr(modeling_utils, "save_on_cpu", save_on_cpu)
    return sizes


def test_the_trial_of_the_doctor_takes_the_same_arguments_as_the_run(tmp_path, offloaded):
    given = {"every_n_layers": 2, "offload": True, "use_reentrant": False}
    run = trainer(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=given)
    train_row(run, 3, 5)
    assert [layer.gradient_checkpointing for layer in run.model.model.layers] == [True, False]
    assert offloaded
    assert run.args.gradient_checkpointing_kwargs == given


def test_arguments_that_an_older_transformers_does_not_have_are_not_passed(monkeypatch):
    calls = []

    def enable(self, kwargs=None):
        calls.append(kwargs)

    new_name = "activation_checkpointing_enable"  # since 5.24, where the old one warns
    name = new_name if hasattr(PreTrainedModel, new_name) else "gradient_checkpointing_enable"
    monkeypatch.setattr(PreTrainedModel, name, enable)
    enable_gradient_checkpointing(policy(), {"use_reentrant": False})
    enable_gradient_checkpointing(policy(), None)
    assert calls == [{"use_reentrant": False}, None]


@pytest.mark.parametrize(
    "given", [{"every_n_layers": 2}, {"offload": True}, {"every_n_layers": 2, "offload": True}], ids=str
)
def test_training_is_the_same(tmp_path, given, offloaded):
    plain = trainer(tmp_path / "plain", model=policy(), max_steps=2, gradient_checkpointing=False)
    plain.train()
    other = trainer(
        tmp_path / "other",
        model=policy(),
        max_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={**given, "use_reentrant": False},
    )
    other.train()
    assert bool(offloaded) == ("offload" in given)
    for ours, theirs in zip(other.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
