"""The correction for a separate sampler, and the masks, against TRL's own functions and TRL's own trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.cases import surrogate_inputs
from support.parity_runs import (
    PROMPTS,
    Policy,
    Setting,
    assert_same_log,
    assert_same_update,
    largest_difference,
    make_trl_trainer,
    noisy_sampler,
    prompt_text,
    train_groupwise,
    train_trl,
)

from groupwise.core.entropy import entropy_threshold
from groupwise.core.ratios import off_policy_keep, sampler_correction, sampler_log_gap
from groupwise.core.surrogates import SurrogateSettings, vespo_gate

trl = pytest.importorskip("trl", minversion="1.16.0")
pytestmark = pytest.mark.parity

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


CORRECTED: dict[str, dict[str, Any]] = {
    "token_truncate": {"loss_type": "dapo", "vllm_importance_sampling_clip_min": 0.7},
    "token_mask": {"loss_type": "grpo", "beta": 0.04, "vllm_importance_sampling_clip_min": 0.7},
    "sequence_truncate": {"loss_type": "sapo"},
    "sequence_mask": {"loss_type": "dapo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "token_truncate vespo": {"loss_type": "vespo", "num_iterations": 2},
    "token_mask vespo": {"loss_type": "vespo", "vllm_importance_sampling_clip_max": 2.0},
    "token_truncate off_policy_mask": {"loss_type": "bnpo", "off_policy_mask_threshold": 0.1},
    "sequence_mask top_entropy": {"loss_type": "luspo", "learning_rate": 0.003, "top_entropy_quantile": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_training(name: str, policy: Policy, tmp_path: Path) -> None:
    """TRL's trainer, with log-probs of another sampler, against ours; the correction makes a difference."""
    options = {
        "learning_rate": 0.03,
        "vllm_importance_sampling_mode": name.split()[0],
        "vllm_importance_sampling_clip_max": 1.4,
        **CORRECTED[name],
    }
    setting = Setting(options, sampler_logps=noisy_sampler(policy))
    ours = train_groupwise(policy, setting, tmp_path / "ours")
    theirs = train_trl(policy, setting, tmp_path / "theirs")
    assert theirs.trainer.use_vllm
    assert_same_update(ours, theirs, policy)
    if setting.options.get("num_iterations") != 2:  # ours logs these at every step, TRL only after generating
        assert_same_log(ours, theirs)
    uncorrected = Setting(
        {**options, "vllm_importance_sampling_correction": False}, sampler_logps=setting.sampler_logps
    )
    without = train_groupwise(policy, uncorrected, tmp_path / "without")
    assert largest_difference(ours.parameters, without.parameters) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tokens_without_sampler_logps(mode: str, policy: Policy, tmp_path: Path) -> None:
    setting = Setting(
        {
            "loss_type": "grpo",
            "learning_rate": 0.03,
            "vllm_importance_sampling_mode": mode,
            "off_policy_mask_threshold": 0.1,
        },
        sampler_logps=noisy_sampler(policy, unscored=True),
    )
    ours = train_groupwise(policy, setting, tmp_path / "ours")
    theirs = train_trl(policy, setting, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_placeholder_log_probs_of_a_rollout_func_change_nothing(
    loss_type: str, policy: Policy, tmp_path: Path
) -> None:
    """Without vLLM both libraries carry the log-probs of a rollout_func and correct for none of them."""
    options = {"loss_type": loss_type, "learning_rate": 0.03}
    placeholders = Setting(
        options, sampler_logps=lambda prompt, completion: [0.0] * len(completion), from_vllm=False
    )
    ours = train_groupwise(policy, placeholders, tmp_path / "ours")
    theirs = train_trl(policy, placeholders, tmp_path / "theirs")
    assert not theirs.trainer.use_vllm
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)
    assert ours.logged("sampling/sampling_logp_difference/mean")[0] > 1


@pytest.mark.slow
def test_off_policy_mask_prefers_the_sampler(policy: Policy, tmp_path: Path) -> None:
    """Without correction the sampler's log-probs still say which sequences drifted."""
    options = {
        "loss_type": "grpo",
        "learning_rate": 0.03,
        "num_iterations": 2,
        "vllm_importance_sampling_correction": False,
    }
    sampler = noisy_sampler(policy)
    masked = Setting({**options, "off_policy_mask_threshold": 0.1}, sampler_logps=sampler)
    ours = train_groupwise(policy, masked, tmp_path / "ours")
    theirs = train_trl(policy, masked, tmp_path / "theirs")
    assert_same_update(ours, theirs, policy)
    without = train_groupwise(policy, Setting(options, sampler_logps=sampler), tmp_path / "without")
    assert largest_difference(ours.parameters, without.parameters) > 1e-4


@pytest.fixture(scope="module")
def trl_trainer(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Any:
    setting = Setting({"loss_type": "dapo"}, sampler_logps=noisy_sampler(policy, unscored=True))
    return make_trl_trainer(policy, setting, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize(("clip_min", "clip_max"), [(None, 1.4), (0.7, None), (0.7, 1.4), (1.1, 1.4)])
@pytest.mark.parametrize("mode", MODES)
def test_correction_factor(
    mode: str, clip_min: float | None, clip_max: float | None, trl_trainer: Any
) -> None:
    """The factor TRL's trainer computes, and ours from the log-probs and the mask it computed it from."""
    trl_trainer.vllm_importance_sampling_mode = mode
    trl_trainer.vllm_importance_sampling_clip_min = clip_min
    trl_trainer.vllm_importance_sampling_clip_max = clip_max
    rows = [{"prompt": prompt_text(i)} for i in range(PROMPTS) for _ in range(4)]
    theirs = trl_trainer._generate_and_score_completions(rows)
    gap_BT = sampler_log_gap(
        theirs["old_per_token_logps"], theirs["sampling_per_token_logps"], theirs["completion_mask"]
    )
    ours = sampler_correction(gap_BT, mode, clip_min, clip_max)
    torch.testing.assert_close(ours, theirs["importance_sampling_ratio"], rtol=0, atol=0)
    assert len(ours.unique()) > 2
    assert (ours.ne(gap_BT.exp() if "token" in mode else gap_BT.sum(-1, keepdim=True).exp())).any()


def random_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantages of both signs and 0, log-probs of two policies, some NaN, a ragged mask, one row empty."""
    generator = torch.Generator().manual_seed(seed)
    advantages_B1 = torch.randn(96, 1, generator=generator)
    advantages_B1[3:6] = 0.0
    logps_BT = -3 * torch.rand(96, 9, generator=generator)
    other_BT = logps_BT + 0.6 * torch.randn(96, 9, generator=generator) + 0.2
    other_BT[::7, 0] = torch.nan
    lengths_B1 = torch.randint(0, 10, (96, 1), generator=generator)
    lengths_B1[0] = 0
    return advantages_B1, logps_BT, other_BT, (torch.arange(9) < lengths_B1).long()


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.4])
def test_off_policy_mask(threshold: float) -> None:
    advantages_B1, logps_BT, other_BT, mask_BT = random_rows(1)
    theirs = trl.GRPOTrainer.get_off_policy_mask(advantages_B1, logps_BT, other_BT, mask_BT, threshold)
    ours = off_policy_keep(advantages_B1, logps_BT, other_BT, mask_BT, threshold)
    assert torch.equal(ours, theirs.to(ours))
    assert 0 < ours.sum() < len(ours)


@pytest.mark.parametrize("scale", [0.1, 1.0, 60.0])
@pytest.mark.parametrize("correction", [None, (0.7, 1.4, "token_mask"), (None, 1.4, "token_truncate")])
def test_vespo_weights(scale: float, correction: tuple[Any, Any, str] | None) -> None:
    """Also where every clamp of the sequence weight acts: tokens beyond 20, sums beyond 20 and log 1e-8."""
    advantages_B1, logps_BT, other_BT, mask_BT = random_rows(2)
    log_ratio_BT = (scale * (logps_BT - other_BT).nan_to_num(0.0)) * mask_BT
    factor_BT = None
    if correction is not None:
        clip_min, clip_max, mode = correction
        factor_BT = sampler_correction(sampler_log_gap(logps_BT, other_BT, mask_BT), mode, clip_min, clip_max)
    constants = {"k_pos": 1.5, "lambda_pos": 2.5, "k_neg": 2.0, "lambda_neg": 1.2}
    theirs = trl.GRPOTrainer.get_gamma_weights(advantages_B1, log_ratio_BT, mask_BT, factor_BT, **constants)
    inputs = surrogate_inputs(
        log_ratio_BT,
        advantages_BX=advantages_B1,
        logps_BT=logps_BT,
        loss_mask_BT=mask_BT.float(),
        log_correction_BX=None if factor_BT is None else factor_BT.log().masked_fill(mask_BT == 0, 0.0),
    )
    ours = vespo_gate(
        inputs, SurrogateSettings(**{f"vespo_{name}": value for name, value in constants.items()})
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert ours.std() > 0.05


@pytest.mark.parametrize("top_quantile", [0.9, 0.5, 0.2, 0.03, 0.0])
def test_entropy_mask(top_quantile: float, trl_trainer: Any) -> None:
    """Which tokens are kept, among 40 values with ties."""
    _, logps_BT, _, mask_BT = random_rows(3)
    entropies_BT = (-logps_BT).mul(8).round().div(8)
    theirs = trl_trainer.get_high_entropy_mask(entropies_BT, mask_BT, 1 - top_quantile)
    threshold = entropy_threshold(entropies_BT[mask_BT.bool()], top_quantile)
    assert torch.equal((entropies_BT >= threshold) & mask_BT.bool(), theirs)
