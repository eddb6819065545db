"""Environments that run rollouts themselves, and request the policy's turns message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Protocol

from groupwise.agents.loop import AgentLoop, ChatResponse, Rollout, Steps, TurnRequest
from groupwise.errors import AgentError, boundary, checked_entries
from groupwise.generation.rollout_func import taken_column
from groupwise.records import copied
from groupwise.threads import CallExecutor, settle
from groupwise.tokenization.prompts import Message
from groupwise.tokenization.text import replace_surrogates
from groupwise.tokenization.tool_calls import ToolSchema


class MaxLengthReachedError(Exception):
    """The completion has reached its maximum length, so that the policy has no further turn."""


#: ``await chat(messages, tool_schemas)`` samples the next turn; raises :class:`MaxLengthReachedError`.
ChatFunction = Callable[[list[Message], list[ToolSchema]], Awaitable[ChatResponse]]


class RolloutEnvironment(Protocol):
    """An environment that runs a rollout itself.

    Attributes:
        time_limit: seconds within which a rollout must request a turn or end, while none is being sampled.
        uses_tools: it passes tool schemas to ``chat``, which the chat template must be able to render.
    """

    time_limit: float
    uses_tools: bool

    async def run_rollout(self, row: dict[str, Any], chat: ChatFunction) -> dict[str, Any]:
        """Run one rollout and return values for the reward functions, by column.

        Messages given to ``chat`` should continue those of the previous call and its response: then tokens
        are appended. Otherwise the rollout forks (``Trajectory.continue_from``).
        """

    def reward_funcs(self) -> list[Callable[..., Any]]:
        """Return the environment's own reward functions."""


class EnvironmentLoop(AgentLoop):
    """Run a :class:`RolloutEnvironment` for every row, concurrently in the event loop of the executor."""

    def __init__(self, environment: RolloutEnvironment) -> None:
        self.environment = environment
        self.executor = CallExecutor(idle_limit=environment.time_limit, limited_by="time_limit")
        self.uses_tools = getattr(environment, "uses_tools", False)

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        return self.environment.reward_funcs()

    def run_rollout(self, rollout: Rollout) -> Steps:
        """Run the environment's coroutine, and pass its requests and the policy's turns on.

        Raises:
            AgentError: the environment raised, exceeded its time limit, or ended without a turn.
        """
        title = f"environment {type(self.environment).__name__!r}"
        event: Future[TurnRequest | dict[str, Any]] = Future()  # the next request, or the columns
        reply: asyncio.Future[ChatResponse]

        async def chat(messages: list[Message], schemas: list[ToolSchema]) -> ChatResponse:
            nonlocal reply
            if event.done():
                raise RuntimeError("chat was called before its previous call returned")
            reply = asyncio.get_running_loop().create_future()
            event.set_result(TurnRequest(replace_surrogates(list(messages)), list(schemas)))
            return await reply

        async def run() -> None:
            try:
                columns = await self.environment.run_rollout(copied(rollout.row), chat)
                settle(event, columns)
            except MaxLengthReachedError:
                settle(event, {})  # the completion is complete, without columns
            except BaseException as problem:  # SystemExit would end the event loop
                settle(event, error=problem)

        task = self.executor.loop.submit(run())
        try:
            while True:
                yield [event]
                with boundary(AgentError, f"{title}, method 'run_rollout'", sample=rollout.index):
                    outcome = event.result()
                if not isinstance(outcome, TurnRequest):
                    break
                event = Future()
                error: Exception = MaxLengthReachedError()
                answer: ChatResponse | None = None
                try:
                    answer = yield outcome  # None: no token remains for the turn
                except Exception as problem:
                    error = problem
                reply.get_loop().call_soon_threadsafe(settle, reply, answer, None if answer else error)
        finally:
            task.cancel()
        if rollout.trajectory is None:
            raise AgentError(f"{title}: rollout {rollout.index} ended without a turn of the policy")
        source = f"{title}, method 'run_rollout'"
        rollout.columns = checked_entries(outcome, source, AgentError, objection=taken_column)
