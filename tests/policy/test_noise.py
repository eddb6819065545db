"""Preparation of models: nothing random is left with ``disable_dropout``; checkpointing where there is some.

Files: ``policy/loading.py``, ``policy/layouts/check.py``.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from support import runs
from support.architectures import build, completions

from groupwise import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.policy.introspection import dropout_of_attention
from groupwise.policy.layouts.check import RowsAlone, check_forward
from groupwise.policy.loading import disable_dropout, prepare_policy

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WIDE = {"d_model": 32, "attention_heads": 4, "ffn_dim": 48, "num_layers": 2}
#: Where the noise is: numbers of modules, functional dropout of layers, routers in training mode.
NOISY = {
    "opt": (transformers.OPTConfig, {"word_embed_proj_dim": 32, "ffn_dim": 48, "attention_dropout": 0.3}),
    "xglm": (transformers.XGLMConfig, {**WIDE, "layerdrop": 0.4}),
    "biogpt": (transformers.BioGptConfig, {"layerdrop": 0.4}),
    "bloom": (transformers.BloomConfig, {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.3}),
    "seed_oss": (transformers.SeedOssConfig, {"residual_dropout": 0.3, "attention_dropout": 0.3}),
    "mixtral": (transformers.MixtralConfig, {**EXPERTS, "router_jitter_noise": 0.3}),
    "minimax": (transformers.MiniMaxConfig, {**EXPERTS, "router_jitter_noise": 0.3}),
}
IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def rows_alone(model):
    return RowsAlone(model, completions(), dtype=torch.float32, sharded=False)


@pytest.mark.parametrize("name", NOISY)
def test_two_forwards_in_training_mode_are_equal(name):
    model = build(*NOISY[name])
    with torch.no_grad():
        assert not torch.equal(logits(model), logits(model))
    disable_dropout(model)
    state = torch.get_rng_state()
    rows = rows_alone(model)
    check_forward(rows, has_dropout=False)
    assert rows.noise == 0 and torch.equal(torch.get_rng_state(), state)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    given = logits(model)
    torch.testing.assert_close(given, logits(model), rtol=0, atol=0)
    given.sum().backward()  # recomputation ends early
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(given, logits(model.eval()), rtol=1e-5, atol=1e-5)


def test_noise_that_no_setting_removes_is_refused():
    # Routers that sample experts in training mode, among all within a wide range of the best.
    model = build(transformers.PhimoeConfig, {**EXPERTS, "router_jitter_noise": 10.0})
    disable_dropout(model)
    rows = rows_alone(model)
    check_forward(rows, has_dropout=True)
    with pytest.raises(ConfigError, match=r"differ by .* nats: a part of Phimoe.* draws random numbers"):
        check_forward(rows, has_dropout=False)


def test_the_attention_of_every_name_has_dropout():
    assert dropout_of_attention(build(*NOISY["opt"])) == "its attention has dropout"
    assert dropout_of_attention(build(transformers.OPTConfig, {"word_embed_proj_dim": 32})) is None


@pytest.mark.slow
def test_a_run_without_dropout_makes_the_update_of_one_that_never_had_any(tmp_path):
    noisy, plain = (
        build(transformers.OPTConfig, {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": rate})
        for rate in (0.5, 0.0)
    )
    for name, model in (("noisy", noisy), ("plain", plain)):
        model.generation_config.eos_token_id = None
        run = runs.trainer(tmp_path / name, model=model, disable_dropout=name == "noisy", max_steps=1)
        run.train()
    for (name, given), expected in zip(noisy.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(given, expected, msg=name)


def test_checkpointing_that_a_model_does_not_have_is_off_unless_it_was_asked_for(tmp_path, caplog):
    model = build(transformers.CTRLConfig, {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4})
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert config.gradient_checkpointing
    prepare_policy(model, config, None, None)
    assert not config.gradient_checkpointing
    assert "gradient checkpointing is off: CTRLLMHeadModel does not have it" in caplog.text
    asked = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="gradient_checkpointing=True, but CTRLLMHeadModel has no"):
        prepare_policy(model, asked, None, None)
