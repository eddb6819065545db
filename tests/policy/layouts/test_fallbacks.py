"""Models for which a fast layout, the chunked head or padding is wrong: a run takes what is right.

Each was trained with other log-probs than the model's own before the rows alone were the reference.

Files: ``policy/layouts/check.py``, ``policy/logprobs.py``, ``policy/layout_choice.py``.
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.architectures import (
    IMAGE,
    RIGHT,
    SIZES,
    TOWER,
    _build,
    alone,
    build,
    completions,
    values_and_gradients,
)
from support.configs import config_of
from support.runs import trainer
from torch.nn.functional import scaled_dot_product_attention

from groupwise.compat.transformers import supports_cache_in_checkpoints
from groupwise.errors import ConfigError
from groupwise.policy import attention
from groupwise.policy.attention import install_attention_hook
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.introspection import base_model
from groupwise.policy.layout_choice import _length_that_matters, choose_layout, next_layouts
from groupwise.policy.layouts.check import choose_way
from groupwise.policy.layouts.padded import compute_equal_lengths, compute_padded_logprobs
from groupwise.policy.loading import prepare_policy
from groupwise.policy.logprobs import LogprobComputer

#: Before transformers 5.19, whose caches several tokens continue, models take other ways.
pytestmark = pytest.mark.skipif(not supports_cache_in_checkpoints(), reason="transformers before 5.19")

ROPE_SWITCH = 40  # tokens
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": ROPE_SWITCH}
LONG = completions(((12, (20, 9)), (40, (6, 12)), (3, (30,))))


def computer_of(model, longer=0):
    """As a run builds it with the default settings."""
    path = choose_layout("auto", model, group_size=4, with_aux_loss=False)
    if path.choice in ("packed", "shared_prefix"):
        install_attention_hook(base_model(model))
    others = next_layouts(path.choice, model, group_size=4, one_forward="", whole=False)
    head = LogprobHead("chunked")
    return LogprobComputer(
        path.choice, head, other_layouts=others, other_heads=("dense",), longer=lambda prompt: longer
    )


class ScaledHead(torch.nn.Linear):
    """A head with a forward of its own, and a scale that is trained."""

    def __init__(self, head):
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight, self.logit_scale = head.weight, torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden):
        return super().forward(hidden) * self.logit_scale


class NormalizedHead(torch.nn.Linear):
    def __init__(self, head):
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight = head.weight

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, torch.nn.functional.normalize(self.weight))


def with_head(kind):
    model = build(transformers.LlamaConfig, {"tie_word_embeddings": False})
    model.lm_head = kind(model.lm_head)
    return model


def with_hook_on_the_head():
    model = build(*RIGHT["llama"])
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 2)
    return model


def with_scale_per_token():
    """The model scales the states of every token before its head, which is inside its forward."""
    model = build(transformers.LlamaConfig, {"tie_word_embeddings": False})
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * args[0][..., :1].exp(),))
    return model


CASES = {
    # name: model, layout and head that are right, number of tokens that matters
    "head with a scale": (lambda: with_head(ScaledHead), "shared_prefix", "dense", 0),
    "head that normalizes": (lambda: with_head(NormalizedHead), "shared_prefix", "dense", 0),
    "hook on the head": (with_hook_on_the_head, "shared_prefix", "dense", 0),
    "hook before the head": (with_scale_per_token, "shared_prefix", "chunked", 0),
    "rwkv": (
        lambda: build(transformers.RwkvConfig, {"attention_hidden_size": 32, "num_hidden_layers": 2}),
        *("equal_length", "chunked", 0),
    ),
    "doge": (lambda: build(transformers.DogeConfig, {}), "forked", "chunked", 0),
    "llama 4 with a floor scale": (
        lambda: build(
            transformers.Llama4TextConfig,
            {
                **{"floor_scale": 8, "attn_scale": 2.0, "no_rope_layers": [1, 0, 0]},
                **{"num_local_experts": 2, "intermediate_size_mlp": 48},
            },
        ),
        *("forked", "chunked", 0),
    ),
    "blenderbot": (
        lambda: build(
            transformers.BlenderbotConfig,
            {
                **{"d_model": 32, "is_decoder": True, "is_encoder_decoder": False},
                **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
            },
        ),
        *("forked", "chunked", 0),
    ),
    "nemotron": (lambda: build(transformers.NemotronConfig, {}), "forked", "chunked", 0),
    "recurrent_gemma": (
        lambda: build(transformers.RecurrentGemmaConfig, {"lru_width": 32, "attention_window_size": 8}),
        *("equal_length", "dense", 0),
    ),
    "longrope": (
        lambda: build(
            transformers.Phi3Config,
            {
                **{"sliding_window": None, "original_max_position_embeddings": ROPE_SWITCH},
                "max_position_embeddings": 128,
                "rope_parameters": ROPE
                | {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                    "factor": 3.2,
                },
            },
        ),
        *("equal_length", "chunked", ROPE_SWITCH),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_run_takes_what_computes_the_model(name):
    make, layout, head, longer = CASES[name]
    model = make().eval()
    batch = LONG if longer else completions()
    expected = values_and_gradients(copy.deepcopy(model), batch, alone)
    computer = computer_of(model, longer)
    given = values_and_gradients(model, batch, lambda m, rows, _, **kwargs: computer(m, rows, **kwargs))
    assert (computer.layout, computer.head.name) == (layout, head)
    torch.testing.assert_close(given[:2], expected[:2], atol=1e-5, rtol=1e-6)
    scale = max(float(gradient.abs().max()) for gradient in expected[2])
    for ours, theirs in zip(given[2], expected[2], strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * scale
    chosen = {path.name: path for path in computer.paths}
    assert chosen["layout"].choice == layout and chosen["head"].choice == head
    changed = [path for path in computer.paths if path.warns]
    assert all("log-probs" in path.reason for path in changed)


def test_rows_that_depend_on_earlier_ones_are_refused():
    changes = {"max_position_embeddings": ROPE_SWITCH, "rope_parameters": ROPE | {"rope_type": "dynamic"}}
    changes["rope_parameters"]["factor"] = 4.0
    computer = computer_of(build(transformers.LlamaConfig, changes), ROPE_SWITCH)
    with pytest.raises(ConfigError, match=r"no sequence layout reproduces .* type 'dynamic'"):
        computer(build(transformers.LlamaConfig, changes), LONG, with_entropy=False)


def test_a_model_that_is_not_causal_is_refused():
    """PaliGemma attends to all tokens of a text: a completion is its suffix in training alone."""
    text, tower = {**SIZES, "model_type": "gemma"}, {**TOWER, "model_type": "siglip_vision_model"}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=tower, image_token_index=IMAGE, projection_dim=32
    )
    model = _build(transformers.AutoModelForImageTextToText, config, 0)
    with pytest.raises(ConfigError, match=r"last token of a row changes .* PaliGemma.*not attend causally"):
        computer_of(model)(model, completions(), with_entropy=False)


def test_settings_that_name_layout_and_head_are_refused_where_they_are_wrong():
    model = with_head(ScaledHead)
    install_attention_hook(model)
    computer = LogprobComputer("packed", LogprobHead("chunked"), other_layouts=())
    with pytest.raises(ConfigError, match="'packed' does not reproduce"):
        computer(model, completions(), with_entropy=False)
    computer = LogprobComputer("padded", LogprobHead("chunked"), other_layouts=())
    with pytest.raises(ConfigError, match=r"'padded' does not reproduce .*; use 'auto', which tries"):
        computer(model, completions(), with_entropy=False)


def test_dropout_is_left_out_of_the_comparison_and_causality_is_not():
    """The forward of training is another one each time: layouts are compared in evaluation mode."""
    model = build(transformers.OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5}).train()
    computer, state = computer_of(model), torch.get_rng_state()
    choose_way(computer, model, completions())
    assert computer.layout == "shared_prefix" and model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert computer.paths[0].reason == "compared in evaluation mode: its forward in training is random"


def test_a_forward_without_the_balancing_loss_that_it_accepts_is_refused(monkeypatch):
    model = build(transformers.MixtralConfig, {"num_local_experts": 4, "output_router_logits": False})
    forward = type(model).forward

    @functools.wraps(forward)
    def without(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.aux_loss = None
        return output

    computer = computer_of(model)
    computer.with_aux_loss = True
    monkeypatch.setattr(type(model), "forward", without)
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM accepts .* and returns no balancing loss"):
        computer(model, completions(), with_entropy=False, with_aux_loss=True)


def test_a_mixture_that_scales_its_logits_is_compared_with_its_own_head(monkeypatch):
    """Its config does not say so: the chunked head is refused, and not the model."""
    model = build(transformers.MixtralConfig, {"num_local_experts": 4, "output_router_logits": False})
    forward = type(model).forward

    @functools.wraps(forward)
    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    computer = computer_of(model)
    computer.with_aux_loss = True
    monkeypatch.setattr(type(model), "forward", scaled)
    computer(model, completions(), with_entropy=False, with_aux_loss=True)
    assert (computer.layout, computer.head.name) == ("shared_prefix", "dense")


def test_a_forward_that_selects_positions_wrongly_is_seen():
    """The reference computes all positions of a row: no layout does."""
    model = build(*RIGHT["llama"])

    def first_instead_of_last(module, args, kwargs):
        kept = kwargs.get("logits_to_keep", 0)  # a number, or positions
        number = kept if isinstance(kept, int) else len(kept)
        return args, kwargs | ({"logits_to_keep": torch.arange(number)} if number else {})

    model.register_forward_pre_hook(first_instead_of_last, with_kwargs=True)
    computer = LogprobComputer("padded", LogprobHead("dense"), other_layouts=("equal_length",))
    with pytest.raises(ConfigError, match="no sequence layout reproduces"):
        computer(model, completions(), with_entropy=False)


def test_the_last_queries_attend_to_all_keys_before_them():
    """Some models compute their last layers at the last tokens alone: fewer queries than keys, no mask."""
    query, key, value = torch.randn(3, 2, 4, 7, 8)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1)
    whole = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    given, _ = attention._attention(module, query[:, :, -3:], key, value, None)
    torch.testing.assert_close(given, whole[:, -3:])


def test_rows_of_equal_lengths_have_no_padding():
    model, batch = build(*RIGHT["llama"]), completions(((3, (4, 4)), (9, (2, 4)), (3, (4, 1))))
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(
            (*kwargs["input_ids"].shape, int(kwargs["attention_mask"].sum()))
        ),
        with_kwargs=True,
    )
    given = compute_equal_lengths(model, batch, LogprobHead("chunked"), with_entropy=True)
    assert sorted(sizes) == [(1, 4, 4), (1, 11, 11), (1, 13, 13), (3, 7, 21)]
    padded = compute_padded_logprobs(model, batch, LogprobHead("chunked"), with_entropy=True)
    mask = batch.completion_mask_BT
    torch.testing.assert_close(given.logps_BT * mask, padded.logps_BT * mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(given.entropy_BT * mask, padded.entropy_BT * mask, atol=1e-5, rtol=0)


def test_the_ladder_of_a_model_has_the_layouts_that_it_supports():
    llama, lfm2 = build(*RIGHT["llama"]), build(transformers.Lfm2Config, {"layer_types": ["conv"] * 3})
    assert next_layouts("shared_prefix", llama, 4, "", False) == [
        "forked",
        "packed",
        "padded",
        "equal_length",
    ]
    assert next_layouts("shared_prefix", llama, 4, "a reason", False) == ["packed", "padded"]
    assert next_layouts("packed", llama, 1, "", True) == ["padded"]
    assert next_layouts("forked", lfm2, 4, "", False) == ["padded", "equal_length"]


def test_lengths_that_matter_are_those_that_rows_of_the_run_reach():
    given = {"sliding_window": 16, "hidden_size": 12, "layers": {"full": ROPE | {"rope_type": "longrope"}}}
    model = SimpleNamespace(config=transformers.PretrainedConfig(**given))
    args = config_of(max_completion_length=10)
    assert [_length_that_matters(model, args, prompt) for prompt in (6, 7, 30, 31)] == [0, 16, 16, 40]


def test_reentrant_checkpoints_of_layers_that_share_keys_are_refused():
    changes = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 67}
    changes |= {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = build(transformers.Gemma3nTextConfig, {**changes, "layer_types": kinds, "sliding_window": 4})
    args = config_of(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ConfigError, match="1 layers of the model use the keys of earlier ones"):
        prepare_policy(model, args, None, None)


def test_a_run_of_a_head_with_a_scale_trains_the_scale(tmp_path):
    model = with_head(ScaledHead)
    before = model.lm_head.logit_scale.item()
    run = trainer(tmp_path, model=model, max_steps=1, learning_rate=1e-2)
    run.train()
    assert run.model.lm_head.logit_scale.item() != before
    path = next(path for path in run.fast_paths() if path.name == "head")
    assert path.choice == "dense" and "does not reproduce this model's log-probs" in path.reason
