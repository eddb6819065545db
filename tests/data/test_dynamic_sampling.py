"""Dynamic sampling: which groups a step is trained on, where they come from and what is carried over."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import WORDS, policy, tokenizer, trainer

from groupwise import Completion, ConfigError, GRPOTrainer, register_aggregation
from groupwise.core.advantages import GroupRewards
from groupwise.data.dynamic_sampling import (
    FillSettings,
    LeftoverGroups,
    fill_batch,
    has_variance,
    round_size,
    with_old_logps,
)
from groupwise.records import RewardBatch, RolloutBatch

NAN = math.nan


def group_rewards(rows, size, weights=(1.0,), **given):
    return GroupRewards(torch.tensor(rows), torch.tensor(weights), size, **given)


@pytest.mark.parametrize(
    ("rewards", "varies"),
    [
        ([0.0, 1.0, 0.0], True),
        ([0.1, 0.1, 0.1], False),
        ([-2.0, -2.0, -2.5], True),
        ([NAN, NAN, NAN], False),
        ([1.0, NAN, NAN], False),  # a single reward cannot vary
        ([1.0, NAN, 1.0], False),
        ([1.0, NAN, 2.0], True),
        ([0.3, 0.1 + 0.2, 0.3], False),  # rounding is no difference
        ([1e-3, 1.1e-3, 1e-3], True),
    ],
)
def test_groups_whose_rewards_differ(rewards, varies):
    rows = [[reward] for reward in [0.0, 0.0, 1.0, *rewards]]
    assert has_variance(group_rewards(rows, 3)) == [True, varies]


def test_functions_that_cancel_vary_only_one_by_one():
    rewards = group_rewards([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 2, (1.0, 1.0))
    assert has_variance(rewards) == [False, False]
    assert has_variance(rewards, "normalize_then_sum") == [True, False]


def test_variance_is_that_of_the_registered_aggregation():
    register_aggregation("worst", lambda rewards_NF, weights_F, num_generations: rewards_NF.amin(-1))
    rewards = group_rewards([[1.0, 0.0], [0.0, 5.0], [1.0, 0.0], [1.0, 2.0]], 2, (1.0, 1.0))
    assert has_variance(rewards, "worst") == [False, True]


def test_weights_of_zero_do_not_make_a_difference():
    assert has_variance(group_rewards([[1.0, 0.0], [1.0, 1.0]], 2, (1.0, 0.0))) == [False]


def test_rewards_of_steps_count():
    steps = {0: [[(1, 0.5)], [(2, 0.5)], [(1, 0.5), (3, 0.0)], []]}
    assert has_variance(group_rewards([[NAN]] * 4, 2, step_rewards=steps, num_tokens=4)) == [False, True]


@pytest.mark.parametrize(
    ("num_unfilled", "share", "ranks", "expected"),
    [
        (8, 1.0, 1, 8),
        (3, 0.5, 1, 6),
        (3, 0.4, 1, 8),  # 7.5, rounded up
        (3, 0.1, 1, 8),  # at most a full batch
        (3, 0.0, 1, 8),
        (3, 1.0, 8, 4),  # 4 completions for each of 8 ranks: prompts in pairs
        (1, 1.0, 2, 1),  # 2 completions for each of 2 ranks
    ],
)
def test_round_sizes(num_unfilled, share, ranks, expected):
    # 4 completions per prompt.
    assert round_size(num_unfilled, share, FillSettings(8, 4, 10, ranks=ranks)) == expected


def scripted(varied, size):
    """Samples the next prompts 0, 1, 2, ...; the rewards of those in ``varied`` differ."""
    numbers = itertools.count()

    def sample(count):
        ids = [number for number in itertools.islice(numbers, count) for _ in range(size)]
        rewards = [[float(i == 0 and number in varied)] for number in ids[::size] for i in range(size)]
        rollout = RolloutBatch(
            rows=[{"number": number} for number in ids],
            prompts=[str(number) for number in ids],
            prompt_ids=[[number] for number in ids],
            completions=[Completion([i]) for i in range(len(ids))],
            texts=["x"] * len(ids),
            extra={"place": list(range(len(ids)))},
        )
        return RewardBatch(rollout, group_rewards(rewards, size), slice(0, len(ids)), {"seen": list(ids)})

    return sample


def alone(values):
    return values


def trained_on(filled):
    return [row["number"] for row in filled.scored.rollout.rows]


@settings(max_examples=60)
@given(
    st.sets(st.integers(0, 60)),
    st.integers(1, 5),
    st.integers(2, 3),
)
def test_every_group_with_variance_is_trained_on_once_and_in_order(varied, wanted, size):
    varied = varied | set(range(61, 200))  # in the end all vary, so that every batch can be filled
    fill = FillSettings(wanted, size, max_rounds=100)
    sample, carry, seen = scripted(varied, size), LeftoverGroups(), []
    for _ in range(6):
        filled = fill_batch(carry, fill, sample, alone)
        assert filled.num_unfilled == 0 and len(filled.surplus) < wanted
        groups = trained_on(filled)
        assert Counter(groups) == dict.fromkeys(groups, size)
        seen += groups[::size]
        carry = LeftoverGroups(filled.surplus, filled.share_with_variance)
    assert seen == sorted(varied)[: len(seen)]
    assert filled.scored.columns["seen"] == groups
    assert filled.scored.rewards.rewards_NF.flatten().tolist() == [
        float(i % size == 0) for i in range(len(groups))
    ]


def test_a_batch_that_cannot_be_filled_takes_groups_without_variance():
    fill = FillSettings(4, 2, max_rounds=2)
    filled = fill_batch(LeftoverGroups(), fill, scripted({3}, 2), alone)
    # Two rounds of 4 prompts: only prompt 3 varies, 0, 1 and 2 fill up, 4 to 7 are discarded.
    assert trained_on(filled) == [3, 3, 0, 0, 1, 1, 2, 2]
    assert filled.num_unfilled == 3 and filled.surplus == []
    values = {name: reduction.value() for name, reduction in filled.metrics.items()}
    assert values == {
        "dynamic_sampling/rounds": 2.0,
        "dynamic_sampling/discarded_share": 4 / 8,
        "dynamic_sampling/unfilled_share": 3 / 4,
        "dynamic_sampling/carried": 0.0,
    }


def test_ranks_share_the_batch_of_one_process():
    # 3 groups of 4 on 2 ranks: the second group has completions of both. Prompts 0 and 1 have no variance.
    def of_rank(rank):
        whole = scripted(set(range(2, 40)), 4)

        def sample(count):
            scored = whole(count)
            share = len(scored.rollout) // 2
            local = slice(rank * share, (rank + 1) * share)
            part = {
                name: getattr(scored.rollout, name)[local]
                for name in ("rows", "prompts", "prompt_ids", "completions", "texts")
            }
            extra = {"place": scored.rollout.extra["place"][local]}
            return RewardBatch(
                RolloutBatch(**part, extra=extra),
                scored.rewards,
                local,
                {"seen": scored.columns["seen"][local]},
            )

        return sample

    def run(gathered):
        """What each of the two ranks fills, when the exchange gives ``gathered`` to both."""
        own, filled = [], []
        for rank in (0, 1):
            fill = FillSettings(3, 4, 5, ranks=2, rank=rank)

            def gather(values):
                own.append(values)
                return gathered if gathered is not None else values

            try:
                filled.append(fill_batch(LeftoverGroups(), fill, of_rank(rank), gather))
            except (RuntimeError, IndexError, ValueError):
                assert gathered is None  # without the other rank's half, groups are not whole
        return own, filled

    own, _ = run(None)
    _, (first, second) = run(own[0] + own[1])
    one = fill_batch(LeftoverGroups(), FillSettings(3, 4, 5), scripted(set(range(2, 40)), 4), alone)
    assert trained_on(first) + trained_on(second) == trained_on(one) == [2] * 4 + [3] * 4 + [4] * 4
    assert first.surplus == second.surplus == one.surplus and len(one.surplus) == 1
    assert (first.scored.local, second.scored.local) == (slice(0, 6), slice(6, 12))
    assert torch.equal(first.scored.rewards.rewards_NF, one.scored.rewards.rewards_NF)


def test_carried_groups_survive_a_checkpoint(tmp_path):
    filled = fill_batch(LeftoverGroups(), FillSettings(2, 2, 5), scripted(set(range(1, 9)), 2), alone)
    groups = with_old_logps(
        filled.surplus, FillSettings(2, 2, 5), lambda rollout: [[-0.5]] * len(rollout), alone
    )
    carry = LeftoverGroups(groups, 0.75)
    assert groups[0][0].completion.old_logps == [-0.5]
    torch.save(carry.state_dict(), tmp_path / "carry.pt")
    assert LeftoverGroups.from_state(torch.load(tmp_path / "carry.pt", weights_only=True)) == carry


def test_groups_that_a_checkpoint_cannot_hold_are_left_out(caplog):
    filled = fill_batch(LeftoverGroups(), FillSettings(2, 2, 5), scripted(set(range(1, 9)), 2), alone)
    filled.surplus[0][0].values["rows"]["image"] = object()
    with caplog.at_level(logging.WARNING):
        assert LeftoverGroups(filled.surplus).state_dict()["groups"] == []
    assert "1 carried groups are not part of the checkpoint" in caplog.text


# With the trainer.


def numbered(count):
    return Dataset.from_dict({"prompt": [WORDS[i % 28] for i in range(count)], "number": list(range(count))})


def planted(varied):
    """Rewards that differ within the groups of the given rows only."""

    def reward(number, completion_ids, **_):
        return [float(n in varied and ids[0] % 2 == 0) for n, ids in zip(number, completion_ids, strict=True)]

    return reward


def by_place(prompts, run):
    """Completions that depend on the prompt and on the place in the group only; even and odd take turns."""
    ids = tokenizer()(list(prompts))["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [[4 + i % 4, prompt[0], 1] for i, prompt in enumerate(ids)]}


VARIED = {1, 2, 5, 6, 7, 8, 11, 13, 14, 17, 18, 19, 22, 23, *range(26, 28)}


class Spy(GRPOTrainer):
    """Keeps the batches that losses are computed of."""

    def compute_policy_loss(self, batch, scores):
        self.__dict__.setdefault("batches", []).append((self.state.global_step, batch))
        return super().compute_policy_loss(batch, scores)


def spied(directory, **given):
    run = trainer(directory, **given)
    run.__class__ = Spy
    return run


def weights(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def test_one_group_a_step_trains_as_on_the_prompts_with_variance(tmp_path):
    # Rounds of a single prompt leave nothing over, so the run is that on a dataset without the other rows.
    common = {"rollout_func": by_place, "shuffle_dataset": False, "max_steps": 5}
    whole = trainer(tmp_path, planted(VARIED), train_dataset=numbered(28), dynamic_sampling=True, **common)
    chosen = trainer(tmp_path, planted(VARIED), train_dataset=numbered(28).select(sorted(VARIED)), **common)
    for run in (whole, chosen):
        run.train()
    assert not torch.equal(weights(whole), torch.cat([p.flatten() for p in policy().parameters()]))
    assert torch.equal(weights(whole), weights(chosen))
    rounds = [line["dynamic_sampling/rounds"] for line in whole.state.log_history if "loss" in line]
    assert rounds == [2, 1, 3, 1, 1]  # rows 0-1, 2, 3-5, 6, 7


def test_groups_left_over_are_trained_on_next_with_the_log_probs_of_their_policy(tmp_path):
    # Batches of 3 groups. Step 1: of rows 0-2 two vary, of 2 more (3, 4) none, then of 3 more all: 5, 6, 7.
    run = spied(
        tmp_path, rewards=planted(VARIED), train_dataset=numbered(28), dynamic_sampling=True,
        shuffle_dataset=False, rollout_func=by_place, per_device_train_batch_size=12, max_steps=2,
        gradient_checkpointing=False,
    )  # fmt: skip
    run.args.max_steps = 1
    run.train()
    carried = run.feed.carry.groups
    assert [group[0].values["rows"]["number"] for group in carried] == [6, 7]
    first = policy()  # the policy that sampled them
    for sample in itertools.chain(*carried):
        tokens = torch.tensor([sample.values["prompt_ids"] + sample.completion.token_ids])
        logps = first(tokens).logits[0].log_softmax(-1)
        prompt = len(sample.values["prompt_ids"])
        expected = [
            logps[prompt - 1 + i, token].item() for i, token in enumerate(sample.completion.token_ids)
        ]
        assert sample.completion.old_logps == pytest.approx(expected, abs=1e-5)

    run = spied(
        tmp_path / "on", rewards=planted(VARIED), train_dataset=numbered(28), dynamic_sampling=True,
        shuffle_dataset=False, rollout_func=by_place, per_device_train_batch_size=12, max_steps=2,
        gradient_checkpointing=False, log_completions=True, sequence_layout="padded",
    )  # fmt: skip
    run.train()
    assert all(batch.old_logps_BT is None for step, batch in run.batches if step == 0)
    (second,) = [batch for step, batch in run.batches if step == 1]
    prompts = second.prompt_ids_BL[:, -1].tolist()
    old = dict(zip(prompts, second.old_logps_BT.tolist(), strict=True))
    assert not second.old_logps_BT.isnan().any()  # the others have those of the present policy
    stored = {s.values["prompt_ids"][-1]: s.completion.old_logps for group in carried for s in group[-1:]}
    assert len(stored) == 2
    for prompt, logps in stored.items():
        assert old[prompt] == pytest.approx(logps, abs=1e-6)
    logged = [line for line in run.state.log_history if "loss" in line]
    assert [line["dynamic_sampling/carried"] for line in logged] == [0, 2]


def test_metrics_tell_of_everything_that_was_sampled(tmp_path):
    run = trainer(
        tmp_path, planted({1}), train_dataset=numbered(28), dynamic_sampling=True, shuffle_dataset=False,
        rollout_func=by_place, max_steps=1,
    )  # fmt: skip
    run.train()
    (line,) = [line for line in run.state.log_history if "loss" in line]
    # Rows 0 and 1 with 4 completions of 3 tokens and a prompt of 1; 2 of them have a reward of 1.
    assert line["num_tokens"] == 2 * 4 * 4
    assert line["reward"] == pytest.approx(2 / 8)
    assert line["frac_reward_zero_std"] == pytest.approx(1 / 2)
    assert line["dynamic_sampling/discarded_share"] == pytest.approx(1 / 2)


def test_a_constant_reward_ends_with_a_warning_and_an_update_of_zero(tmp_path, caplog):
    run = trainer(
        tmp_path, planted(set()), train_dataset=numbered(4), dynamic_sampling=True, max_steps=3,
        dynamic_sampling_max_rounds=2, rollout_func=by_place,
    )  # fmt: skip
    before = weights(run)
    with caplog.at_level(logging.WARNING):
        run.train()
    assert torch.equal(weights(run), before)
    assert caplog.text.count("after dynamic_sampling_max_rounds=2 rounds, 1 of the 1 groups") == 1
    # 3 steps of 2 prompts go over the 4 rows one and a half times.
    assert run.feed.source.queue.state_dict() == {"finished_passes": 1, "position": 2}


def test_rewards_that_are_missing_are_replaced(tmp_path):
    def reward(number, completion_ids, **_):
        return [
            None if n % 2 == 0 else float(ids[0] % 2 == 0)
            for n, ids in zip(number, completion_ids, strict=True)
        ]

    run = spied(
        tmp_path, rewards=reward, train_dataset=numbered(8), dynamic_sampling=True, shuffle_dataset=False,
        rollout_func=by_place, max_steps=3,
    )  # fmt: skip
    run.train()
    words = tokenizer()([WORDS[1], WORDS[3], WORDS[5]])["input_ids"]
    assert [batch.prompt_ids_BL[0].tolist() for _, batch in run.batches] == words


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path):
    given = {"train_dataset": numbered(8), "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tmp_path, **given).train()
    run = trainer(tmp_path, dynamic_sampling=True, **given)
    with pytest.raises(ConfigError, match="take their prompts in different ways"):
        run.train(resume_from_checkpoint=True)
