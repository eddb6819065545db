"""Gradient checkpointing of some layers, and its activations in host memory: the same training."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from support.runs import policy, trainer
from torch.autograd.graph import saved_tensors_hooks
from transformers import modeling_utils

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
