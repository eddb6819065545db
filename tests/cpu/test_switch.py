"""The functions that turn the savings of the CPU on."""

from __future__ import annotations

import pytest
import torch
from support.runs import trainer

from groupwise import cpu
from groupwise.compat.torch import has_onednn_linear
from groupwise.cpu import malloc
from groupwise.cpu.linear import OneDNNLinear

needs_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="this PyTorch has no oneDNN")


def layers(device: str = "cpu") -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(200, 130, device=device))


@needs_onednn
def test_training_replaces_linears_of_models_on_the_cpu(monkeypatch):
    called = []
    monkeypatch.setattr(malloc, "return_large_blocks", lambda: called.append("malloc"))
    on_cpu, elsewhere = layers(), layers("meta")
    cpu.install_cpu_training([on_cpu, elsewhere])
    assert isinstance(on_cpu[0], OneDNNLinear) and not isinstance(elsewhere[0], OneDNNLinear)
    assert called == ["malloc"]


def test_linears_are_not_replaced_where_another_library_replaces_them(monkeypatch):
    monkeypatch.setattr(malloc, "return_large_blocks", lambda: True)
    model = layers()
    cpu.install_cpu_training([model], onednn_linears=False)
    assert type(model[0]) is torch.nn.Linear


def test_nothing_is_done_on_other_devices(monkeypatch):
    for name in ("return_large_blocks", "keep_large_blocks", "malloc_trim"):
        monkeypatch.setattr(malloc, name, lambda: pytest.fail("the model is not on a CPU"))
    model = layers("meta")
    cpu.install_cpu_training([model])
    cpu.trim_heap(torch.device("meta"))
    with cpu.cpu_generation(model):
        assert type(model[0]) is torch.nn.Linear


@needs_onednn
def test_generation_packs_weights_and_ends():
    model = layers()
    cpu.install_cpu_training([model])
    with cpu.cpu_generation(model):
        assert model[0].packing is not None
    assert model[0].packing is None


def test_the_heap_is_trimmed_between_the_passes_of_each_micro_batch(tmp_path, monkeypatch):
    order = []
    run = trainer(tmp_path, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    monkeypatch.setattr(malloc, "malloc_trim", lambda: order.append("trim"))
    backward = run.accelerator.backward
    monkeypatch.setattr(
        run.accelerator, "backward", lambda *args, **kw: (order.append("backward"), backward(*args, **kw))
    )
    run.train()
    # The first one ends the sampling, which kept freed blocks.
    assert order == ["trim", *["trim", "backward"] * (len(order) // 2)] and len(order) > 1
