"""Rewards per turn: spans of turns, lists of rewards, their checks, and runs with them.

Files: ``agents/environments.py``, ``rewards/runtime/calling.py``, ``mixins/reward.py``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.agent_runs import calls_reward, chats, measure, trainer, turn_reward
from support.fakes.scripted import ScriptedBackend, agents, byte_tokenizer, call, question

from groupwise import GRPOTrainer
from groupwise.agents.environments import EnvironmentPool
from groupwise.errors import RewardError
from groupwise.records import Completion, RewardBatch, RolloutBatch
from groupwise.records.rollout import GroupRewards
from groupwise.reporting.metrics import turn_metrics
from groupwise.rewards.runtime.calling import call_rewards, checked_rewards


class Ladder:
    """Pays for every step up, in the turn that makes it."""

    def reset(self, **row: Any) -> None:
        self.height = 0

    def climb(self, by: int) -> str:
        """Climb.

        Args:
            by: how many steps.
        """
        self.height += by
        return f"at {self.height}"

    def get_reward(self, completion: list[dict[str, Any]]) -> list[float | None]:
        turns = [message for message in completion if message["role"] == "assistant"]
        return [float(len(calls)) if (calls := turn.get("tool_calls")) else None for turn in turns]


SCRIPTS = [[call("climb", by=1), call("climb", by=2) + call("climb", by=1), "up"], ["no"]]


@pytest.mark.parametrize("retried", [None, 1])
def test_an_environment_pays_each_turn(retried):
    tokenizer, pool = byte_tokenizer(), EnvironmentPool(Ladder)
    loop = agents(tokenizer, (), pool, max_retries=retried)
    rollouts = loop.generate_rollouts([question("a"), question("b")], ScriptedBackend(tokenizer, SCRIPTS))
    turns = rollouts.completions[0].turns
    decoded = [tokenizer.decode(rollouts.completions[0].token_ids[start:end]) for start, end in turns]
    assert decoded == [f"{text}<|im_end|>" for text in SCRIPTS[0]]
    (rewards,), *_ = call_rewards(pool.reward_funcs(), ["Ladder"], rollouts)
    first, second, _ = turns
    assert rewards == [[(first[1] - 1, 1.0), (second[1] - 1, 2.0)], []]


@pytest.mark.slow
def test_a_run_with_rewards_per_turn_in_logs_tables_and_evaluations(tmp_path: Path) -> None:
    class Watched(GRPOTrainer):
        def compute_rewards(self, rollouts: Any) -> Any:
            seen.append(super().compute_rewards(rollouts))
            return seen[-1]

    seen: list[RewardBatch] = []
    settings = {"reward_funcs": [turn_reward, calls_reward], "reward_weights": [2.0, 0.5], "max_steps": 1}
    run = trainer(
        tmp_path, Watched, tools=[measure], log_completions=True, num_generations_eval=2,
        eval_dataset=chats(2), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, **settings,
    )  # fmt: skip
    run.train()
    log, evaluated = run.state.log_history[:2]
    for rewards, logged, prefix in zip(seen, (log, evaluated), ("", "eval_"), strict=False):
        ((column, steps_N),) = rewards.step_rewards.items()
        sums = [sum(reward for _, reward in steps) for steps in steps_N]
        assert column == 0 and max(map(len, rewards.turns)) > 1 and all(steps_N)
        outcomes = rewards.rewards_NF[:, 1].tolist()
        totals = [2 * one + 0.5 * other for one, other in zip(sums, outcomes, strict=True)]
        assert logged[f"{prefix}reward"] == pytest.approx(sum(totals) / 4)
        assert logged[f"{prefix}reward/turn_2"] > 0
    (table,) = (tmp_path / "completions").glob("completions_00001.parquet")
    rows = pq.read_table(table).to_pylist()
    first = [sum(reward for _, reward in steps) for steps in seen[0].step_rewards[0]]
    assert [row["turn_reward"] for row in rows] == pytest.approx(first)


def two_turns(**given: Any) -> RolloutBatch:
    """Tokens 0 and 1, a result of a tool at 2, token 3; and the same with a row before the last one."""
    mask = [1, 1, 0, 1]
    completions = [
        Completion([5, 6, 7, 8], loss_mask=mask),
        Completion([5, 6, 7, 8], loss_mask=mask, **given),
    ]
    return RolloutBatch([{}, {}], ["p", "p"], [[1], [1]], completions, ["text", "text"], num_generations=2)


def test_turn_ends_are_those_of_the_tokens_that_a_function_receives():
    def ends(turn_ends, completion_ids, **_):
        given.extend(zip(turn_ends, completion_ids, strict=True))
        return [[(end, 1.0) for end in ends if end is not None] for ends in turn_ends]

    given: list[Any] = []
    rollouts = two_turns(last_row=(3, 4), contexts=((3, [9]),))
    rewards = call_rewards([ends], ["ends"], rollouts).rewards_FB[0]
    assert given == [([1, 3], [5, 6, 7, 8]), ([None, 0], [8])]
    assert rewards == [[(1, 1.0), (3, 1.0)], [(3, 1.0)]]


def test_completions_of_one_turn_get_no_turn_ends_and_a_column_of_the_name_stays():
    def reward(turn_ends=None, **_):
        given.append(turn_ends)
        return [1.0]

    given: list[Any] = []
    for row, completion in (({}, Completion([5])), ({"turn_ends": 7}, Completion([5], loss_mask=[1]))):
        call_rewards([reward], ["reward"], RolloutBatch([row], ["p"], [[1]], [completion], ["text"]))
    assert given == [None, [7]]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "(1 rewards for 2 turns)"),
        ([1.0, 2.0, 3.0], "(3 rewards for 2 turns)"),
        ([1.0, math.nan], "(nan for turn 2 of 2)"),
        (["1", 2.0], "('1' for turn 1 of 2)"),
        ([(1, 1.0), (2, 1.0)], "(step (2, 1.0))"),
        ([(4, 1.0)], "(step (4, 1.0))"),
        ([(3, math.nan)], "(step (3, nan))"),
        ([(3, 1.0), 1.0], "(step 1.0)"),
    ],
    ids=["short", "long", "nan", "text", "token of a tool", "after the end", "nan step", "mixed"],
)
def test_a_wrong_reward_names_rollout_turn_and_value(value, said):
    with pytest.raises(RewardError) as caught:
        checked_rewards([None, value], "judge", two_turns())
    assert "'judge' returned [" in str(caught.value) and f"for row 1 {said}; allowed: " in str(caught.value)


def test_a_token_of_a_tool_is_refused_by_its_place_in_the_last_row():
    with pytest.raises(RewardError, match=r"for row 1 \(step \(0, 1.0\)\)"):
        checked_rewards([None, [(0, 1.0)]], "judge", two_turns(last_row=(2, 4)))


def test_a_turn_without_tokens_before_all_others_is_credited_to_none():
    completion = Completion([5], loss_mask=[1], turns=((0, 0), (0, 1)))
    rollouts = RolloutBatch([{}], ["p"], [[1]], [completion], ["text"])
    assert checked_rewards([[2.0, 1.0]], "judge", rollouts) == [[(0, 1.0)]]


def test_a_list_of_numbers_is_refused_where_no_turns_are_known():
    rollouts = RolloutBatch([{}], ["p"], [[1]], [Completion([5])], ["text"])
    with pytest.raises(RewardError, match=r"for row 0 \(step 0.5\)"):
        checked_rewards([[0.5]], "judge", rollouts)


def test_metrics_of_turns_are_weighted_means_over_the_completions_that_have_one():
    turns = [[(i, i + 1) for i in range(11)], [(0, 2), (2, 4)]]
    steps = [[(i, float(i)) for i in range(11)], [(1, 3.0)]]
    rewards = GroupRewards(
        torch.full((2, 2), math.nan),
        torch.tensor([2.0, 0.5]),
        2,
        {0: steps, 1: [[(0, 4.0)], []]},
        11,
        turns=turns,
    )
    got = {name: metric.value() for name, metric in turn_metrics(rewards).items()}
    expected = {"reward/turn_1": (2.0 + 6.0) / 2, **{f"reward/turn_{i}": 2.0 * (i - 1) for i in range(2, 9)}}
    assert got == {**expected, "reward/later_turns": 2.0 * (8 + 9 + 10)}


def test_turns_stay_with_their_completions():
    def batch(turns: Any, number: float) -> RewardBatch:
        return RewardBatch(
            torch.full((2, 1), math.nan),
            torch.ones(1),
            2,
            {0: [[(0, number)], []]},
            3,
            local=slice(0, 2),
            turns=turns,
        )

    first, second = batch([[(0, 1)], [(1, 3)]], 1.0), batch((), 2.0)
    whole = RewardBatch.concatenate([first, second])
    assert whole.turns == [[(0, 1)], [(1, 3)], (), ()]
    assert whole.select([1, 3]).turns == [[(1, 3)], ()] and second.select([1]).turns == ()
