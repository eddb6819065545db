"""Ranges, choices, types and conditions of single settings, each with an example that violates it."""

from __future__ import annotations

import math

import pytest
from support.configs import invalid

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES, register_objective

SETTINGS = GRPOConfig.SETTINGS
CONSTRAINED = sorted(
    name for name, setting in SETTINGS.items() if setting.allowed or setting.requires or setting.unsupported
)

CHOICES = {
    "loss_type": ("DR-GRPO", "dr_grpo"),
    "advantage_baseline": ("leave1out", "leave_one_out"),
    "kl_estimator": ("K3", "k3"),
    "importance_sampling_level": ("seq", "sequence"),
    "vllm_importance_sampling_mode": ("tokn_mask", "token_mask"),
    "scale_rewards": ("batches", "batch"),
    "multi_objective_aggregation": ("normalise_then_sum", "normalize_then_sum"),
    "reward_on_error": ("rais", "raise"),
    "logprob_head": ("chunkd", "chunked"),
    "sequence_layout": ("sharedprefix", "shared_prefix"),
    "vllm_mode": ("sever", "server"),
    "vllm_model_impl": ("transformer", "transformers"),
}

# without logging_steps, which TrainingArguments validates, and the old name, whose value is moved
FLOAT_FIELDS = sorted(
    name
    for name, setting in SETTINGS.items()
    if float in setting.types and name not in ("logging_steps", "vllm_importance_sampling_cap")
)


@pytest.mark.parametrize("name", CONSTRAINED)
def test_example_violates_its_setting_alone(build, name):
    found, text = invalid(build, **{name: SETTINGS[name].example})
    assert set(found) == {name}
    (message,) = found[name]
    assert message in text and message.startswith(f"{name}={SETTINGS[name].example!r} ")
    assert "; allowed: " in message and "; nearest valid: " in message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"top_p": 1.5}, "top_p=1.5 is out of range; allowed: > 0 and <= 1; nearest valid: 1"),
        ({"top_p": 0.0}, "allowed: > 0 and <= 1; nearest valid: any value above 0"),
        ({"vllm_group_port": 0}, "allowed: >= 1 and <= 65535; nearest valid: 1"),
        (
            {"sync_ref_model": True},
            "sync_ref_model=True requires beta > 0; allowed: beta > 0; nearest valid: ",
        ),
        ({"sync_ref_model": True}, "nearest valid: sync_ref_model=False"),
    ],
)
def test_messages_name_the_range_and_the_nearest_value(build, setting, message):
    assert message in invalid(build, **setting)[1]


@pytest.mark.parametrize("name", CHOICES)
def test_misspelt_names_get_the_nearest_and_the_list(build, name):
    given, nearest = CHOICES[name]
    _, text = invalid(build, **{name: given})
    assert f"{name}={given!r} is unknown" in text
    assert text.endswith(f"nearest valid: {nearest!r}")


def test_loss_types_in_the_message_are_those_of_the_table(build):
    _, text = invalid(build, loss_type="ppo")
    assert f"allowed: {', '.join(OBJECTIVES)}; " in text


def test_a_registered_objective_is_a_valid_loss_type(build):
    register_objective("mine", OBJECTIVES["dapo"].surrogate, OBJECTIVES["dapo"].normalizer)
    assert build(loss_type="mine").loss_type == "mine"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOAT_FIELDS)
def test_no_float_field_may_be_infinite_or_nan(build, name, value):
    found, text = invalid(build, **{name: value})
    assert set(found) == {name}
    assert f"{name}={value} is not finite" in text


def test_inherited_floats_and_list_elements_must_be_finite(build):
    found, text = invalid(build, weight_decay=math.nan, reward_weights=[1.0, math.inf])
    assert set(found) == {"weight_decay", "reward_weights"}
    assert "weight_decay=nan is not finite" in text
    assert "reward_weights=[1.0, inf] is not finite" in text


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("num_generations", 8.0, "float"),
        ("num_generations", True, "bool"),
        ("num_generations", None, "NoneType"),
        ("beta", [0.1], "list"),
        ("loss_type", None, "NoneType"),
        ("loss_type", 3, "int"),
        ("disable_dropout", 1, "int"),
        ("generation_kwargs", "temperature", "str"),
        ("generation_kwargs", "{broken", "str"),
        ("reward_weights", 1.0, "float"),
        ("per_device_train_batch_size", "many", "str"),
        ("epsilon", "wide", "str"),
    ],
)
def test_wrong_types_are_reported_once_with_the_right_ones(build, name, value, kind):
    found, text = invalid(build, **{name: value})
    assert set(found) == {name}
    assert f"{name}={value!r} is of type {kind}; allowed: " in text
