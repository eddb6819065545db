"""Dynamic sampling: which groups fill a batch.

Files: ``records/rollout.py``.
"""

from __future__ import annotations

import itertools
import logging
import math
import pickle
import threading
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import config_of
from support.fakes.ranks import on_ranks
from support.runs import WORDS, policy, tokenizer, trainer

from groupwise import Completion, GRPOTrainer
from groupwise.data.dynamic_sampling import DynamicBatch, round_size
from groupwise.errors import warn_once
from groupwise.records import RewardBatch, RolloutBatch
from groupwise.records.images import ImageInputs
from groupwise.records.rollout import GroupRewards

NAN = math.nan


def group_rewards(rows, size, weights=(1.0,), **given):
    return GroupRewards(torch.tensor(rows), torch.tensor(weights), size, **given)


def sampling_config(num_prompts, size, max_rounds=10, **ranks):
    """Return a configuration of ``num_prompts`` groups of ``size`` per batch."""
    return config_of(
        dynamic_sampling=True,
        dynamic_sampling_max_rounds=max_rounds,
        generation_batch_size=num_prompts * size,
        num_generations=size,
        **ranks,
    )


@pytest.mark.parametrize(
    ("num_unfilled", "share", "world_size", "expected"),
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
def test_round_sizes(num_unfilled, share, world_size, expected):
    # 4 completions per prompt
    assert round_size(num_unfilled, share, sampling_config(8, 4, world_size=world_size)) == expected


class Prompts:
    """Prompts 0, 1, 2, ... and rounds of them in which the rewards of the prompts in ``varied`` differ."""

    def __init__(self, varied, size, world_size=1, rank=0):
        self.numbers, self.varied, self.size = itertools.count(), varied, size
        self.world_size, self.rank = world_size, rank

    def sample(self, count):
        """Rollouts of this rank and rewards of all ranks; the first reward of a varied group is 1."""
        prompts = list(itertools.islice(self.numbers, count))
        ids = [number for number in prompts for _ in range(self.size)]
        rewards = [[float(i == 0 and n in self.varied)] for n in prompts for i in range(self.size)]
        share = len(ids) // self.world_size
        local = slice(self.rank * share, (self.rank + 1) * share)
        own = ids[local]
        rollouts = RolloutBatch(
            rows=[{"number": number} for number in own],
            prompts=[str(number) for number in own],
            prompt_ids=[[number] for number in own],
            completions=[Completion([i]) for i in range(local.start, local.stop)],
            texts=[f"text {number}" for number in own],
            num_generations=self.size,
            extra={"place": list(range(local.start, local.stop))},
        )
        return rollouts, RewardBatch(
            **vars(group_rewards(rewards, self.size)), local=local, columns={"seen": list(own)}
        )


def test_a_rank_keeps_the_columns_of_its_own_rows():
    rewards_NF, columns = torch.arange(4.0)[:, None], {"seen": ["a", "b", "c", "d"]}
    whole = RewardBatch(rewards_NF, torch.ones(1), 2, local=slice(0, 4), columns=columns)
    part = whole.of_rank(slice(2, 4))
    assert part.columns == {"seen": ["c", "d"]}
    assert part.local_part().rewards_NF.flatten().tolist() == [2.0, 3.0]


def fill(prompts, config, gather=list):
    """Run the loop of a step; returns what ``finish`` returns, and the batch."""
    batch = DynamicBatch(config, gather)
    while not batch.is_full:
        batch.add(*prompts.sample(batch.num_to_sample))
    return *batch.finish(), batch


def trained_on(rollouts):
    return [row["number"] for row in rollouts.rows]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sets(st.integers(0, 60)),
    st.integers(1, 5),
    st.integers(2, 3),
)
def test_a_batch_has_the_first_groups_with_variance_in_order(varied, wanted, size):
    varied = varied | set(range(61, 200))  # in the end all vary, so that every batch can be filled
    prompts, next_prompt = Prompts(varied, size), 0
    for _ in range(6):
        rollouts, rewards, batch = fill(prompts, sampling_config(wanted, size, 100))
        groups = trained_on(rollouts)
        assert batch.num_unfilled == 0
        assert groups[::size] == sorted(n for n in varied if n >= next_prompt)[:wanted]
        assert Counter(groups) == dict.fromkeys(groups, size)
        assert rewards.columns["seen"] == groups
        assert rewards.rewards_NF.flatten().tolist() == [float(i % size == 0) for i in range(len(groups))]
        next_prompt = next(prompts.numbers)  # those of the rounds are used up; this one, too
        prompts.numbers = itertools.count(next_prompt)


def test_every_column_of_a_rollout_is_kept():
    rollouts, rewards, _ = fill(Prompts({1, 2, 3}, 2), sampling_config(1, 2))
    # prompt 0 has no variance; prompt 1 is completions 0 and 1 of the second round
    assert rollouts == RolloutBatch(
        rows=[{"number": 1}] * 2,
        prompts=["1"] * 2,
        prompt_ids=[[1]] * 2,
        completions=[Completion([0]), Completion([1])],
        texts=["text 1"] * 2,
        num_generations=2,
        extra={"place": [0, 1]},
    )
    assert (rewards.columns, rewards.local, rewards.num_tokens) == ({"seen": [1, 1]}, slice(0, 2), 1)
    columns = {f.name for f in fields(RolloutBatch)} - {
        "num_generations",
        "num_valid",
        "metrics",
        "row_ids",
        "sampler",
        "mode",
    }
    assert columns == {"rows", "prompts", "prompt_ids", "completions", "texts", "extra", "images"}


def test_images_and_step_rewards_stay_with_their_completions():
    images = [ImageInputs({"pixel_values": torch.tensor([float(i)])}) for i in range(4)]
    rollouts, rewards = Prompts({0}, 2).sample(2)
    steps = {0: [[(0, 0.5)], [(0, 0.5)], [(0, 0.25)], [(0, 1.0)]]}
    batch = DynamicBatch(sampling_config(1, 2), list)
    values = group_rewards([[NAN]] * 4, 2, step_rewards=steps, num_tokens=1)
    batch.add(replace(rollouts, images=images), replace(rewards, **vars(values)))
    filled, filled_rewards = batch.finish()
    assert filled.images == images[2:]  # the second group has variance
    assert filled_rewards.step_rewards == {0: [[(0, 0.25)], [(0, 1.0)]]}


def test_columns_that_some_completions_lack_are_none():
    first, second = Prompts({0, 1}, 2), Prompts({0, 1}, 2)
    batch = DynamicBatch(sampling_config(2, 2), list)
    batch.add(*first.sample(1))
    rollouts, rewards = second.sample(1)
    batch.add(replace(rollouts, extra={"other": ["a", "b"]}), replace(rewards, columns={}))
    filled, filled_rewards = batch.finish()
    assert filled.extra == {"place": [0, 1, None, None], "other": [None, None, "a", "b"]}
    assert filled_rewards.columns == {"seen": [0, 0, None, None]}


def test_token_wise_advantages_are_as_wide_as_the_longest_completion():
    rollouts, rewards = Prompts({0}, 2).sample(1)
    batch = DynamicBatch(sampling_config(1, 2), list)
    batch.add(replace(rollouts, completions=[Completion([1, 2, 3]), Completion([1])]), rewards)
    assert batch.finish()[1].num_tokens == 3


def test_a_batch_that_cannot_be_filled_takes_groups_without_variance():
    rollouts, _, batch = fill(Prompts({3}, 2), sampling_config(4, 2, max_rounds=2))
    # Two rounds of 4 prompts: only prompt 3 varies, 0, 1 and 2 fill the batch, 4 to 7 are discarded.
    assert trained_on(rollouts) == [3, 3, 0, 0, 1, 1, 2, 2]
    values = {name: reduction.value() for name, reduction in batch.metrics.items()}
    assert values == {
        "dynamic_sampling/rounds": 2.0,
        "dynamic_sampling/discarded_share": 4 / 8,
        "dynamic_sampling/unfilled_share": 3 / 4,
    }


def test_one_warning_names_the_groups_without_variance(caplog):
    prompts = Prompts({0, 1, 2}, 2)
    with caplog.at_level(logging.WARNING):
        fill(prompts, sampling_config(3, 2, max_rounds=1))
        assert not caplog.text
        for _ in range(2):
            fill(prompts, sampling_config(3, 2, max_rounds=1))
    assert caplog.text.count("after dynamic_sampling_max_rounds=1 rounds, 3 of the 3 groups") == 1


def test_later_rounds_are_sized_by_the_share_with_variance():
    # batches of 4: of the first 4 prompts two vary, so two missing groups need 4 more, of which all vary
    batch = DynamicBatch(sampling_config(4, 2), list)
    prompts = Prompts({0, 1, 4, 5, 6, 7}, 2)
    assert (batch.is_full, batch.num_to_sample, batch.num_unfilled) == (False, 4, 4)
    batch.add(*prompts.sample(4))
    assert (batch.is_full, batch.num_to_sample, batch.num_unfilled) == (False, 4, 2)
    batch.add(*prompts.sample(4))
    assert (batch.is_full, batch.num_unfilled) == (True, 0)
    rollouts, _ = batch.finish()
    assert trained_on(rollouts)[::2] == [0, 1, 4, 5]
    # 8 groups were sampled: two without variance and two beyond the batch are discarded
    assert batch.metrics["dynamic_sampling/discarded_share"].value() == 4 / 8


def test_without_dynamic_sampling_one_round_is_the_batch(tmp_path, monkeypatch):
    monkeypatch.delattr("groupwise.trainer.DynamicBatch")  # whoever looks the name up fails
    run = trainer(tmp_path, planted(set()), train_dataset=numbered(4), max_steps=2, shuffle_dataset=False)
    run.train()
    logged = [line for line in run.state.log_history if "loss" in line]
    assert len(logged) == 2 and logged[-1]["frac_reward_zero_std"] == 1
    assert not any(name.startswith("dynamic_sampling/") for line in logged for name in line)


def test_ranks_share_the_batch_of_one_process():
    # 3 groups of 4 on 2 ranks: the second group has completions of both. Prompts 0 and 1 have no variance.
    varied = set(range(2, 40))

    def on_rank(rank, gather, exchange):
        own = sampling_config(3, 4, 5, world_size=2, rank=rank)
        return fill(Prompts(varied, 4, 2, rank), own, gather)

    first, second = on_ranks(2, on_rank)
    one = fill(Prompts(varied, 4), sampling_config(3, 4, 5))
    assert trained_on(first[0]) + trained_on(second[0]) == trained_on(one[0]) == [2] * 4 + [3] * 4 + [4] * 4
    assert first[0].extra["place"] + second[0].extra["place"] == one[0].extra["place"]
    assert (first[1].local, second[1].local) == (slice(0, 6), slice(6, 12))
    for filled in (first, second):
        assert torch.equal(filled[1].rewards_NF, one[1].rewards_NF)


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

    def compute_policy_loss(self, batch, logprobs):
        self.__dict__.setdefault("batches", []).append((self.state.global_step, batch))
        return super().compute_policy_loss(batch, logprobs)


def spied(directory, **given):
    run = trainer(directory, **given)
    run.__class__ = Spy
    return run


def weights(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


@pytest.mark.slow
def test_one_group_a_step_trains_as_on_the_prompts_with_variance(tmp_path):
    # Rounds of a single prompt discard no group with variance: the run is that on a dataset of such rows.
    common = {"rollout_func": by_place, "shuffle_dataset": False, "max_steps": 5}
    whole = trainer(tmp_path, planted(VARIED), train_dataset=numbered(28), dynamic_sampling=True, **common)
    chosen = trainer(tmp_path, planted(VARIED), train_dataset=numbered(28).select(sorted(VARIED)), **common)
    for run in (whole, chosen):
        run.train()
    assert not torch.equal(weights(whole), torch.cat([p.flatten() for p in policy().parameters()]))
    assert torch.equal(weights(whole), weights(chosen))
    rounds = [line["dynamic_sampling/rounds"] for line in whole.state.log_history if "loss" in line]
    assert rounds == [2, 1, 3, 1, 1]  # rows 0-1, 2, 3-5, 6, 7


def test_every_batch_is_of_the_current_policy(tmp_path):
    # Batches of 3 groups: of rows 0-2 two vary, of 2 more (3, 4) none, of 3 more all: 6 and 7 are discarded.
    run = spied(
        tmp_path, rewards=planted(VARIED), train_dataset=numbered(28), dynamic_sampling=True,
        shuffle_dataset=False, rollout_func=by_place, per_device_train_batch_size=12, max_steps=2,
        gradient_checkpointing=False, sequence_layout="padded",
    )  # fmt: skip
    run.train()
    assert all(batch.old_logps_BT.isnan().all() for _, batch in run.batches)
    prompts = [sorted({ids[-1] for ids in batch.prompt_ids_BL.tolist()}) for _, batch in run.batches]
    words = [sorted(tokenizer()([WORDS[n] for n in rows])["input_ids"]) for rows in ((1, 2, 5), (8, 11, 13))]
    assert [[[token] for token in step] for step in prompts] == words


def test_metrics_count_every_sampled_group(tmp_path):
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
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        run.train()
    assert torch.equal(weights(run), before)
    assert caplog.text.count("after dynamic_sampling_max_rounds=2 rounds, 1 of the 1 groups") == 1
    # 3 steps of 2 prompts go over the 4 rows one and a half times.
    assert (run.prompts.epoch, run.prompts.index) == (1, 2)


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


def test_a_checkpoint_of_a_run_without_dynamic_sampling_continues_with_a_warning(tmp_path, caplog):
    given = {"train_dataset": numbered(8), "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tmp_path, **given).train()
    run = trainer(tmp_path, **{**given, "dynamic_sampling": True, "max_steps": 2})
    run.train(resume_from_checkpoint=True)
    assert "dynamic_sampling=True (was False)" in caplog.text and run.state.global_step == 2


def test_environments_are_not_gathered():
    """A lock, as a database connection, cannot be sent to another process."""
    prompts = Prompts({0, 1}, 2)

    def sample(count):
        rollouts, rewards = prompts.sample(count)
        return replace(rollouts, extra={"environments": [threading.Lock() for _ in rollouts.rows]}), rewards

    batch = DynamicBatch(sampling_config(1, 2), lambda own: pickle.loads(pickle.dumps(own)))
    batch.add(*sample(2))
    rollouts, _ = batch.finish()
    assert rollouts.extra == {}
