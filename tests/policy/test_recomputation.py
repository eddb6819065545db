"""Layers that gradient checkpointing does not recompute: the same training, within the memory there is.

Files: ``hf/callbacks.py``.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from support.runs import policy, trainer
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback
from transformers.models.llama.modeling_llama import LlamaAttention

from groupwise.policy import recomputation
from groupwise.policy.recomputation import (
    SelectiveRecomputation,
    make_recomputation,
    recomputation_path,
    saved_bytes,
)

LAYERS = 4


@pytest.fixture
def forwards(monkeypatch):
    """Forward passes with gradients of each layer of the present step, by the index of the layer."""
    counts, forward = Counter(), LlamaAttention.forward

    def counted(self, *args, **kwargs):
        if torch.is_grad_enabled():
            counts[self.layer_idx] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", counted)  # checkpoints know a layer's forward from 5.24 on
    return counts


class PerStep(TrainerCallback):
    """Record the forward passes of every step; optionally set the room after the first one."""

    def __init__(self, forwards, layers_to_fit=None):
        self.forwards, self.steps, self.layers_to_fit = forwards, [], layers_to_fit

    def on_step_begin(self, args, state, control, **_):
        self.forwards.clear()

    def on_step_end(self, args, state, control, **_):
        self.steps.append([self.forwards[index] for index in range(LAYERS)])


def run(directory, forwards, layers_to_fit=None, **given):
    record = PerStep(forwards)
    made = trainer(
        directory,
        model=policy(num_hidden_layers=LAYERS),
        callbacks=[record],
        **{"max_steps": 3, "gradient_checkpointing": True, "save_strategy": "no", **given},
    )
    made.logprob_computer.checked = True  # its rows have more tokens than these micro-batches
    if layers_to_fit is not None:
        chosen = made.recomputation
        begin = chosen.begin

        def begin_with_room(device):
            begin(device)
            chosen.room = layers_to_fit * chosen._bytes

        chosen.begin = begin_with_room
    made.train()
    return made, record.steps


def same_parameters(one, other):
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.slow
def test_layers_that_fit_are_not_recomputed_and_training_is_the_same(tmp_path, forwards):
    plain, once = run(tmp_path / "plain", forwards, gradient_checkpointing=False)
    every, twice = run(tmp_path / "every", forwards, activation_memory_fraction=0.0)
    chosen, steps = run(tmp_path / "chosen", forwards)
    # The first step also compares layouts. It recomputes all layers but the one that is measured; then a tiny
    # model fits whole.
    assert steps[0][0] > steps[0][3]
    assert once[1:] == [[1, 1, 1, 1]] * 2 == steps[1:] and twice[1:] == [[2, 2, 2, 2]] * 2
    assert same_parameters(chosen, every) and same_parameters(chosen, plain)


@pytest.mark.slow
def test_the_last_layers_are_kept_as_far_as_the_room_goes(tmp_path, forwards):
    # All micro-batches have about the tokens of the first: 4 per completion, of which none is skipped.
    given = {"max_completion_length": 4, "generation_kwargs": {"min_new_tokens": 4}}
    given["skip_zero_advantage"] = False
    every, _ = run(tmp_path / "every", forwards, activation_memory_fraction=0.0, **given)
    some, steps = run(tmp_path / "some", forwards, layers_to_fit=2.5, **given)
    assert steps[1:] == [[2, 2, 1, 1]] * 2
    assert same_parameters(some, every)


def test_the_estimate_is_linear_below_what_was_measured_and_quadratic_above():
    chosen = SelectiveRecomputation(0.5)
    chosen._num_layers, chosen._tokens, chosen._bytes, chosen.room = 30, 100, 10.0, 80.0
    assert chosen.num_kept(100) == 8  # 80 / 10
    assert chosen.num_kept(50) == 16  # 80 / (10 · 50/100)
    assert chosen.num_kept(200) == 2  # 80 / (10 · 4)
    assert chosen.num_kept(1) == 30  # all
    chosen.room = 1e9  # far more than needed
    assert [(chosen.halve(), chosen.num_kept(100)) for _ in range(3)] == [(True, 15), (True, 7), (True, 3)]
    assert [(chosen.halve(), chosen.num_kept(100)) for _ in range(3)] == [(True, 1), (True, 0), (False, 0)]


def test_a_room_of_zero_is_a_measurement(monkeypatch):
    monkeypatch.setattr(recomputation, "free_memory", lambda device: 20.0)
    chosen = SelectiveRecomputation(0.5)
    chosen._num_layers, chosen._tokens, chosen._bytes = 4, 100, 8.0
    assert (chosen.halve(), chosen.num_kept(100)) == (False, 0)  # out of memory in the first step
    chosen.begin(torch.device("cpu"))
    assert chosen.num_kept(100) == 1  # 0.5 · 20 / 8
    assert (chosen.halve(), chosen.num_kept(100)) == (True, 0)
    chosen.begin(torch.device("cpu"))  # the next step
    assert (chosen.room, chosen.num_kept(100)) == (0.0, 0)


def test_a_larger_micro_batch_is_measured():
    chosen, layer = SelectiveRecomputation(0.5), torch.nn.Linear(8, 8)
    chosen._num_layers = 1
    recomputed = []

    def checkpointed(function, *args):
        recomputed.append(args[0].shape)
        return checkpoint(function, *args, use_reentrant=False)

    for length in (4, 8, 6):
        hidden = torch.randn(2, length, 8, requires_grad=True)
        chosen._run(0, layer, checkpointed, lambda h: torch.tanh(layer(h)), hidden)
        assert chosen._tokens == min(2 * length, 16) or length == 6
    # tanh saves its output, (2, length, 8) float32; input and weight of the linear layer are not counted.
    assert chosen._bytes == 2 * 8 * 8 * 4
    assert recomputed == [(2, 6, 8)]  # without room


def test_saved_bytes_leaves_out_weights_and_arguments():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    inputs = torch.randn(3, 8, requires_grad=True)
    output, size = saved_bytes(layer, layer, inputs)
    assert size == 3 * 16 * 4  # the output of tanh, which the second linear layer saves too
    output.sum().backward()
    expected = torch.autograd.grad(layer(inputs).sum(), [inputs, *layer.parameters()])
    found = [inputs.grad, *(parameter.grad for parameter in layer.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_an_out_of_memory_error_halves_the_room_before_micro_batches_are_split(tmp_path, forwards, caplog):
    every, _ = run(tmp_path / "every", forwards, activation_memory_fraction=0.0)
    failures, forward = [1], LlamaAttention.forward

    made = trainer(
        tmp_path / "chosen",
        model=policy(num_hidden_layers=LAYERS),
        max_steps=3,
        gradient_checkpointing=True,
        save_strategy="no",
    )

    def failing(self, *args, **kwargs):
        if made.recomputation.room and torch.is_grad_enabled() and failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(self, *args, **kwargs)

    LlamaAttention.forward = failing  # the fixture puts it back
    made.train()
    assert not failures and made.splitter.max_tokens is None
    assert "more layers are recomputed" in caplog.text
    assert same_parameters(made, every)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"gradient_checkpointing": False}, ""),
        ({"activation_memory_fraction": 0.0}, "activation_memory_fraction=0"),
        ({"torch_compile": True}, "torch_compile"),
        ({"vllm_enable_sleep_mode": True}, "sleeping engine"),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, "offloaded"),
        ({"distributed_type": DistributedType.FSDP}, "sharded"),
        ({"device": torch.device("meta")}, "does not report"),
    ],
    ids=str,
)
def test_runs_that_recompute_every_layer_give_the_reason(given, reason):
    defaults = {
        "gradient_checkpointing": True, "activation_memory_fraction": 0.5, "torch_compile": False,
        "vllm_enable_sleep_mode": False, "gradient_checkpointing_kwargs": None,
        "distributed_type": DistributedType.NO, "device": torch.device("cpu"),
    }  # fmt: skip
    settings = SimpleNamespace(**{**defaults, **given})
    assert make_recomputation(settings, settings) is None
    path = recomputation_path(settings, settings)
    assert reason in path.reason and bool(reason) == bool(path.reason)
    assert path.warns is ("device" in given)
    assert make_recomputation(SimpleNamespace(**defaults), SimpleNamespace(**defaults)) is not None


def test_processes_of_a_machine_share_its_memory_within_the_limit_of_the_container(tmp_path, monkeypatch):
    device = torch.device("cpu")
    whole = recomputation.free_memory(device)
    assert 0 < whole <= psutil.virtual_memory().total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8e12))
    monkeypatch.setattr(recomputation, "_container_memory", lambda: 6e12)
    alone = recomputation.free_memory(device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared = recomputation.free_memory(device)
    assert alone > 5.9e12 and shared == pytest.approx(alone / 2, rel=0.02)


V1, V2 = ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"), ("", "memory.max", "memory.current")


@pytest.mark.parametrize(
    ("groups", "version", "files", "left"),
    [
        ("0::/\n", V2, {"": (900, 200)}, 700),
        ("0::/slurm/job_7/step\n", V2, {"slurm/job_7": (500, 100), "slurm/job_7/step": ("max", 90)}, 400),
        ("0::/user.slice/a.scope\n", V2, {"user.slice": (800, 700), "user.slice/a.scope": (500, 50)}, 100),
        ("0::/docker/of_the_host\n", V2, {"": (300, 100)}, 200),
        ("3:cpu:/\n4:memory:/slurm/job\n0::/\n", V1, {"slurm": (600, 10), "slurm/job": (2**63 - 1, 9)}, 590),
        ("5:memory,hugetlb:/docker/of_the_host\n", V1, {"": (400, 150)}, 250),
        ("0::/../outside\n", V2, {}, float("inf")),
        ("", V2, {"": (400, 150)}, float("inf")),
    ],
    ids=["v2", "v2 parent", "v2 tightest", "v2 container", "v1 parent", "v1 container", "outside", "none"],
)  # fmt: skip
def test_the_limit_of_a_control_group_or_a_parent_of_it_counts(tmp_path, groups, version, files, left):
    """Files of control groups of version 1 or 2; ``left`` is limit - use of the group that leaves least."""
    prefix, *names = version
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for group, values in files.items():
        folder = tmp_path / "sys/fs/cgroup" / prefix / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, values, strict=True):
            (folder / name).write_text(f"{value}\n")
    assert recomputation._container_memory(tmp_path) == left


def test_without_control_groups_nothing_limits_memory(tmp_path):
    assert recomputation._container_memory(tmp_path) == float("inf")
