"""Token weights from counts of all ranks, the loss of a micro-batch, the entropy coefficient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.batches import token_batch
from support.configs import config_of
from support.fakes.mixin_hosts import Ranks, host

from groupwise.core.entropy import EntropyControl
from groupwise.core.metrics import Mean
from groupwise.core.objectives import ObjectiveSettings
from groupwise.data.buffer import ExperienceBuffer
from groupwise.mixins.loss import LossMixin, objective_settings
from groupwise.records import Experience, LogprobOutput, MicroBatch

SETTINGS = {
    "loss_type": "dapo",
    "max_completion_length": 10,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "entropy_target": 2.0,
    "entropy_coef_delta": 0.25,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
}


def mixin(others=(), objective=None, entropy=None, **settings):
    settings = {**SETTINGS, **settings}
    return host(
        LossMixin,
        Ranks(others),
        settings=settings,
        entropy_control=EntropyControl(settings["entropy_coef"], entropy),
        objective_settings=objective or ObjectiveSettings(settings["loss_type"]),
    )


def experience(masks, **given):
    """Rows with the given completion masks and advantages of 1."""
    mask = torch.tensor(masks)
    tokens = token_batch(torch.ones(len(mask), 1).long(), torch.ones(len(mask), 1).long(), mask + 3, mask)
    return Experience(**{**vars(tokens), "advantages_BX": torch.ones(len(mask), 1), **given})


#: 3 rows with 2, 1 and 1 loss tokens, of which the quantile keeps 2.
WINDOW = [experience([[1, 1], [1, 0]]), experience([[0, 1]])]
KEPT = [torch.tensor([[1, 0], [1, 0]]), torch.tensor([[0, 0]])]
OTHER = [5, 6, 2, 2]  # rows, loss tokens, kept tokens and micro-batches of the other rank


@pytest.mark.parametrize(
    ("loss_type", "first", "second"),
    [
        # 2 ranks / 10 loss tokens; 2 / (8 rows x tokens of the row); 2 / (8 x 10 tokens at most)
        ("dapo", [[0.2, 0.2], [0.2, 0.0]], [[0.0, 0.2]]),
        ("grpo", [[0.125, 0.125], [0.25, 0.0]], [[0.0, 0.25]]),
        ("dr_grpo", [[0.025, 0.025], [0.025, 0.0]], [[0.0, 0.025]]),
        # 1 / (2 micro-batches x tokens of this one)
        ("bnpo", [[1 / 6, 1 / 6], [1 / 6, 0.0]], [[0.0, 0.5]]),
    ],
)
def test_token_weights_follow_from_counts_of_all_ranks(loss_type, first, second):
    batches = mixin([OTHER], loss_type=loss_type).set_token_weights(WINDOW, KEPT)
    for batch, expected, kept, given in zip(batches, (first, second), KEPT, WINDOW, strict=True):
        torch.testing.assert_close(batch.token_weights_BT, torch.tensor(expected))
        assert batch.entropy_mask_BT is kept and batch.entropy_weights_BT is None
        assert batch.sequence_weight_B1.tolist() == [[2 / 8]] * len(given)  # 2 ranks / 8 rows
        assert batch.completion_ids_BT is given.completion_ids_BT


@pytest.mark.parametrize("credit", ["rollout", "row"])
@pytest.mark.parametrize("size", [1, 2])  # rows of a micro-batch; of size 1, two have a dropped row alone
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "scalerl"])
def test_dropped_completions_count_in_no_normalizer(loss_type, generation, size, credit):
    """Under every normalizer, the weights of the others are those of a window without the dropped rows."""
    rows = experience(
        [[1, 1], [0, 0], [1, 0], [0, 0]],
        group_ids_B=torch.tensor([0, 0, 1, 2]),  # all of group 2 is dropped
        dropped_B=torch.tensor([False, True, False, True]),
    )
    buffer = ExperienceBuffer()
    for _ in range(generation):
        buffer.fill(rows.split(size), num_iterations=1, num_groups=3)
    alone = [experience([[1, 1]]), experience([[1, 0]], group_ids_B=torch.tensor([1]))]

    def weigh(window: list[Experience]) -> MicroBatch:
        run = mixin([[5, 6, 6, 2], [[9, 6]]], loss_type=loss_type, rollout_credit=credit)
        return MicroBatch.concatenate(run.set_token_weights(window, [batch.loss_mask_BT for batch in window]))

    found, expected = weigh(buffer.take(buffer.num_left)), weigh(alone)
    assert torch.equal(found.token_weights_BT[[0, 2]], expected.token_weights_BT)
    assert torch.equal(found.sequence_weight_B1[[0, 2]], expected.sequence_weight_B1)
    assert not found.token_weights_BT[[1, 3]].any() and not found.sequence_weight_B1[[1, 3]].any()


def test_a_window_of_dropped_completions_has_no_weights():
    window = experience([[0, 0], [0, 0]], dropped_B=torch.tensor([True, True]))
    (found,) = mixin([[0, 0, 0, 0]], loss_type="grpo").set_token_weights([window], [window.loss_mask_BT])
    assert not found.token_weights_BT.any() and not found.sequence_weight_B1.any()


def test_loss_tokens_are_counted_by_prompt():
    run = mixin([[[6, 7], [9, 3]]])
    first = experience([[1, 1], [1, 0], [1, 0]], group_ids_B=torch.tensor([4, 5, 4]))
    second = experience([[1, 1], [1, 1]], group_ids_B=torch.tensor([5, 6]))
    counted = torch.tensor([True, True, True, True, False])  # the last row only pads an evaluation batch
    assert run._count_group_tokens([first, second], counted) == {4: 3, 5: 3, 6: 7, 9: 3}


def test_padding_rows_are_no_sequences():
    window = [WINDOW[0], replace(WINDOW[1], dropped_B=torch.tensor([True]))]
    first, second = mixin([OTHER]).set_token_weights(window, KEPT)
    torch.testing.assert_close(first.sequence_weight_B1, torch.full((2, 1), 2 / 7))  # 2 ranks / (2 + 5 rows)
    assert second.sequence_weight_B1.tolist() == [[0.0]]


def test_the_prompts_of_padding_rows_do_not_count():
    window = [
        experience([[1, 1], [1, 0]], group_ids_B=torch.tensor([4, 5])),
        experience([[0, 0]], group_ids_B=torch.tensor([6]), dropped_B=torch.tensor([True])),
    ]
    run = mixin([OTHER, [[9, 5]]], loss_type="scalerl")
    first, _ = run.set_token_weights(window, KEPT)
    # 2 ranks / (prompts 4, 5 and 9 x loss tokens of the prompt)
    torch.testing.assert_close(first.token_weights_BT, torch.tensor([[1 / 3, 1 / 3], [2 / 3, 0.0]]))


def test_the_entropy_bonus_is_a_mean_over_the_kept_tokens_of_all_ranks():
    first, second = mixin([OTHER], entropy_coef=0.5).set_token_weights(WINDOW, KEPT)
    # 0.5 x 2 ranks / (2 + 2 tokens)
    assert first.entropy_weights_BT.tolist() == [[0.25, 0.0], [0.25, 0.0]]
    assert second.entropy_weights_BT.tolist() == [[0.0, 0.0]]
    empty = mixin([[5, 0, 0, 1]], entropy_coef=0.5).set_token_weights(WINDOW[:1], [torch.zeros(2, 2)])
    assert empty[0].entropy_weights_BT.tolist() == [[0.0, 0.0]] * 2


def test_the_adaptive_bonus_waits_for_an_entropy_below_its_target():
    for entropy, expected in ((None, 0.0), (2.5, 0.0), (1.5, 0.25)):
        run = mixin([OTHER], use_adaptive_entropy=True, entropy_coef=0.5, entropy=entropy)
        assert run.set_token_weights(WINDOW, KEPT)[0].entropy_weights_BT[0, 0] == expected


def micro_batch(run=None, **given):
    run = run or mixin([[0, 0, 0, 1]])
    return run.set_token_weights([experience([[1, 1], [1, 0]], **given)], [torch.tensor([[1, 0], [1, 0]])])[0]


LOGPS = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
ENTROPY = torch.tensor([[1.0, 5.0], [3.0, 7.0]])


def test_unknown_old_log_probs_are_those_of_the_current_policy():
    output = mixin().compute_policy_loss(micro_batch(), LogprobOutput(LOGPS, ENTROPY))
    # ratio 1 and advantage 1 on 2 kept tokens with weights 2 ranks / 3 loss tokens
    assert output.loss.item() == pytest.approx(-4 / 3)
    (gradient,) = torch.autograd.grad(output.loss, LOGPS)
    torch.testing.assert_close(gradient, torch.tensor([[-2 / 3, 0.0], [-2 / 3, 0.0]]))
    # of the known ones the clip at 1.2 holds: 1.2 + 1
    known = micro_batch(old_logps_BT=torch.tensor([[-2.0, math.nan], [math.nan, math.nan]]))
    output = mixin().compute_policy_loss(known, LogprobOutput(LOGPS, ENTROPY))
    assert output.loss.item() == pytest.approx(-2.2 * 2 / 3)
    assert output.bonus_entropy is None and "policy_loss" not in output.metrics


def test_the_policy_loss_is_counted_by_its_share_of_the_window():
    run = mixin([[6, 0, 0, 1]], entropy_coef=0.5)
    batch = micro_batch(run)
    output = run.compute_policy_loss(batch, LogprobOutput(LOGPS, ENTROPY))
    # 2 rows of 8 on 2 ranks; the bonus subtracts 0.5 x 2 / 2 x (1 + 3)
    assert output.metrics["policy_loss"].count == 0.5
    assert output.loss.item() == pytest.approx(output.metrics["policy_loss"].total.item() - 2.0)
    assert output.bonus_entropy.value() == 2.0  # mean of 1 and 3


def test_every_term_reaches_the_objective():
    objective = ObjectiveSettings("dapo", beta=1.0, kl_estimator="k1")
    batch = micro_batch(ref_logps_BT=torch.tensor([[-1.5, -2.0], [-3.0, -4.0]]))
    output = mixin(objective=objective).compute_policy_loss(batch, LogprobOutput(LOGPS, ENTROPY))
    # k1 = -1 + 1.5 on one token of weight 2 / 3
    assert output.loss.item() == pytest.approx(-4 / 3 + 0.5 * 2 / 3)
    sampler = micro_batch(sampler_logps_BT=torch.tensor([[-1.5, -2.0], [-3.0, -4.0]]))
    output = mixin().compute_policy_loss(sampler, LogprobOutput(LOGPS, ENTROPY))
    assert output.metrics["sampling/sampling_logp_difference/max"].value() == 0.5


def test_the_entropy_coefficient_moves_with_the_entropy_of_all_ranks():
    assert mixin().update_entropy_coef(Mean(1.0, 1.0)) == {}
    fixed = mixin(entropy_coef=0.5)
    assert fixed.update_entropy_coef(Mean(1.0, 1.0))["entropy_coef"].value() == 0.5
    # (3 + 3) / (1 + 2) = 2, the target: up by 0.25
    run = mixin([[3.0, 2.0]], use_adaptive_entropy=True, entropy_coef=0.5)
    assert run.update_entropy_coef(Mean(torch.tensor(3.0), 1.0))["entropy_coef"].value() == 0.75
    assert run.entropy_control == EntropyControl(0.75, 2.0)
    # (3 + 6) / (1 + 2) = 3, above: down, and not below its minimum
    run = mixin([[6.0, 2.0]], use_adaptive_entropy=True, entropy_coef=0.5, entropy_coef_min=0.375)
    assert run.update_entropy_coef(Mean(3.0, 1.0))["entropy_coef"].value() == 0.375
    # no token at all
    run = mixin([[0.0, 0.0]], use_adaptive_entropy=True, entropy_coef=0.875)
    assert run.update_entropy_coef(Mean(0.0, 0.0))["entropy_coef"].value() == 1.0


def test_every_setting_of_the_objective_comes_from_its_own_field():
    given = {
        name: f"value of {name}"
        for name in (
            "importance_sampling_level", "beta", "kl_estimator", "kl_in_reward", "use_bias_correction_kl",
            "off_policy_mask_threshold", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_clip_max", "epsilon", "epsilon_high", "delta", "sapo_temperature_pos",
            "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
        )
    }  # fmt: skip
    given |= {"loss_type": "sapo", "loss_kwargs": None}
    settings = objective_settings(config_of(**given))
    values = {**vars(settings), **vars(settings.surrogate)}
    assert values.pop("loss_type") == "sapo" and values.pop("epsilon_low") == "value of epsilon"
    assert values.pop("surrogate") is settings.surrogate and values.pop("truncation_unknown") is False
    assert values == {
        name: f"value of {name}" for name in given.keys() - {"epsilon", "loss_type", "loss_kwargs"}
    }
    given |= {"epsilon_high": None, "loss_type": "dapo"}
    settings = objective_settings(config_of(**given), placeholder_logps=True)
    assert settings.vllm_importance_sampling_mode is None and settings.loss_type == "dapo"
    assert settings.surrogate.epsilon_high == "value of epsilon"
