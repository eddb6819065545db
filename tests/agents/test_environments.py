"""EnvironmentPool: pooled instances, reset with the row, methods as tools, ``get_reward``.

Files: ``agents/loop.py``, ``agents/start.py``, ``agents/tool_loop.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from typing import Any

import numpy as np
import pytest
from support.fakes.scripted import ScriptedBackend, agents, byte_tokenizer, call, question

from groupwise.agents import allow_image_paths
from groupwise.agents.environments import EnvironmentPool, add_observation
from groupwise.agents.loop import Rollout
from groupwise.agents.tool_loop import ToolLoop
from groupwise.errors import AgentError, ConfigError, RewardError
from groupwise.rewards.runtime.calling import call_rewards
from groupwise.threads import CallExecutor, start_thread


class Counter:
    """Counts up to a goal."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.number = 0

    def reset(self, goal: int = 3, **row: Any) -> str:
        self.goal, self.number, self.row = goal, 0, row
        return f" Reach {goal}."

    def increase(self, by: int) -> str:
        """Add to the number.

        Args:
            by: how much.
        """
        self.number += by
        return f"now {self.number}"

    def get_reward(self) -> float:
        return float(self.number == self.goal)

    def _hidden(self) -> None: ...


class Silent:
    """Returns no observation, and has an async reward."""

    def reset(self, **row: Any) -> None: ...

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


class Pictures:
    """Returns the blocks in its row, which may come from elsewhere."""

    def reset(self, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return blocks


class TrustedPictures(Pictures):
    reset = allow_image_paths(lambda self, blocks: blocks)


@pytest.mark.parametrize("image", [{"image": "/etc/hosts"}, {"url": "http://x/y.png"}, {"image": [1, 2]}])
def test_an_observation_of_an_image_by_path_needs_the_decorator(image):
    blocks = [{"type": "text", "text": "look"}, {"type": "image", **image}]
    with pytest.raises(AgentError, match="an image block with a path or a URL, which is not"):
        observe(Pictures, blocks)
    seen = [*blocks[:1], {"type": "image", "image": np.zeros((2, 2, 3), dtype=np.uint8)}]
    assert observe(Pictures, seen) == observation_of(seen)
    assert observe(TrustedPictures, blocks) == observation_of(blocks)


def observation_of(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": ""}, *blocks]


def observe(factory: Any, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reset an environment with these blocks; return the content of the prompt."""
    loop = ToolLoop([], EnvironmentPool(factory))
    row = {"blocks": blocks}
    (place,) = loop.begin_batch([row])
    steps = loop.run_rollout(Rollout(0, row, place))
    return steps.send(loop.executor.start(next(steps))).messages[0]["content"]


def generate_rollouts(
    environments: EnvironmentPool, scripts: list[list[str]], rows: list[dict[str, Any]], tools: Any = ()
):
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, tools, environments)
    return loop, loop.generate_rollouts(rows, ScriptedBackend(tokenizer, scripts))


def test_reset_gets_the_row_and_methods_are_tools():
    row = {**question("Count."), "goal": 5, "level": "easy"}
    given = [dict(message) for message in row["prompt"]]
    scripts = [[call("increase", by=2) + call("increase", by=3), "done"], ["I give up"]]
    loop, rollout = generate_rollouts(EnvironmentPool(Counter), scripts, [row, row])
    assert rollout.prompts[0] == [{"role": "user", "content": "Count. Reach 5."}]
    assert [message["content"] for message in rollout.texts[0][1:3]] == ["now 2", "now 5"]
    assert rollout.extra["environments"] is loop.environments
    assert [environment.number for environment in loop.environments] == [5, 0]
    assert loop.environments[0].row == {"prompt": given, "level": "easy"}
    assert row["prompt"] == given  # the dataset's row is not changed


def test_reset_may_change_its_arguments():
    class Taking:
        def reset(self, items: list[int], **row: Any) -> None:
            self.number = len(items)
            items.clear()

    row = {**question("Take."), "items": [1, 2, 3]}
    loop, _ = generate_rollouts(EnvironmentPool(Taking), [["done"], ["done"]], [row, row])
    assert [environment.number for environment in loop.environments] == [3, 3]
    assert row["items"] == [1, 2, 3]


def test_instances_are_reused_by_every_batch():
    Counter.made = 0
    environments = EnvironmentPool(Counter)
    rows = [{**question("Count."), "goal": goal} for goal in (1, 2, 3)]
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, (), environments)
    batches = [
        loop.generate_rollouts(rows, ScriptedBackend(tokenizer, [["no"]] * 3)).extra["environments"]
        for _ in range(2)
    ]
    assert Counter.made == 3
    assert all(first is second for first, second in zip(*batches, strict=True))
    assert len({id(environment) for environment in batches[0]}) == 3


def test_get_reward_becomes_one_reward_function_per_class():
    environments = EnvironmentPool({"count": Counter, "silent": Silent, "again": Counter})
    rows = [{**question("?"), "environment": name, "goal": 0} for name in ("silent", "count", "again")]
    loop, rollout = generate_rollouts(environments, [["x"], [call("increase", by=1), "y"], ["z"]], rows)
    count, silent = environments.reward_funcs()
    assert (count.__name__, silent.__name__) == ("Counter", "Silent")
    assert count(**rollout.extra, completions=rollout.texts, prompts=[]) == [None, 0.0, 1.0]
    assert silent(**rollout.extra, completions=rollout.texts, prompts=[]) == [0.5, None, None]
    assert "environment" not in loop.environments[1].row


def test_instances_of_two_classes_are_refused():
    """Only the first class would be asked for tools and rewards."""

    def defined_anew():
        class Mine(Silent):
            pass

        return Mine()

    for factory in (iter([Silent(), Counter()]).__next__, defined_anew):
        with pytest.raises(
            ConfigError, match=r"returned a (Counter|Mine), at first a (Silent|Mine); allowed"
        ):
            generate_rollouts(EnvironmentPool(factory), [["x"]] * 2, [question("?")] * 2)


def test_each_rollout_has_the_tools_of_its_own_environment():
    environments = EnvironmentPool({"count": Counter, "silent": Silent})
    rows = [{**question("?"), "environment": name} for name in ("count", "silent")]
    _, rollout = generate_rollouts(environments, [["x"], [call("increase", by=1), "y"]], rows)
    decode = byte_tokenizer().decode
    assert ["increase" in decode(ids) for ids in rollout.prompt_ids] == [True, False]
    assert [len(messages) for messages in rollout.texts] == [1, 1]  # without tools, text is never a call


def test_calls_of_one_environment_are_sequential():
    class Careful(Counter):
        def increase(self, by: int) -> str:
            """Add.

            Args:
                by: how much.
            """
            before = self.number
            threading.Event().wait(0.02)
            self.number = before + by  # loses an update if calls are concurrent
            return str(self.number)

    loop, _ = generate_rollouts(
        EnvironmentPool(Careful), [["".join([call("increase", by=1)] * 4), "x"]], [question("?")]
    )
    assert loop.environments[0].number == 4


@pytest.mark.parametrize(
    ("prompt", "observation", "expected"),
    [
        ("a", None, "a"),
        ("a", "b", "ab"),
        ("a", [{"type": "text", "text": "b"}], "ab"),
        ([{"role": "user", "content": "a"}], "b", [{"role": "user", "content": "ab"}]),
        (
            [{"role": "user", "content": "a"}],
            [{"type": "text", "text": "b"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "b",
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
            "b",
            [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}],
        ),
        (
            [{"role": "system", "content": "a"}],
            "b",
            [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        ),
    ],
)
def test_an_observation_follows_the_last_user_message(prompt, observation, expected):
    given = str(prompt)
    assert add_observation(prompt, observation) == expected
    assert str(prompt) == given


class Failing(Counter):
    def reset(self, goal: int = 0, **row: Any) -> Any:
        if goal == 1:
            raise OSError("no such level")
        return 7 if goal == 2 else None

    def get_reward(self) -> float:
        raise ZeroDivisionError("no steps")


class Stuck(Counter):
    def reset(self, goal: int = 0, **row: Any) -> None:
        if goal:
            threading.Event().wait(30)

    def get_reward(self) -> float:
        threading.Event().wait(30)
        return 0.0


class Leaving(Counter):
    async def reset(self, **row: Any) -> None:
        raise SystemExit(0)


@pytest.mark.parametrize(
    ("cls", "goal", "message"),
    [
        (
            Failing,
            1,
            r"environment 'Failing', method 'reset' \(given sample=1.*raised OSError: no such level",
        ),
        (Failing, 2, r"method 'reset'.*it returned int; allowed: None, str, a list of content blocks"),
        (
            Stuck,
            1,
            r"environment 'Stuck', method 'reset' \(given sample=1.*no result within 1 seconds \(tool_t",
        ),
        (Leaving, 1, r"environment 'Leaving', method 'reset'.*SystemExit: 0"),
    ],
)
def test_a_failing_reset_names_environment_method_and_row(cls, goal, message):
    rows = [{**question("?"), "goal": 0}, {**question("?"), "goal": goal}]
    with pytest.raises(AgentError, match=message):
        generate_rollouts(
            EnvironmentPool(cls, CallExecutor(1.0, limited_by="tool_timeout")), [["x"], ["y"]], rows
        )  # the first one resets within the limit on a busy machine too


def test_tool_timeout_limits_get_reward():
    environments = EnvironmentPool(Stuck, CallExecutor(30.0, limited_by="tool_timeout"))
    _, rollout = generate_rollouts(environments, [["x"]], [question("?")])
    environments.executor.timeout = 0.05
    with pytest.raises(
        RewardError, match=r"'Stuck', method 'get_reward'.*no result within 0.05 seconds \(tool_timeout\)"
    ):
        environments.reward_funcs()[0](**rollout.extra, completions=rollout.texts)


@pytest.mark.timeout(60)
def test_an_environment_with_a_call_in_progress_is_not_used_again_after_an_interrupt():
    class Busy(Silent):
        async def wait(self) -> None:
            """Wait for longer than the run."""
            await asyncio.sleep(30)

        def interrupt(self) -> None:
            """Raise what Ctrl-C does."""
            raise KeyboardInterrupt

    environments = EnvironmentPool(Busy)
    waiting, other = environments.types[None].idle = [environments.types[None].first, Busy()]
    with pytest.raises(KeyboardInterrupt):
        generate_rollouts(environments, [[call("wait")], [call("interrupt")]], [question("?")] * 2)
    assert environments.executor.unfinished == {id(waiting): waiting, id(other): other}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["thread", "async", "get_reward"])
def test_an_environment_with_an_unfinished_call_is_not_used_again(kind):
    """The call ends during the next rollout, whose environment is another one."""
    leave, left = threading.Event(), threading.Event()

    class Late(Silent):
        def reset(self, **row: Any) -> None:
            self.number = 0

        def late(self) -> None:
            """Write after the time limit."""
            leave.wait(30)
            self.number += 1000
            left.set()

        async def late_async(self) -> None:
            """Ignore the cancellation."""
            while not leave.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            self.late()

        def finish(self) -> None:
            """Wait for the late call."""
            leave.set()
            left.wait(30)
            self.number += 1

        def get_reward(self) -> float:
            if kind == "get_reward" and not leave.is_set():
                self.late()
            return float(self.number)

    def rewards(name: str, limit: float) -> list[float]:
        environments.executor.timeout = 30.0
        loop = agents(tokenizer, [], environments)
        scripts = [[call(name), "x"], ["x"]] if name else [["x"], ["x"]]
        backend = ScriptedBackend(tokenizer, scripts)
        # After the resets, which may take longer than a short limit on a busy machine.
        backend.before_call = lambda _: setattr(environments.executor, "timeout", limit)
        rollout = loop.generate_rollouts([question("?")] * 2, backend)
        try:
            return environments.reward_funcs()[0](**rollout.extra, completions=rollout.texts)
        finally:
            loop.end_batch()

    tokenizer, environments = byte_tokenizer(), EnvironmentPool(Late, CallExecutor(30.0))
    late = {"thread": "late", "async": "late_async", "get_reward": ""}[kind]
    with contextlib.suppress(RewardError):  # of get_reward
        start_thread(lambda: rewards(late, 0.05)).result(60)
    assert not left.is_set()
    assert start_thread(lambda: rewards("finish", 30.0)).result(60) == [1.0, 0.0]
    assert left.is_set()
    idle = environments.types[None].idle
    assert len(idle) == 2 and {each.number for each in idle} == {0, 1}


class Ledger:
    """An sqlite connection belongs to the thread that opened it."""

    def reset(self, **row: Any) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE entries (amount INTEGER)")

    def book(self, amount: int) -> list[Any]:
        """Book an amount.

        Args:
            amount: how much.
        """
        self.database.execute("INSERT INTO entries VALUES (?)", (amount,))
        return self.database.execute("SELECT amount FROM entries").fetchall()

    def get_reward(self) -> float:
        return float(self.database.execute("SELECT SUM(amount) FROM entries").fetchone()[0])


def test_reset_tools_and_get_reward_share_a_thread():
    environments = EnvironmentPool(Ledger)
    scripts = [[call("book", amount=2), call("book", amount=3), "x"], [call("book", amount=7), "y"]]
    _, rollout = generate_rollouts(environments, scripts, [question("a"), question("b")])
    results = [[m["content"] for m in text if m["role"] == "tool"] for text in rollout.texts]
    assert results == [[[(2,)], [(2,), (3,)]], [[(7,)]]]
    assert rollout.metrics["tools/failure_frequency"].value() == 0
    called = call_rewards(environments.reward_funcs(), ["Ledger"], rollout, timeout=30.0)
    assert called.rewards_FB == [[5.0, 7.0]]


def test_async_methods_share_an_event_loop():
    loops = []

    class Session(Silent):
        async def reset(self, **row: Any) -> None:
            self.loop = asyncio.get_running_loop()

        async def get_reward(self) -> float:
            loops.append(asyncio.get_running_loop() is self.loop)
            return 1.0

    environments = EnvironmentPool(Session)
    _, rollout = generate_rollouts(environments, [["x"]], [question("?")])
    assert environments.reward_funcs()[0](**rollout.extra, completions=rollout.texts) == [1.0] and loops == [
        True
    ]


def test_async_and_sync_methods_of_an_environment_run_in_the_order_of_the_calls():
    class Mixed(Counter):
        async def double(self) -> str:
            """Double the number."""
            await asyncio.sleep(0.01)
            self.number *= 2
            return str(self.number)

    text = call("increase", by=1) + call("double") + call("increase", by=1) + call("double")
    loop, _ = generate_rollouts(EnvironmentPool(Mixed), [[text, "x"]], [question("?")])
    assert loop.environments[0].number == ((0 + 1) * 2 + 1) * 2


def test_a_failing_get_reward_names_environment_method_and_row():
    environments = EnvironmentPool(Failing)
    _, rollout = generate_rollouts(environments, [["x"]], [question("?")])
    with pytest.raises(RewardError, match=r"environment 'Failing', method 'get_reward'.*sample=0.*no steps"):
        environments.reward_funcs()[0](**rollout.extra, completions=rollout.texts)


def test_an_error_in_a_method_becomes_the_tool_result():
    class Fragile(Counter):
        def increase(self, by: int) -> str:
            """Add.

            Args:
                by: how much.
            """
            raise RuntimeError("out of order")

    _, rollout = generate_rollouts(EnvironmentPool(Fragile), [[call("increase", by=1), "x"]], [question("?")])
    assert rollout.texts[0][1]["content"] == "{'error': 'out of order'}"


def undocumented(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (3, r"environment_factory of the environment is 3 \(int\)"),
        ({}, "empty dict"),
        ({"a": "b"}, "environment 'a' is 'b'"),
        (object, "'object'.*has no method 'reset'"),
        (type("Mute", (Counter,), {"undocumented": undocumented}), "'undocumented' cannot be described"),
    ],
)
def test_invalid_environments_are_refused(factory, message):
    with pytest.raises(ConfigError, match=message):
        EnvironmentPool(factory)


def test_a_failing_factory_is_named():
    def factory() -> Counter:
        raise ConnectionError("no server")

    with pytest.raises(
        AgentError, match="environment_factory of the environment raised ConnectionError: no server"
    ):
        EnvironmentPool(factory)


def test_an_unknown_environment_is_refused_with_the_known_names():
    with pytest.raises(
        ConfigError, match="row 0 has environment='cuont'; allowed: the names in environment_factory, 'count'"
    ):
        EnvironmentPool({"count": Counter}).acquire([{"environment": "cuont"}])


def test_tools_of_the_same_name_are_refused():
    def increase(by: int) -> str:
        """Add.

        Args:
            by: how much.
        """
        return str(by)

    from groupwise.agents.tools import make_tool

    with pytest.raises(ConfigError, match="several tools are called 'increase'"):
        ToolLoop([make_tool(increase)], EnvironmentPool(Counter))
