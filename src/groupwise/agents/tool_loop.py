"""The agent loop of tools and environments: run the calls of a turn, append the results, request a turn."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from groupwise.agents.environments import (
    EnvironmentPool,
    Slot,
    add_observation,
    check_observation,
    reward_call,
)
from groupwise.agents.loop import AgentLoop, Rollout, Steps, TurnRequest, empty_prompt
from groupwise.agents.tools import Tool, check_names, failed_result, invocation, tool_result
from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import AgentError, ConfigError, boundary, shortened
from groupwise.records import copied
from groupwise.threads import CallExecutor, Invocation
from groupwise.tokenization.images import insert_images
from groupwise.tokenization.prompts import Message, is_conversational
from groupwise.tokenization.tool_calls import ToolCall

logger = logging.getLogger(__name__)


class ToolLoop(AgentLoop):
    """Run rollouts with tools, in an environment of the pool if there is one, until a turn calls no tool.

    Args:
        tools: tools of every rollout.
        pool: environments; None without.
        executor: calls the tools; None: that of the pool, or one without a time limit.
        max_iterations: turns whose tool calls are executed; None: unlimited.
        scores_rollouts: ``get_reward`` is called at the end of a rollout, so that the rollout fails with it.
    """

    reads_images = renders_prompts = True

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        pool: EnvironmentPool | None = None,
        executor: CallExecutor | None = None,
        *,
        max_iterations: int | None = None,
        scores_rollouts: bool = False,
    ) -> None:
        self.tools, self.pool = list(tools), pool
        self.executor = executor or (CallExecutor() if pool is None else pool.executor)
        self.max_iterations, self.scores_rollouts = max_iterations, scores_rollouts
        self.provides_tasks = pool is not None
        self.is_routed = pool is not None and pool.is_routed
        self._reported: set[tuple[str, str]] = set()
        of_types = [] if pool is None else [each.tools(each.first) for each in pool.types.values()]
        for own in of_types or [[]]:
            check_names([*self.tools, *own])
        self.all_tools = [*self.tools, *(tool for own in of_types for tool in own)]
        self.uses_tools = self.has_later_turns = bool(self.all_tools)

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        return [] if self.pool is None else self.pool.reward_funcs()

    def begin_batch(self, rows: Sequence[dict[str, Any]]) -> Sequence[Slot | None]:
        return [None] * len(rows) if self.pool is None else self.pool.acquire(rows)

    def end_batch(self, places: Sequence[Any]) -> None:
        if self.pool is not None:
            self.pool.release(places)

    def run_rollout(self, rollout: Rollout) -> Steps:
        """Reset the environment, then alternate between turns and tool calls.

        Raises:
            ConfigError: the prompt is a text, but the rollout has tools.
            AgentError: the environment's factory, ``reset`` or ``get_reward`` failed, or a tool raised it.
        """
        rollout.prompt = insert_images({"prompt": empty_prompt(), **rollout.row})
        if self.pool is None:
            yield from self._alternate(rollout, self.tools)
            return
        slot: Slot = rollout.place
        kind = slot.environment_type
        rollout.columns["environments"] = None
        try:
            if slot.instance is None:
                slot.instance = kind.create()
            environment = rollout.columns["environments"] = slot.instance
            call = functools.partial(environment.reset, **copied(slot.columns))
            (reset,) = yield [Invocation(call, environment)]
            with boundary(
                AgentError, f"{kind.title}, method 'reset'", sample=rollout.index, row=slot.columns
            ):
                observation = reset.result()
                check_observation(observation, environment.reset)
            rollout.prompt = add_observation(rollout.prompt, observation)
            yield from self._alternate(rollout, [*self.tools, *kind.tools(environment)])
            if self.scores_rollouts and kind.has_reward:
                (reward,) = yield [reward_call(environment, rollout.messages[len(rollout.prompt) :])]
                with boundary(AgentError, f"{kind.title}, method 'get_reward'", sample=rollout.index):
                    reward.result()
                self.pool.rewards[id(environment)] = reward
        except AgentError:
            slot.instance = None  # the next attempt gets a fresh one
            raise

    def _alternate(self, rollout: Rollout, tools: Sequence[Tool]) -> Steps:
        """Alternate between turns and tool calls until a turn calls no tool, or a limit is reached."""
        if tools and not is_conversational(rollout.prompt):
            raise ConfigError(
                f"row {rollout.index} has a text prompt ({rollout.prompt!r:.80}), but tools need chat "
                "prompts: a list of messages such as [{'role': 'user', 'content': ...}]"
            )
        by_name, schemas = {tool.name: tool for tool in tools}, [tool.schema for tool in tools]
        turn = yield TurnRequest(rollout.prompt, schemas)
        iterations = 0
        while turn is not None and turn.tool_calls and tools and not turn.truncated:
            if iterations == self.max_iterations:
                return
            iterations += 1
            calls = turn.tool_calls
            futures = yield [invocation(call, by_name) for call in calls]
            results = [
                tool_result(call, by_name, future, images=rollout.images is not None)
                for call, future in zip(calls, futures, strict=True)
            ]
            start = len(rollout.tool_results)
            rollout.tool_results += zip(calls, results, strict=True)
            try:
                turn = yield TurnRequest(_followed_by(rollout, start), schemas)
            except Exception as problem:  # the processor rejects an image, or the chat template the content
                results = [each if each.failure else failed_result(problem) for each in results]
                rollout.tool_results[start:] = zip(calls, results, strict=True)
                turn = yield TurnRequest(_followed_by(rollout, start), schemas)

    def metrics(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the frequencies of calls and of failures; warn if every call of the batch failed."""
        if not self.uses_tools:
            return {}
        results = [result for rollout in rollouts for result in rollout.tool_results]
        failures = [(call, result.failure) for call, result in results if result.failure]
        if failures and len(failures) == len(results):
            self._report(*failures[0], len(results))
        return {
            "tools/call_frequency": Mean(float(len(results)), float(len(rollouts))),
            "tools/failure_frequency": Mean(float(len(failures)), float(len(results))),
        }

    def _report(self, call: ToolCall, failure: str, num_calls: int) -> None:
        """Warn about the first of ``num_calls`` failed calls, once per tool and kind of error."""
        is_known = any(call.name == tool.name for tool in self.all_tools)
        kind = call.name if is_known else "", failure.partition(":")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning(
                "all %d tool calls of a generation failed; the first one: %s(%s): %s",
                num_calls,
                call.name,
                ", ".join(f"{name}={shortened(value)}" for name, value in call.arguments.items()),
                shortened(failure),
            )


def _followed_by(rollout: Rollout, start: int) -> list[Message]:
    """Return the conversation with messages of the tool results from ``start`` on."""
    results: list[Message] = [
        {"role": "tool", "name": call.name, "content": result.content}
        for call, result in rollout.tool_results[start:]
    ]
    return [*cast(list[Message], rollout.messages), *results]
