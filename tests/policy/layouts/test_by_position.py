"""`packed` with attention that separates sequences by positions: flash and flex attention of transformers.

Flash attention needs a GPU: here its function for sequences of several lengths is plain attention, sequence
by sequence, with the arguments that it documents.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.architectures import RIGHT, build, completions, values_and_gradients
from support.batches import packed
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from groupwise.errors import ConfigError
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layout_choice import choose_layout
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import SamplerSettings


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """(tokens, heads, size) of sequences up to ``cu_seqlens``; a window counts keys before a query's."""
    assert causal and dropout_p == 0.0 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    per_head = q.shape[1] // k.shape[1]
    outputs = []
    for start, end in cu_seqlens_q.unfold(0, 2, 1).tolist():
        keys, values = (x[start:end].repeat_interleave(per_head, dim=1) for x in (k, v))
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (back >= 0) & (back <= (window_size[0] if window_size[0] >= 0 else end))
        scores = torch.einsum("thd,shd->hts", q[start:end], keys) * softmax_scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hts,shd->thd", weights, values))
    return torch.cat(outputs)


def dense_attention(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """(rows, tokens, heads, size) of rows without padding."""
    ends = torch.arange(q.shape[1], q.numel() + 1, q.shape[1]).int()[: len(q)]
    ends, flat = torch.nn.functional.pad(ends, (1, 0)), [x.flatten(0, 1) for x in (q, k, v)]
    lengths = (ends, ends, q.shape[1], q.shape[1])
    return varlen_attention(*flat, *lengths, dropout_p, softmax_scale, causal, window_size).view(q.shape)


@pytest.fixture
def flash_on_cpu(monkeypatch):
    ours = {
        "_flash_fn": dense_attention,
        "_flash_varlen_fn": varlen_attention,
        "_pad_fn": flash._pad_input,
        "_unpad_fn": flash._unpad_input,
    }
    names = ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn")
    functions = [ours.get(name) for name in names if hasattr(flash, name)]  # not in every version
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(flash, "_loaded_implementation", None)


def with_attention(name, implementation):
    model = build(*RIGHT[name])
    model.config._attn_implementation = implementation  # the setter asks for the package and the device
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "mistral_sliding", "olmo2"])
def test_flash_attention_gives_the_log_probs_and_gradients_of_padded_rows(name, flash_on_cpu, monkeypatch):
    class Unread:
        def __bool__(self):
            raise AssertionError("lengths are read back from the positions")

    monkeypatch.setattr(flash, "_is_packed_sequence", lambda *_, **__: Unread())
    batch = completions()
    expected = values_and_gradients(build(*RIGHT[name]), batch, compute_padded_logprobs)
    model = with_attention(name, "flash_attention_2")
    given = values_and_gradients(model, batch, packed(shared=False))
    # float32 with sums of up to 67 terms: 100 roundings of 6e-8
    torch.testing.assert_close(given[:2], expected[:2], atol=1e-5, rtol=0)
    scale = max(float(gradient.abs().max()) for gradient in expected[2])
    for ours, theirs in zip(given[2], expected[2], strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * scale


@pytest.fixture
def hub_kernel():
    """Register flash attention under the name of a kernel of the Hub, as transformers does after loading."""
    name = "kernels-community/flash-attn2"
    AttentionInterface.register(name, flash_attention_forward)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    yield name
    del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


def test_a_hub_kernel_for_flash_attention_is_packed(flash_on_cpu, hub_kernel):
    model, head, batch = with_attention("llama", hub_kernel), LogprobHead("chunked"), completions()
    computer = LogprobComputer(choose_layout("auto", model, group_size=4, with_aux_loss=False).choice, head)
    given = computer(model, batch, with_entropy=False).logps_BT
    assert computer.layout == "packed" and computer.checked
    expected = compute_padded_logprobs(build(*RIGHT["llama"]), batch, head, with_entropy=False).logps_BT
    assert ((given - expected) * batch.completion_mask_BT).abs().max() < 1e-5


def test_a_run_on_a_gpu_that_is_padded_warns_with_the_way_out():
    for on_gpu in (True, False):
        model = with_attention("llama", "eager")
        path = choose_layout("auto", model, group_size=1, with_aux_loss=False, on_gpu=on_gpu)
        assert path.choice == "padded" and path.warns is on_gpu
        assert "'eager'" in path.reason and "attn_implementation='sdpa', flash attention" in path.reason
        assert ("sequence_layout='padded' accepts" in path.reason) is on_gpu


def test_flash_attention_passes_the_check_of_the_first_use(flash_on_cpu):
    model, head = with_attention("llama", "flash_attention_2"), LogprobHead("chunked")
    computer = LogprobComputer("packed", head)
    scores = computer(model, completions(), with_entropy=False)
    assert computer.layout == "packed" and computer.checked
    alone = packed(shared=False)(model, completions(), head, with_entropy=False)
    assert torch.equal(scores.logps_BT, alone.logps_BT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral_sliding"])
def test_flex_attention_gives_the_log_probs_of_padded_rows(name, monkeypatch):
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)  # not compiled
    batch = replace(completions(), sampler=SamplerSettings(temperature=0.7))
    head = LogprobHead("chunked")
    with torch.no_grad():  # it has no backward on a CPU
        expected = compute_padded_logprobs(build(*RIGHT[name]), batch, head, with_entropy=True)
        model = with_attention(name, "flex_attention")
        given = packed(shared=False)(model, batch, head, with_entropy=True)
    for ours, theirs in ((given.logps_BT, expected.logps_BT), (given.entropy_BT, expected.entropy_BT)):
        gap = (ours - theirs) * batch.completion_mask_BT
        assert gap.abs().max() < 1e-5


@pytest.mark.parametrize(
    "implementation",
    [
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "flex_attention",
        "kernels-community/flash-attn2",  # flash_attention_2 without the package flash-attn
        "kernels-community/vllm-flash-attn3",
    ],
)
def test_flash_and_flex_attention_use_the_packed_layout(implementation):
    model = with_attention("llama", implementation)
    for wanted in ("auto", "packed"):
        assert choose_layout(wanted, model, group_size=4, with_aux_loss=False).choice == "packed"
    with pytest.raises(ConfigError, match=f"{implementation}.*sdpa"):
        choose_layout("shared_prefix", model, group_size=4, with_aux_loss=False)
    assert model.config._attn_implementation == implementation


def test_a_reference_without_packing_support_is_padded():
    model, head = with_attention("llama", "eager"), LogprobHead("chunked")
    for layout in ("packed", "shared_prefix"):
        scores = LogprobComputer(layout, head)(model, completions(), with_entropy=False)
        padded = compute_padded_logprobs(model, completions(), head, with_entropy=False)
        assert torch.equal(scores.logps_BT, padded.logps_BT)
