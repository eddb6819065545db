"""Layouts without padding: log-probs, entropies and gradients equal those of the padded layout.

Files: ``policy/logprobs.py``, ``policy/layout_choice.py``.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.architectures import (
    GEMMA2,
    RIGHT,
    SIZES,
    UNUSUAL,
    alone,
    build,
    completions,
    values_and_gradients,
)
from support.batches import packed
from support.runs import trainer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from groupwise.compat.transformers import supports_cache_in_checkpoints
from groupwise.errors import ConfigError
from groupwise.policy import attention
from groupwise.policy.attention import install_attention_hook
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layout_choice import choose_layout, unsupported
from groupwise.policy.layouts.packed import Block, compute_packed_logprobs, pack_sequences
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import SamplerSettings

REFUSED = {
    "mamba": (transformers.MambaConfig, {"state_size": 4}, "position_ids|attention layers"),
    "gpt_oss": (transformers.GptOssConfig, {"num_local_experts": 4}, "sinks"),
    "llama_eager": (
        transformers.LlamaConfig,
        {"attn_implementation": "eager"},
        "'eager'; load it with attn_implementation='sdpa'",
    ),
    "llama_dropout": (transformers.LlamaConfig, {"attention_dropout": 0.1}, "dropout"),
    "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    **({} if GEMMA2 else {"gemma2": (transformers.Gemma2Config, {}, "'eager'")}),
}


def assert_packed_equals_padded(model, batch, tolerance):
    assert unsupported(model) is None
    expected = values_and_gradients(model, batch, compute_padded_logprobs)
    for shared in (False, True):
        given = values_and_gradients(model, batch, packed(shared=shared))
        torch.testing.assert_close(given[:2], expected[:2], atol=tolerance, rtol=0)
        scale = max(float(gradient.abs().max()) for gradient in expected[2])
        for ours, theirs in zip(given[2], expected[2], strict=True):
            assert (ours - theirs).abs().max() < tolerance * scale


@pytest.mark.parametrize("name", [*RIGHT, *UNUSUAL])
def test_an_architecture_gives_its_own_log_probs_and_gradients(name):
    model = build(*{**RIGHT, **UNUSUAL}[name])
    if name in ("mixtral", "qwen3_moe", "phimoe_sliding"):
        model.eval()  # routers may add noise in training
    # float32 with sums of up to 67 terms: 100 roundings of 6e-8
    assert_packed_equals_padded(model, completions(), tolerance=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_would_be_wrong_is_refused(name):
    config_class, changes, reason = REFUSED[name]
    model = build(config_class, changes)
    with pytest.raises(ConfigError, match=reason):
        choose_layout("shared_prefix", model, group_size=4, with_aux_loss=False)
    # Prompts are computed once all the same, by passes over the cache of those that have one.
    forked = supports_cache_in_checkpoints() and name in ("gpt_oss", "llama_eager", "lfm2", "gemma2")
    otherwise = "forked" if forked else "padded"
    assert choose_layout("auto", model, group_size=4, with_aux_loss=False).choice == otherwise


def test_no_attention_is_advised_that_the_model_refuses(monkeypatch):
    model = build(*REFUSED["llama_eager"][:2])
    monkeypatch.setattr(type(model), "_supports_sdpa", False)
    assert unsupported(model) == "its attention implementation is 'eager'"


def test_gradient_checkpointing_recomputes_the_same():
    model = build(*RIGHT["llama"])
    batch = completions()
    assert unsupported(model) is None
    plain = values_and_gradients(model, batch, packed(shared=True))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = replace(batch, sampler=SamplerSettings(temperature=0.7))
    scores = packed(shared=True)(model, batch, LogprobHead("chunked"), with_entropy=True)
    mask = batch.completion_mask_BT
    values = scores.logps_BT * mask + 0.3 * scores.entropy_BT * mask
    (values * torch.linspace(0.5, 2.0, values.numel()).view_as(values)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(gradients, plain[2], atol=0, rtol=0)


def test_an_adapter_is_trained_the_same():
    model = get_peft_model(
        build(*RIGHT["qwen2"]),
        LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    assert_packed_equals_padded(model, completions(), tolerance=1e-5)


def test_bfloat16_stays_within_its_rounding():
    model = build(*RIGHT["llama"]).to(torch.bfloat16)
    exact = build(*RIGHT["llama"]).double()
    assert unsupported(model) is None
    batch, head = completions(), LogprobHead("chunked")
    mask = batch.completion_mask_BT
    with torch.no_grad():
        truth, padded = (
            compute_padded_logprobs(m, batch, head, with_entropy=False).logps_BT for m in (exact, model)
        )
        packed_logps = packed(shared=True)(model, batch, head, with_entropy=False).logps_BT
    error, allowed = ((logps - truth).abs() * mask for logps in (packed_logps, padded))
    assert error.mean() <= 1.5 * allowed.mean() + 1e-3


@pytest.mark.parametrize(
    "lengths", [((5, (6,) * 8),), ((3, (1,)), (4, (30, 2, 1))), ((12, (0, 0)), (1, (5, 5)))]
)
def test_any_mix_of_lengths(lengths):
    assert_packed_equals_padded(build(*RIGHT["mistral_sliding"]), completions(lengths), tolerance=1e-5)


def test_a_shared_prompt_is_computed_once():
    # groups (3; 4+1+7), (9; 2+0), (2; 3): 14 prompt and 17 completion tokens; packed repeats the prompts
    batch = completions()
    assert pack_sequences(batch, shared=True).token_ids_1S.numel() == 14 + 17
    assert pack_sequences(batch, shared=False).token_ids_1S.numel() == 3 * 3 + 9 * 2 + 2 + 17


def test_the_attention_hook_leaves_the_padded_layout_unchanged():
    model, batch = build(*RIGHT["gemma3"]), completions()
    before = compute_padded_logprobs(model, batch, LogprobHead("dense"), with_entropy=False).logps_BT
    assert install_attention_hook(model)
    after = compute_padded_logprobs(model, batch, LogprobHead("dense"), with_entropy=False).logps_BT
    assert torch.equal(before, after)


def test_auto_takes_the_layout_that_computes_least():
    model = build(*RIGHT["llama"])
    assert choose_layout("auto", model, group_size=4, with_aux_loss=False).choice == "shared_prefix"
    assert choose_layout("auto", model, group_size=1, with_aux_loss=False).choice == "packed"
    assert choose_layout("auto", model, group_size=4, with_aux_loss=True).choice == "padded"
    assert choose_layout("padded", model, group_size=4, with_aux_loss=False).choice == "padded"
    with pytest.raises(ConfigError, match="balancing loss"):
        choose_layout("packed", model, group_size=4, with_aux_loss=True)


def test_noise_on_embeddings_is_scaled_by_the_length_of_a_sequence(tmp_path):
    assert trainer(tmp_path).logprob_computer.layout == "shared_prefix"
    assert trainer(tmp_path, neftune_noise_alpha=5.0).logprob_computer.layout == "padded"


def test_the_first_use_check_finds_computation_across_packed_sequences(caplog):
    class Neighbours(torch.nn.Module):
        """Mixes in the previous token, which depends on the order of packed tokens."""

        def forward(self, hidden):
            return hidden + torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))

    model = build(*RIGHT["llama"])
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, Neighbours())
    assert unsupported(model) is None  # its configuration does not show it
    computer = LogprobComputer(
        "shared_prefix", LogprobHead("chunked"), other_layouts=("padded", "equal_length")
    )
    with caplog.at_level(logging.WARNING):
        scores = computer(model, completions(), with_entropy=False)
    assert computer.layout == "equal_length"  # in a padded row the first token follows padding
    assert "sequence_layout='shared_prefix' does not reproduce this model's log-probs" in caplog.text
    expected = alone(model, completions(), LogprobHead("dense"), with_entropy=False)
    mask_BT = completions().completion_mask_BT
    torch.testing.assert_close(scores.logps_BT * mask_BT, expected.logps_BT, atol=1e-5, rtol=0)


def test_the_first_use_check_finds_a_wrong_gradient():
    class Detached(torch.nn.Module):
        """Correct values without a gradient, but only for a long row, as a packed one."""

        def forward(self, hidden):
            return hidden.detach() if hidden.shape[1] > 64 else hidden

    model = build(*RIGHT["llama"])
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, Detached())
    computer = LogprobComputer("packed", LogprobHead("chunked"))
    computer(model, completions(), with_entropy=False)
    assert computer.layout == "padded"


def test_every_rank_falls_back_when_one_does():
    answers = iter([True, False])  # of "packed", of "padded"
    computer = LogprobComputer("packed", LogprobHead("chunked"), any_rank=lambda here: next(answers))
    computer(build(*RIGHT["llama"]), completions(), with_entropy=False)
    assert computer.layout == "padded"


def test_the_first_use_check_keeps_a_correct_layout_and_the_random_state():
    model = build(*RIGHT["llama"])
    assert choose_layout("auto", model, group_size=4, with_aux_loss=False).choice == "shared_prefix"
    computer = LogprobComputer("shared_prefix", LogprobHead("chunked"))
    state = torch.get_rng_state()
    with torch.no_grad():
        computer(model, completions(), with_entropy=False)
    assert computer.layout == "shared_prefix" and model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_keys_are_expanded_where_no_fused_kernel_takes_groups_of_heads(monkeypatch, autocast):
    """As on a GPU before Ampere or in float32, where math attention would hold all scores."""
    calls = []

    def remember(query, key, value, **settings):
        calls.append((key.shape[1], settings["enable_gqa"], query.dtype))
        return scaled_dot_product_attention(query, key, value, **settings)

    def run():
        torch.manual_seed(0)
        shapes = ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = attention.grouped_query_attention(*inputs, None)
            assert torch.equal(out, scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True))
        return [out.float(), *torch.autograd.grad(out.square().sum(), inputs)]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", remember)
    dtype = torch.bfloat16 if autocast else torch.float32
    grouped = run()
    with sdpa_kernel(SDPBackend.MATH):  # the choice where no other kernel takes groups
        run()
    monkeypatch.setattr(attention, "has_fused_gqa", lambda query, *_: query.dtype is not dtype)
    expanded = run()
    assert calls == [(2, True, dtype), (4, False, dtype), (4, False, dtype)]
    for ours, theirs in zip(expanded, grouped, strict=True):
        rounding = 2**-6 if autocast else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


@pytest.mark.representative("packed gradients on threads")
@pytest.mark.slow
def test_gradients_do_not_depend_on_the_order_of_threads():
    """Two threads add the gradients of 64 completions to the last token of their prompt."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "hidden_size": 512, "head_dim": 128, "num_hidden_layers": 1})
    ).train()
    batch = completions([(4, (3,) * 64)])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = []
        for _ in range(20):
            model.zero_grad()
            output = packed(shared=True)(model, batch, LogprobHead(), with_entropy=True)
            weights = torch.arange(1.0, output.logps_BT.numel() + 1).sin().view_as(output.logps_BT)
            (output.logps_BT * weights + output.entropy_BT).sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients[1:])


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_share_one_mask_that_lives_as_long_as_their_activations(monkeypatch, autocast):
    """A mask has H / J · Q x K values: one per layer would grow with the square of the tokens."""
    model, made, make = build(*RIGHT["llama"]), [], Block.mask
    sequences = pack_sequences(completions(), shared=True)
    blocks, dtype = sequences.attention.blocks, torch.bfloat16 if autocast else torch.float32
    masked = [block for block in blocks if make(block, None, 1, dtype) is not None]
    assert install_attention_hook(model) and model.config.num_hidden_layers > 1 and masked

    def remember(block, *kind):
        mask = make(block, *kind)
        made.extend([mask.dtype] if mask is not None else [])
        return mask

    monkeypatch.setattr(Block, "mask", remember)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = compute_packed_logprobs(model, completions(), sequences, LogprobHead(), with_entropy=False)
    assert made == [dtype] * len(masked)
    output.logps_BT.sum().backward()
    assert not sequences.attention._masks  # freed, although a micro-batch is kept to repeat its window
