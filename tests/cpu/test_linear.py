"""oneDNN's linear layers against float64: as close as PyTorch's own, in value and in every gradient.

bfloat16 by autocast and by the weights' dtype; processors that emulate it run these tests too, packing apart.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from groupwise.compat.torch import has_native_bf16_cpu, has_onednn_linear
from groupwise.cpu import linear
from groupwise.cpu.linear import OneDNNLinear, prepacked_weights, replace_linears

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this PyTorch has no oneDNN")


FLOAT32, AUTOCAST, BFLOAT16 = PRECISIONS = ("float32", "autocast", "bfloat16")
native_bf16 = pytest.mark.skipif(not has_native_bf16_cpu(), reason="this CPU emulates bfloat16")


@pytest.fixture(autouse=True)
def bfloat16_everywhere(monkeypatch):
    monkeypatch.setattr(linear, "has_native_bf16_cpu", lambda: True)


def autocast_for(precision):
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == AUTOCAST)


class Quantised(torch.nn.Linear):
    """Stands for a layer that computes something else from its weight."""


def results(layer, inputs, weights):
    inputs = inputs.detach().clone().requires_grad_()
    output = layer(inputs)
    (output * weights).sum().backward()
    return [output.detach(), inputs.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 200), (3, 5, 200), (1, 1, 200), (0, 200)])
def test_values_and_gradients_are_as_close_as_those_of_pytorch(shape, bias, precision):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == BFLOAT16 else torch.float32
    plain = torch.nn.Linear(200, 130, bias=bias, dtype=dtype)
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    replace_linears(fast)
    assert type(fast) is OneDNNLinear
    inputs = torch.randn(shape).to(dtype)
    weights = torch.randn(*shape[:-1], 130).to(dtype)
    truth = results(exact, inputs.double(), weights.double())
    with autocast_for(precision):
        ours, theirs = (results(layer, inputs, weights) for layer in (fast, plain))
    for one, reference, true in zip(ours, theirs, truth, strict=True):
        assert one.dtype == reference.dtype and one.shape == true.shape
        if one.numel():
            assert (one - true).abs().max() <= 2 * (reference - true).abs().max() + 1e-6


def test_operands_need_not_be_contiguous():
    layer = torch.nn.Linear(200, 130)
    inputs = torch.randn(2, 400, 6).transpose(1, 2)[..., ::2]
    expected = layer(inputs)
    replace_linears(layer)
    torch.testing.assert_close(layer(inputs), expected, atol=1e-5, rtol=0)


def test_a_frozen_weight_gets_no_gradient():
    layer = torch.nn.Linear(200, 130)
    layer.weight.requires_grad_(False)
    replace_linears(layer)
    inputs = torch.randn(3, 200, requires_grad=True)
    layer(inputs).sum().backward()
    assert layer.weight.grad is None and inputs.grad is not None and layer.bias.grad is not None


@pytest.mark.parametrize("precision", [FLOAT32, AUTOCAST])
def test_a_checkpoint_does_not_repeat_the_last_product(precision, monkeypatch):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(200, 130), torch.nn.SiLU(), torch.nn.Linear(130, 200))
    replace_linears(layers)
    inputs = torch.randn(3, 200, requires_grad=True)
    with autocast_for(precision):
        layers(inputs).square().sum().backward()
    expected = [inputs.grad, *(parameter.grad for parameter in layers.parameters())]
    inputs.grad = None
    layers.zero_grad()
    shapes = []
    product = linear.onednn_linear
    monkeypatch.setattr(
        linear, "onednn_linear", lambda *given: shapes.append(given[1].shape) or product(*given)
    )
    with autocast_for(precision):
        output = checkpoint(layers, inputs, use_reentrant=False)
        forward = shapes.copy()
        output.square().sum().backward()
    got = [inputs.grad, *(parameter.grad for parameter in layers.parameters())]
    assert forward == [(130, 200), (200, 130)]
    # One is recomputed; two of each layer's gradient.
    assert shapes[2] == forward[0] and len(shapes) == 2 + 1 + 4
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_other_dtypes_and_vectors_use_pytorch():
    layer = torch.nn.Linear(200, 130)
    plain = copy.deepcopy(layer)
    replace_linears(layer)
    inputs = torch.randn(3, 200)
    assert torch.equal(layer(inputs[0]), plain(inputs[0]))
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(layer(inputs), plain(inputs)) and layer(inputs).dtype == torch.float16
    assert layer.double()(inputs.double()).dtype == torch.float64


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 500])
def test_prepacked_weights_make_the_same_products(rows, bias):
    torch.manual_seed(0)
    plain = torch.nn.Linear(200, 130, bias=bias)
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    replace_linears(fast)
    packed = []
    with torch.no_grad(), prepacked_weights(fast):
        for _ in range(6):
            inputs = torch.randn(rows, 1, 200)
            truth = exact(inputs.double())
            bound = 2 * (plain(inputs) - truth).abs().max() + 1e-6
            assert (fast(inputs) - truth).abs().max() <= bound
            packed.append(fast.packing.weight_OI.is_mkldnn)
    assert packed == [False] * 3 + [True] * 3
    assert fast.packing is None


def test_a_packed_copy_does_not_outlive_its_weight():
    """Gradients and what comes after the context see the weight as it is."""
    layer = torch.nn.Linear(200, 130, bias=False)
    replace_linears(layer)
    inputs = torch.randn(3, 200)
    with prepacked_weights(layer):
        with torch.no_grad():
            before = [layer(inputs) for _ in range(4)][-1]
            layer.weight.mul_(2)
            assert torch.equal(layer(inputs), before)  # the copy is what multiplies: else nothing is tested
        torch.testing.assert_close(layer(inputs), 2 * before)
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs), 2 * before)


@native_bf16
@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_cast_once_and_packed_under_autocast(bias):
    torch.manual_seed(0)
    plain = torch.nn.Linear(200, 130, bias=bias)
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    replace_linears(fast)
    with torch.no_grad(), prepacked_weights(fast):
        for precision in (AUTOCAST, FLOAT32):  # another dtype starts from the weight, not from the copy
            copies = []
            for _ in range(6):
                inputs = torch.randn(8, 1, 200)
                truth = exact(inputs.double())
                with autocast_for(precision):
                    bound = 2 * (plain(inputs) - truth).abs().max() + 1e-6
                    assert (fast(inputs) - truth).abs().max() <= bound
                copies.append(fast.packing.weight_OI)
            assert [each.is_mkldnn for each in copies] == [False] * 3 + [True] * 3
            assert len({id(each) for each in copies}) == 2
            assert copies[-1].dtype == (torch.bfloat16 if precision == AUTOCAST else torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nothing_is_packed_that_other_precisions_do_not_use(dtype, monkeypatch):
    monkeypatch.setattr(linear, "has_native_bf16_cpu", lambda: False)
    layer = torch.nn.Linear(200, 130)
    replace_linears(layer)
    with torch.no_grad(), prepacked_weights(layer), torch.autocast("cpu", dtype):
        for _ in range(6):
            layer(torch.randn(3, 200))
        assert not layer.packing.weight_OI.is_mkldnn


def test_only_large_plain_linear_layers_are_replaced():
    model = torch.nn.Sequential(torch.nn.Linear(200, 130), torch.nn.Linear(200, 8), Quantised(200, 200))
    state = model.state_dict()
    for _ in range(2):
        replace_linears(model)
    assert [type(layer) for layer in model] == [OneDNNLinear, torch.nn.Linear, Quantised]
    assert model.state_dict().keys() == state.keys()
    assert all(
        isinstance(layer, torch.nn.Linear) for layer in pickle.loads(pickle.dumps(copy.deepcopy(model)))
    )
