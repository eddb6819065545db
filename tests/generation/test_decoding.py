"""Decoding of groups against transformers' own ``generate`` and against exact probabilities.

Files: ``cpu/multinomial.py``, ``generation/growing_cache.py``, ``generation/settings.py``,
``generation/transformers_backend.py``.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from support.architectures import VISION, build_vision, completions_of_images
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DogeConfig,
    DogeForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    cache_utils,
)
from transformers.cache_utils import DynamicLayer

from groupwise.compat.torch import has_onednn_linear
from groupwise.core.padding import length_mask, pad_sequences
from groupwise.cpu.linear import replace_linears
from groupwise.cpu.multinomial import NO_TOKEN, unchecked_multinomial
from groupwise.errors import BackendError
from groupwise.generation import decoding
from groupwise.generation.decoding import OneQueryAttention, decode_groups, group_prompts, sample_tokens
from groupwise.generation.growing_cache import GrowingLayer, continue_rows
from groupwise.generation.settings import decoding_path
from groupwise.generation.transformers_backend import TransformersBackend
from groupwise.records import ImageInputs, SamplingOptions
from groupwise.records.fast_paths import FastPath

SIZE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**SIZE, "num_key_value_heads": 2, "head_dim": 8}
SLIDING = {**GROUPED, "sliding_window": 5}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, SIZE),
    "doge_mask_of_its_own": (DogeForCausalLM, DogeConfig, {**GROUPED, "keep_window_size": 4}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, SLIDING),
    "gemma2_sliding": (Gemma2ForCausalLM, Gemma2Config, SLIDING),
    "gemma3_sliding": (Gemma3ForCausalLM, Gemma3TextConfig, SLIDING),
}
if hasattr(cache_utils, "LinearAttentionLayer"):  # not in 5.3: such models have caches of their own there
    MODELS |= {
        # States of convolutions and recurrences beside keys and values, in other layers or in the same.
        "qwen3_5": (
            Qwen3_5ForCausalLM,
            Qwen3_5TextConfig,
            {**GROUPED, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
            | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
            | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        ),
        "falcon_h1": (
            FalconH1ForCausalLM,
            FalconH1Config,
            {**GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
        ),
        "lfm2": (Lfm2ForCausalLM, Lfm2Config, {**GROUPED, "layer_types": ["conv", "full_attention", "conv"]}),
        "jamba": (
            JambaForCausalLM,
            JambaConfig,
            {**SIZE, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
            | {"mamba_d_state": 4, "num_key_value_heads": 2},
        ),
    }
WITHOUT_ROWS = {
    "openai_gpt": (OpenAIGPTLMHeadModel, OpenAIGPTConfig, {**SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mamba": (MambaForCausalLM, MambaConfig, {**SIZE, "state_size": 4}),
}
#: Three groups of unequal prompts, one of them a single row.
PROMPTS = [[5, 6, 7]] * 3 + [[11, 12, 13, 14, 15, 16, 17, 18]] + [[20]] * 4
ENDS = [3, 8, 9, 10, 21, 22]


def tiny(name: str, seed: int = 0):
    """A model whose weights are large enough for greedy completions to differ and end at different places."""
    model_class, config_class, changes = {**MODELS, **WITHOUT_ROWS}[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


def settings(**changes) -> GenerationConfig:
    defaults = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": ENDS}
    return GenerationConfig(**{**defaults, "use_cache": True, **changes})


def by_generate(model, prompts, config, monkeypatch):
    """Completions from transformers' own loop on every row."""
    path = FastPath("decoding", "transformers", "the test compares both loops")
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.generation.transformers_backend.decoding_path", lambda *_: path)
        return TransformersBackend(lambda: model, config).generate(prompts)


def by_groups(model, prompts, config):
    assert not decoding_path(model, config).reason
    return TransformersBackend(lambda: model, config).generate(prompts)


def forward_shapes(model) -> list[tuple[int, int]]:
    """Filled with (rows, new tokens) of every forward from now on."""
    shapes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_greedy_completions_are_those_of_generate(name, seed, monkeypatch):
    model = tiny(name, seed)
    expected = by_generate(model, PROMPTS, settings(), monkeypatch)
    assert by_groups(model, PROMPTS, settings()) == expected


@pytest.mark.slow
def test_compared_completions_have_different_lengths():
    """The comparison above covers rows that end early, rows that reach the limit, and different texts."""
    lengths = {len(row.token_ids) for name in MODELS for row in by_groups(tiny(name), PROMPTS, settings())}
    assert len(lengths) >= 6 and 24 in lengths


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 3.0},
        {"min_new_tokens": 9},
        {"bad_words_ids": [[7, 35], [17, 36]]},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [17, 18], "forced_eos_token_id": 3},
        {"exponential_decay_length_penalty": (2, 1.5)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_processors_see_the_rows_that_they_see_in_generate(changes, monkeypatch):
    model, config = tiny("llama"), settings(**changes)
    expected = by_generate(model, PROMPTS, config, monkeypatch)
    assert by_groups(model, PROMPTS, config) == expected
    assert expected != by_generate(model, PROMPTS, settings(), monkeypatch)  # the setting matters here


def markov_model(logits_VV: torch.Tensor):
    """A Llama whose next-token logits are a row of the table, whatever came before."""
    size = len(logits_VV)
    shape = {**GROUPED, "vocab_size": size, "hidden_size": size, "num_hidden_layers": 1, "rms_norm_eps": 0.0}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(logits_VV.T / size**0.5)  # the norm makes unit vectors that long
    return model


def test_sampled_frequencies_are_the_exact_probabilities():
    """Chains over 4 tokens of which token 3 ends: each completion of at most 3 tokens has its probability."""
    torch.manual_seed(0)
    logits = torch.randn(8, 8, dtype=torch.float64)
    logits[:, 4:] = -30.0
    probabilities = (logits / 0.7).softmax(-1)
    config = settings(max_new_tokens=3, do_sample=True, temperature=0.7, top_k=0, eos_token_id=3)
    rows = 20000
    sampled = by_groups(markov_model(logits.float()), [[1]] * rows + [[0, 2]] * rows, config)
    for start, completions in ((1, sampled[:rows]), (2, sampled[rows:])):
        expected: dict[tuple[int, ...], float] = {}
        frontier = [((), start, 1.0)]
        while frontier:
            tokens, last, chance = frontier.pop()
            if len(tokens) == 3 or (tokens and last == 3):
                expected[tokens] = chance
                continue
            frontier += [((*tokens, t), t, chance * probabilities[last, t].item()) for t in range(4)]
        counts = dict.fromkeys(expected, 0)
        for completion in completions:
            counts[tuple(completion.token_ids)] += 1
        cells = [(counts[tokens], rows * chance) for tokens, chance in expected.items() if rows * chance >= 5]
        chi_square = sum((seen - mean) ** 2 / mean for seen, mean in cells)
        freedom = len(cells) - 1
        # Wilson and Hilferty: (chi² / df)^(1/3) is nearly normal; 4 standard deviations.
        bound = freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert freedom > 10 and chi_square < bound


@pytest.mark.parametrize("size", [768, 771])
def test_tokens_are_drawn_from_every_block_with_their_probabilities(size):
    """768 tokens are three blocks, 771 have no common divisor with the size of a block."""
    torch.manual_seed(0)
    logits = torch.full((size,), -torch.inf)
    likely = torch.tensor([0, 3, 255, 256, 300, 511, 512, 700, 767])
    logits[likely] = torch.randn(len(likely))
    draws = 20000
    counts = sample_tokens(logits.expand(draws, size), do_sample=True).bincount(minlength=size)
    assert counts[likely].sum() == draws
    means = draws * logits.double().softmax(-1)[likely]
    chi_square = ((counts[likely] - means) ** 2 / means).sum()
    freedom = len(likely) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert means.min() >= 5 and chi_square < bound


@pytest.mark.skipif(not has_onednn_linear(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_logits_raise_a_backend_error(value):
    scores = torch.zeros(2, 600)
    scores[1, 3] = value
    with pytest.raises(BackendError, match="logits are NaN or infinite"):
        sample_tokens(scores, True)


def test_sampling_on_an_accelerator_draws_as_torch_does_and_reports_nan_once(monkeypatch):
    probabilities = torch.randn(64, 500).softmax(-1)
    probabilities[:, ::3] = 0
    expected = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(3)).squeeze(1)
    probabilities[7, 2] = torch.nan
    tokens = unchecked_multinomial(probabilities, torch.Generator().manual_seed(3))
    assert tokens[7] == NO_TOKEN
    assert torch.equal(tokens.where(torch.arange(64) != 7, expected), expected)
    monkeypatch.setattr(decoding, "multinomial", unchecked_multinomial)
    model = tiny("llama")
    config = settings(do_sample=True, max_new_tokens=4)
    assert [len(completion.token_ids) for completion in by_groups(model, PROMPTS, config)]
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(BackendError, match="logits are NaN or infinite"):
        by_groups(model, PROMPTS, config)


@pytest.mark.parametrize("stock", [False, True])
def test_completions_of_rows_with_seeds_do_not_depend_on_their_batch(stock):
    backend = TransformersBackend(lambda: model, settings(do_sample=True))
    model, backend.stock_decoding, backend.generator = tiny("llama"), stock, torch.Generator()
    with torch.no_grad():
        model.lm_head.weight.div_(5)  # else nearly every token is certain

    def sampled(rows):
        seeds = [100 + row for row in rows]
        completions = backend.generate([PROMPTS[row] for row in rows], SamplingOptions(seeds=seeds))
        return [completion.token_ids for completion in completions]

    whole = sampled(range(len(PROMPTS)))
    assert len({tuple(ids) for ids in whole}) == len(PROMPTS)
    assert sampled(range(5)) + sampled(range(5, len(PROMPTS))) == whole  # of two ranks
    assert sampled([6, 0, 3]) == [whole[6], whole[0], whole[3]]


def test_weights_are_packed_again_in_every_generation():
    changes = {**GROUPED, "vocab_size": 128, "hidden_size": 128, "head_dim": 64, "intermediate_size": 128}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**changes, tie_word_embeddings=False)).eval()
    plain = copy.deepcopy(model)
    replace_linears(model)
    packed: list[bool] = []
    model.lm_head.register_forward_hook(lambda layer, *_: packed.append(layer.packing.weight_OI.is_mkldnn))
    config = settings(max_new_tokens=8, eos_token_id=None)
    for _ in range(2):
        assert by_groups(model, PROMPTS, config) == by_groups(plain, PROMPTS, config)
        assert packed == [False] * 3 + [True] * 5
        packed.clear()
        with torch.no_grad():
            for each in (model, plain):
                each.lm_head.weight.copy_(each.lm_head.weight.roll(1, 0))


def test_a_prompt_is_read_once_for_its_group():
    model = tiny("llama")
    shapes = forward_shapes(model)
    by_groups(model, PROMPTS, settings(max_new_tokens=2, eos_token_id=None))
    assert shapes == [(3, 8), (8, 1)]  # three distinct prompts, the longest of 8 tokens; then eight rows


def test_rows_that_ended_leave_the_batch():
    model = tiny("llama", 1)
    shapes = forward_shapes(model)
    lengths = [len(row.token_ids) for row in by_groups(model, PROMPTS, settings())]
    assert lengths == [1, 1, 1, 3, 5, 5, 5, 5]
    # Three of eight leave after the first token; of five, one is less than a quarter and stays to the end.
    assert shapes == [(3, 8), *[(5, 1)] * 4]


def test_sequences_are_padded_like_those_of_generate():
    model, config = tiny("llama", 1), settings()
    first, copies = group_prompts(PROMPTS)
    distinct = [PROMPTS[row] for row in first]
    loop = partial(decode_groups, copies=copies)
    found, expected = (
        model.generate(
            pad_sequences(prompts, 0, left=True),
            attention_mask=length_mask([len(prompt) for prompt in prompts], 8, left=True),
            generation_config=config,
            custom_generate=custom_generate,
        )
        for prompts, custom_generate in ((distinct, loop), (PROMPTS, None))
    )
    assert torch.equal(found, expected)


def test_everything_stops_when_all_rows_end_at_once(monkeypatch):
    model = tiny("llama")
    config = settings(forced_bos_token_id=3, eos_token_id=list(range(40)))
    shapes = forward_shapes(model)
    rows = by_groups(model, PROMPTS, config)
    assert [len(row.token_ids) for row in rows] == [1] * len(PROMPTS)
    assert shapes == [(3, 8)]
    assert rows == by_generate(model, PROMPTS, config, monkeypatch)


def test_one_group_without_padding(monkeypatch):
    model, prompts = tiny("llama", 2), [[9, 8, 7, 6]] * 5
    assert by_groups(model, prompts, settings()) == by_generate(model, prompts, settings(), monkeypatch)


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_models_without_a_cache_of_rows_use_the_loop_of_generate(name, monkeypatch):
    model = tiny(name)
    assert decoding_path(model, settings()).reason
    rows = TransformersBackend(lambda: model, settings()).generate(PROMPTS)
    assert rows == by_generate(model, PROMPTS, settings(), monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
        {"guidance_scale": 2.0},
        {"num_return_sequences": 2, "do_sample": True},
        {"encoder_repetition_penalty": 2.0},
        {"return_dict_in_generate": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_beyond_single_rows_use_the_loop_of_generate(changes):
    model = tiny("llama")
    assert decoding_path(model, settings(**changes)).reason
    model.generation_config = GenerationConfig(**changes)  # generate takes what is unset from here
    assert decoding_path(model, settings(use_cache=None)).reason


@pytest.mark.parametrize("name", ["generate", "_get_logits_processor", "_get_stopping_criteria"])
def test_an_overridden_generate_is_used(name):
    model = tiny("llama")
    assert not decoding_path(model, settings()).reason
    setattr(model, name, partial(getattr(LlamaForCausalLM, name), model))
    assert decoding_path(model, settings()).reason


def test_stateful_models_use_the_loop_of_generate(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(model, "_is_stateful", True)
    assert decoding_path(model, settings()).reason


def test_ranks_that_share_parameters_use_the_loop_of_generate(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr("groupwise.distributed.is_fsdp_managed_module", lambda _: True)
    monkeypatch.setattr("groupwise.generation.transformers_backend.decode_groups", None)  # would fail
    rows = TransformersBackend(lambda: model, settings()).generate(PROMPTS)
    assert rows == by_generate(model, PROMPTS, settings(), monkeypatch)


def test_weights_are_cast_once_for_all_forwards_under_autocast():
    """A forward that enters autocast itself, as under accelerate: one cast of a weight, not one per token."""
    model, config = tiny("llama"), settings(max_new_tokens=6, eos_token_id=None)
    plain = model.forward
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(plain)
    seen: list[int] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0] is model.lm_head.weight:
                seen.append(1)
            return func(*args, **(kwargs or {}))

    with Casts():
        by_groups(model, PROMPTS, config)
    assert len(seen) == 1


def test_the_cache_is_written_in_place_until_it_is_full():
    torch.manual_seed(0)
    reference = DynamicLayer()
    start = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6)
    rows = torch.tensor([0, 0, 1])
    reference.update(start[0][rows], start[1][rows])
    cache = DynamicCache()
    cache.update(*start, 0)
    continue_rows(cache, rows, 1000)
    growing = cache.layers[0]
    places = set()
    for step in range(80):
        new = torch.randn(len(growing.keys), 3, 1, 5), torch.randn(len(growing.keys), 3, 1, 6)
        for mine, theirs in zip(growing.update(*new), reference.update(*new), strict=True):
            assert torch.equal(mine, theirs)
        if step == 40:
            for each in (growing, reference):
                each.batch_select_indices(torch.tensor([0, 2]))
        assert growing.get_seq_length() == reference.get_seq_length() == 5 + step
        places.add(growing.keys.data_ptr())
    assert len(places) <= 5  # of 80 steps: at first, when rows left, and when the room was used up


def test_the_cache_is_stored_in_the_dtype_of_new_values():
    """Under autocast keys and the prompt are float32; attention would cast them all for every token."""
    torch.manual_seed(0)
    filled, start = DynamicLayer(), (torch.randn(3, 3, 4, 5), torch.randn(3, 3, 4, 6))
    filled.update(*start)
    growing = GrowingLayer(filled, limit=1000)
    expected = [states.bfloat16() for states in start]
    for _ in range(40):
        keys, values = torch.randn(3, 3, 1, 5), torch.randn(3, 3, 1, 6).bfloat16()
        expected = [
            torch.cat([old, new.bfloat16()], dim=2) for old, new in zip(expected, (keys, values), strict=True)
        ]
        for mine, theirs in zip(growing.update(keys, values), expected, strict=True):
            assert mine.dtype == torch.bfloat16 and torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_attention_of_one_query_is_no_further_from_the_truth(autocast, masked, dtype):
    torch.manual_seed(0)
    query, key, value = (3 * torch.randn(4, heads, n, 16) for heads, n in ((6, 1), (2, 90), (2, 90)))
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = torch.rand(4, 1, 1, 90) < 0.7 if masked else None
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = OneQueryAttention(mask)(query, key, value, None, None)

    def fused(dtype):
        operands = [states.to(dtype) for states in (query, key, value)]
        return scaled_dot_product_attention(*operands, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    truth = fused(torch.float64)
    assert out.dtype == dtype and out.shape == truth.shape
    error, budget = ((each - truth).square().mean().sqrt() for each in (out, fused(dtype)))
    assert error <= 1.02 * budget


def test_a_window_hides_older_positions():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :7] = False
    windowed = mask.clone()
    windowed[..., :5] = False
    expected = OneQueryAttention(windowed)(query, key, value, None, None)
    torch.testing.assert_close(OneQueryAttention(mask)(query, key, value, None, 4), expected)
    scores = torch.einsum("bhd,bhsd->bhs", query[:, :, 0], key.repeat_interleave(2, 1)) / 8**0.5
    weights = scores.masked_fill(~windowed[:, 0], -torch.inf).softmax(-1)
    by_hand = torch.einsum("bhs,bhsd->bhd", weights, value.repeat_interleave(2, 1))[:, None]
    torch.testing.assert_close(expected, by_hand)


@pytest.mark.parametrize("name", VISION)
def test_images_are_computed_once_per_group_and_decoded_as_generate_does(name):
    model, batch = build_vision(name).eval(), completions_of_images(name)
    pairs = zip(batch.prompt_ids_BL, batch.prompt_mask_BL.bool(), strict=True)
    prompts = [ids[mask].tolist() for ids, mask in pairs]
    config = settings(max_new_tokens=12, do_sample=False, eos_token_id=list(range(5, 30)))
    path = decoding_path(model, config)
    if "makes no DynamicCache" in path.reason:  # Qwen3.5 before transformers 5.19
        pytest.skip(path.reason)
    stock, own = (TransformersBackend(lambda: model, config) for _ in range(2))
    stock.stock_decoding = True
    seen = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    images = SamplingOptions(images=list(batch.images))
    completions = own.generate(prompts, images)
    assert path.choice == "own loop" and seen[0][0] == 4 and seen[1][1] == 1
    leave = sum(len(completion.token_ids) < 12 for completion in completions) >= 3  # of nine rows
    assert min(rows for rows, _ in seen[1:]) < (9 if leave else 10)
    assert completions == stock.generate(prompts, images)


def test_neighbouring_equal_prompts_are_one_group():
    assert group_prompts([[1], [1], [2, 3], [1]]) == ([0, 2, 3], [2, 1, 1])
    red, blue = (ImageInputs({"pixel_values": torch.tensor([color])}) for color in (1.0, 2.0))
    again = ImageInputs({"pixel_values": torch.tensor([1.0])})
    assert group_prompts([[1]] * 4, [red, again, blue, ImageInputs()]) == ([0, 2, 3], [2, 1, 1])


@pytest.mark.real_model
def test_greedy_completions_of_a_real_model(smollm2_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    texts = ["The capital of France is", "2 + 3 =", "Name three colours of the rainbow, in one short line:"]
    prompts = [tokenizer(text)["input_ids"] for text in texts for _ in range(2)]
    full_stop = tokenizer(".")["input_ids"][-1]
    config = settings(max_new_tokens=16, eos_token_id=[2, full_stop], pad_token_id=0)
    expected = by_generate(model, prompts, config, monkeypatch)
    assert by_groups(model, prompts, config) == expected
    assert len({len(row.token_ids) for row in expected}) > 1
