"""Time limits of reward functions, what a failing one does to a batch, and what runs at the same time.

Files: ``rewards/runtime/calling.py``, ``rewards/runtime/models.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from groupwise.errors import RewardError
from groupwise.records import Completion, RolloutBatch
from groupwise.rewards.runtime import calling
from groupwise.rewards.runtime.calling import call_rewards
from groupwise.rewards.runtime.models import RewardModel
from groupwise.threads import EventLoop, start_thread

ROLLOUT = RolloutBatch(
    rows=[{"answer": "1"}, {"answer": "2"}],
    prompts=["a", "b"],
    prompt_ids=[[1], [2]],
    completions=[Completion([3]), Completion([4])],
    texts=["c", "d"],
)
FOREVER = 600.0


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(calling, "_warned", set())


@pytest.fixture
def release():
    """Ends the functions that a test gave up."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def loop():
    made = EventLoop("rewards")
    yield made
    made.close()


def good(**_):
    return [1.0, 2.0]


async def good_async(**_):
    return [3.0, 4.0]


def call(*functions, **settings):
    return call_rewards(functions, [f.__name__ for f in functions], ROLLOUT, **settings)


def test_functions_run_in_the_callers_thread_if_it_can_be_interrupted():
    seen = []

    def where(**_):
        seen.append(threading.current_thread())
        return [0.0, 0.0]

    def calls():
        call(where)
        call(where, timeout=FOREVER)
        return threading.current_thread()

    calls()
    other = start_thread(calls).result(FOREVER)
    assert seen[:3] == [threading.main_thread()] * 2 + [other]
    assert seen[3] not in (threading.main_thread(), other) and seen[3].daemon


@pytest.mark.parametrize("grad", [True, False])
def test_threads_keep_the_callers_gradient_mode(grad):
    seen = []

    def plain(**_):
        seen.append(torch.is_grad_enabled())
        return [0.0, 0.0]

    async def waiting(**_):
        return plain()

    with torch.set_grad_enabled(grad):
        call(plain, waiting, timeout=FOREVER)
    assert seen == [grad, grad]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("timeout", [None, FOREVER])
def test_a_gradient_mode_that_a_function_leaves_behind_is_set_back(grad, timeout, caplog):

    def switches(**_):
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return [0.0, 0.0]

    def switches_and_raises(**_):
        switches()
        raise KeyError("answer")

    async def switches_async(**_):
        return switches()

    functions = [switches, switches_and_raises, switches_async, good]
    with torch.set_grad_enabled(grad):
        call(*functions, timeout=timeout, on_error="none")
        assert torch.is_grad_enabled() is grad
    for function in functions[:3]:
        said = f"'{function.__name__}' left torch.set_grad_enabled({not grad}) behind"
        assert sum(said in record.getMessage() for record in caplog.records) == 1
    assert "'good' left" not in caplog.text


@pytest.mark.parametrize(
    "error", [SystemExit(0), asyncio.CancelledError(), StopIteration(), pytest.exit.Exception("x")]
)
@pytest.mark.parametrize("timeout", [None, FOREVER])
@pytest.mark.parametrize("is_async", [False, True])
def test_exceptions_that_end_a_process_or_task_are_failures_of_the_function(error, timeout, is_async):
    def leaves(**_):
        raise error

    async def leaves_async(**_):
        raise error

    function = leaves_async if is_async else leaves
    with pytest.raises(RewardError, match=rf"'{function.__name__}' raised"):
        call(good, good_async, function, timeout=timeout)
    assert call(function, good, timeout=timeout, on_error="none").rewards_FB[1] == [1.0, 2.0]


def test_an_unreached_time_limit_changes_nothing():
    assert call(good, good_async, timeout=FOREVER)[:2] == call(good, good_async)[:2]
    assert call(good, good_async).rewards_FB == [[1.0, 2.0], [3.0, 4.0]]


def test_a_function_that_takes_too_long_is_reported(release):
    def slow(**_):
        release.wait(FOREVER)

    with pytest.raises(RewardError, match=r"'slow' raised .*within 1\.5 seconds \(reward_timeout\)"):
        call(good, slow, timeout=1.5)  # enough for the other one on any machine


def test_an_async_function_that_takes_too_long_is_cancelled():
    cancelled = threading.Event()

    async def slow(**_):
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(RewardError, match=r"'slow' raised .*within 1 seconds \(reward_timeout\)"):
        call(slow, good_async, timeout=1.0)  # enough for both to begin
    assert cancelled.wait(60)


@pytest.mark.timeout(60)
def test_async_functions_that_ignore_cancellation_do_not_block(release, loop, monkeypatch, caplog):
    """Later calls have a new event loop."""
    monkeypatch.setattr("groupwise.threads.BLOCKED_MARGIN", 0.2)

    async def blocking(**_):
        release.wait(FOREVER)
        return [0.0, 0.0]

    async def deaf(**_):
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    for function in (blocking, deaf):
        with pytest.raises(RewardError, match="reward_timeout"):
            call(function, timeout=0.2, loop=loop)
    assert "blocks the event loop" in caplog.text
    assert call(good_async, timeout=FOREVER, loop=loop).rewards_FB == [[3.0, 4.0]]


def test_the_time_limit_applies_to_each_call():
    def half(**_):
        time.sleep(1.0)
        return [1.0, 1.0]

    names = ["a", "b", "c"]
    assert call_rewards([half] * 3, names, ROLLOUT, timeout=2.5).rewards_FB == [[1.0, 1.0]] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("timeout", [None, FOREVER])
def test_async_functions_run_beside_each_other_and_beside_the_others(timeout):
    arrived = {name: threading.Event() for name in ("first", "second", "plain")}

    def waits(name):
        async def reward(**_):
            arrived[name].set()
            while not all(event.is_set() for event in arrived.values()):
                await asyncio.sleep(0.01)
            return [1.0, 1.0]

        return reward

    def plain(**_):
        arrived["plain"].set()
        # never ends unless the async ones run meanwhile
        assert arrived["first"].wait(30) and arrived["second"].wait(30)
        return [2.0, 2.0]

    result = call_rewards([waits("first"), plain, waits("second")], ["a", "b", "c"], ROLLOUT, timeout=timeout)
    assert result.rewards_FB == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]


def raises(**_):
    raise KeyError("answer")


async def raises_async(**_):
    raise KeyError("answer")


def too_few(**_):
    return [1.0]


def not_a_number(**_):
    return [1.0, math.nan]


def refuses_arguments():
    return [1.0, 1.0]


@pytest.mark.parametrize("failing", [raises, raises_async, too_few, not_a_number, refuses_arguments])
@pytest.mark.parametrize("timeout", [None, FOREVER])
def test_a_failing_function_gives_none_and_the_others_count(failing, timeout, caplog):
    rewards_FB, failures, _ = call(good, failing, good_async, timeout=timeout, on_error="none")
    assert rewards_FB[0] == [1.0, 2.0] and rewards_FB[2] == [3.0, 4.0]
    assert len(rewards_FB[1]) == 2 and all(math.isnan(reward) for reward in rewards_FB[1])
    assert list(failures) == [1] and failing.__name__ in str(failures[1])
    with pytest.raises(RewardError, match=failing.__name__) as caught:
        call(good, failing, good_async, timeout=timeout)
    assert str(caught.value) == str(failures[1])
    assert type(caught.value.__cause__) is type(failures[1].__cause__)


def test_a_slow_function_gives_none(release):
    def slow(**_):
        release.wait(FOREVER)

    rewards_FB, failures, _ = call(slow, good, timeout=1.5, on_error="none")
    assert all(math.isnan(reward) for reward in rewards_FB[0]) and rewards_FB[1] == [1.0, 2.0]
    assert "within 1.5 seconds (reward_timeout)" in str(failures[0])


def test_the_first_failure_of_each_function_is_logged_with_its_cause(caplog):
    def flaky(trial, **_):
        raise ValueError(f"trial {trial}")

    for trial in range(3):
        call(flaky, raises, on_error="none", trial=trial)
    messages = [record.getMessage() for record in caplog.records if record.name == calling.__name__]
    assert len(messages) == 2
    assert "'flaky' raised ValueError: trial 0" in messages[0]
    assert "'raises' raised KeyError" in messages[1]


@pytest.mark.parametrize("timeout", [None, FOREVER])
def test_an_interrupt_is_no_failure(timeout):
    """Python handles the signal in the main thread, which calls the function or waits for it."""

    def interrupted(**_):
        signal.raise_signal(signal.SIGINT)
        return [0.0, 0.0] if timeout is None else time.sleep(2)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(interrupted, timeout=timeout, on_error="none")
    finally:
        signal.signal(signal.SIGINT, previous)


def test_partials_of_async_functions_are_async():
    async def scaled(factor, **_):
        await asyncio.sleep(0)
        return [factor, factor]

    partial = functools.partial(scaled, 2.0)
    assert call_rewards([partial], ["scaled"], ROLLOUT, timeout=FOREVER).rewards_FB == [[2.0, 2.0]]


def test_reward_models_stay_in_the_callers_thread(monkeypatch):
    seen = []

    def score(self, **_):
        seen.append(threading.current_thread())
        return [1.0, 1.0]

    monkeypatch.setattr(RewardModel, "__call__", score)
    call_rewards([RewardModel.__new__(RewardModel)], ["model"], ROLLOUT, timeout=1e-9)
    assert seen == [threading.main_thread()]


def test_each_function_has_its_own_seconds(monkeypatch, release):
    """On a clock that only the functions turn: the async ones wait beside the others, and take their own."""
    now = [0.0]
    monkeypatch.setattr(calling, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def turn(seconds: float) -> None:
        now[0] += seconds

    def slow(**_):
        turn(3.0)
        return [0.0, 0.0]

    async def quick(**_):
        turn(0.5)
        return [0.0, 0.0]

    assert call(slow, good).seconds_F == [3.0, 0.0]
    assert call(quick).seconds_F == [0.5]


def test_a_function_that_timed_out_has_its_seconds_until_then(release):
    def endless(**_):
        release.wait(FOREVER)

    seconds_F = call(endless, good, timeout=1.0, on_error="none").seconds_F  # it begins within the limit
    assert 0 < seconds_F[0] < FOREVER  # not NaN


ROWS = RolloutBatch(
    rows=[{"answer": "1"}, {"answer": "2"}, {"answer": "x"}, {"answer": "x"}],
    prompts=["a", "b", "c", "c"],
    prompt_ids=[[1], [2], [3], [3]],
    completions=[Completion([4])] * 4,
    texts=["p", "q", "r", "s"],
)
CHATS = RolloutBatch(
    rows=ROWS.rows,
    prompts=[[{"role": "user", "content": text}] for text in ROWS.prompts],
    prompt_ids=ROWS.prompt_ids,
    completions=ROWS.completions,
    texts=[[{"role": "assistant", "content": text}] for text in ROWS.texts],
)


def in_a_comprehension(completions, answer, **_):
    return [float(text == "2" or int(given)) for text, given in zip(completions, answer, strict=True)]


def in_a_helper(completions, answer, **_):
    def score(text):
        if text == "s":
            raise ValueError("no score")
        return 1.0

    return [score(text) for text in completions]


async def in_the_background(completions, **_):
    for text in completions:
        assert text != "q"
    return [1.0] * len(completions)


def takes_messages(completions, **_):
    return [float(len(completion[0]["content"])) for completion in completions]


def takes_texts(completions, **_):
    return [float(len(completion.strip())) for completion in completions]


@pytest.mark.parametrize(
    ("function", "rollouts", "messages"),
    [
        (
            in_a_comprehension,
            ROWS,
            [
                "raised ValueError: invalid literal for int() with base 10: 'x' (test_reward_runtime.py, ",
                ": return [float(text == ",
            ],
        ),
        (in_a_helper, ROWS, [': raise ValueError("no score"))']),
        (in_the_background, ROWS, [': assert text != "q")']),
        (takes_messages, ROWS, ["; a completion is a string, like its prompt"]),
        (takes_texts, CHATS, ["; a completion is a list of messages, like its prompt"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("timeout", [None, FOREVER], ids=["here", "thread"])
def test_an_exception_names_the_line_and_the_form_of_completions(function, rollouts, messages, timeout):
    with pytest.raises(RewardError) as error:
        call_rewards([function], [function.__name__], rollouts, timeout=timeout)
    for message in messages:
        assert message in str(error.value)
