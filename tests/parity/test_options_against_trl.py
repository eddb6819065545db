"""Single settings against TRL, each in runs where leaving it out would give other parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.parity_runs import (
    OBJECTIVES,
    Policy,
    Setting,
    assert_same_log,
    assert_same_update,
    largest_difference,
    mixed_reward,
    patchy_reward,
    train_groupwise,
    train_trl,
    very_patchy_reward,
)

trl_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
pytestmark = pytest.mark.parity

#: Two passes over each generation: the ratio leaves 1, and with it the narrow clip range.
REUSED: dict[str, Any] = {"num_iterations": 2, "learning_rate": 0.03, "epsilon": 0.01, "epsilon_high": 0.02}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (settings of both runs compared, the one tested)
    "mask_truncated": ({"loss_type": "dapo"}, {"mask_truncated_completions": True}),
    "mask_truncated_grpo": ({"loss_type": "grpo"}, {"mask_truncated_completions": True}),
    "delta": ({"loss_type": "grpo"}, {"delta": 1.03}),
    "delta_inside_the_clip_range": ({"loss_type": "grpo"}, {"delta": 1.01}),
    "delta_sequence": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "steps_per_generation": 2},
        {"delta": 1.025},
    ),
    "epsilon_high": ({"loss_type": "dapo"}, {"epsilon_high": 0.06}),
    "top_entropy": ({"loss_type": "dapo"}, {"top_entropy_quantile": 0.4}),
    "top_entropy_of_one_token": ({"loss_type": "dapo", "learning_rate": 0.3}, {"top_entropy_quantile": 0.0}),
    "top_entropy_with_kl": ({"loss_type": "grpo", "beta": 0.04}, {"top_entropy_quantile": 0.4}),
    "entropy_bonus": ({"loss_type": "dapo"}, {"entropy_coef": 0.05}),
    "entropy_bonus_grpo": ({"loss_type": "grpo", "top_entropy_quantile": 0.4}, {"entropy_coef": 0.05}),
    "scale_batch": ({"loss_type": "dapo"}, {"scale_rewards": "batch"}),
    "scale_none": ({"loss_type": "dapo"}, {"scale_rewards": "none"}),
    "temperature_low": ({"loss_type": "dapo"}, {"temperature": 0.7}),
    "temperature_high": ({"loss_type": "sapo", "beta": 0.04}, {"temperature": 1.5}),
    "bias_corrected_kl": ({"loss_type": "dapo", "beta": 0.4}, {"use_bias_correction_kl": True}),
    "bias_corrected_kl_sequence": (
        {"loss_type": "grpo", "beta": 0.4, "importance_sampling_level": "sequence"},
        {"use_bias_correction_kl": True},
    ),
    "off_policy_mask": ({"loss_type": "dapo"}, {"off_policy_mask_threshold": 0.005}),
    "sapo_temperatures": (
        {"loss_type": "sapo"},
        {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
    ),
    "vespo_constants": (
        {"loss_type": "vespo"},
        {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 1.5, "vespo_lambda_neg": 4.0},
    ),
    "many_small_groups": ({"loss_type": "dapo"}, {"num_generations": 2}),
    "one_group": ({"loss_type": "dapo"}, {"num_generations": 8}),
    "constant_length": ({"loss_type": "dr_grpo"}, {"max_completion_length": 11}),
}


OTHER_MEANING = {
    # TRL reports groups without variance by the std it divides by, which here is that of the batch.
    "scale_batch": frozenset({"frac_reward_zero_std"}),
    # TRL counts the ratios that exceed the clip range after it has bounded them by delta.
    "delta_inside_the_clip_range": frozenset(
        {"clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean"}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_trainer, "shuffle_sequence_dict", lambda rows: rows)
    common, tested = OPTIONS[name]
    with_it = Setting({**REUSED, **common, **tested})
    ours = train_groupwise(policy, with_it, tmp_path / "ours")
    theirs = train_trl(policy, with_it, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs, but=OTHER_MEANING.get(name, frozenset()))
    without = train_groupwise(policy, Setting({**REUSED, **common}), tmp_path / "without")
    assert largest_difference(ours.parameters, without.parameters) > 1e-4


REWARDS = {
    "two": (mixed_reward, patchy_reward),
    "with_unrewarded_completions": (patchy_reward, very_patchy_reward),
}


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize(
    "options",
    [
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.3, 2.0]},
        {"scale_rewards": "group", "reward_weights": [0.3, 2.0]},
        {"scale_rewards": "batch", "reward_weights": [1.0, -0.5]},
        {"scale_rewards": "none", "learning_rate": 0.01},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_several_rewards(rewards: str, options: dict[str, Any], policy: Policy, tmp_path: Path) -> None:
    setting = Setting({"loss_type": "dapo", "learning_rate": 0.03, **options}, REWARDS[rewards])
    ours = train_groupwise(policy, setting, tmp_path / "ours")
    theirs = train_trl(policy, setting, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)


@pytest.mark.parametrize(
    ("entropy_coef", "target"),
    [(0.0, 5.0), (0.0, 0.1), (0.03, 3.12), (0.03, 5.0)],
    ids=["rises", "stays_at_zero", "target_in_range", "from_a_first_value"],
)
def test_adaptive_entropy(entropy_coef: float, target: float, policy: Policy, tmp_path: Path) -> None:
    """The coefficient moves by 0.02 a step, and is used only while a measured entropy is at most target."""
    setting = Setting(
        {
            "loss_type": "grpo",
            "learning_rate": 0.03,
            "use_adaptive_entropy": True,
            "entropy_coef": entropy_coef,
            "entropy_coef_delta": 0.02,
            "entropy_target": target,
        }
    )
    ours = train_groupwise(policy, setting, tmp_path / "ours")
    theirs = train_trl(policy, setting, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)
    assert ours.logged("entropy_coef") == pytest.approx(theirs.logged("entropy_coef"))
    if target == 3.12:
        assert sorted(value <= target for value in ours.logged("entropy")[:3]) == [False, False, True]
    if target == 5.0:  # 40 tokens have at most log 40 = 3.7 nats: the coefficient rises at every step
        assert ours.trainer.entropy_coef == pytest.approx(entropy_coef + 4 * 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize(("accumulation", "num_iterations", "beta"), [(2, 2, 0.04)])
def test_accumulation(
    loss_type: str,
    accumulation: int,
    num_iterations: int,
    beta: float,
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One generation fills the window.

    TRL deals out the rows of a generation anew before it cuts them into micro-batches. Only a mean over the
    tokens of each micro-batch (bnpo) depends on that, so there the rows stay where they are.
    """
    if loss_type == "bnpo":
        monkeypatch.setattr(trl_trainer, "shuffle_sequence_dict", lambda rows: rows)
    setting = Setting(
        {
            **OBJECTIVES[loss_type],
            "gradient_accumulation_steps": accumulation,
            "num_iterations": num_iterations,
            "beta": beta,
        }
    )
    ours = train_groupwise(policy, setting, tmp_path / "ours")
    theirs = train_trl(policy, setting, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo", "luspo"])
def test_generation_larger_than_the_window(
    loss_type: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two optimizer steps per generation, the second off-policy; losses without a token count of the window.

    The rows stay where they are, so that both libraries train on the same ones first.
    """
    monkeypatch.setattr(trl_trainer, "shuffle_sequence_dict", lambda rows: rows)
    setting = Setting(
        {
            **OBJECTIVES[loss_type],
            "steps_per_generation": 2,
        }
    )
    ours = train_groupwise(policy, setting, tmp_path / "ours")
    theirs = train_trl(policy, setting, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)
