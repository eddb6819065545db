"""Rewards of all ranks in one table, their metrics, and rewards of prompts that are finished early."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.fakes.mixin_hosts import Ranks, host

from groupwise.core.advantages import AdvantageSettings, normalized_advantages
from groupwise.errors import RewardError, TrainingError
from groupwise.mixins import RewardMixin
from groupwise.random_state import RandomState
from groupwise.records import Completion, RewardBatch, RolloutBatch
from groupwise.records.rollout import GroupRewards
from groupwise.reporting.metrics import reward_metrics
from groupwise.rewards.runtime.loading import rounded_functions
from groupwise.rewards.runtime.partial import PartialReward
from groupwise.tokenization.prompts import prompt_digest

NAN = math.nan


def mixin(functions, rank=0, kind=RewardMixin, **settings):
    given = {"reward_timeout": None, "reward_on_error": "raise"}
    return host(
        kind,
        Ranks(rank=rank),
        settings={**given, "multi_objective_aggregation": "sum_then_normalize", **settings},
        state="the state",
        rng=RandomState(),
        event_loop=None,
        reward_callables=functions,
        reward_func_names=[getattr(function, "__name__", "partial") for function in functions],
        reward_weights=torch.tensor([1.0, 2.0][: len(functions)]),
    )


def rollouts(lengths=(1, 3), **given):
    count = len(lengths)
    return RolloutBatch(
        rows=[{"number": i} for i in range(count)],
        prompts=["p"] * count,
        prompt_ids=[[1]] * count,
        completions=[Completion([4] * length) for length in lengths],
        texts=["t"] * count,
        **given,
    )


@pytest.fixture
def other_rank(monkeypatch):
    """Contribution of the other rank when rewards are gathered, with this one's prompts; by default none."""
    other = []

    def gathered(own):
        parts = [(None, e) if isinstance(e, Exception) else ((*e, *own[0][0][len(e) :]), None) for e in other]
        return [*own, *parts]

    monkeypatch.setattr("groupwise.distributed.gather_object", gathered)
    return other


def length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def sometimes(number, log_extra, log_metric, trainer_state, **_):
    assert trainer_state == "the state"
    log_extra("seen", number)
    log_metric("logged", 3)
    return [None if n == 0 else 0.5 for n in number]


def test_rewards_of_all_ranks_are_one_table(other_rank):
    other_rank.append(([[2.0, 7.0], [NAN, NAN]], 5))
    found = mixin([length, sometimes]).compute_rewards(rollouts(num_generations=2))
    expected = torch.tensor([[1.0, NAN], [3.0, 0.5], [2.0, NAN], [7.0, NAN]])
    torch.testing.assert_close(found.rewards_NF, expected, equal_nan=True)
    assert found.weights_F.tolist() == [1.0, 2.0]
    assert (found.num_generations, found.num_tokens) == (2, 5)
    assert (found.step_rewards, found.local, found.columns) == ({}, slice(0, 2), {"seen": [0, 1]})
    assert found.metrics["logged"].value() == 3.0
    assert found.metrics["time/reward/length"].value() >= 0
    assert not any(name.endswith("errors") for name in found.metrics)


def test_the_second_rank_finds_its_rows_behind_those_of_the_first(other_rank):
    assert mixin([length], rank=1).compute_rewards(rollouts()).local == slice(2, 4)


def test_padding_rows_of_an_evaluation_batch_have_no_reward(other_rank):
    other_rank.append(([[2.0, 7.0]], 5))
    found = mixin([length]).compute_rewards(rollouts(num_valid=3))
    assert found.rewards_NF.flatten().tolist() == [1.0, 3.0, 2.0]
    assert found.metrics["reward"].count == 3 and found.num_valid == 2
    assert replace(found, local=slice(2, 4)).num_valid == 1  # of the second rank


def test_a_function_with_step_rewards_on_any_rank_has_step_rewards(other_rank):
    other_rank.append(([[[(0, 1.0)], [(1, 2.0)]], [1.0, 1.0]], 2))

    def nothing(completion_ids, **_):
        return [None] * len(completion_ids)

    found = mixin([nothing, length]).compute_rewards(rollouts())
    assert found.step_rewards == {0: [[], [], [(0, 1.0)], [(1, 2.0)]]}
    assert found.rewards_NF[:, 0].isnan().all()
    assert found.rewards_NF[:, 1].tolist() == [1.0, 3.0, 1.0, 1.0]


def test_turns_of_completions_with_steps_are_those_of_all_ranks(other_rank):
    digests = [(prompt_digest(None), prompt_digest("p"))] * 2
    other_rank.append(([[[(0, 1.0)], [(1, 2.0)]]], 2, digests, [((0, 1),), ((0, 2),)]))
    batch = rollouts((1, 3), num_valid=3)
    completions = [replace(each, loss_mask=[1, 0, 1][: len(each.token_ids)]) for each in batch.completions]

    def last_turn(turn_ends, **_):
        return [None if len(ends) == 1 else [None, 4.0] for ends in turn_ends]

    found = mixin([last_turn]).compute_rewards(replace(batch, completions=completions))
    assert found.turns == [(), ((0, 1), (2, 3)), ((0, 1),)]
    assert found.step_rewards == {0: [[], [(2, 4.0)], [(0, 1.0)]]}
    assert found.metrics["reward/turn_2"].value() == 4.0


def test_numbers_on_one_rank_and_steps_on_another_are_refused(other_rank):
    other_rank.append(([[[(0, 1.0)], []]], 2))
    with pytest.raises(RewardError, match="'length' returned step rewards on some processes and numbers"):
        mixin([length]).compute_rewards(rollouts())


def test_an_error_of_another_rank_is_raised_here_too_and_the_own_one_unchanged(other_rank):
    other_rank.append(RewardError("reward function 'theirs' raised KeyError: 'answer'"))
    with pytest.raises(RewardError, match=r"^rank 1: reward function 'theirs' raised KeyError: 'answer'$"):
        mixin([length]).compute_rewards(rollouts())
    with pytest.raises(RewardError, match=r"^reward function '.*' returned 0 rewards for 2 completions"):
        mixin([lambda **_: []]).compute_rewards(rollouts())


def test_a_group_with_prompts_of_two_datasets_names_rank_and_row(other_rank):
    """Two ranks with two rows each of one group: the last one has another prompt."""
    prompt = (prompt_digest("same"), prompt_digest("p"))
    batch = replace(rollouts(num_generations=4), rows=[{"prompt": "same"}] * 2)
    other_rank.append(([[2.0, 7.0]], 5, [prompt, prompt]))
    assert mixin([length]).compute_rewards(batch).rewards_NF.flatten().tolist() == [1.0, 3.0, 2.0, 7.0]
    other_rank[0] = ([[2.0, 7.0]], 5, [prompt, (prompt_digest("other"), prompt[1])])
    with pytest.raises(TrainingError, match=r"^row 1 of rank 1 has another prompt than row 0 of rank 0"):
        mixin([length]).compute_rewards(batch)


def test_different_tasks_in_a_group_are_said_once(other_rank, caplog):
    batch = rollouts((1, 2, 3, 4), num_generations=2)
    batch.prompts[2] = "q"
    batch.completions[3] = replace(batch.completions[3], dropped=True)  # of a failed reset
    mixin([length]).compute_rewards(batch)
    assert "different prompts" not in caplog.text
    batch.prompts[0] = [{"role": "user", "content": "another"}]
    for _ in range(2):
        mixin([length]).compute_rewards(batch)
    assert caplog.text.count("rollouts of a group have different prompts") == 1


def test_functions_get_no_dropped_completions(other_rank):
    other_rank.append(([[2.0, 7.0, NAN], [NAN, NAN, NAN]], 5))
    batch = rollouts((1, 2, 3), extra={"seed": [5, 6, 7]})
    batch.completions[1] = replace(batch.completions[1], dropped=True)
    seen = []

    def length_of_kept(completion_ids, seed, log_extra, **_):
        seen.extend(seed)
        log_extra("size", [len(ids) for ids in completion_ids])
        return [float(len(ids)) for ids in completion_ids]

    found = mixin([length_of_kept, sometimes]).compute_rewards(batch)
    expected = torch.tensor([[1.0, NAN], [NAN, NAN], [3.0, 0.5], [2.0, NAN], [7.0, NAN], [NAN, NAN]])
    torch.testing.assert_close(found.rewards_NF, expected, equal_nan=True)
    assert seen == [5, 7] and found.columns == {"size": [1, None, 3], "seen": [0, None, 2]}


def test_functions_are_not_called_if_all_completions_are_dropped(other_rank):
    batch = rollouts()
    batch.completions[:] = [replace(completion, dropped=True) for completion in batch.completions]

    def called(**_):
        raise AssertionError

    found = mixin([called, length]).compute_rewards(batch)
    assert found.rewards_NF.isnan().all() and found.rewards_NF.shape == (2, 2)


def test_a_group_with_fewer_than_two_others_is_dropped():
    """Two ranks with 4 completions each, groups of 4: the second group has one completion left."""
    batch = rollouts([1] * 4, num_generations=4)
    batch.completions[1] = replace(batch.completions[1], dropped=True)
    first = mixin([length], rollout_on_error="retry")
    first.accelerator.others = [[True, True, False, True]]
    kept, dropped_N = first.drop_failed(batch)
    assert [completion.dropped for completion in kept.completions] == [False, True, False, False]
    assert dropped_N.tolist() == [False, True, False, False] + [True] * 4
    assert values(kept.metrics) == {"rollouts/dropped_share": 5 / 8, "rollouts/dropped_groups": 1}
    batch = rollouts([1] * 4, num_generations=4)
    batch.completions[:] = [replace(c, dropped=i != 2) for i, c in enumerate(batch.completions)]
    second = mixin([length], rank=1, rollout_on_error="retry")
    second.accelerator.others = [[False, True, False, False]]
    kept, same_N = second.drop_failed(batch)
    assert all(completion.dropped for completion in kept.completions) and torch.equal(same_N, dropped_N)
    assert values(kept.metrics)["rollouts/dropped_groups"] == 0  # counted by the first rank
    assert mixin([length], rollout_on_error="raise").drop_failed(batch) == (batch, None)


def test_dropped_completions_lose_the_rewards_that_an_override_gives_them():
    rewards_NF, steps = torch.tensor([[1.0, NAN], [2.0, NAN]]), {1: [[(0, 1.0)], [(0, 2.0)]]}
    batch = RewardBatch(rewards_NF, torch.ones(2), 2, steps, local=slice(0, 2))
    assert batch.without(None) is batch and batch.without(torch.tensor([False, False])) is batch
    found = batch.without(torch.tensor([True, False]))
    torch.testing.assert_close(found.rewards_NF, torch.tensor([[NAN, NAN], [2.0, NAN]]), equal_nan=True)
    assert found.step_rewards == {1: [[], [(0, 2.0)]]} and batch.step_rewards[1][0] == [(0, 1.0)]


def test_errors_are_counted_by_function(other_rank):
    def broken(**_):
        raise ValueError("broken")

    found = mixin([length, broken], reward_on_error="none").compute_rewards(rollouts())
    assert found.metrics["rewards/length/errors"].value() == 0.0
    assert found.metrics["rewards/broken/errors"].value() == 1.0


class Early(PartialReward):
    """Remembers the parts that it is asked to begin with."""

    def __init__(self):
        self.begun = []

    def begin(self, part, executor, **shared):
        self.begun.append((part, executor.timeout, executor.limited_by, shared))


class OwnRewards(RewardMixin):
    """Computes rewards in its own way."""

    def compute_rewards(self, rollouts):
        raise NotImplementedError


def test_finished_prompts_reach_the_per_sample_functions():
    early = Early()
    start = mixin([length, early], reward_timeout=7.0).start_partial_rewards()
    part = rollouts()
    start(part)
    assert early.begun == [(part, 7.0, "reward_timeout", {"trainer_state": "the state"})]
    assert mixin([length]).start_partial_rewards() is None
    assert mixin([early], kind=OwnRewards).start_partial_rewards() is None


def values(metrics):
    return {name: reduction.value() for name, reduction in metrics.items()}


def test_reward_metrics():
    table = torch.tensor([[1.0, NAN], [3.0, NAN], [NAN, NAN], [NAN, NAN], [2.0, NAN], [2.0, NAN]])
    metrics = reward_metrics(GroupRewards(table, torch.tensor([1.0, 1.0]), 2), ["one", "none"])
    # 1, 3, 2, 2: mean 2, variance (1 + 1) / 3; of the two groups with rewards one has no spread
    std = (2 / 3) ** 0.5
    assert values(metrics) == pytest.approx(
        {
            "rewards/one/mean": 2.0, "rewards/one/std": std, "reward": 2.0, "reward_std": std,
            "frac_reward_zero_std": 0.5,
        }
    )  # fmt: skip
    assert {metric.count for metric in metrics.values()} == {4, 2}
    assert metrics["frac_reward_zero_std"].count == 2
    empty = GroupRewards(torch.full((2, 1), NAN), torch.tensor([1.0]), 2)
    assert reward_metrics(empty, ["none"]) == {}


def test_equal_rewards_have_no_spread():
    equal, spread = [0.06] * 5, [0.06] * 4 + [0.060001]
    table = torch.tensor([*equal, *spread])[:, None]
    found = values(reward_metrics(GroupRewards(table, torch.tensor([1.0]), 5), ["one"]))
    assert found["frac_reward_zero_std"] == 0.5
    found = values(reward_metrics(GroupRewards(table[:5], torch.tensor([1.0]), 5), ["one"]))
    assert (found["reward_std"], found["rewards/one/std"]) == (
        0.0,
        0.0,
    )  # 5 · 0.06 / 5 ≠ 0.06 in float32


def test_rewards_that_float32_cannot_tell_apart_are_found(caplog, other_rank):
    third = 1 / 3
    groups = {  # of three completions; float32 has steps of 8 at 1e8 and of 6e-8 at 1
        "steps of 8": [1e8, 1e8 + 3, NAN],
        "a distance of 12": [1e8, 1e8 + 12, 1e8 + 20],
        "a small term": [1.0, 1.0 + 1e-8, 1.0],
        "far apart": [1e8, 3e8, NAN],
        "equal": [1e8 + 3, 1e8 + 3, 1e8 + 3],
        "equal but for rounding": [third, third + 5e-17, 0.1 + 0.2 + third - 0.3],
        "small": [third, 2 * third, 1e-6],
        "missing": [NAN, NAN, NAN],
    }
    found = rounded_functions(torch.tensor(list(groups.values()), dtype=torch.float64), 3)
    assert [list(groups)[i] for i in found] == ["steps of 8", "a distance of 12", "a small term"]
    two_groups = torch.tensor([[0.0, 1.0, 2.0, *groups["steps of 8"]]], dtype=torch.float64)
    assert rounded_functions(two_groups, 3) == [0]

    def huge(completion_ids, **_):
        return [1e8 + len(ids) for ids in completion_ids]

    for _ in range(2):
        mixin([length, huge]).compute_rewards(rollouts(num_generations=2))
    (record,) = [record for record in caplog.records if record.name.startswith("groupwise")]
    assert "reward function 'huge': the differences between rewards of a group are lost" in record.message


def test_step_rewards_count_by_their_sum():
    steps = {0: [[(0, 1.0), (1, 2.0)], [(0, 0.5)]]}
    table = GroupRewards(torch.tensor([[NAN, 1.0], [NAN, 2.0]]), torch.tensor([1.0, 3.0]), 2, steps)
    found = values(reward_metrics(table, ["steps", "whole"]))
    assert found["rewards/steps/mean"] == 1.75 and found["rewards/whole/mean"] == 1.5
    assert found["reward"] == 6.25  # 3 + 3 · 1 and 0.5 + 3 · 2
    alone = GroupRewards(torch.full((2, 1), NAN), torch.tensor([2.0]), 2, {0: [[(0, 2.0)], []]})
    found = values(reward_metrics(alone, ["steps"]))
    assert (found["reward"], found["frac_reward_zero_std"]) == (4.0, 1.0)  # without steps: no reward


def test_a_group_of_equal_sums_whose_steps_differ_has_a_gradient():
    steps = {0: [[(0, 1.0), (1, 2.0)], [(0, 3.0)], [(0, 1.0)], [(0, 1.0)]], 1: [[(0, 2.0)]] * 4}
    table = GroupRewards(torch.full((4, 2), NAN), torch.ones(2), 2, steps, num_tokens=2)
    assert values(reward_metrics(table, ["steps", "constant"]))["frac_reward_zero_std"] == 0.5
    advantages_NT = normalized_advantages(table, AdvantageSettings())
    assert advantages_NT.ne(0).any(-1).tolist() == [True, True, False, False]
