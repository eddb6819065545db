"""Independent functions on parts of a rollout: when what they gave is used, and when they are called anew.

Files: ``rewards/runtime/marking.py``, ``rewards/runtime/partial.py``.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import replace

import pytest

from groupwise.errors import RewardError
from groupwise.records import Completion, RolloutBatch
from groupwise.rewards import get_cosine_scaled_reward, per_sample_reward, think_format_reward
from groupwise.rewards.runtime.calling import call_rewards
from groupwise.rewards.runtime.marking import mark_of
from groupwise.rewards.runtime.partial import with_partial_results
from groupwise.sandbox import isolated
from groupwise.threads import CallExecutor, EventLoop

LONG = 60.0  # seconds after which a wait is given up; no test takes them
LOOP = EventLoop("partial-rewards")


def limited(timeout=None):
    return CallExecutor(timeout, limited_by="reward_timeout", loop=LOOP)


def part(*numbers):
    """One completion for each number, which is its token, its row id and in its row."""
    return RolloutBatch(
        rows=[{"answer": str(number)} for number in numbers],
        prompts=[f"p{number}" for number in numbers],
        prompt_ids=[[number] for number in numbers],
        completions=[Completion([number]) for number in numbers],
        texts=[f"t{number}" for number in numbers],
        row_ids=numbers,
    )


def call(function, rollout, **settings):
    return call_rewards([function], ["f"], rollout, loop=LOOP, **settings).rewards_FB[0]


def recorded(is_async=False):
    """A function that gives the token and notes the tokens of every call."""
    calls = []

    def rewards(completion_ids, answer, **_):
        calls.append([ids[0] for ids in completion_ids])
        assert answer == [str(ids[0]) for ids in completion_ids]
        return [None if ids[0] == 4 else float(ids[0]) for ids in completion_ids]

    async def later(**columns):
        await asyncio.sleep(0)
        return rewards(**columns)

    return with_partial_results(later if is_async else rewards), calls


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("timeout", [None, LONG])
def test_rewards_of_parts_are_put_in_the_order_of_the_whole(is_async, timeout):
    function, calls = recorded(is_async)
    first, second = part(3, 4), part(5)
    for one in (second, first):
        function.begin(one, limited(timeout))
    whole = RolloutBatch.concatenate([first, second])
    assert str(call(function, whole, timeout=timeout)) == "[3.0, nan, 5.0]"
    assert sorted(token for tokens in calls for token in tokens) == [3, 4, 5]


def test_partial_results_of_other_rollouts_are_not_used():
    function, calls = recorded()
    function.begin(part(3), limited())
    whole = part(3, 5)  # equal tokens, another generation
    assert call(function, whole) == [3.0, 5.0] and calls == [[3], [3, 5]]
    begun = part(3)
    function.begin(begun, limited())
    assert call(function, RolloutBatch.concatenate([begun, part(5)])) == [3.0, 5.0]
    assert calls[2:] == [[3], [3, 5]]


@pytest.mark.parametrize(
    "changed",
    [
        lambda whole: replace(whole, texts=["other", *whole.texts[1:]]),
        lambda whole: replace(whole, rows=[{"answer": "3", "level": 1}, {"answer": "5", "level": 2}]),
        lambda whole: replace(whole, prompts=["other", *whole.prompts[1:]]),
        lambda whole: replace(whole, extra={"tool_calls": [0, 0]}),
    ],
)
def test_a_changed_rollout_is_rewarded_again(changed):
    function, calls = recorded()
    first = part(3, 5)
    function.begin(first, limited())
    assert call(function, changed(first)) == [3.0, 5.0] and len(calls) == 2


def test_rows_are_matched_by_id_and_not_by_identity():
    function, calls = recorded()
    function.begin(replace(part(3, 5), row_ids=[2, 0]), limited())
    function.begin(replace(part(6), row_ids=[1]), limited())
    assert call(function, replace(part(5, 6, 3), row_ids=range(3))) == [
        5.0,
        6.0,
        3.0,
    ]  # equal rows, other objects
    assert calls == [[3, 5], [6]]


@pytest.mark.parametrize("wrap", [lambda function: function, with_partial_results])
def test_a_function_that_changes_its_arguments_changes_no_tokens(wrap):
    def spoils(completion_ids, prompts, **_):
        for ids in completion_ids:
            ids.append(99)
        prompts.clear()
        return [0.0] * len(completion_ids)

    lengths = []

    def reads(completion_ids, prompts, **_):
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(len(prompts))] * len(completion_ids)

    rollouts = part(3, 5)
    call_rewards([wrap(spoils), reads], ["spoils", "reads"], rollouts)
    assert [c.token_ids for c in rollouts.completions] == [[3], [5]] and lengths == [1, 1]
    assert rollouts.prompts == ["p3", "p5"]


def test_a_failed_partial_call_is_repeated_on_the_complete_batch():
    def fails_at_five(completion_ids, **_):
        if [5] in completion_ids:
            raise ValueError(f"five among {len(completion_ids)}")
        return [1.0] * len(completion_ids)

    messages = []
    for begun in (True, False):
        function = with_partial_results(fails_at_five)
        first, second = part(3), part(5)
        for one in (first, second) if begun else ():
            function.begin(one, limited())
        with pytest.raises(RewardError) as caught:
            call(function, RolloutBatch.concatenate([first, second]))
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "five among 2" in messages[0]


def test_logs_of_parts_become_those_of_the_whole():
    @per_sample_reward
    def logs(completion_ids, log_extra, log_metric, **_):
        values = [ids[0] for ids in completion_ids]
        log_extra("token", values)
        if 3 in values:
            log_extra("with_three", [True] * len(values))
        log_metric("tokens", sum(values) / len(values))
        return [0.0] * len(values)

    function = with_partial_results(logs)
    first, second = part(3, 4), part(5, 6)
    for one in (second, first):
        function.begin(one, limited())
    columns, metrics = {}, []
    log = {"log_extra": columns.__setitem__, "log_metric": lambda *entry: metrics.append(entry)}
    call(function, RolloutBatch.concatenate([first, second]), **log)
    assert columns == {"token": [3, 4, 5, 6], "with_three": [True, True, None, None]}
    assert metrics == [("tokens", 3.5), ("tokens", 5.5)]


def test_async_partial_calls_do_not_overlap_and_are_merged():
    entered, leave, calls = threading.Event(), threading.Event(), []

    async def judge(completion_ids, **_):
        calls.append([ids[0] for ids in completion_ids])
        entered.set()
        while not leave.is_set():
            await asyncio.sleep(0.01)
        return [0.0] * len(completion_ids)

    function = with_partial_results(judge)
    parts = [part(3), part(4), part(5)]
    function.begin(parts[0], limited())
    assert entered.wait(LONG)
    for one in parts[1:]:
        function.begin(one, limited())
    leave.set()
    assert call(function, RolloutBatch.concatenate(parts)) == [0.0] * 3
    assert calls == [[3], [4, 5]]


def test_an_async_function_that_is_cancelled_is_not_waited_for():
    async def leaves(completion_ids, **_):
        if len(completion_ids) == 1:
            raise asyncio.CancelledError
        return [1.0] * len(completion_ids)

    function = with_partial_results(leaves)
    first, second = part(3), part(4)
    function.begin(first, limited())
    assert call(function, RolloutBatch.concatenate([first, second]), timeout=LONG) == [1.0, 1.0]


def test_a_function_can_be_called_again_after_a_timeout():
    leave = threading.Event()

    async def judge(completion_ids, **_):
        while not leave.is_set():
            await asyncio.sleep(0.01)
        return [float(ids[0]) for ids in completion_ids]

    function = with_partial_results(judge)
    first, second = part(3), part(4)
    function.begin(first, limited())
    with pytest.raises(RewardError, match=r"within 0\.1 seconds \(reward_timeout\)"):
        call(function, first, timeout=0.1)
    leave.set()
    function.begin(second, limited())
    assert call(function, second, timeout=LONG) == [4.0]


def test_per_sample_reward_marks_functions_and_partials():
    @per_sample_reward
    def marked(**_): ...

    mark = "per_sample_reward"
    assert mark_of(marked, mark) and mark_of(functools.partial(marked, x=1), mark)
    assert mark_of(think_format_reward, mark)
    assert mark_of(get_cosine_scaled_reward(max_len=8), mark)
    assert not mark_of(isolated(lambda **_: []), mark)  # it counts failed rows by the call
    assert not mark_of(lambda **_: [], mark)
