"""Validation of a whole configuration: one error for all violations, warnings for settings without effect."""

from __future__ import annotations

import math

import pytest
from support.configs import invalid

from groupwise.config.validation import check, violations
from groupwise.errors import ConfigError


def test_the_defaults_violate_nothing(build):
    assert violations(build()) == {}


@pytest.mark.parametrize("skip", [True, False])
def test_skip_zero_advantage_may_be_either(build, skip):
    assert build(skip_zero_advantage=skip).skip_zero_advantage is skip


@pytest.mark.parametrize("head", ["auto", "dense", "chunked"])
def test_every_head_is_built(build, head):
    assert build(logprob_head=head).logprob_head == head


def test_all_violations_come_in_one_error(build):
    found, text = invalid(
        build, loss_type="grop", beta=-1, temperature=math.nan, top_p=2.0, num_iterations=0, delta=0.0
    )
    assert set(found) == {"loss_type", "beta", "temperature", "top_p", "num_iterations", "delta"}
    assert text.startswith("GRPOConfig: 6 invalid setting(s)\n  - ")
    assert all(f"\n  - {message}" in text for messages in found.values() for message in messages)


def test_config_error_is_a_value_error(build):
    with pytest.raises(ValueError, match="num_generations=1"):
        build(num_generations=1)


def test_the_check_can_be_repeated_after_a_change(build):
    config = build()
    config.beta = -0.5
    with pytest.raises(ConfigError, match=r"beta=-0\.5 is out of range; allowed: >= 0; nearest valid: 0"):
        check(config)


def test_relations_are_checked_once_every_value_is_valid(build):
    # kl_in_reward requires beta > 0, and the default bounds are from 0 to 1
    given = {"beta": -1.0, "kl_in_reward": True, "num_generations": 0, "entropy_coef_min": 2.0}
    found, _ = invalid(build, **given)
    assert set(found) == {"beta", "num_generations"}
    found, _ = invalid(build, **{**given, "beta": 0.0, "num_generations": 8})
    assert set(found) == {"kl_in_reward", "entropy_coef_bounds"}


@pytest.mark.parametrize(
    ("kwargs", "warned"),
    [
        ({"delta": 4.0, "loss_type": "sapo"}, "delta=4.0 has no effect unless loss_type is grpo, bnpo"),
        (
            {"rollout_credit": "row", "loss_type": "dapo"},
            "rollout_credit='row' has no effect unless loss_type divides by a number of sequences",
        ),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 has no effect unless loss_type='sapo'"),
        ({"kl_estimator": "k1"}, "kl_estimator='k1' has no effect unless beta > 0"),
        (
            {"vllm_structured_outputs_regex": "a+"},
            "vllm_structured_outputs_regex='a+' has no effect unless use_vllm=True",
        ),
        ({"entropy_target": 0.3}, "entropy_target=0.3 has no effect unless use_adaptive_entropy=True"),
        (
            {"include_num_input_tokens_seen": True},
            "include_num_input_tokens_seen='all' is ignored: the metric",
        ),
        ({"log_unique_prompts": True}, "log_unique_prompts=True has no effect unless log_completions=True"),
        (
            {
                "use_transformers_continuous_batching": True,
                "transformers_continuous_batching_config": {"max_batch_tokens": 256},
            },
            "use_transformers_continuous_batching=True, transformers_continuous_batching_config="
            "{'max_batch_tokens': 256} is ignored: without vLLM, groupwise's own decoding loop samples",
        ),
        ({"use_transformers_paged": True}, "use_transformers_paged=True is ignored: without vLLM"),
    ],
)
def test_settings_without_effect_are_warned_of_once(build, caplog, kwargs, warned):
    build(**kwargs)
    build(**kwargs)
    messages = [
        record.getMessage() for record in caplog.records if record.name == "groupwise.config.validation"
    ]
    assert [warned in message for message in messages] == [True]


def test_settings_with_effect_are_not_mentioned(build, caplog):
    build(
        delta=4.0,
        loss_type="grpo",
        beta=0.1,
        kl_estimator="k1",
        use_adaptive_entropy=True,
        entropy_target=0.3,
    )
    assert [record for record in caplog.records if record.name == "groupwise.config.validation"] == []
