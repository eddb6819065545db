"""Settings of the outer loop."""

from __future__ import annotations

import pytest

from groupwise import ConfigError, GRPOConfig, IterativeConfig


def test_all_violations_are_in_one_message():
    with pytest.raises(ConfigError) as caught:
        IterativeConfig(
            iterations=0,
            reward_prompts=True,
            reward_objective="pairwize",
            reward_learning_rate=0,
            reward_batch_size=2.5,
            reward_epochs=-1,
            replay_share=1.0,
        )
    for said in (
        "IterativeConfig: 7 invalid setting(s)",
        "iterations=0 is out of range; allowed: >= 1; nearest valid: 1",
        "reward_prompts=True is of type bool; allowed: int; nearest valid: 64 (the default)",
        "reward_objective='pairwize' is unknown; allowed: pairwise, pointwise; nearest valid: 'pairwise'",
        "reward_learning_rate=0 is out of range; allowed: > 0; nearest valid: any value above 0",
        "reward_batch_size=2.5 is of type float",
        "reward_epochs=-1 is out of range",
        "replay_share=1.0 is out of range; allowed: >= 0 and < 1; nearest valid: any value below 1",
    ):
        assert said in str(caught.value)


def test_the_number_of_iterations_has_no_default():
    with pytest.raises(
        ConfigError, match="iterations='two' is of type str; allowed: int; nearest valid: a value"
    ):
        IterativeConfig(iterations="two")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), True, "1e-5"])
@pytest.mark.parametrize("name", ["reward_learning_rate", "replay_share"])
def test_numbers_of_the_outer_loop_are_finite(name, value):
    with pytest.raises(ConfigError, match=rf"{name}={value!r} is (not finite|of type)"):
        IterativeConfig(iterations=1, **{name: value})


def test_the_reference_moves_at_the_end_of_iterations_if_there_is_one(tmp_path):
    config = GRPOConfig(str(tmp_path), max_steps=12, beta=0.1, use_cpu=True, bf16=False)
    changed = IterativeConfig(iterations=3).with_reference_refresh(config)
    assert changed.sync_ref_model
    assert (changed.ref_model_mixup_alpha, changed.ref_model_sync_steps) == (1.0, 4)
    assert not config.sync_ref_model and config.ref_model_sync_steps == 512
    # the same settings given by hand are accepted
    assert IterativeConfig(iterations=3).with_reference_refresh(changed) == changed
    without = GRPOConfig(str(tmp_path), max_steps=12, use_cpu=True, bf16=False)
    assert IterativeConfig(iterations=3).with_reference_refresh(without) is without
