"""Changes of settings between steps: what acts, what is reported, and which changes are refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from support.configs import messages

from groupwise.config.changes import check_step, checked, fit_processes, take_snapshot
from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError


def step(config, before, *, new_run: bool = False):
    """The settings whose changes act, and the snapshot of the step."""
    changed = check_step(config, before, new_run=new_run)
    return changed, take_snapshot(config)


def test_a_changed_setting_acts_at_the_next_step(build):
    config = build(beta=0.04)
    before = take_snapshot(config)
    assert check_step(config, before, new_run=False) == set()
    config.beta, config.temperature = 0.1, 0.7
    changed, now = step(config, before)
    assert changed == {"beta", "temperature"} and (config.beta, config.temperature) == (0.1, 0.7)
    assert step(config, now)[0] == set()


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5)])
def test_scalars_become_numbers(build, value):
    assert type(checked(build(), "temperature", value, "temperature")) is float


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
    with pytest.raises(ConfigError) as error:
        checked(build(), name, value, attribute)
    assert said in str(error.value)


def test_an_invalid_value_of_the_configuration_is_refused_at_every_step_until_it_is_valid(build):
    config = build()
    before = take_snapshot(config)
    config.beta = -1.0
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"beta=-1\.0 is out of range"):
            check_step(config, before, new_run=False)
    config.beta = 0.0
    assert check_step(config, before, new_run=False) == set()


def test_assigning_the_value_that_a_fixed_setting_has_is_no_change(build):
    assert checked(build(), "num_generations", 8, "num_generations") == 8


def test_relations_are_checked_when_the_step_begins(build):
    config = build(vllm_importance_sampling_clip_min=0.5)
    before = take_snapshot(config)
    name = "vllm_importance_sampling_clip_max"
    config.vllm_importance_sampling_clip_max = checked(config, name, 0.25, name)
    with pytest.raises(ConfigError, match="clip_max changed during the run: 1 invalid setting") as error:
        check_step(config, before, new_run=False)
    said = "vllm_importance_sampling_clip_min=0.5 with vllm_importance_sampling_clip_max=0.25 requires a "
    assert said in str(error.value)
    config.vllm_importance_sampling_clip_min = 0.125
    assert len(check_step(config, before, new_run=False)) == 2


def test_a_setting_that_requires_a_kl_does_not_keep_beta_from_reaching_zero(build):
    config = build(beta=0.04, use_bias_correction_kl=True)
    before = take_snapshot(config)
    config.beta = 0.0
    assert check_step(config, before, new_run=False) == {"beta"}


def test_a_sampler_argument_beside_the_fields_gives_way_to_the_changed_field(build):
    config = build(generation_kwargs={"temperature": 0.9, "no_repeat_ngram_size": 2})
    changed, before = step(config, take_snapshot(config))
    assert (changed, config.temperature) == (set(), 0.9)
    config.temperature = 0.5
    _, before = step(config, before)
    assert (config.temperature, config.generation_kwargs) == (0.5, {"no_repeat_ngram_size": 2})
    step(config, before)
    assert config.temperature == 0.5


def test_a_fixed_setting_that_is_changed_gets_its_value_back_and_is_reported_once(build, caplog):
    config = build()
    before = take_snapshot(config)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            config.num_generations, config.vllm_mode = 4, "server"
            changed, before = step(config, before)
            assert (changed, config.num_generations, config.vllm_mode) == (set(), 8, "colocate")
    assert messages(caplog) == [
        "args.num_generations=4 has no effect: it is read when the trainer is built, and the run continues "
        "with 8",
        "args.vllm_mode='server' has no effect: it is read when the trainer is built, and the run continues "
        "with 'colocate'",
    ]


def test_a_change_without_effect_is_reported(build, caplog):
    config = build()
    before = take_snapshot(config)
    with caplog.at_level(logging.WARNING):
        for value in (2.0, 3.0):
            config.sapo_temperature_pos = value
            _, before = step(config, before)
    assert messages(caplog) == ["sapo_temperature_pos was changed, but has no effect unless loss_type='sapo'"]


def test_open_values_are_resolved_again(build):
    config = build(epsilon=0.1)
    before = take_snapshot(config)
    config.epsilon, config.epsilon_high, config.num_generations_eval, config.top_k = 0.3, None, None, -1
    check_step(config, before, new_run=False)
    assert (config.epsilon_high, config.num_generations_eval, config.top_k) == (0.3, 8, 0)


def test_containers_changed_in_place_are_seen(build):
    config = build(reward_weights=[1.0, 2.0])
    before = take_snapshot(config)
    for value in (3.0, 4.0):
        config.reward_weights[0] = value
        changed, before = step(config, before)
        assert changed == {"reward_weights"} and before["reward_weights"] == [value, 2.0]


def test_what_trainer_reads_at_the_start_of_a_run_is_reported_during_it(build, caplog):
    config = build(learning_rate=1e-3)
    before = take_snapshot(config)
    config.learning_rate = 1e-4
    _, before = step(config, before, new_run=True)
    assert messages(caplog) == []
    config.learning_rate = 1e-5
    _, before = step(config, before)
    step(config, before)
    assert messages(caplog) == ["args.learning_rate=1e-05 has no effect on a run that has started"]


def _fit(monkeypatch, now, *, each=2, saved=None, written_by=4, **given):
    """The configuration on ``now`` processes after a checkpoint with 8 of 24 completions a step."""
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: now))
    config = GRPOConfig(
        "out",
        per_device_train_batch_size=each,
        generation_batch_size=24 if 24 % (each * now) == 0 else None,
        **{"num_generations": 2, "use_cpu": True, "bf16": False, "report_to": "none", **given},
    )
    before = take_snapshot(config)
    settings = {"generation_batch_size": 24, "steps_per_generation": 3, "gradient_accumulation_steps": 1}
    state = {"world_size": written_by, "settings": {**settings, **(saved or {})}}
    fit_processes(config, before, state, "checkpoint-3")
    return config, before, state


@pytest.mark.parametrize(
    ("now", "each", "accumulation", "steps"), [(1, 2, 4, 12), (2, 2, 2, 6), (8, 1, 1, 3)]
)
def test_accumulation_follows_the_number_of_processes(monkeypatch, caplog, now, each, accumulation, steps):
    config, before, state = _fit(monkeypatch, now, each=each)
    for values in (vars(config), before, state["settings"]):
        assert values["gradient_accumulation_steps"] == accumulation
        assert (values["steps_per_generation"], values["generation_batch_size"]) == (steps, 24)
    assert f"is of 4: gradient_accumulation_steps={accumulation} keeps the 8 compl" in caplog.text
    assert check_step(config, before, new_run=True) == set()


@pytest.mark.parametrize(
    ("group", "dynamic", "warns"),
    [
        (3, True, True),  # rounds of any number of prompts on 1 process, of multiples of 4 on 4
        (2, True, True),  # of multiples of 2 on 4
        (4, True, False),
        (3, False, False),
    ],
)
def test_rounds_of_dynamic_sampling_that_depend_on_the_processes_are_a_warning(
    monkeypatch, caplog, group, dynamic, warns
):
    _fit(monkeypatch, 1, num_generations=group, dynamic_sampling=dynamic)
    assert ("a round on 4 processes, and of 1 on 1: steps may have other prompts" in caplog.text) is warns


@pytest.mark.parametrize(
    ("now", "each", "ways"),
    [
        (3, 2, "start 1 or 2 or 4 processes"),
        (4, 4, "start 1 or 2 processes, or set per_device_train_batch_size to a divisor of 2"),
        (2, 3, "set per_device_train_batch_size to a divisor of 4"),
    ],
)
def test_a_batch_that_the_processes_cannot_form_is_refused(monkeypatch, now, each, ways):
    with pytest.raises(
        ConfigError, match=f"{now} with per_device_train_batch_size={each} cannot form"
    ) as error:
        _fit(monkeypatch, now, each=each)
    assert str(error.value).endswith(f"generated 24 at a time; {ways}")
