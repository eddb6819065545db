"""Rollouts to padded tensors, and the log-probs that an update needs.

Files: ``policy/reference.py``, ``policy/reference_choice.py``.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.batches import token_batch
from support.fakes.mixin_hosts import Ranks, host
from torch import nn

from groupwise.errors import ConfigError
from groupwise.mixins import LogprobMixin
from groupwise.records import Completion, Experience, LogprobOutput, OldAndRefLogps, RewardBatch, RolloutBatch

NAN = math.nan


class Model(nn.Module):
    """A policy whose log-prob of token t is ``scale`` · t, and whose entropy is t."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale


class Computer:
    """Computes log-probs; remembers the first completion tokens of each call, and whether dropout was on."""

    def __init__(self):
        self.calls, self.checked = [], []

    def check(self, model, batch):
        if not self.checked:
            self.checked.append((model, len(batch), len(self.calls)))

    def __call__(self, model, batch, *, with_entropy, with_aux_loss):
        self.calls.append((batch.completion_ids_BT[:, 0].tolist(), model.training))
        assert not torch.is_grad_enabled() and with_aux_loss == model.training
        logps_BT = model.scale * batch.completion_ids_BT.float()
        return LogprobOutput(logps_BT, batch.completion_ids_BT.float() if with_entropy else None)


class Reference:
    """A reference model, or none."""

    model = None

    @property
    def exists(self):
        return self.model is not None

    @contextmanager
    def scoring(self, policy):
        yield self.model


def mixin(accelerator=None, **settings):
    defaults = {
        "per_device_train_batch_size": 2,
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "use_liger_kernel": False,
        "dynamic_sampling": False,
        "kl_estimator": "k1",
        "beta": 0.5,
        "top_entropy_quantile": 1.0,
    }
    model = Model(-1.0)
    return host(
        LogprobMixin,
        accelerator or Ranks(),
        settings={**defaults, **settings},
        model=model,
        model_wrapped=model,
        processing_class=SimpleNamespace(pad_token_id=9),
        reference=Reference(),
        logprob_computer=Computer(),
        aux_loss_enabled=True,
        metrics_column="",
    )


def rollouts(completions, **given):
    count = len(completions)
    columns = {"rows": [{}] * count, "prompts": ["p"] * count, "texts": ["t"] * count}
    prompt_ids = [[5, 6], *[[7]] * (count - 1)]
    return RolloutBatch(prompt_ids=prompt_ids, completions=completions, **{**columns, **given})


TWO = [Completion([3, 2]), Completion([4], truncated=True)]


def test_rollouts_are_padded_on_both_sides():
    tokens = mixin().collate(rollouts(TWO))
    assert tokens.prompt_ids_BL.tolist() == [[5, 6], [9, 7]]
    assert tokens.prompt_mask_BL.tolist() == [[1, 1], [0, 1]]
    assert tokens.completion_ids_BT.tolist() == [[3, 2], [4, 9]]
    assert tokens.completion_mask_BT.tolist() == tokens.loss_mask_BT.tolist() == [[1, 1], [1, 0]]
    assert tokens.old_logps_BT.isnan().all() and tokens.old_logps_BT.shape == (2, 2)
    assert tokens.sampler_logps_BT is None and tokens.images is None
    assert tokens.group_ids_B.tolist() == [0, 1]
    wide = mixin(pad_to_multiple_of=4).collate(rollouts(TWO))
    assert wide.prompt_ids_BL.shape == wide.completion_ids_BT.shape == (2, 4)


def test_groups_are_numbered_over_all_ranks():
    tokens = mixin(Ranks(rank=1)).collate(rollouts([*TWO, *TWO], num_generations=2))
    assert tokens.group_ids_B.tolist() == [2, 2, 3, 3]  # rank 0 has rows 0 to 3


def test_dropped_completions_have_no_loss():
    dropped = [TWO[0], replace(TWO[1], dropped=True)]
    tokens = mixin(Ranks(rank=1)).collate(rollouts([*dropped, *dropped], num_generations=2))
    assert tokens.loss_mask_BT.tolist() == [[1, 1], [0, 0]] * 2
    assert tokens.group_ids_B.tolist() == [2, 2, 3, 3] and tokens.dropped_B.tolist() == [False, True] * 2


def test_a_processor_pads_with_the_token_of_its_tokenizer():
    run = mixin()
    run.processing_class = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=8))
    assert run.collate(rollouts(TWO)).completion_ids_BT.tolist() == [[3, 2], [4, 8]]


def test_tokens_without_loss():
    tools = [Completion([3, 2], loss_mask=[0, 1]), Completion([4], truncated=True)]
    assert mixin().collate(rollouts(tools)).loss_mask_BT.tolist() == [[0, 1], [1, 0]]
    masked = mixin(mask_truncated_completions=True).collate(rollouts(tools))
    assert masked.loss_mask_BT.tolist() == [[0, 1], [0, 0]]
    assert mixin().collate(rollouts(TWO).drop_from(2)).dropped_B is None
    padded = mixin().collate(rollouts(TWO).drop_from(1))
    assert padded.loss_mask_BT.tolist() == [[1, 1], [0, 0]] and padded.dropped_B.tolist() == [False, True]
    assert padded.completion_mask_BT.tolist() == [[1, 1], [1, 0]]


def test_reported_log_probs_keep_their_places():
    given = [Completion([3, 2], logps=[-0.5, NAN]), Completion([4])]
    tokens = mixin().collate(rollouts(given, images=["one", "two"]))
    expected = [[-0.5, NAN], [NAN, NAN]]
    torch.testing.assert_close(tokens.sampler_logps_BT, torch.tensor(expected), equal_nan=True)
    assert tokens.images == ("one", "two")


def tokens_of(ids, **given):
    completions = torch.tensor(ids)
    ones = torch.ones(len(ids), 1).long()
    return token_batch(ones, ones, completions, (completions > 0).long(), **given)


THREE = [[1, 2], [3, 0], [4, 5]]


def test_old_log_probs_stay_unknown_when_the_policy_does_not_change():
    run = mixin()
    logps = run.old_and_ref_logps(tokens_of(THREE), on_policy=True)
    assert logps.old_logps_BT.isnan().all() and logps.ref_logps_BT is None
    assert run.logprob_computer.calls == []


def test_log_probs_are_computed_by_micro_batch_and_without_dropout():
    run = mixin()
    run.reference.model = Model(-10.0).eval()
    logps = run.old_and_ref_logps(tokens_of(THREE), on_policy=False)
    assert logps.old_logps_BT.tolist() == [[-1, -2], [-3, 0], [-4, -5]]
    assert logps.ref_logps_BT.tolist() == [[-10, -20], [-30, 0], [-40, -50]]
    assert run.logprob_computer.calls == [([1, 3], False), ([4], False)] * 2
    assert run.model.training
    run.model.eval()
    run.old_and_ref_logps(tokens_of(THREE), on_policy=True)
    assert not run.model.training


def test_rows_without_gradient_are_not_computed():
    """Their behaviour policy counts as the current one, should a change of settings give them a gradient."""
    run = mixin()
    logps = run.old_and_ref_logps(tokens_of(THREE), only=[1], on_policy=False)
    assert logps.old_logps_BT[1].tolist() == [-3, 0] and logps.old_logps_BT[[0, 2]].isnan().all()
    assert run.logprob_computer.calls == [([3], False)]


def test_the_layout_is_chosen_with_the_policy_before_any_log_probs():
    """Not with a reference or a teacher, and by every rank, also one without a row to compute."""
    run = mixin()
    run.reference.model = Model(-10.0).eval()
    run.old_and_ref_logps(tokens_of(THREE), on_policy=True)
    run.old_and_ref_logps(tokens_of(THREE), on_policy=True)
    assert run.logprob_computer.checked == [(run.model, 3, 0)] and run.logprob_computer.calls
    run = mixin()
    run.old_and_ref_logps(tokens_of(THREE), only=[], on_policy=False)
    assert run.logprob_computer.checked == [(run.model, 3, 0)] and not run.logprob_computer.calls
    run = mixin()
    run.completion_logprobs(rollouts(TWO), Model(-10.0).eval())
    assert run.logprob_computer.checked == [(run.model, 2, 0)]


def experience(advantages, **fields):
    tokens = replace(tokens_of(THREE), old_logps_BT=torch.full((3, 2), -0.5))
    return Experience(**vars(tokens), advantages_BX=torch.tensor(advantages), **fields)


def test_a_newer_reference_completes_the_experience_of_a_generation():
    lacking = experience([[0.7], [0.0], [-0.7]])
    complete = experience([[0.7], [0.0], [-0.7]], ref_logps_BT=torch.full((3, 2), -9.0))
    run = mixin()
    assert run.add_missing_ref_logps([lacking]) == [lacking]  # no reference
    run.reference.model = Model(-10.0).eval()
    found, kept = run.add_missing_ref_logps([lacking, complete])
    assert kept is complete and run.model.training
    assert found.ref_logps_BT.tolist() == [[-10, -20], [-30, 0], [-40, -50]]
    assert found.old_logps_BT is lacking.old_logps_BT
    assert run.logprob_computer.calls == [([1, 3], False), ([4], False)]


def rewards(**given):
    rewards_NF = torch.tensor([[1.0], [0.0], [0.5]])
    return RewardBatch(rewards_NF, torch.tensor([1.0]), 1, **given, local=slice(0, 2))


def test_the_kl_of_loss_tokens_is_the_penalty_of_a_reward():
    tokens = tokens_of(THREE[:2])
    old = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    ref = torch.tensor([[-1.5, -3.0], [-2.0, NAN]])
    # the other rank has one completion that counts and one that pads an evaluation batch
    run = mixin(Ranks([[4.0, 99.0]]))
    given = rewards()
    found = run.apply_kl_penalty(given, tokens, OldAndRefLogps(old, ref))
    # k1: (0.5 + 1), -1; times beta = 0.5
    assert found.penalty_N.tolist() == [0.75, -0.5, 2.0]
    assert given.penalty_N is None and found.local == given.local
    assert run.apply_kl_penalty(given, tokens, None) is given
    assert run.apply_kl_penalty(given, tokens, OldAndRefLogps(old, None)) is given


def test_the_kl_cannot_be_taken_off_step_rewards():
    logps = OldAndRefLogps(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ConfigError, match="step rewards"):
        mixin().apply_kl_penalty(rewards(step_rewards={0: [[(0, 1.0)], [], []]}), tokens_of([[1]]), logps)


def test_all_loss_tokens_are_selected_without_a_quantile():
    run, window = mixin(), [tokens_of(THREE[:1])]
    (mask,) = run.compute_entropy_masks(window)
    assert mask is window[0].loss_mask_BT and run.logprob_computer.calls == []


def test_the_entropy_quantile_is_that_of_all_ranks():
    # entropies 1, 2, 3, 4, 5 here and 8 to 12 on the other rank (-1 pads): the top half is 8 and more
    window = [tokens_of(THREE[:2]), tokens_of(THREE[2:])]
    run = mixin(Ranks([[8.0, 9.0, 10.0, 11.0, 12.0, -1.0, -1.0]]), top_entropy_quantile=0.5)
    assert [mask.tolist() for mask in run.compute_entropy_masks(window)] == [[[0, 0], [0, 0]], [[0, 0]]]
    # with low entropies there: the median of 0, 0, 0, 1, 2, 3, 4, 5 is 1.5
    run = mixin(Ranks([[0.0, 0.0, 0.0, -1.0]]), top_entropy_quantile=0.5)
    assert [mask.tolist() for mask in run.compute_entropy_masks(window)] == [[[0, 1], [1, 0]], [[1, 1]]]
    # a token at the threshold is selected: the median of 1 to 5 is 3
    run = mixin(Ranks([[-1.0]]), top_entropy_quantile=0.5)
    assert [mask.tolist() for mask in run.compute_entropy_masks(window)] == [[[0, 0], [1, 0]], [[1, 1]]]


def test_tokens_without_loss_are_never_selected_by_entropy():
    tokens = replace(tokens_of([[1, 2], [3, 9]]), loss_mask_BT=torch.tensor([[1, 1], [1, 0]]))
    # entropies 1, 2 and 3 of the loss tokens, median 2; the token of a tool has 9
    run = mixin(Ranks([[-1.0]]), top_entropy_quantile=0.5)
    assert [mask.tolist() for mask in run.compute_entropy_masks([tokens])] == [[[0, 1], [1, 0]]]
