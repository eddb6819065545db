"""Both heads against brute force in float64; the chunked one also against its promises on memory.

Files: ``policy/heads/dense.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.heads import HEADS, dense_head
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from groupwise.compat import torch as compat_torch
from groupwise.policy.heads import chunked
from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.dense import logps_from_logits
from groupwise.policy.heads.weights import HeadWeights

LOW = (torch.bfloat16, torch.float16)
TRANSFORMS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.25},
    "scale_and_softcap": {"scale": 3.0, "softcap": 2.0},
}


def rows(n=7, v=13, h=5, dtype=torch.float64, seed=0, spread=1.0):
    """Hidden states, weight, bias (all leaves that want gradients) and targets."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype).requires_grad_()
        for shape in [(n, h), (v, h), (v,)]
    )
    return hidden, weight, bias, torch.randint(v, (n,), generator=generator)


def upstream(n):
    return torch.randn(2, n, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def truth(hidden, weight, bias, targets, temperature=1.0, scale=1.0, softcap=None):
    """Log-probs and entropy from their definitions in float64, differentiable, sharing no code with heads."""
    logits = scale * (hidden.double() @ weight.double().T + (0 if bias is None else bias.double()))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = (logits / temperature).exp()
    p = weights / weights.sum(-1, keepdim=True)
    return p[torch.arange(len(p)), targets].log(), -(p * p.log()).sum(-1)


def outcome(function, inputs, *arguments, **options):
    """Both outputs, and the gradients of every input under fixed random upstream gradients, in float64."""
    tensors = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    logps, entropy = function(*arguments, **options)
    for_logps, for_entropy = upstream(len(logps))
    loss = (logps * for_logps).sum() + (entropy * for_entropy).sum()
    gradients = torch.autograd.grad(loss, tensors)
    return [value.detach().double() for value in (logps, entropy, *gradients)]


def outcome_of(head_fn, hidden, weight, bias, targets, temperature=1.0, fp32=False, transform=None, **chunks):
    head = HeadWeights(weight, bias, fp32=fp32, **(transform or {}))
    return outcome(head_fn, (hidden, weight, bias), hidden, head, targets, temperature, **chunks)


def outcome_of_truth(hidden, weight, bias, targets, temperature=1.0, transform=None):
    """In float64 throughout, so that gradients are not rounded to the inputs' dtype."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    return outcome(truth, leaves, *leaves, targets, temperature, **(transform or {}))


def assert_close(given_values, expected, rtol=1e-10):
    assert len(given_values) == len(expected)
    for one, other in zip(given_values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * (1 + other.abs().max().item()))


@pytest.mark.parametrize("head_fn", HEADS.values())
def test_a_row_computed_by_hand(head_fn):
    # h = 2, W = [0, 1, -1], b = [0, 0, ln 3]: raw logits 0, 2, -2 + ln 3. Scale 1/2: 0, 1, -1 + ln(3)/2.
    # Temperature 1/2: x = 0, 2, -2 + ln 3, so e^x = 1, e², 3/e².
    weight, bias = torch.tensor([[0.0], [1.0], [-1.0]]), torch.tensor([0.0, 0.0, math.log(3)])
    head = HeadWeights(weight, bias, scale=0.5)
    total = 1 + math.exp(2) + 3 * math.exp(-2)
    p = [1 / total, math.exp(2) / total, 3 * math.exp(-2) / total]
    logps, entropy = head_fn(torch.full((3, 1), 2.0), head, torch.arange(3), 0.5)
    assert logps.tolist() == pytest.approx([math.log(value) for value in p], rel=1e-6)
    assert entropy.tolist() == pytest.approx([-sum(value * math.log(value) for value in p)] * 3, rel=1e-6)


@pytest.mark.parametrize("head_fn", HEADS.values())
def test_softcap_comes_before_the_temperature(head_fn):
    # cap 2, scale 3, raw 1: x = 2 tanh(3/2) / (1/4), against a raw logit of 0.
    x = 2 * math.tanh(1.5) / 0.25
    head = HeadWeights(torch.tensor([[1.0], [0.0]]), softcap=2.0, scale=3.0)
    logps, _ = head_fn(torch.ones(1, 1), head, torch.tensor([1]), 0.25)
    assert logps.item() == pytest.approx(-math.log1p(math.exp(x)), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("head_fn", HEADS.values())
def test_values_and_gradients_in_float64(head_fn, transform, with_bias, temperature):
    hidden, weight, bias, targets = rows()
    inputs = (hidden, weight, bias if with_bias else None, targets, temperature)
    chunks = {"chunk_rows": 3, "chunk_columns": 4} if head_fn is chunked_head else {}
    assert_close(
        outcome_of(head_fn, *inputs, transform=transform, **chunks),
        outcome_of_truth(*inputs, transform=transform),
    )


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_chunked_gradients_are_the_slopes_of_the_values(transform):
    hidden, weight, bias, targets = rows(n=3, v=5, h=2)

    def scores(hidden, weight, bias):
        head = HeadWeights(weight, bias, **transform)
        return chunked_head(hidden, head, targets, 0.7, chunk_rows=2, chunk_columns=3)

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


@settings(max_examples=40)
@given(
    n=st.integers(1, 9), v=st.integers(1, 11), chunk_rows=st.integers(1, 10), chunk_columns=st.integers(1, 12)
)
def test_chunk_size_changes_nothing(n, v, chunk_rows, chunk_columns):
    inputs = rows(n=n, v=v)
    given_values = outcome_of(chunked_head, *inputs, chunk_rows=chunk_rows, chunk_columns=chunk_columns)
    assert_close(given_values, outcome_of_truth(*inputs))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("transform", [{}, {"softcap": 3.0, "scale": 0.5}], ids=["plain", "softcap"])
@pytest.mark.parametrize("shape", [(1, 17), (64, 129), (50, 1031)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("chunk_rows", [24, 64])  # several row tiles, and all rows in one
def test_chunked_is_no_further_from_the_truth_than_dense(
    chunk_rows, dtype, shape, transform, fp32, monkeypatch
):
    monkeypatch.setattr(chunked, "has_native_bf16_cpu", lambda: True)
    n, v = shape
    hidden, weight, bias, targets = rows(n, v, 64, dtype, spread=0.3)
    inputs = (hidden, weight, bias, targets, 0.9)
    expected = outcome_of_truth(*inputs, transform=transform)
    dense = outcome_of(dense_head, *inputs, fp32=fp32, transform=transform)
    by_tiles = outcome_of(
        chunked_head, *inputs, fp32=fp32, transform=transform, chunk_rows=chunk_rows, chunk_columns=100
    )
    for one, reference, exact in zip(by_tiles, dense, expected, strict=True):
        # 4 float32 roundings of the largest value: what another order of summation may cost.
        slack = 4 * torch.finfo(torch.float32).eps * (1 + exact.abs().max())
        budget = (reference - exact).square().mean().sqrt() + slack
        if dtype in LOW:  # a gradient ends in one rounding of its own, which may fall to either side
            budget = budget * 1.02
        assert (one - exact).square().mean().sqrt() <= budget


@pytest.mark.parametrize("transform", [{}, {"softcap": 3.0, "scale": 0.5}], ids=["plain", "softcap"])
@pytest.mark.parametrize("shape", [(64, 129), (50, 1031)], ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_products_of_cuda_without_out_dtype(dtype, shape, transform, monkeypatch):
    """The branches of CUDA, computed on the CPU as torch before 2.8 computes them there."""
    n, v = shape
    inputs = (*rows(n, v, 64, dtype, spread=0.3), 0.9)
    expected = outcome_of_truth(*inputs, transform=transform)
    dense = outcome_of(dense_head, *inputs, transform=transform)
    products = []

    def counted(function):
        return lambda *given: products.append(function.__name__) or function(*given)

    monkeypatch.setattr(compat_torch, "has_out_dtype", lambda: False)
    for function in (compat_torch.mm_into, compat_torch.addmm_into):
        monkeypatch.setattr(chunked, function.__name__, counted(function))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        found = outcome_of(chunked_head, *inputs, transform=transform, chunk_rows=24, chunk_columns=100)
    tiles = math.ceil(n / 24) * math.ceil(v / 100)
    assert sorted(products) == ["addmm_into"] * 2 * tiles + ["mm_into"] * 2 * tiles
    eps = torch.finfo(torch.float32).eps
    for one, exact in zip(found[:2], expected[:2], strict=True):  # logits are not rounded to half precision
        assert (one - exact).abs().max() <= 8 * eps * (1 + exact.abs().max())
    for one, reference, exact in zip(found[2:], dense[2:], expected[2:], strict=True):
        budget = (reference - exact).square().mean().sqrt() * 1.02 + 4 * eps * (1 + exact.abs().max())
        assert (one - exact).square().mean().sqrt() <= budget


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("head_fn", HEADS.values())
def test_fp32_head_is_closer_to_the_truth(head_fn, dtype):
    inputs = rows(40, 200, 64, dtype, spread=0.5)
    expected = outcome_of_truth(*inputs)[:2]
    plain, exact = (outcome_of(head_fn, *inputs, fp32=fp32)[:2] for fp32 in (False, True))
    for rough, fine, value in zip(plain, exact, expected, strict=True):
        assert (fine - value).abs().max() < 0.1 * (rough - value).abs().max()


@pytest.mark.parametrize("head_fn", HEADS.values())
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_results_are_float32_and_gradients_keep_their_parameters_dtype(head_fn, dtype):
    hidden, weight, bias, targets = rows(dtype=dtype)
    logps, entropy = head_fn(hidden, HeadWeights(weight, bias), targets)
    assert logps.dtype == entropy.dtype == torch.float32
    (logps + entropy).sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == dtype


@pytest.mark.parametrize("output", ["logps", "entropy"])
@pytest.mark.parametrize("transform", [{}, {"softcap": 1.5}], ids=["plain", "softcap"])
def test_gradient_of_one_output_alone(output, transform):
    hidden, weight, bias, targets = rows()
    index = ["logps", "entropy"].index(output)
    head = HeadWeights(weight, bias, **transform)
    given_value = chunked_head(hidden, head, targets, 0.7, chunk_rows=3, chunk_columns=4)[index]
    expected = truth(hidden, weight, bias, targets, 0.7, **transform)[index]
    leaves = (hidden, weight, bias)
    scale = upstream(len(targets))[index]
    assert_close(
        torch.autograd.grad((given_value * scale).sum(), leaves),
        torch.autograd.grad((expected * scale).sum(), leaves),
    )


@pytest.mark.parametrize("head_fn", HEADS.values())
def test_without_entropy_only_the_entropy_is_missing(head_fn):
    hidden, weight, bias, targets = rows()
    logps, entropy = head_fn(hidden, HeadWeights(weight, bias), targets, 0.7, with_entropy=False)
    assert entropy is None
    expected, _ = truth(hidden, weight, bias, targets, 0.7)
    gradients = [torch.autograd.grad(value.sum(), (hidden, weight, bias)) for value in (logps, expected)]
    assert_close((logps, *gradients[0]), (expected, *gradients[1]))


@pytest.mark.parametrize("head_fn", HEADS.values())
def test_no_rows(head_fn):
    hidden, weight, bias, targets = rows(n=0)
    logps, entropy = head_fn(hidden, HeadWeights(weight, bias), targets)
    assert logps.shape == entropy.shape == (0,)
    (logps.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 5)
    assert not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {1, 2}, {0, 1}], ids=str)
def test_frozen_inputs_get_no_gradient_and_do_not_change_the_others(frozen):
    inputs = list(rows())
    expected = outcome_of_truth(*inputs)
    wanted = expected[:2] + [expected[2 + place] for place in range(3) if place not in frozen]
    for place in frozen:
        inputs[place] = inputs[place].detach()
    assert_close(outcome_of(chunked_head, *inputs, chunk_rows=3, chunk_columns=4), wanted)


def test_weight_tied_to_the_embedding_gets_both_gradients():
    _, weight, _, targets = rows(h=5)
    ids = torch.tensor([3, 1, 1, 12, 0, 5, 9])

    def scores(head):
        logps, entropy = head(torch.tanh(weight[ids]))
        return torch.autograd.grad((logps - 2 * entropy).sum(), weight)

    assert_close(
        scores(
            lambda hidden: chunked_head(hidden, HeadWeights(weight), targets, chunk_rows=2, chunk_columns=5)
        ),
        scores(lambda hidden: truth(hidden, weight, None, targets)),
    )


@pytest.mark.parametrize("head_fn", HEADS.values())
def test_huge_logits_neither_overflow_nor_lose_the_entropy(head_fn):
    # Two equal maxima of 10⁴, in the first tile and in the last, among logits of -10⁴: p = 1/2, 1/2, so
    # logp = -ln 2 and H = ln 2; for a target of -10⁴, logp = -20000 - ln 2.
    weight = torch.full((9, 1), -1e4)
    weight[0] = weight[8] = 1e4
    head, chunks = HeadWeights(weight), {"chunk_columns": 2} if head_fn is chunked_head else {}
    logps, entropy = head_fn(torch.ones(2, 1), head, torch.tensor([8, 4]), **chunks)
    assert logps.tolist() == pytest.approx([-math.log(2), -20000 - math.log(2)], rel=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2, rel=1e-6)


@pytest.mark.parametrize("head_fn", HEADS.values())
def test_autocast_sets_the_dtype_of_the_product_unless_the_head_is_fp32(head_fn):
    hidden, weight, bias, targets = rows(20, 40, 16, torch.float32)
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight, bias)]
    in_bfloat16 = outcome_of(head_fn, *rounded, targets)
    in_float32 = outcome_of(head_fn, hidden, weight, bias, targets)

    def under_autocast(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return head_fn(*arguments)

    automatic = outcome_of(under_autocast, hidden, weight, bias, targets)
    forced = outcome_of(under_autocast, hidden, weight, bias, targets, fp32=True)
    assert_close(automatic[:2], in_bfloat16[:2], rtol=0)
    assert_close(automatic[2:], in_bfloat16[2:], rtol=2**-7)
    assert_close(forced, in_float32, rtol=0)


def test_second_derivative_is_refused():
    hidden, weight, bias, targets = rows()
    logps, _ = chunked_head(hidden, HeadWeights(weight, bias), targets)
    (gradient,) = torch.autograd.grad(logps.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_leading_axes_of_logits_are_kept():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    logps, entropy = logps_from_logits(logits, targets, 0.5)
    expected_logps, expected_entropy = truth(2 * logits.view(6, 5), torch.eye(5), None, targets.flatten())
    assert_close((logps.flatten(), entropy.flatten()), (expected_logps, expected_entropy))


class LargestTensor(TorchDispatchMode):
    """Size, in elements, of the largest tensor any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def largest_tensor(head_fn, frozen_weight=False, dtype=torch.float32, **chunks):
    hidden, weight, bias, targets = rows(64, 500, 8, dtype)
    weight.requires_grad_(not frozen_weight)
    head = HeadWeights(weight.detach() if frozen_weight else weight, bias, softcap=5.0)
    with LargestTensor() as largest:
        logps, entropy = head_fn(hidden, head, targets, **chunks)
        (logps + entropy).sum().backward()
    return largest.elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_larger_than_a_tile_or_the_weight_is_ever_made(dtype):
    # N V = 64 * 500 = 32000 logits, V H = 4000, a tile 16 * 100 = 1600, its part of the weight 800.
    chunks = {"chunk_rows": 16, "chunk_columns": 100, "dtype": dtype}
    assert largest_tensor(dense_head, dtype=dtype) == 32000
    assert largest_tensor(chunked_head, **chunks) == 4000
    assert largest_tensor(chunked_head, frozen_weight=True, **chunks) <= 4000


@pytest.mark.parametrize(("frozen", "products"), [("neither", 3), ("weight", 2), ("hidden", 2)])
def test_backward_makes_no_product_for_a_frozen_input(frozen, products):
    # One product to make the logits again and one per gradient, each of 2 N V H = 2 * 64 * 500 * 8 operations
    # (float64, whose products the counter knows).
    hidden, weight, _, targets = rows(64, 500, 8)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    head = HeadWeights(weight)
    logps, entropy = chunked_head(hidden, head, targets, chunk_rows=16, chunk_columns=100)
    with FlopCounterMode(display=False) as counter:
        (logps + entropy).sum().backward()
    assert counter.get_total_flops() == products * 2 * 64 * 500 * 8


def test_only_inputs_and_three_numbers_per_row_stay_between_the_passes():
    hidden, weight, bias, targets = rows(64, 500, 8, torch.float32)
    kept = []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = chunked_head(hidden, HeadWeights(weight, bias), targets)
    inputs = {tensor.data_ptr() for tensor in (hidden, weight, bias, targets)}
    own = [tensor.shape for tensor in kept if tensor.data_ptr() not in inputs]
    assert len(kept) == 7 and own == [(64,)] * 3
    assert all(output.grad_fn is not None for output in outputs)


def test_no_graph_is_kept_without_gradients():
    hidden, weight, bias, targets = rows()
    with torch.no_grad():
        logps, entropy = chunked_head(hidden, HeadWeights(weight, bias), targets)
    assert logps.grad_fn is None and entropy.grad_fn is None
