"""Rules of config/validation.py: each example violates its rule alone; the message names a valid value."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from support.configs import invalid
from transformers.integrations import integration_utils

from groupwise.config import validation
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.validation import RULES, delta_inside_clip_range, violations, warnings_of
from groupwise.core import objectives
from groupwise.errors import ConfigError

#: Settings that violate a rule alone, or that a caution warns of.
EXAMPLES: dict[str, dict[str, object]] = {
    "old_and_new_name_differ": {
        "vllm_importance_sampling_cap": 2.0,
        "vllm_importance_sampling_clip_max": 4.0,
    },
    "report_to_is_installed": {"report_to": "tensorbord"},
    "loss_kwargs_of_objective": {"loss_kwargs": {"tau": 1.0}},
    "generation_batch_size_in_whole_micro_batches": {"generation_batch_size": 12, "num_generations": 4},
    "generation_batch_size_in_whole_groups": {"per_device_train_batch_size": 12, "num_generations": 8},
    "eval_batch_in_whole_groups": {"eval_strategy": "steps", "per_device_eval_batch_size": 6},
    "accelerator_config_of_rows": {"accelerator_config": {"dispatch_batches": True}},
    "parallelism_of_one_sequence": {"parallelism_config": SimpleNamespace(cp_size=2)},
    "generation_kwargs_of_one_completion": {"generation_kwargs": {"num_return_sequences": 2}},
    "eval_generation_kwargs_are_sampler_settings": {"eval_generation_kwargs": {"temprature": 0.6}},
    "regex_syntax": {"use_vllm": True, "vllm_structured_outputs_regex": "(yes|no"},
    "vllm_max_model_length_holds_completions": {
        "use_vllm": True,
        "vllm_max_model_length": 256,
        "max_completion_length": 256,
    },
    "delta_inside_clip_range": {"delta": 1.1},
    "entropy_coef_bounds": {"entropy_coef_min": 2.0},
    "dataset_weights_above_zero": {"dataset_weights": {"maths": 0}},
    "prompt_filter_of_rates": {"prompt_filter": {"min": 2}},
    "truncation_with_liger": {"use_liger_kernel": True, "top_p": 0.9},
}


def test_every_rule_has_an_example():
    assert set(EXAMPLES) == {rule.__name__ for rule in [*RULES, delta_inside_clip_range]}
    functions = {name: value for name, value in vars(validation).items() if inspect.isfunction(value)}
    assert set(EXAMPLES) == {
        name for name, f in functions.items() if [*inspect.signature(f).parameters] == ["c"]
    }


def test_rule_names_are_unique():
    names = [*(rule.__name__ for rule in [*RULES, delta_inside_clip_range]), *GRPOConfig.SETTINGS]
    assert len(names) == len(set(names))


@pytest.mark.filterwarnings("ignore:vllm_importance_sampling_cap is the old name:FutureWarning")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_example_violates_its_rule_alone(build, rule):
    found, text = invalid(build, **EXAMPLES[rule.__name__])
    assert set(found) == {rule.__name__}
    (message,) = found[rule.__name__]
    assert message in text
    for part in ("=", "allowed: ", "nearest valid: "):
        assert part in message
    assert any(f"{field}=" in message or f"{field}[" in message for field in EXAMPLES[rule.__name__])


def test_example_of_a_caution_is_valid_and_warned_of(build):
    example = EXAMPLES["delta_inside_clip_range"]
    config = build(**example)
    assert violations(config) == {}
    (message,) = delta_inside_clip_range(config)
    assert warnings_of(config) == [message]
    assert all(f"{field}={value!r}" in message for field, value in example.items())


def test_delta_at_the_end_of_the_clip_range_never_binds_alone(build):
    config = build(epsilon=0.5, delta=1.5)
    assert config.delta == 1.5
    (message,) = warnings_of(config)
    assert message.startswith("delta=1.5 is inside the clip range, which ends at 1 + epsilon_high=0.5")
    assert warnings_of(build(epsilon=0.5, delta=1.51)) == []


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
    _, text = invalid(build, **kwargs)
    assert text.endswith(nearest)


@pytest.mark.parametrize(("coef", "nearest"), [(1.5, 1.0), (-0.5, 0.0)])
def test_an_adaptive_coefficient_begins_within_its_bounds(build, coef, nearest):
    found, text = invalid(build, use_adaptive_entropy=True, entropy_coef=coef)
    assert set(found) == {"entropy_coef_bounds"}
    assert f"entropy_coef={coef} is outside the bounds of use_adaptive_entropy; allowed: from 0.0" in text
    assert text.endswith(f"nearest valid: {nearest}")


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
    _, text = invalid(build, per_device_eval_batch_size=3, eval_strategy="steps")
    assert text.endswith("per_device_eval_batch_size 2 or 4, or num_generations_eval 6 or 12")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"beta": 0.04, "kl_in_reward": True},
        {"beta": 0.04, "use_bias_correction_kl": True},
        {"beta": 0.04, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0},
        {"delta": 1.21},
        {"delta": 0.5, "loss_type": "cispo", "epsilon_high": 5.0},
        {"use_adaptive_entropy": True, "entropy_coef": 1.0},
        {"entropy_coef": -0.01},
        {"vllm_importance_sampling_clip_min": 3.0},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5},
        {"num_generations_eval": 1, "eval_strategy": "steps", "per_device_eval_batch_size": 3},
        {"num_generations": 2, "per_device_train_batch_size": 2},
        {"top_p": 1.0, "min_p": 1.0, "top_k": 0, "repetition_penalty": 0.5},
        {"off_policy_mask_threshold": 0.0, "top_entropy_quantile": 0.0},
        {"use_bias_correction_kl": True, "beta": 0.0},
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
    ("key", "value", "message"),
    [
        ("top_p", 1.5, "eval_generation_kwargs['top_p']=1.5 is out of range; allowed: > 0 and <= 1"),
        ("temperature", -1, "eval_generation_kwargs['temperature']=-1 is out of range; allowed: > 0"),
        ("top_k", True, "eval_generation_kwargs['top_k']=True is of type bool; allowed: int"),
        ("top_k", 2.5, "eval_generation_kwargs['top_k']=2.5 is of type float; allowed: int"),
        ("min_p", None, "eval_generation_kwargs['min_p']=None is of type NoneType; allowed: float"),
    ],
)
def test_sampler_settings_of_evaluation_have_the_ranges_of_their_fields(build, key, value, message):
    _, text = invalid(build, eval_generation_kwargs={key: value})
    assert message in text


def test_evaluation_may_be_greedy(build):
    assert (
        build(eval_generation_kwargs={"temperature": 0, "top_k": 5}).eval_generation_kwargs["temperature"]
        == 0
    )


def test_a_dashboard_without_its_package_is_refused(build, monkeypatch):
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(
        ConfigError, match=r"report_to='wandb' needs a package.*allowed: tensorboard;"
    ) as refused:
        build(report_to=["tensorboard", "wandb"])
    assert str(refused.value).endswith("run pip install 'groupwise[dashboards]'")
    assert build(report_to="tensorboard").report_to == ["tensorboard"]
    assert build(report_to=["flyte"]).report_to == ["flyte"]


@dataclass(frozen=True)
class Hyperparameters:
    tau: float
    power: int = 2


@pytest.fixture
def objective_with_settings():
    """Objective "tempered" whose hyperparameters are those of ``Hyperparameters``."""

    @dataclass(frozen=True)
    class WithSettings(objectives.Objective):
        settings: type | None = None

    entry = objectives.OBJECTIVES["dapo"]
    fields = {item.name: getattr(entry, item.name) for item in dataclasses.fields(entry)}
    objectives.OBJECTIVES.register("tempered", WithSettings(**{**fields, "settings": Hyperparameters}))


def test_loss_kwargs_of_an_objective(build, objective_with_settings):
    given = {"tau": 1, "power": 3}
    assert build(loss_type="tempered", loss_kwargs=given).loss_kwargs is given
    assert given == {"tau": 1, "power": 3}
    assert build(loss_type="tempered", loss_kwargs='{"tau": 0.5}').loss_kwargs == {"tau": 0.5}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"taus": 1.0, "tau": 1.0},
            "loss_kwargs['taus']=1.0 is unknown to loss_type='tempered'; allowed: tau, power; "
            "nearest valid: 'tau'",
        ),
        (
            {"tau": 1.0, "power": 0.5},
            "loss_kwargs['power']=0.5 is of type float; allowed: int; nearest valid: 2 (the default)",
        ),
        ({"tau": "hot"}, "loss_kwargs['tau']='hot' is of type str; allowed: float; nearest valid: a float"),
        ({"tau": float("nan")}, "loss_kwargs['tau']=nan is not a number; allowed: numbers; nearest valid: a"),
        ({"power": 1}, "loss_kwargs={'power': 1} lacks 'tau'; allowed: tau, power"),
        (None, "loss_kwargs=None lacks 'tau'"),
    ],
)
def test_invalid_loss_kwargs(build, objective_with_settings, kwargs, message):
    found, text = invalid(build, loss_type="tempered", loss_kwargs=kwargs)
    assert set(found) == {"loss_kwargs_of_objective"}
    assert message in text


def test_loss_kwargs_without_settings_name_the_objectives_that_have_some(build, objective_with_settings):
    _, text = invalid(build, loss_type="grpo", loss_kwargs={"tau": 1.0})
    assert "loss_kwargs={'tau': 1.0} with loss_type='grpo', which has no hyperparameters" in text
    assert "tempered" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"split_batches": True}, "allowed: split_batches=False"),
        ({"even_batches": False}, "all processes must evaluate equally many completions"),
        (
            {"gradient_accumulation_kwargs": {"num_steps": 4}},
            "nearest valid: gradient_accumulation_steps=4",
        ),
    ],
)
def test_settings_of_accelerate_that_would_break_batches_are_refused(build, given, said):
    found, _ = invalid(build, accelerator_config=given)
    assert [said in message for message in found["accelerator_config_of_rows"]] == [True]


def test_other_settings_of_accelerate_are_accepted(build):
    build(
        accelerator_config={
            "dispatch_batches": False,
            "gradient_accumulation_kwargs": {"sync_each_batch": True},
        }
    )


@pytest.mark.parametrize("given", [{"n": 2}, {"return_dict_in_generate": True}])
def test_sampler_arguments_that_change_the_result_are_refused(build, given):
    found, _ = invalid(build, generation_kwargs=given)
    (message,) = found["generation_kwargs_of_one_completion"]
    assert "changes the result of the sampler" in message
    build(generation_kwargs={"num_return_sequences": 1, "return_dict_in_generate": False})


def test_sampler_settings_of_an_evaluation_obey_the_bounds_of_the_fields(build):
    found, _ = invalid(build, eval_generation_kwargs={"repetition_penalty": 0})
    (message,) = found["eval_generation_kwargs_are_sampler_settings"]
    assert "eval_generation_kwargs['repetition_penalty']=0 is out of range; allowed: > 0" in message
