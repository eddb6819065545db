"""The functions that turn the savings of the CPU on."""

from __future__ import annotations

import os

import psutil
import pytest
import torch
from support.runs import trainer

from groupwise import cpu
from groupwise.compat.torch import has_onednn_linear
from groupwise.cpu.linear import OneDNNLinear

needs_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="this PyTorch has no oneDNN")


def layers(device: str = "cpu") -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(200, 130, device=device))


@needs_onednn
def test_training_replaces_linears_of_models_on_the_cpu(monkeypatch):
    called = []
    monkeypatch.setattr(cpu, "return_large_blocks", lambda: called.append("malloc"))
    on_cpu, elsewhere = layers(), layers("meta")
    cpu.install_cpu_training([on_cpu, elsewhere])
    assert isinstance(on_cpu[0], OneDNNLinear) and not isinstance(elsewhere[0], OneDNNLinear)
    assert called == ["malloc"]


@pytest.mark.parametrize(
    ("threads", "load", "warns"), [(4, 16.0, True), (4, 15.9, False), (1, 99.0, False)], ids=str
)
def test_threads_on_a_busy_machine_are_a_warning_with_the_remedy(tmp_path, monkeypatch, threads, load, warns):
    run = trainer(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    found = [path for path in run.fast_paths() if path.name == "threads"]
    assert [path.warns for path in found] == [True] * warns
    assert all("16 processes want the machine's 8 cores" in path.reason for path in found)
    assert all("OMP_NUM_THREADS=1" in str(path) for path in found)


def test_linears_are_not_replaced_where_another_library_replaces_them(monkeypatch):
    monkeypatch.setattr(cpu, "return_large_blocks", lambda: None)
    model = layers()
    cpu.install_cpu_training([model], onednn_linears=False)
    assert type(model[0]) is torch.nn.Linear


def test_nothing_is_done_on_other_devices(monkeypatch):
    for name in ("return_large_blocks", "keep_large_blocks", "malloc_trim"):
        monkeypatch.setattr(cpu, name, lambda: pytest.fail("the model is not on a CPU"))
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
    monkeypatch.setattr(cpu, "malloc_trim", lambda: order.append("trim"))
    backward = run.accelerator.backward
    monkeypatch.setattr(
        run.accelerator, "backward", lambda *args, **kw: (order.append("backward"), backward(*args, **kw))
    )
    run.train()
    # The first one ends the sampling, which kept freed blocks.
    assert order == ["trim", *["trim", "backward"] * (len(order) // 2)] and len(order) > 1
