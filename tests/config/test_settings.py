"""Ranges, choices, types and requirements of settings, each with an example that violates it.

Files: ``config/conditions.py``.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
from support.configs import invalid

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.objectives import OBJECTIVES, register_objective
from groupwise.errors import ConfigError

SETTINGS = GRPOConfig.SETTINGS
CONSTRAINED = sorted(name for name, setting in SETTINGS.items() if setting.allowed or setting.unsupported)
REQUIREMENTS = [(name, condition) for name, setting in SETTINGS.items() for condition in setting.requires]
#: A value that violates the bounds or choices of a setting, or that has a requirement.
EXAMPLES: dict[str, object] = {
    "learning_rate": -1e-06,
    "activation_memory_fraction": 1.5,
    "router_aux_loss_coef": -0.1,
    "router_aux_loss_scope": "sequence",
    "router_replay": "R1",
    "num_generations": 1,
    "num_generations_eval": 0,
    "max_completion_length": 0,
    "max_prompt_length": 0,
    "pad_to_multiple_of": 0,
    "generation_batch_size": -8,
    "steps_per_generation": 0,
    "temperature": 0.0,
    "top_p": 1.5,
    "top_k": -2,
    "min_p": -0.1,
    "repetition_penalty": 0.0,
    "ds3_gather_for_generation": False,
    "vllm_mode": "colocated",
    "vllm_model_impl": "hf",
    "vllm_server_port": 0,
    "vllm_server_timeout": 0.0,
    "vllm_group_port": 70000,
    "vllm_gpu_memory_utilization": 1.2,
    "vllm_max_model_length": 0,
    "vllm_tensor_parallel_size": 0,
    "vllm_weight_check": "every_step",
    "vllm_importance_sampling_mode": "sequence_maks",
    "vllm_importance_sampling_clip_max": -3.0,
    "vllm_importance_sampling_clip_min": -0.5,
    "logprob_mismatch_check": "warm",
    "logprob_mismatch_steps": 0,
    "beta": -1.0,
    "kl_estimator": "k4",
    "kl_in_reward": True,
    "use_bias_correction_kl": True,
    "num_iterations": 0,
    "epsilon": -0.2,
    "epsilon_high": -0.2,
    "delta": 0.0,
    "loss_type": "grop",
    "importance_sampling_level": "tokens",
    "sapo_temperature_pos": 0.0,
    "sapo_temperature_neg": -1.0,
    "vespo_k_pos": 0.0,
    "vespo_lambda_pos": 0.0,
    "vespo_k_neg": -1.0,
    "vespo_lambda_neg": -1.0,
    "off_policy_mask_threshold": -0.1,
    "top_entropy_quantile": -0.1,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 1.1,
    "ref_model_sync_steps": 0,
    "entropy_coef_delta": 0.0,
    "entropy_target": -0.2,
    "scale_rewards": "groups",
    "multi_objective_aggregation": "sum",
    "advantage_baseline": "leave_out",
    "reward_timeout": 0.0,
    "reward_on_error": "ignore",
    "eval_pass_at_k": [0],
    "eval_max_samples": 0,
    "max_tool_calling_iterations": 0,
    "tool_timeout": 0.0,
    "rollout_on_error": "drop",
    "rollout_retries": -1,
    "rollout_credit": "step",
    "use_liger_kernel": True,
    "logprob_head": "chunk",
    "sequence_layout": "padding",
    "dynamic_sampling_max_rounds": 0,
    "rollout_staleness": -1,
    "num_completions_to_print": -1,
    "log_completions_hub_repo": "me/completions",
    "hub_include": ["prompts"],
    "max_steps": -2,
    "per_device_train_batch_size": 0,
    "gradient_accumulation_steps": 0,
    "auto_find_batch_size": True,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "per_device_eval_batch_size": 0,
    "seed": -5,
    "data_seed": -5,
    "dataloader_in_order": False,
    "train_sampling_strategy": "sequential",
}
#: Other settings with which a requirement is not met, by setting and text of the requirement.
VIOLATED_BY: dict[tuple[str, str], dict[str, object]] = {
    ("ds3_gather_for_generation", "use_vllm=False"): {"use_vllm": True},
    ("vllm_tensor_parallel_size", "a divisor of the number of processes"): {"use_vllm": True},
    ("vllm_importance_sampling_mode", "a clip_max or a clip_min to truncate to"): {
        "vllm_importance_sampling_clip_max": None
    },
    ("vllm_importance_sampling_clip_min", "a value of at most vllm_importance_sampling_clip_max"): {
        "vllm_importance_sampling_clip_max": 0.5
    },
    ("kl_in_reward", "a multi_objective_aggregation that normalizes the sum"): {
        "beta": 0.04,
        "multi_objective_aggregation": "normalize_then_sum",
    },
    ("use_bias_correction_kl", "kl_in_reward=False if beta > 0"): {"kl_in_reward": True, "beta": 0.04},
    ("eval_pass_at_k", "each k at most num_generations_eval"): {"num_generations_eval": 4},
    (
        "use_liger_kernel",
        "loss_type='grpo' or 'bnpo' or 'dr_grpo' or 'dapo' or 'cispo' or 'sapo' or 'luspo' or 'vespo'",
    ): {"loss_type": "mine"},
    ("use_liger_kernel", "importance_sampling_level='token' if loss_type is cispo, sapo or vespo"): {
        "importance_sampling_level": "sequence",
        "loss_type": "sapo",
    },
    (
        "use_liger_kernel",
        "importance_sampling_level='sequence' and no KL in the loss if loss_type is luspo",
    ): {"loss_type": "luspo"},
    ("use_liger_kernel", "kl_estimator='k3' if the KL is in the loss"): {"kl_estimator": "k2", "beta": 0.1},
    ("use_liger_kernel", "off_policy_mask_threshold=None"): {"off_policy_mask_threshold": 0.5},
    ("use_liger_kernel", "top_entropy_quantile=1.0"): {"top_entropy_quantile": 0.5},
    ("use_liger_kernel", "entropy_coef=0.0"): {"entropy_coef": 0.1},
    ("use_liger_kernel", "use_adaptive_entropy=False"): {"use_adaptive_entropy": True},
    ("use_liger_kernel", "sequence_layout='padded' or 'auto'"): {"sequence_layout": "packed"},
    ("use_liger_kernel", "logprob_head='auto'"): {"logprob_head": "dense"},
    ("rollout_staleness", "steps_per_generation x num_iterations divisible by gradient_accumulation_steps"): {
        "use_vllm": True,
        "vllm_mode": "server",
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
    ("rollout_staleness", "vllm_importance_sampling_correction=True"): {
        "vllm_importance_sampling_correction": False,
        "use_vllm": True,
        "vllm_mode": "server",
    },
    ("rollout_staleness", "at most 1 with dynamic_sampling=True"): {
        "use_vllm": True,
        "vllm_mode": "server",
        "dynamic_sampling": True,
    },
    ("neftune_noise_alpha", "sequence_layout='auto' or 'padded'"): {"sequence_layout": "packed"},
    ("router_aux_loss_scope", "use_liger_kernel=False"): {"use_liger_kernel": True},
    ("router_replay", "use_liger_kernel=False"): {"use_liger_kernel": True},
    ("router_replay", "torch_compile=False"): {"torch_compile": True},
    ("router_replay", "use_vllm=False if router_replay is R3"): {"use_vllm": True},
}
#: Valid values of settings whose example is out of their range; the other requirements are of the example.
VALID = {
    "vllm_tensor_parallel_size": 1000003,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": 2.0,
    "eval_pass_at_k": [1, 16],
    "rollout_staleness": 2,
    "router_aux_loss_scope": "global_batch",
    "router_replay": "R3",
}

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
    found, text = invalid(build, **{name: EXAMPLES[name]})
    assert set(found) == {name}
    (message,) = found[name]
    assert message in text and message.startswith(f"{name}={EXAMPLES[name]!r} ")
    assert "; allowed: " in message and "; nearest valid: " in message


@pytest.mark.parametrize(("name", "condition"), REQUIREMENTS, ids=lambda value: getattr(value, "text", value))
def test_a_requirement_that_is_not_met_is_reported_alone(build, name, condition):
    register_objective("mine", OBJECTIVES["dapo"].surrogate, "token_mean")  # Liger does not have it
    value = VALID.get(name, EXAMPLES[name])
    found, text = invalid(build, **{name: value, **VIOLATED_BY.get((name, condition.text), {})})
    assert set(found) == {name}
    (message,) = found[name]
    assert message in text and message.startswith(f"{name}={value!r}")
    assert condition.reason in message and f"; allowed: {condition.text}; nearest valid: " in message
    assert all(f"{other}=" in message for other in condition.reads)
    assert build(**{name: SETTINGS[name].default}) is not None


def test_the_default_of_a_subclass_has_the_same_requirements(tmp_path):
    mine = dataclasses.make_dataclass("Mine", [("use_liger_kernel", bool, True)], bases=(GRPOConfig,))
    with pytest.raises(ConfigError, match=r"use_liger_kernel=True with logprob_head='dense': Liger's fused"):
        mine(str(tmp_path), report_to="none", bf16=False, logprob_head="dense")


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
        (
            {
                **{"use_vllm": True, "vllm_mode": "server", "rollout_staleness": 1},
                **{"gradient_accumulation_steps": 2, "steps_per_generation": 1},
            },
            "rollout_staleness=1 with steps_per_generation=1, num_iterations=1, gradient_accumulation_steps=2"
            ": the next batch would be generated within an optimizer step; allowed: steps_per_generation x "
            "num_iterations divisible by gradient_accumulation_steps; nearest valid: steps_per_generation=2",
        ),
        (
            {"eval_pass_at_k": [1, 16]},
            "=[1, 16] with num_generations_eval=8 requires each k at most num_gen",
        ),
        ({"eval_pass_at_k": [1, 16]}, "nearest valid: eval_pass_at_k=[1, 8]"),
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
        ("eval_pass_at_k", 1, "int"),
        ("per_device_train_batch_size", "many", "str"),
        ("epsilon", "wide", "str"),
    ],
)
def test_wrong_types_are_reported_once_with_the_right_ones(build, name, value, kind):
    found, text = invalid(build, **{name: value})
    assert set(found) == {name}
    assert f"{name}={value!r} is of type {kind}; allowed: " in text


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("reward_weights", [], "float"),
        ("reward_weights", ["much"], "float"),
        ("reward_weights", [True], "float"),
        ("eval_pass_at_k", [], "int"),
        ("eval_pass_at_k", [1.0], "int"),
    ],
)
def test_elements_of_a_list_have_its_type(build, name, value, kind):
    found, text = invalid(build, **{name: value})
    assert set(found) == {name}
    assert f"{name}={value!r} is no list of {kind}; allowed: one {kind} or several; nearest valid: " in text
