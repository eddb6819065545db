"""The Triton kernels of the chunked head against float64, on a GPU where there is one, else interpreted.

Triton decides between compiling and interpreting when it is imported, so the interpreter gets a process of
its own: ``test_the_comparisons_pass_with_kernels`` runs this file again with TRITON_INTERPRET=1.
The tests hide GPUs from each other; on a machine with one it runs again there.

Files: ``policy/heads/tiles.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.heads import dense_head
from test_heads import LOW, assert_close, outcome, outcome_of_truth, rows, truth, upstream

from groupwise.policy.heads import chunked
from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.tiles import LogitTransform, RowSlopes, RowStatistics, Tiles
from groupwise.policy.heads.weights import HeadWeights
from groupwise.records.sampling_mask import SamplingMask

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TRANSFORMS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "scale_and_softcap": {"scale": 3.0, "softcap": 20.0},
}

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (INTERPRETED or DEVICE == "cuda"),
    reason="neither a GPU nor TRITON_INTERPRET=1: see test_the_comparisons_pass_with_kernels",
)


def on_device(*tensors):
    """Leaves on the device, with gradients wanted where they were."""
    return [None if x is None else x.detach().to(DEVICE).requires_grad_(x.requires_grad) for x in tensors]


def outcome_on_device(head_fn, hidden, weight, bias, targets, temperature, transform, fp32=False, **chunks):
    hidden, weight, bias, targets = on_device(hidden, weight, bias, targets)
    head = HeadWeights(weight, bias, fp32=fp32, **transform)

    def scores(*arguments, **options):
        return [value.cpu() for value in head_fn(*arguments, **options)]

    values = outcome(scores, (hidden, weight, bias), hidden, head, targets, temperature, **chunks)
    return [value.cpu() for value in values]


ON_GPU = pytest.param(
    {"CUDA_VISIBLE_DEVICES": "0"},
    id="gpu",
    marks=pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="this machine has no NVIDIA GPU"),
)


@pytest.mark.slow
@has_triton
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the interpreter, or has the GPU")
@pytest.mark.parametrize("where", [pytest.param({"TRITON_INTERPRET": "1"}, id="interpreter"), ON_GPU])
def test_the_comparisons_pass_with_kernels(where):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **where}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 20


@needs_kernels
def test_the_kernels_are_used_for_all_but_float64():
    from groupwise.policy.heads.kernels import TritonTiles

    device = torch.device(DEVICE)
    used = {dtype: chunked._tile_operations(device, dtype) for dtype in (torch.float32, *LOW)}
    assert set(used.values()) == {TritonTiles}
    assert chunked._tile_operations(device, torch.float64) is Tiles


def test_torch_does_the_work_without_triton_and_on_other_devices(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert chunked._tile_operations(torch.device("cpu"), torch.float32) is Tiles
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert chunked._tile_operations(torch.device("cuda"), torch.float32) is Tiles


@pytest.mark.slow
@has_triton
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="run rather than only compiled")
@pytest.mark.parametrize(
    ("optional", "dtype"), [(True, "bf16"), (False, "fp32")], ids=["bias_softcap_entropy", "plain"]
)
def test_the_kernels_compile_without_a_gpu(optional, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget

    from groupwise.policy.heads import kernels

    kinds = {
        "raw_ptr": "*fp32",
        "columns": "i32",
        "gain": "fp32",
        "BLOCK": "constexpr",
        "targets_ptr": "*i64",
        "kept_ptr": "*u8",
    }
    kinds |= {"grad_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}", "bound": "fp32"}
    if not optional:  # an argument that is None is known to the compiler
        kinds |= dict.fromkeys(["bias_ptr", "bound", "weighted_ptr", "b_ptr", "kept_ptr"], "constexpr")
    for kernel in (kernels._statistics_kernel, kernels._gradient_kernel):
        signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
        fixed = {name: None for name, kind in signature.items() if kind == "constexpr"} | {"BLOCK": 1024}
        source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=fixed)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
        assert compiled.asm["cubin"]


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "with_bias", "shape", "transform"),
    [
        # Without a bias the kernels lack an addition, whatever the dtype.
        (torch.float32, False, (37, 131), "plain"),
        (torch.float32, True, (37, 131), "softcap"),
        *((dtype, True, (37, 131), "scale_and_softcap") for dtype in (torch.float32, *LOW)),
        *((dtype, True, (1, 17), "plain") for dtype in LOW),
    ],
    ids=str,
)
def test_kernels_are_no_further_from_the_truth_than_dense(dtype, with_bias, shape, transform):
    (n, v), transform = shape, TRANSFORMS[transform]
    hidden, weight, bias, targets = rows(n, v, 64, dtype, spread=0.3)
    inputs = (hidden, weight, bias if with_bias else None, targets, 0.9, transform)
    expected = outcome_of_truth(*inputs)
    dense = outcome_on_device(dense_head, *inputs)
    fused = outcome_on_device(chunked_head, *inputs, chunk_rows=24, chunk_columns=50)
    for one, reference, exact in zip(fused, dense, expected, strict=True):
        # The budget of the torch version (test_heads.py).
        slack = 4 * torch.finfo(torch.float32).eps * (1 + exact.abs().max())
        budget = (reference - exact).square().mean().sqrt() + slack
        if dtype in LOW:  # a gradient ends in one rounding of its own, which may fall to either side
            budget = budget * 1.02
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter truncates: twice the error of rounding
            budget = budget * 2
        assert (one - exact).square().mean().sqrt() <= budget


@needs_kernels
@pytest.mark.parametrize("chunks", [(3, 4), (7, 13), (None, None)], ids=str)
def test_chunk_size_changes_only_roundings(chunks):
    hidden, weight, bias, targets = rows(dtype=torch.float32)
    options = dict(zip(["chunk_rows", "chunk_columns"], chunks, strict=True))
    given_values = outcome_on_device(
        chunked_head, hidden, weight, bias, targets, 0.7, TRANSFORMS["softcap"], **options
    )
    expected = outcome_of_truth(hidden, weight, bias, targets, 0.7, TRANSFORMS["softcap"])
    assert_close(given_values, expected, rtol=1e-5)


@needs_kernels
def test_rows_longer_than_a_block_of_columns():
    hidden, weight, bias, targets = rows(3, 9001, 4, torch.float32)
    targets[0], targets[1] = 9000, 4096
    arguments = (hidden, weight, bias, targets, 1.0, {})
    assert_close(outcome_on_device(chunked_head, *arguments), outcome_of_truth(*arguments[:5]), rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_truncated_distributions(transform):
    hidden, weight, bias, targets = rows(9, 131, 16, torch.float32)
    kept = [sorted({target, (5 * target) % 131, 130}) for target in targets.tolist()]
    kept[4] = []  # the whole vocabulary
    options = {"kept": SamplingMask.from_lists(kept), "chunk_rows": 4, "chunk_columns": 50}
    fused = outcome_on_device(chunked_head, hidden, weight, bias, targets, 0.9, transform, **options)
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    reference = HeadWeights(*doubles[1:], **transform)
    expected = outcome(chunked_head, doubles, doubles[0], reference, targets, 0.9, **options)
    assert_close(fused, expected, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("output", ["logps", "entropy"])
@pytest.mark.parametrize("with_entropy", [True, False], ids=["both", "logps_only"])
def test_gradient_of_one_output_alone(output, with_entropy):
    if output == "entropy" and not with_entropy:
        return
    hidden, weight, bias, targets = rows(dtype=torch.float32)
    index = ["logps", "entropy"].index(output)
    scale = upstream(len(targets))[index]
    leaves = on_device(hidden, weight, bias)
    head = HeadWeights(leaves[1], leaves[2], softcap=1.5)
    options = {"with_entropy": with_entropy, "chunk_rows": 3, "chunk_columns": 4}
    given_value = chunked_head(leaves[0], head, targets.to(DEVICE), 0.7, **options)[index]
    given_gradients = torch.autograd.grad((given_value.cpu() * scale).sum(), leaves)

    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    expected = truth(*doubles, targets, 0.7, softcap=1.5)[index]
    expected_gradients = torch.autograd.grad((expected * scale).sum(), doubles)
    assert_close(
        [x.detach().cpu().double() for x in (given_value, *given_gradients)],
        [x.detach() for x in (expected, *expected_gradients)],
        rtol=1e-5,
    )


@needs_kernels
def test_no_rows():
    leaves = on_device(*rows(n=0, dtype=torch.float32)[:3])
    targets = torch.zeros(0, dtype=torch.long, device=DEVICE)
    logps, entropy = chunked_head(leaves[0], HeadWeights(*leaves[1:]), targets)
    (logps.sum() + entropy.sum()).backward()
    assert logps.shape == entropy.shape == (0,)
    assert leaves[0].grad.shape == (0, 5) and not leaves[1].grad.any() and not leaves[2].grad.any()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp32_head_multiplies_in_float32(dtype):
    inputs = rows(20, 60, 32, dtype, spread=0.5)
    given_values = outcome_on_device(chunked_head, *inputs, 1.0, {}, fp32=True, chunk_columns=32)
    expected = outcome_of_truth(*inputs)
    assert_close(given_values[:2], expected[:2], rtol=3e-6)
    assert_close(given_values[2:], expected[2:], rtol=1e-5 if dtype == torch.float32 else 2**-8)


@needs_kernels
def test_huge_logits_neither_overflow_nor_lose_the_entropy():
    # As in test_heads.py: p = 1/2, 1/2 in the first and the last tile, beside logits of -10⁴.
    weight = torch.full((9, 1), -1e4, device=DEVICE)
    weight[0] = weight[8] = 1e4
    targets = torch.tensor([8, 4], device=DEVICE)
    logps, entropy = chunked_head(
        torch.ones(2, 1, device=DEVICE), HeadWeights(weight), targets, chunk_columns=2
    )
    log_2 = torch.tensor(2.0).log().item()
    assert logps.tolist() == pytest.approx([-log_2, -20000 - log_2], rel=1e-6)
    assert entropy.tolist() == pytest.approx([log_2] * 2, rel=1e-6)


def tile_pair(dtype, softcap, operand_dtype):
    """The same work for both implementations: tiles, raw projections, bias, targets (two of them outside)."""
    from groupwise.policy.heads.kernels import TritonTiles

    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(5, 21, generator=generator) * 4
    bias = torch.randn(21, generator=generator).to(operand_dtype)
    targets = torch.tensor([0, 20, -1, 21, 7])
    transform = LogitTransform(0.7, softcap, 0.6)
    pair = []
    for kind, kind_dtype, device in [(Tiles, torch.float64, "cpu"), (TritonTiles, dtype, DEVICE)]:
        tiles = kind(transform, 5 * 21, kind_dtype, operand_dtype, torch.device(device))
        pair.append((tiles, raw.to(device, kind_dtype), bias.to(device), targets.to(device)))
    return pair


@needs_kernels
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_statistics_continue_from_earlier_tiles(with_entropy, softcap):
    results = []
    for tiles, raw, bias, targets in tile_pair(torch.float32, softcap, torch.float32):
        statistics = RowStatistics.empty(5, with_entropy, raw.dtype, raw.device)
        tiles.update_statistics(raw.clone(), bias, targets, statistics)
        tiles.update_statistics(raw.flip(1) + 3, None, targets - 21, statistics)
        kept = [statistics.max_N, statistics.sum_N, statistics.weighted_N, statistics.target_logit_N]
        results.append([value.cpu().double() for value in kept if value is not None])
    assert_close(results[1], results[0], rtol=3e-6)


@needs_kernels
@pytest.mark.parametrize("operand_dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_of_a_tile_in_the_dtype_of_the_products(with_entropy, softcap, operand_dtype):
    generator = torch.Generator().manual_seed(4)
    a, b, g = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    results = []
    for tiles, raw, bias, targets in tile_pair(torch.float32, softcap, operand_dtype):
        a_N, b_N, g_N = (x.to(raw) for x in (a, b, g))
        top_N = torch.full_like(a_N, 9.0)
        slopes = RowSlopes(top_N, a_N, b_N if with_entropy else None, g_N)
        results.append(tiles.gradient(raw.clone(), bias, targets, slopes))
    assert results[1].dtype == operand_dtype
    rounding = max(torch.finfo(operand_dtype).eps, 4e-6)
    assert_close([results[1].cpu().double()], [results[0]], rtol=rounding)


@pytest.mark.slow
@needs_kernels
def test_softcaps_keep_small_logits_exact():
    """tanh(y) is y for small y: 1 - e^(-2y) would lose the digits."""
    raw = torch.logspace(-6, 1, 64).repeat(2, 1)
    raw[1].neg_()
    from groupwise.policy.heads.kernels import TritonTiles

    device = torch.device(DEVICE)
    tiles = TritonTiles(LogitTransform(1.0, 3.0, 1.0), 1, torch.float32, torch.float32, device)
    expected = 3 * torch.tanh(raw.double().flatten() / 3)
    # One column per row: its logit is the target's and the maximum.
    statistics = RowStatistics.empty(128, False, torch.float32, device)
    targets = torch.zeros(128, dtype=torch.long, device=device)
    tiles.update_statistics(raw.view(128, 1).to(device), None, targets, statistics)
    for given_value in (statistics.max_N, statistics.target_logit_N):
        relative = (given_value.cpu().double() / expected - 1).abs().max()
        assert relative <= 6 * torch.finfo(torch.float32).eps
