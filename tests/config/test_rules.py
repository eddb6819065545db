"""Every constraint fires on its own example, alone, and says the way out."""

from __future__ import annotations

import math

import pytest
from transformers.integrations import integration_utils

from groupwise.config.grpo_config import GRPOConfig, field_types
from groupwise.config.validation import RULES, _warn_once, check, violations
from groupwise.core.objectives import OBJECTIVES, register_objective
from groupwise.errors import ConfigError

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

# without logging_steps, which TrainingArguments judges, and the old name, which hands its value on
FLOAT_FIELDS = sorted(
    name
    for name, kinds in field_types().items()
    if float in kinds and name not in ("logging_steps", "vllm_importance_sampling_cap")
)


def _invalid(build, **kwargs) -> tuple[dict[str, str], str]:
    """The violations by name, and the text of the error that the same arguments raise."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.config.grpo_config.check", lambda config: seen.update(violations(config)))
        build(**kwargs)
    with pytest.raises(ConfigError) as caught:
        build(**kwargs)
    return seen, str(caught.value)


def test_the_defaults_violate_nothing(build):
    assert violations(build()) == {}


def test_rule_names_are_unique():
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))


@pytest.mark.filterwarnings("ignore:vllm_importance_sampling_cap is the old name:FutureWarning")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_example_fires_its_rule_alone(build, rule):
    found, text = _invalid(build, **rule.example)
    assert set(found) == {rule.name}
    assert found[rule.name] in text
    for part in ("=", "allowed: ", "nearest valid: "):
        assert part in found[rule.name]
    assert any(f"{field}=" in found[rule.name] or f"{field}[" in found[rule.name] for field in rule.example)


@pytest.mark.parametrize("name", CHOICES)
def test_misspelt_names_get_the_nearest_and_the_list(build, name):
    given, nearest = CHOICES[name]
    _, text = _invalid(build, **{name: given})
    assert f"{name}={given!r} is unknown" in text
    assert text.endswith(f"nearest valid: {nearest!r}")


def test_loss_types_in_the_message_are_those_of_the_table(build):
    _, text = _invalid(build, loss_type="ppo")
    assert f"allowed: {', '.join(OBJECTIVES)}; " in text


def test_a_registered_objective_is_a_valid_loss_type(build):
    register_objective("mine", OBJECTIVES["dapo"].surrogate, OBJECTIVES["dapo"].normalizer)
    assert build(loss_type="mine").loss_type == "mine"


@pytest.mark.parametrize("skip", [True, False])
def test_skip_zero_advantage_may_be_either(build, skip):
    assert build(skip_zero_advantage=skip).skip_zero_advantage is skip


@pytest.mark.parametrize("head", ["auto", "dense", "chunked"])
def test_every_head_is_built(build, head):
    assert build(logprob_head=head).logprob_head == head


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOAT_FIELDS)
def test_no_float_field_may_be_infinite_or_nan(build, name, value):
    found, text = _invalid(build, **{name: value})
    assert set(found) == {"finite_numbers"}
    assert f"{name}={value} is not finite" in text


def test_inherited_floats_and_list_elements_must_be_finite(build):
    found, text = _invalid(build, weight_decay=math.nan, reward_weights=[1.0, math.inf])
    assert set(found) == {"finite_numbers"}
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
    found, text = _invalid(build, **{name: value})
    assert set(found) == {"field_types"}
    assert f"{name}={value!r} is of type {kind}; allowed: " in text


def test_all_violations_come_in_one_error(build):
    found, text = _invalid(
        build, loss_type="grop", beta=-1, temperature=math.nan, top_p=2.0, num_iterations=0, delta=0.0
    )
    assert set(found) == {"loss_type", "beta", "finite_numbers", "top_p", "num_iterations", "delta"}
    assert text.startswith("GRPOConfig: 6 invalid setting(s)\n  - ")
    assert all(f"\n  - {message}" in text for message in found.values())


def test_config_error_is_a_value_error(build):
    with pytest.raises(ValueError, match="num_generations=1"):
        build(num_generations=1)


def test_delta_at_the_end_of_the_clip_range_never_binds_alone(build):
    found, _ = _invalid(build, epsilon=0.5, delta=1.5)
    assert set(found) == {"delta_inside_clip_range"}


def test_the_check_can_be_repeated_after_a_change(build):
    config = build()
    config.beta = -0.5
    with pytest.raises(ConfigError, match=r"beta=-0\.5 is out of range; allowed: >= 0; nearest valid: 0"):
        check(config)


@pytest.mark.parametrize(
    ("kwargs", "nearest"),
    [
        # 12 lies between 1 x 8 and 2 x 8; of its divisors 6 and 12 are next to 8
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
            "generation_batch_size 8 or 16, or num_generations 6 or 12",
        ),
        # micro-batches of 12 and groups of 8 meet first at 24
        ({"per_device_train_batch_size": 12}, "generation_batch_size 24, or num_generations 6 or 12"),
        # 7 is prime: the group of 7 is the only one
        ({"per_device_train_batch_size": 7}, "generation_batch_size 56, or num_generations 7"),
        # given, and 20 is no multiple of 8
        ({"generation_batch_size": 20, "num_generations": 4}, "nearest valid: 16 or 24"),
        # multiples of lcm(8, 3) = 24 around 60, which 3 divides and 8 does not
        ({"generation_batch_size": 60, "num_generations": 3}, "nearest valid: 48 or 72"),
        # 4 micro-batches x 8
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "nearest valid: generation_batch_size=32"),
        # 6 < 8, so one group is the least; 6's own divisors stop at 6
        (
            {"eval_strategy": "steps", "per_device_eval_batch_size": 6},
            "per_device_eval_batch_size 8, or num_generations_eval 6",
        ),
    ],
)
def test_nearest_batch_sizes(build, kwargs, nearest):
    _, text = _invalid(build, **kwargs)
    assert text.endswith(nearest)


def test_eval_batches_do_not_matter_without_evaluation(build):
    assert build(per_device_eval_batch_size=6).per_device_eval_batch_size == 6


def test_several_processes_share_the_groups(build, monkeypatch):
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: 4))
    # 2 per device x 4 processes x 3 steps = 24 completions = 3 groups of 8; evaluation: 2 x 4 = 1 group
    config = build(
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=3,
        eval_strategy="steps",
    )
    assert config.generation_batch_size == 24
    # 3 x 4 = 12 is no multiple of 8; with 4 processes every even number per device is
    _, text = _invalid(build, per_device_eval_batch_size=3, eval_strategy="steps")
    assert text.endswith("per_device_eval_batch_size 2 or 4, or num_generations_eval 6 or 12")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"beta": 0.04, "kl_in_reward": True},
        {"beta": 0.04, "use_bias_correction_kl": True},
        {"beta": 0.04, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0},
        {"delta": 1.21},
        {"generation_kwargs": {"top_k": None, "min_p": None}},
        {"delta": 0.5, "loss_type": "cispo", "epsilon_high": 5.0},
        {"use_adaptive_entropy": True, "entropy_coef": 1.0},
        {"entropy_coef": -0.01},
        {"vllm_importance_sampling_clip_min": 3.0},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5},
        {"num_generations_eval": 1, "eval_strategy": "steps", "per_device_eval_batch_size": 3},
        {"num_generations": 2, "per_device_train_batch_size": 2},
        {"top_p": 1.0, "min_p": 1.0, "top_k": 0, "repetition_penalty": 0.5},
        {"off_policy_mask_threshold": 0.0, "top_entropy_quantile": 0.2},
        {"reward_weights": [1, -0.5]},
        {"learning_rate": 0.0, "epsilon": 0.0},
        {"beta": 1, "temperature": 2},
        {"log_completions": True, "log_completions_hub_repo": "me/completions"},
    ],
    ids=str,
)
def test_valid_edges_pass(build, kwargs):
    config = build(**kwargs)
    assert {name: getattr(config, name) for name in kwargs if name != "eval_strategy"} == {
        name: value for name, value in kwargs.items() if name != "eval_strategy"
    }


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"delta": 4.0, "loss_type": "sapo"}, "delta set, but without effect"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos set, but without effect"),
        ({"kl_estimator": "k1"}, "kl_estimator set, but without effect: beta is 0"),
        ({"entropy_target": 0.3}, "entropy_target set, but without effect"),
        ({"log_unique_prompts": True}, "log_unique_prompts set, but without effect"),
    ],
)
def test_settings_without_effect_are_said_once(build, caplog, kwargs, said):
    _warn_once.cache_clear()
    build(**kwargs)
    build(**kwargs)
    messages = [
        record.getMessage() for record in caplog.records if record.name == "groupwise.config.validation"
    ]
    assert [said in message for message in messages] == [True]


def test_settings_with_effect_are_not_mentioned(build, caplog):
    _warn_once.cache_clear()
    build(
        delta=4.0,
        loss_type="grpo",
        beta=0.1,
        kl_estimator="k1",
        use_adaptive_entropy=True,
        entropy_target=0.3,
    )
    assert [record for record in caplog.records if record.name == "groupwise.config.validation"] == []


def test_a_dashboard_without_its_package_is_refused(build, monkeypatch):
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ConfigError, match=r"report_to='wandb' needs a package.*allowed: tensorboard;"):
        build(report_to=["tensorboard", "wandb"])
    assert build(report_to="tensorboard").report_to == ["tensorboard"]
    assert build(report_to=["flyte"]).report_to == ["flyte"]
