"""Batches that are begun before their step: calls before the first turn, random state, environments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.configs import config_of
from support.fakes.scripted import ScriptedBackend, agents, byte_tokenizer, call, question

from groupwise.agents import multi_turn
from groupwise.agents.environment_driven import EnvironmentLoop
from groupwise.agents.environments import EnvironmentPool
from groupwise.agents.multi_turn import MultiTurnRollouts
from groupwise.errors import AgentError
from groupwise.threads import CallExecutor, Invocation


class Room:
    """``reset`` draws a number, after the row that is named by ``after``."""

    resets: ClassVar[list[str]] = []

    async def reset(self, name: str, after: str | None = None, **row: Any) -> str:
        while after not in (None, *self.resets):
            await asyncio.sleep(0.05)
        self.resets.append(name)
        if name == "broken":
            raise OSError("no server")
        self.name, self.number = name, torch.rand(()).item()
        return f" {name} {self.number}"

    def look(self) -> str:
        """Look around."""
        return self.name

    def get_reward(self) -> float:
        return self.number


@pytest.fixture(autouse=True)
def nothing_reset() -> Iterator[None]:
    Room.resets.clear()
    yield


def rows(*names: str, **columns: Any) -> list[dict[str, Any]]:
    return [{**question("?"), "name": name, **columns} for name in names]


def make(scripts: list[list[str]], **settings: Any) -> tuple[Any, Any, EnvironmentPool]:
    tokenizer, pool = byte_tokenizer(), EnvironmentPool(Room)
    return agents(tokenizer, (), pool, **settings), ScriptedBackend(tokenizer, scripts), pool


def begun(run: Any, backend: Any, later: list[dict[str, Any]], step: int) -> Any:
    """Begin a batch; return the prompts and settings of the turns that were requested ahead in this call."""
    requests: list[Any] = []
    backend.prefetch = lambda prompts, sampling, *, step: requests.append((prompts, sampling))
    run.begin(later, backend, {"temperature": 0.5}, step, [*range(len(later))])
    return requests[0] if requests else None


def test_a_batch_begins_once_and_continues_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_turn, "MIN_WAIT", 0.01)
    run, backend, pool = make([["now"], [call("look"), "x"], ["y"]])
    own, later = rows("a"), [*rows("b", after="c"), *rows("c")]
    prompts, sampling = begun(run, backend, later, 1)
    assert Room.resets == ["c", "b"] and backend.calls == []  # the slow one was waited for
    assert begun(run, backend, later, 1) is None
    now = run.generate_rollouts(own, backend, {}, None, 0)
    assert Room.resets == ["c", "b", "a"]
    batch = run.generate_rollouts([dict(row) for row in later], backend, {"temperature": 0.5}, None, 1)
    assert Room.resets == ["c", "b", "a"]
    # The first call repeats the request, and is that of all rollouts.
    assert backend.calls[1] == prompts and backend.sampling[1] == sampling
    assert [[message["content"] for message in text][1:2] for text in batch.texts] == [["b"], []]
    first, second = now.extra["environments"], batch.extra["environments"]
    assert [each.name for each in (*first, *second)] == ["a", "b", "c"]
    (reward,) = pool.reward_funcs()
    assert reward(**batch.extra, completions=batch.texts) == [each.number for each in second]


def test_a_restored_batch_begins_again_in_its_random_state() -> None:
    run, backend, _ = make([])
    later = rows("a", "b")
    torch.manual_seed(3)
    np.random.seed(3)
    prompts, _ = begun(run, backend, later, 4)
    snapshot, state = run.snapshot(), torch.get_rng_state()
    torch.rand(5)
    run.restore(snapshot)
    moved = torch.get_rng_state()
    assert begun(run, backend, later, 4)[0] == prompts
    assert torch.equal(torch.get_rng_state(), moved) and not torch.equal(moved, state)
    assert run.snapshot() is not snapshot and list(run.snapshot()) == [4]
    # Changed rows: the calls of the rows that were expected count as not made.
    begun(run, backend, rows("c", "b"), 4)
    assert Room.resets == ["a", "b", "a", "b", "c", "b"]
    assert torch.equal(torch.get_rng_state(), moved)
    run.restore({})
    assert run.snapshot() == {}


def test_environments_are_free_after_the_end_of_their_batch() -> None:
    run, backend, pool = make([["x"]] * 4)
    (kind,) = pool.types.values()
    run.generate_rollouts(rows("a", "b"), backend, {}, None, 0)
    own = run.environments
    begun(run, backend, rows("c"), 1)
    assert [each.name for each in own] == ["a", "b"] and kind.idle == []
    run.end_batch()
    run.end_batch()
    assert kind.idle == own
    begun(run, backend, rows("d"), 2)
    run.generate_rollouts(rows("e"), backend)  # an evaluation leaves the batches ahead alone
    assert [each.name for each in own] == ["d", "e"]
    run.restore(run.snapshot())
    assert len(kind.idle) == 2 and own[1] not in kind.idle  # of the evaluation, which is not over


def test_a_failure_ahead_is_raised_or_repeated_in_its_step() -> None:
    later = rows("a", "broken")
    run, backend, _ = make([["x"], ["y"]])
    with pytest.raises(AgentError, match="no server"):
        begun(run, backend, later, 1)
    run, backend, _ = make([["x"], ["y"]], max_retries=1)
    prompts, _ = begun(run, backend, later, 1)
    assert len(prompts) == 1
    batch = run.generate_rollouts(later, backend, {}, None, 1)
    assert [completion.dropped for completion in batch.completions] == [False, True]
    assert Room.resets == ["a", "broken"] * 2 + ["broken"]
    assert batch.metrics["rollouts/retry_frequency"].value() == 1 / 2


def test_an_environment_that_runs_the_rollout_waits_in_chat() -> None:
    ended: list[str] = []

    class Dialogue:
        time_limit, uses_tools = 20.0, False

        async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
            try:
                response = await chat([{"role": "user", "content": row["name"]}], [])
                return {"said": response.message["content"]}
            finally:
                ended.append(row["name"])

        def reward_funcs(self) -> list[Any]:
            return []

    tokenizer = byte_tokenizer()
    end_tokens = frozenset([tokenizer.eos_token_id])
    run = MultiTurnRollouts(
        EnvironmentLoop(Dialogue()), tokenizer, config_of(max_completion_length=50), end_tokens
    )
    backend = ScriptedBackend(tokenizer, [["one"], ["two"], ["three"]])
    prompts, _ = begun(run, backend, rows("a", "b"), 1)
    begun(run, backend, rows("c"), 2)
    assert ended == []
    batch = run.generate_rollouts(rows("a", "b"), backend, {}, None, 1)
    assert backend.calls == [prompts] and batch.extra == {"said": ["one", "two"]}
    (waiting,) = run.ahead[2].rollouts
    run.restore({})
    waiting.steps.close()
    for _ in range(500):
        if len(ended) == 3:
            break
        asyncio.run(asyncio.sleep(0.01))
    assert sorted(ended) == ["a", "b", "c"]  # the one that was discarded is cancelled


def test_the_error_of_a_discarded_batch_is_logged(caplog):
    batch = multi_turn.BatchAhead(None, thread=Future())
    batch.thread.set_exception(ValueError("the call that failed"))
    loop = SimpleNamespace(end_batch=lambda places: None)
    MultiTurnRollouts._close(SimpleNamespace(_end=lambda rollouts: None, loop=loop), batch)
    assert "discarded, and had failed: the call that failed" in caplog.text


def test_an_environment_whose_call_is_discarded_is_not_used_again():
    executor, room, closed = CallExecutor(), Room(), []
    calls = [Invocation(room.look, room), Invocation(room.look)]
    rollout = SimpleNamespace(steps=SimpleNamespace(close=lambda: closed.append(True)), futures=calls)
    MultiTurnRollouts._end(SimpleNamespace(loop=SimpleNamespace(executor=executor)), [rollout])
    assert closed and all("discarded" in str(each.exception(0)) for each in calls)
    assert executor.unfinished == {id(room): room}
