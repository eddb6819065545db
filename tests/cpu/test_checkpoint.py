"""Products that a checkpoint keeps: the same gradients with fewer products, in memory that is free.

Files: ``hf/callbacks.py``.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from support.runs import policy, trainer
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AutoModelForCausalLM

from groupwise import cpu
from groupwise.compat.torch import has_native_bf16_cpu, has_onednn_linear
from groupwise.cpu import linear
from groupwise.cpu.checkpoint import checkpoint_contexts
from groupwise.cpu.linear import replace_linears
from groupwise.hf.callbacks import CheckpointingCallback

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this PyTorch has no oneDNN")

FLOAT32, AUTOCAST, BFLOAT16 = PRECISIONS = ("float32", "autocast", "bfloat16")


class ScaledInPlace(torch.nn.Module):
    def forward(self, inputs):
        return inputs.mul_(2)


def layers(middle: torch.nn.Module | None = None, precision: str = FLOAT32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(200, 130), middle or torch.nn.SiLU(), torch.nn.Linear(130, 200, bias=False)
    )
    assert replace_linears(model) == 2
    return model.to(torch.bfloat16) if precision == BFLOAT16 else model


@pytest.fixture
def products(monkeypatch):
    """Shapes of the weights of all products, in order."""
    monkeypatch.setattr(linear, "has_native_bf16_cpu", lambda: True)
    shapes, product = [], linear.onednn_linear
    monkeypatch.setattr(
        linear, "onednn_linear", lambda *given: shapes.append(tuple(given[1].shape)) or product(*given)
    )
    return shapes


def gradients(model, *, contexts, rows=100, precision=FLOAT32, passes=1):
    """Gradients of inputs and weights of a checkpoint."""
    torch.manual_seed(1)
    dtype = torch.bfloat16 if precision == BFLOAT16 else torch.float32
    inputs = torch.randn(rows, 200, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == AUTOCAST):
        output = checkpoint(model, inputs, use_reentrant=False, context_fn=contexts)
        for left in reversed(range(passes)):
            output.square().sum().backward(retain_graph=left > 0)
    found = [inputs.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kept_product_is_not_repeated_and_changes_no_gradient(precision, products):
    model = layers(precision=precision)
    expected = gradients(model, contexts=noop_context_fn, precision=precision)
    assert len(products) == 2 + 1 + 4  # forward, recomputation, two for each layer's gradients
    products.clear()
    assert same(gradients(model, contexts=checkpoint_contexts, precision=precision), expected)
    assert len(products) == 2 + 0 + 4


def test_products_are_kept_only_in_memory_of_unallocated_gradients(products):
    """A weight of 130 x 200 has the bytes of 200 rows in float32, of 400 in bfloat16."""

    def recomputed(model, *, of_gradients=4, **how):
        products.clear()
        gradients(model, contexts=checkpoint_contexts, **how)
        return len(products) - 2 - of_gradients

    assert recomputed(layers(), rows=200) == 0
    assert recomputed(layers(), rows=201) == 1
    assert recomputed(layers(), rows=400, precision=AUTOCAST) == 0
    assert recomputed(layers(), rows=401, precision=AUTOCAST) == 1
    model = layers()
    model[0].weight.grad = torch.zeros_like(model[0].weight)  # an earlier micro-batch has been here
    assert recomputed(model) == 1
    model = layers()
    model[0].weight.requires_grad_(False)  # an adapter's base
    assert recomputed(model, of_gradients=3) == 1


def test_a_product_that_was_changed_in_place_is_computed_again(products):
    model = layers(ScaledInPlace())
    expected = gradients(model, contexts=noop_context_fn)
    products.clear()
    assert same(gradients(model, contexts=checkpoint_contexts), expected)
    assert len(products) == 2 + 1 + 4


def test_a_second_backward_pass_computes_what_the_first_took(products):
    model = layers()
    expected = gradients(model, contexts=noop_context_fn, passes=2)
    products.clear()
    assert same(gradients(model, contexts=checkpoint_contexts, passes=2), expected)
    assert len(products) == 2 + (0 + 4) + (1 + 4)


def test_a_product_is_held_until_the_graph_is_freed_and_the_last_not_at_all(monkeypatch):
    made = []
    product = linear.onednn_linear

    def recorded(*given):
        output = product(*given)
        made.append(weakref.ref(output.untyped_storage()))
        return output

    model = torch.nn.Sequential(*layers(), torch.nn.Tanh())
    monkeypatch.setattr(linear, "onednn_linear", recorded)
    inputs = torch.randn(100, 200, requires_grad=True)
    output = checkpoint(model, inputs, use_reentrant=False, context_fn=checkpoint_contexts)
    assert [each() is None for each in made] == [False, True]
    del output
    gc.collect()
    assert [each() is None for each in made] == [True, True]


def wide_run(directory, **given):
    """A run whose linear layers are large enough for oneDNN."""
    model = policy(hidden_size=128, intermediate_size=256, num_attention_heads=1)
    return trainer(directory, model=model, max_steps=1, **given)


def test_a_run_keeps_products(tmp_path, products):
    """Seven products of each layer; all but the last, which is never recomputed, are kept."""
    run = wide_run(tmp_path, gradient_checkpointing=True)
    run.train()
    kept = len(products)
    products.clear()
    other = wide_run(tmp_path / "other", gradient_checkpointing=True)
    other.remove_callback(CheckpointingCallback)
    other.train()
    assert len(products) - kept == 2 * 6
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "given",
    [{"use_reentrant": True}, {"use_reentrant": False, "context_fn": noop_context_fn}],
    ids=["reentrant", "own contexts"],
)
def test_checkpoints_of_another_kind_are_left_alone(given):
    model = policy(hidden_size=128, intermediate_size=256, num_attention_heads=1)
    replace_linears(model)
    model.gradient_checkpointing_enable(given)
    before = [module._gradient_checkpointing_func for module in model.model.layers]
    cpu.save_matmul_outputs(model)
    assert [module._gradient_checkpointing_func for module in model.model.layers] == before
    assert all(isinstance(function, partial) for function in before)


def test_models_without_onednn_layers_are_left_alone():
    model = policy()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = model.model.layers[0]._gradient_checkpointing_func
    cpu.save_matmul_outputs(model)
    assert model.model.layers[0]._gradient_checkpointing_func is before


# Without bf16 instructions the products are emulated: 16 tokens take 14 s, 640 tokens 5 minutes.
native_bf16 = pytest.mark.skipif(not has_native_bf16_cpu(), reason="this processor emulates bfloat16")


@pytest.mark.representative("a whole real gradient")
@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize(
    ("tokens", "autocast"),
    [(16, True), pytest.param(640, True, marks=native_bf16), (150, False)],
    ids=["16-bf16", "640-bf16", "150-float32"],
)
def test_the_whole_gradient_of_a_real_model_is_the_same(tokens, autocast, smollm2_path, products):
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).train()
    replace_linears(model)
    ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0))

    def gradient():
        products.clear()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()], len(products)

    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, all_products = gradient()
    cpu.save_matmul_outputs(model)
    found, fewer_products = gradient()
    assert same(found, expected)
    assert all_products - fewer_products == 6 * len(model.model.layers)  # all but the last of each layer
