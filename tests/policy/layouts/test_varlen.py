"""Packed attention through a varlen kernel, for which a scalar reference with its signature stands in.

Files: ``policy/layouts/varlen.py``.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from support.batches import micro_batch
from support.runs import trainer
from test_packed import RIGHT, build, completions, values_and_gradients

from groupwise.compat import torch as compat_torch
from groupwise.policy.attention import install_attention_hook
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layout_choice import make_logprob_computer
from groupwise.policy.layouts import packed, varlen
from groupwise.policy.layouts.packed import HALF_PRECISION, compute_packed_logprobs, pack_sequences
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.layouts.varlen import reason_against_varlen
from groupwise.policy.logprobs import LogprobComputer

HEAD = LogprobHead("chunked")


def reference(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    scale=None, window_size=(-1, -1), enable_gqa=False, shift=0,
):  # fmt: skip
    """``torch.nn.attention.varlen.varlen_attn`` by query and head, causal from the lower right."""
    assert query.dtype == key.dtype == value.dtype and query.dim() == key.dim() == 3
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q[-1] == len(query)
    assert cu_seq_k[-1] == len(key) == len(value) and window_size[1] == 0
    lengths_q, lengths_k = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (max_q, max_k) and min(lengths_q) > 0
    per_head = query.shape[1] // key.shape[1]
    assert enable_gqa == (per_head > 1)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    outputs = []
    for row, (num_q, num_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        keys = slice(int(cu_seq_k[row]), int(cu_seq_k[row]) + num_k)
        for index in range(num_q):
            last = index + num_k - num_q + shift  # aligned at the lower right
            first = 0 if window_size[0] < 0 else max(last - window_size[0], 0)
            q = query[int(cu_seq_q[row]) + index]
            heads = []
            for head in range(query.shape[1]):
                k, v = (x[keys, head // per_head][first : last + 1] for x in (key, value))
                heads.append(((k @ q[head]).float() * scale).softmax(0).to(v.dtype) @ v)
            outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def broken(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def wrong(*arguments, **settings):
    """Aligned one key too early."""
    return reference(*arguments, **settings, shift=-1)


@pytest.fixture
def with_kernel(monkeypatch):
    """Use a stand-in for the kernel, in every precision."""

    def use(kernel):
        monkeypatch.setattr(varlen, "varlen_attention", lambda: kernel)
        monkeypatch.setattr(packed, "HALF_PRECISION", (torch.float32, torch.bfloat16))

    return use


def in_kernel(shared):
    def compute(model, batch, head, *, with_entropy):
        sequences = pack_sequences(batch, shared=shared, varlen=True)
        return compute_packed_logprobs(model, batch, sequences, head, with_entropy=with_entropy)

    return compute


def test_the_reference_has_the_signature_of_the_kernel():
    kernel = compat_torch.varlen_attention()
    if kernel is None:
        pytest.skip("torch is older than 2.13")
    theirs, ours = (inspect.signature(function).parameters for function in (kernel, reference))
    assert [*theirs][:7] == [*ours][:7]
    for name in ("scale", "window_size", "enable_gqa"):
        assert (theirs[name].kind, theirs[name].default) == (ours[name].kind, ours[name].default)


def test_keys_are_those_of_the_prompt_and_the_row():
    # The example of the module: a prompt of 3 tokens, completions of 2, 3 and none.
    rows = [(range(3), range(8, 8)), (range(3), range(5, 8)), (range(3), range(3, 5)), (range(0), range(3))]
    keys, ends, longest = varlen.varlen_rows(rows, torch.device("cpu")).args
    assert keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert ends.tolist() == [[0, 3, 5, 8], [0, 3, 8, 14]] and longest == [3, 6]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "mistral_sliding", "qwen3", "gemma3"])
def test_log_probs_and_gradients_are_those_of_the_padded_layout(name, shared, with_kernel):
    with_kernel(reference)
    model, batch = build(*RIGHT[name]), completions()
    assert install_attention_hook(model)
    expected = values_and_gradients(model, batch, compute_padded_logprobs)
    given = values_and_gradients(model, batch, in_kernel(shared))
    torch.testing.assert_close(given[:2], expected[:2], atol=2e-5, rtol=0)
    torch.testing.assert_close(given[2], expected[2], atol=2e-5, rtol=1e-4)


def test_autocast_and_models_of_another_precision(with_kernel, monkeypatch):
    """A norm after the projections leaves float32 queries beside bfloat16 values; float32 takes blocks."""
    with_kernel(reference)
    monkeypatch.setattr(packed, "HALF_PRECISION", HALF_PRECISION)
    model, batch = build(*RIGHT["qwen3"]), completions()
    assert install_attention_hook(model)
    mask_BT = batch.completion_mask_BT
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        half = in_kernel(True)(model, batch, HEAD, with_entropy=False).logps_BT
    with_kernel(broken)
    monkeypatch.setattr(packed, "HALF_PRECISION", HALF_PRECISION)
    exact = in_kernel(True)(model, batch, HEAD, with_entropy=False).logps_BT
    assert 0 < ((half - exact) * mask_BT).abs().max() < 0.05


def test_a_kernel_that_passes_the_check_is_used(with_kernel):
    with_kernel(reference)
    computer = LogprobComputer("shared_prefix", HEAD, varlen=True)
    computer(build(*RIGHT["mistral_sliding"]), completions(), with_entropy=False)
    assert computer.varlen and computer.layout == "shared_prefix"


@pytest.mark.parametrize(("kernel", "reason"), [(broken, "no kernel image"), (wrong, "mean error in nats")])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_kernel_that_fails_the_check_leaves_blocks(kernel, reason, explicit, with_kernel, caplog):
    with_kernel(kernel)
    model, batch = build(*RIGHT["llama"]), completions()
    computer = LogprobComputer(
        "shared_prefix", HEAD, varlen=True, other_layouts=() if explicit else ("padded",)
    )
    given = micro_batch(
        batch.prompt_ids_BL, batch.prompt_mask_BL, batch.completion_ids_BT, batch.completion_mask_BT,
        token_weights_BT=batch.completion_mask_BT, sequence_weight_B1=batch.completion_mask_BT[:, :1],
        advantages_BX=batch.completion_mask_BT[:, :1],
    )  # fmt: skip
    computer.check(model, given)
    prepared = computer.prepare(given)
    scores = computer(model, prepared, with_entropy=False)
    assert computer.layout == "shared_prefix" and not computer.varlen and not computer.fell_back
    (path,) = computer.paths[2:]
    assert (path.choice, path.warns) == ("blocks", True) and reason in path.reason
    assert "attention is computed in blocks" in caplog.text
    blocks = LogprobComputer("shared_prefix", HEAD)(model, batch, with_entropy=False)
    assert torch.equal(scores.logps_BT, blocks.logps_BT)


def test_the_reasons_against_the_kernel(monkeypatch):
    gpu, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(varlen, "varlen_attention", lambda: reference)
    assert reason_against_varlen(gpu, half) == ""
    assert reason_against_varlen(gpu, torch.float32) == "flash attention has no float32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "Ampere" in reason_against_varlen(gpu, half)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attention", lambda: None)
    assert "torch 2.13" in reason_against_varlen(gpu, half)


def test_a_run_on_a_gpu_has_the_kernel_among_its_fast_paths(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    assert not run.logprob_computer.varlen and len(run.logprob_computer.paths) == 2  # on a CPU
    monkeypatch.setattr(type(run.accelerator), "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(varlen, "varlen_attention", lambda: reference)
    for dtype, text in (
        (torch.bfloat16, "varlen"),
        (torch.float32, "blocks (flash attention has no float32)"),
    ):
        run.model.to(dtype)
        computer = make_logprob_computer(run.model, run.args, run.accelerator)
        assert [str(path) for path in computer.paths[2:]] == [f"attention: {text}"]
        assert computer.varlen == (text == "varlen")
    assert pack_sequences(completions(), shared=True).attention.varlen is None
