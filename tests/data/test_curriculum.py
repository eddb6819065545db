"""Prompts by their solve rates: which are taken, rollback and resume, metrics, errors.

Files: ``data/sources.py``, ``check_curriculum`` in ``data/dataset_checks.py``.
"""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from support.configs import config_of
from support.runs import prompts, trainer

from groupwise import ConfigError, GRPOConfig
from groupwise.data.sampler import PromptSampler
from groupwise.data.sources import CurriculumPrompts, PromptRates
from groupwise.distributed import RankSlice
from groupwise.records import GroupRewards

FILTER = {"min": 0.1, "max": 0.9, "again_after": 5}
SIZE, GROUP = 12, 2


def source_of(*, curriculum=None, size=SIZE, seed=3, share=None, **given):
    config = config_of(**{"prompt_filter": None, "seed": seed, "num_generations": GROUP, **given})
    rows = [{"prompt": f"w{i}", "row": i} for i in range(size)]
    share = share or RankSlice(GROUP)
    make = lambda: PromptSampler(rows, config)  # noqa: E731
    return CurriculumPrompts(rows, make, share, config, curriculum)


def solve(source, count, step, solved):
    """Take prompts, reward both completions of each by ``solved``, and return the prompts and the metrics."""
    taken = [row["row"] for row in source.take(count, step)][::GROUP]
    rewards_NF = torch.tensor([[float(reward)] for row in taken for reward in solved(row)])
    return taken, source.add_rewards(GroupRewards(rewards_NF, torch.ones(1), GROUP), ["correct"])


def outcome(row, step=0):
    """Prompts 0, 4, 8 are solved never, 1, 5, 9 always, the others by half; two change after step 6."""
    if row in (0, 1) and step > 6:
        return (1.0, 0.0)
    return {0: (0.0, 0.0), 1: (1.0, 1.0)}.get(row % 4, (0.0, 1.0))


def orders(seed, size=SIZE):
    """Permutations of the epochs, as the plain run has them."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(size, generator=generator).tolist()


def expected(seed, batches, count):
    """The prompts that the filter takes, in scalar loops."""
    order, last, found = chain.from_iterable(orders(seed)), {}, []
    for step in range(batches):
        batch = []
        while len(batch) < count:
            row = next(order)
            rate, when = last.get(row, (0.5, -100))
            if 0.1 <= rate <= 0.9 or step - when >= 5:
                batch.append(row)
        for row in batch:
            last[row] = sum(outcome(row, step)) / 2, step
        found.append(batch)
    return found


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_filter_takes_the_prompts_of_a_scalar_loop(count):
    source, found, read = source_of(prompt_filter=FILTER), [], 0.0
    for step in range(20):
        taken, metrics = solve(source, count, step, lambda row, step=step: outcome(row, step))
        found.append(taken)
        read += metrics["prompts/skipped_share"].count
    assert found == expected(3, 20, count) and (read > 20 * count or count == 1)
    assert source.snapshot()["epoch"] * SIZE + source.snapshot()["index"] == read


def test_what_has_been_learned_is_known():
    source = source_of(prompt_filter=FILTER)
    taken, metrics = solve(source, 5, 7, outcome)
    rates = dict(zip(range(SIZE), source.rates.rate_N.tolist(), strict=True))
    assert {row: rates[row] for row in taken} == {row: sum(outcome(row)) / 2 for row in taken}
    assert all(math.isnan(rates[row]) for row in rates if row not in taken)
    assert source.rates.step_N.tolist() == [7 if row in taken else -1 for row in range(SIZE)]
    assert source.rates.count_N.tolist() == [int(row in taken) for row in range(SIZE)]
    assert metrics["prompts/never_sampled"].value() == 7 and metrics["prompts/skipped_share"].value() == 0
    assert metrics["prompts/solve_rate"].value() == pytest.approx(sum(rates[row] for row in taken) / 5)
    size = sum(tensor.element_size() for tensor in vars(source.rates).values())
    assert size == 12  # bytes of a prompt


def test_two_ranks_take_the_prompts_of_one():
    one, two = source_of(prompt_filter=FILTER), [
        source_of(prompt_filter=FILTER, share=RankSlice(GROUP, rank, 2)) for rank in (0, 1)
    ]  # fmt: skip
    for step in range(12):
        rows = one.take(5, step)  # the third group has a row on either rank
        assert [row for source in two for row in source.take(5, step)] == rows
        rewards_NF = torch.tensor([[sum(outcome(row["row"], step)) / 2] for row in rows])
        for source in (one, *two):
            source.add_rewards(GroupRewards(rewards_NF, torch.ones(1), GROUP), ["correct"])
    assert all(source.snapshot()["index"] == one.snapshot()["index"] for source in two)


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_mark_has_position_rates_and_the_state_of_the_curriculum(stop):
    """Other rewards after the mark would choose other prompts; a copy of the mark continues elsewhere."""
    source, found = source_of(curriculum=Falling(), prompt_filter=FILTER), []
    for step in range(12):
        if step == stop:
            mark = source.snapshot()
            for later in range(3):
                solve(source, 3, step + later, lambda row: (0.0, 0.0))
            source.restore(mark)
        found.append(solve(source, 3, step, outcome)[0])
    resumed = source_of(curriculum=Falling(), prompt_filter=FILTER)
    resumed.restore(mark)
    assert [solve(resumed, 3, step, outcome)[0] for step in range(stop, 12)] == found[stop:]
    assert resumed.snapshot()["curriculum"] == source.snapshot()["curriculum"] == {"calls": 12}
    rates = [vars(each.rates).values() for each in (resumed, source)]
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(*rates, strict=True))


class Falling:
    """Weights that fall with the rate and with the number of calls, of which it has a state."""

    calls = 0

    def __call__(self, rates, step):
        self.calls += 1
        return [1.0 if rate != rate or row < 6 else 1 / self.calls for row, rate in enumerate(rates.rate_N)]

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def test_a_weight_is_the_share_of_epochs_in_which_a_prompt_is_taken():
    weights = [4.0, 2.0, 1.0, 0.0] * 3
    source, counts = source_of(curriculum=lambda rates, step: weights), [0] * SIZE
    while source.epoch < 400:
        for row in solve(source, 7, 0, outcome)[0]:
            counts[row] += 1
    # Of 400 epochs, with a deviation of at most sqrt(400 / 4) = 10.
    assert all(abs(n - 400 * w / 4) <= 40 for n, w in zip(counts, weights, strict=True)), counts
    assert counts[0] == pytest.approx(400, abs=1) and counts[3] == 0


def test_a_group_without_rewards_leaves_the_rate():
    rates = PromptRates.unseen(2).updated({0: 0.5}, 1).updated({0: math.nan}, 3)
    assert [each.tolist()[0] for each in vars(rates).values()] == [0.5, 3, 2]


def test_rewards_of_some_completions_may_be_missing_and_of_others_not_from_0_to_1():
    source = source_of(prompt_filter={**FILTER, "reward": "solved"})
    rows = [row["row"] for row in source.take(2)][::GROUP]
    rewards_NF = torch.tensor([[7.0, 1.0], [8.0, math.nan], [9.0, math.nan], [1.0, math.nan]])
    metrics = source.add_rewards(GroupRewards(rewards_NF, torch.ones(2), GROUP), ["length", "solved"])
    assert source.rates.rate_N[rows[0]] == 1 and source.rates.rate_N[rows[1]].isnan()
    assert source.rates.count_N[rows].tolist() == [1, 1] and metrics["prompts/solve_rate"].value() == 1
    source = source_of(prompt_filter=FILTER, reward_weights=[0.5, 0.5])
    source.take(1)
    weights_F, rewards_NF = torch.tensor([0.5, 0.5]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    source.add_rewards(GroupRewards(rewards_NF, weights_F, GROUP), ["a", "b"])
    assert source.rates.rate_N.nan_to_num(0).sum() == 0.75


@pytest.mark.parametrize(("reward", "nearest"), [(-1.0, 0), (1.5, 1)])
def test_a_reward_that_is_no_rate_is_named(reward, nearest):
    source = source_of(prompt_filter=FILTER)
    with pytest.raises(ConfigError, match=rf"completion is {reward:g}, .* nearest: {nearest}\. .*'correct'"):
        solve(source, 2, 0, lambda row: (0.5, reward))
    solve(
        source_of(curriculum=lambda rates, step: rates.rate_N.nan_to_num(2) * 0 + 1), 2, 0, lambda _: (5, 7)
    )


def test_a_filter_that_leaves_nothing_gives_its_counts():
    source = source_of(prompt_filter={"min": 0.1, "max": 0.9})
    solve(source, SIZE, 0, lambda row: (0.0, 0.0) if row < 5 else (1.0, 1.0))
    with pytest.raises(
        ConfigError,
        match=r"none of the 12 prompts is left after 3 steps: 5 have .* 7 above max, 12 of which are not due",
    ):
        source.take(1, 3)
    source = source_of(curriculum=lambda rates, step: [step < 1] * SIZE)
    source.take(1)
    with pytest.raises(
        ConfigError, match=r"none of the 12 prompts is left after 1 steps: .*12 others have weight 0"
    ):
        source.take(1, 1)


def test_a_sampler_that_leaves_out_the_prompts_that_are_left_ends_with_the_counts():
    source = source_of(prompt_filter={"max": 0.9})
    source.make_sampler = lambda: [0, 1, 2]
    solve(source, 3, 0, lambda row: (1.0, 1.0))
    with pytest.raises(ConfigError, match=r"none of the 12 prompts is left.*3 above max, 3 of which are"):
        source.take(1, 1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * 3, r"weights of shape \(3,\); allowed: .*each of the 12 prompts"),
        ([1.0] * 11 + [-2.0], "the weight -2; allowed: a finite number >= 0"),
        ([float("nan")] * 12, "the weight nan"),
        ("easy", "curriculum .given step=0. raised"),
    ],
)
def test_weights_that_are_none_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        source_of(curriculum=lambda rates, step: weights).take(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"low": 0.1}, r"\['low'\] is unknown; allowed: min, max, again_after, reward; nearest"),
        ({"min": -0.1}, r"\['min'\]=-0.1 is out of range; allowed: >= 0 and <= 1; nearest valid: 0"),
        ({"max": 95}, r"\['max'\]=95 is out of range.*nearest valid: 1"),
        ({"max": "1"}, r"\['max'\]='1' is of type str"),
        ({"again_after": 0}, r"\['again_after'\]=0 is out of range.*nearest valid: 1"),
        ({"min": 0.9, "max": 0.1}, r"min=0.9 above max=0.1"),
        ([0.1, 0.9], "prompt_filter=.* is of type list"),
    ],
)
def test_bad_values_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig("unused", use_cpu=True, prompt_filter=given)


def correct(completion_ids, **_):
    """1 for completions with an even sum: known for each completion, and of every rate."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_dataset": prompts().to_iterable_dataset()},
            r"by their index, and a IterableDataset has none",
        ),
        ({"dataloader_num_workers": 1}, "earlier rewards: dataloader_num_workers=1 reads ahead; set 0"),
        ({"prompt_filter": {"reward": "corect"}}, "'corect' is no reward function.*nearest name: 'correct'"),
        ({"prompt_filter": None, "curriculum": {"min": 0}}, "curriculum=.*is not callable"),
    ],
)
def test_runs_that_cannot_choose_are_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, correct, **{"prompt_filter": FILTER, **given})


def test_the_rates_are_those_of_the_rewards_and_are_logged(tmp_path):
    run = trainer(
        tmp_path, correct, prompt_filter={"max": 0.99, "again_after": 2}, max_steps=4, num_generations=2
    )
    run.train()
    rates = run.prompts.rates
    assert rates.count_N.sum() == 8 and rates.step_N.max() == 3  # two prompts a step
    logs = [log for log in run.state.log_history if "reward" in log]
    assert [log["prompts/never_sampled"] for log in logs][:1] == [6.0]
    assert all(0 <= log["prompts/solve_rate"] <= 1 and log["prompts/skipped_share"] == 0 for log in logs[:1])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_resumed_run_chooses_the_same_prompts(tmp_path, dynamic):
    def run(steps, name, resume=None, **given):
        seen = []

        def reward(completion_ids, row, **_):
            seen.append(row[::2])
            return correct(completion_ids)

        made = trainer(
            tmp_path / name, reward, max_steps=steps, num_generations=2, train_dataset=prompts(24),
            prompt_filter={"min": 0.1, "max": 0.9, "again_after": 5}, curriculum=Falling(),
            dynamic_sampling=dynamic, dynamic_sampling_max_rounds=2, lr_scheduler_type="constant", **given,
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        return seen, made.model.state_dict(), made.prompts.snapshot()

    seen, weights, state = run(9, "one")
    before, *_ = run(5, "two", save_strategy="steps", save_steps=5)
    after, again, resumed = run(9, "two", resume=str(tmp_path / "two" / "checkpoint-5"))
    assert before + after == seen and all(weights[name].equal(again[name]) for name in weights)
    assert state["curriculum"] == resumed["curriculum"] and len({*map(tuple, seen)}) > 4
