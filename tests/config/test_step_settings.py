"""Changes of settings during a run: which value counts, when, and which changes are refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from support.configs import messages

from groupwise.config.step_settings import StepSettings
from groupwise.errors import ConfigError


def step(settings: StepSettings, *, new_generation: bool = True):
    return settings.begin_step(new_generation=new_generation)


def test_an_assigned_value_takes_effect_at_the_next_step_and_leaves_the_configuration_alone(build):
    config = build(beta=0.04)
    before = dict(vars(config))
    settings = StepSettings(config)
    settings.assign("beta", 0.1, "beta")
    assert (settings.value("beta"), settings.current.beta) == (0.1, 0.04)
    assert step(settings).beta == settings.current.beta == 0.1
    assert step(settings).beta == 0.1
    assert vars(config) == before


def test_the_later_of_attribute_and_configuration_counts(build):
    config = build(beta=0.04)
    settings = StepSettings(config)
    config.beta = 0.2
    assert settings.value("beta") == 0.2 and step(settings).beta == 0.2
    settings.assign("beta", 0.1, "beta")
    assert step(settings).beta == 0.1
    config.beta = 0.3
    assert settings.value("beta") == 0.3 and step(settings).beta == 0.3
    config.beta = 0.2  # the value that it had when the attribute was assigned
    assert step(settings).beta == 0.2


def test_sampler_settings_wait_for_a_new_generation(build):
    config = build()
    settings = StepSettings(config)
    settings.assign("temperature", 0.5, "temperature")
    settings.assign("epsilon", 0.1, "epsilon_low")
    held = step(settings, new_generation=False)
    assert (held.temperature, held.epsilon, settings.value("temperature")) == (1.0, 0.1, 0.5)
    config.temperature = 0.7
    assert step(settings, new_generation=False).temperature == 1.0
    assert step(settings).temperature == 0.7


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5)])
def test_scalars_become_numbers(build, value):
    settings = StepSettings(build())
    settings.assign("temperature", value, "temperature")
    assert step(settings).temperature == 0.5


@pytest.mark.parametrize(
    ("name", "attribute", "value", "said"),
    [
        ("beta", "beta", -1.0, "trainer.beta=-1.0 is out of range; allowed: >= 0; nearest valid: 0"),
        ("loss_type", "loss_type", "grop", "trainer.loss_type='grop' is unknown; allowed: "),
        ("epsilon", "epsilon_low", "0.1", "trainer.epsilon_low='0.1' is of type str; allowed: float"),
        ("num_generations", "num_generations", 4, "trainer.num_generations=4: num_generations is read when"),
        ("use_vllm", "use_vllm", True, "build a trainer with GRPOConfig(use_vllm=True) and continue with "),
    ],
)
def test_invalid_values_are_refused_at_the_assignment(build, name, attribute, value, said):
    settings = StepSettings(build())
    with pytest.raises(ConfigError) as error:
        settings.assign(name, value, attribute)
    assert said in str(error.value)
    assert step(settings).to_dict() == StepSettings(build()).current.to_dict()


def test_assigning_the_value_that_a_fixed_setting_has_is_no_change(build):
    settings = StepSettings(build())
    settings.assign("num_generations", 8, "num_generations")
    assert step(settings).num_generations == 8


def test_relations_are_checked_when_the_step_begins(build):
    config = build(vllm_importance_sampling_clip_min=0.5)
    settings = StepSettings(config)
    settings.assign("vllm_importance_sampling_clip_max", 0.25, "vllm_importance_sampling_clip_max")
    with pytest.raises(ConfigError, match="clip_max changed during the run: 1 invalid setting") as error:
        step(settings)
    said = "vllm_importance_sampling_clip_min=0.5 with vllm_importance_sampling_clip_max=0.25 requires a "
    assert said in str(error.value)
    settings.assign("vllm_importance_sampling_clip_min", 0.125, "vllm_importance_sampling_clip_min")
    assert step(settings).vllm_importance_sampling_clip_max == 0.25


def test_a_setting_that_requires_a_kl_does_not_keep_beta_from_reaching_zero(build):
    settings = StepSettings(build(beta=0.04, use_bias_correction_kl=True))
    settings.assign("beta", 0.0, "beta")
    assert step(settings).beta == 0.0


def test_a_sampler_argument_beside_the_fields_gives_way_to_the_assigned_field(build):
    settings = StepSettings(build(generation_kwargs={"temperature": 0.9, "no_repeat_ngram_size": 2}))
    assert step(settings).temperature == 0.9
    settings.assign("temperature", 0.5, "temperature")
    now = step(settings)
    assert (now.temperature, now.generation_kwargs) == (0.5, {"no_repeat_ngram_size": 2})
    assert step(settings).temperature == 0.5


def test_a_fixed_setting_that_is_changed_in_the_configuration_is_reported_once(build, caplog):
    config = build()
    settings = StepSettings(config)
    config.num_generations, config.vllm_mode = 4, "server"
    with caplog.at_level(logging.WARNING):
        assert step(settings).num_generations == 8
        step(settings)
    assert messages(caplog) == [
        "args.num_generations=4 has no effect: it is read when the trainer is built, and the run continues "
        "with 8",
        "args.vllm_mode='server' has no effect: it is read when the trainer is built, and the run continues "
        "with 'colocate'",
    ]
    assert settings.value("num_generations") == 8


def test_a_change_without_effect_is_reported(build, caplog):
    config = build()
    settings = StepSettings(config)
    config.sapo_temperature_pos = 2.0
    with caplog.at_level(logging.WARNING):
        step(settings)
        config.sapo_temperature_pos = 3.0
        step(settings)
    assert messages(caplog) == ["sapo_temperature_pos was changed, but has no effect unless loss_type='sapo'"]


def test_open_values_are_resolved_again(build):
    settings = StepSettings(build(epsilon=0.1))
    settings.assign("epsilon", 0.3, "epsilon_low")
    settings.assign("epsilon_high", None, "epsilon_high")
    settings.assign("num_generations_eval", None, "num_generations_eval")
    now = step(settings)
    assert (now.epsilon_high, now.num_generations_eval) == (0.3, 8)


def test_containers_changed_in_place_are_seen(build):
    config = build(reward_weights=[1.0, 2.0])
    settings = StepSettings(config)
    config.reward_weights[0] = 3.0
    assert step(settings).reward_weights == [3.0, 2.0]
    assert settings.value("reward_weights") == [3.0, 2.0]
    config.reward_weights[0] = 4.0
    first = settings.current
    assert step(settings).reward_weights == [4.0, 2.0] and first is not settings.current


def test_what_trainer_reads_at_the_start_of_a_run_is_reported_during_it(build, caplog):
    config = build(learning_rate=1e-3)
    settings = StepSettings(config)
    config.learning_rate = 1e-4
    settings.begin_step(new_generation=True, new_run=True)
    assert messages(caplog) == []
    config.learning_rate = 1e-5
    step(settings)
    step(settings)
    assert messages(caplog) == ["args.learning_rate=1e-05 has no effect on a run that has started"]


def test_fields_of_trainer_follow_the_configuration(build):
    config = build(max_steps=5)
    settings = StepSettings(config)
    config.max_steps, config.gradient_accumulation_steps = 7, 2
    now = settings.begin_step(new_generation=True, new_run=True)
    assert (now.max_steps, now.gradient_accumulation_steps) == (7, 2)
