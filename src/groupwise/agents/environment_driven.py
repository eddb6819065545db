"""Rollouts run by an environment, which requests the policy's turns message by message."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from groupwise.agents.executor import ToolExecutor, as_exception
from groupwise.agents.multi_turn import MIN_WAIT, MultiTurnSettings, sample_turns, start_trajectory
from groupwise.agents.retries import RolloutRetries, dropped_completion
from groupwise.agents.trajectory import Trajectory
from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import AgentError, boundary
from groupwise.generation.base import GenerationBackend
from groupwise.records import RolloutBatch, copied
from groupwise.tokenization.prompts import Message, replace_surrogates
from groupwise.tokenization.rendering import PrefixMismatchError, Renderer
from groupwise.tokenization.tool_calls import ToolSchema, TurnParser


class MaxLengthReachedError(Exception):
    """The completion has reached its maximum length, so that the policy has no further turn."""


@dataclass(frozen=True)
class ChatResponse:
    """A turn of the policy.

    Attributes:
        message: assistant message as chat templates expect it, with ``tool_calls`` if there are any.
        truncated: the turn was cut at the maximum length.
    """

    message: Message
    truncated: bool


#: ``await chat(messages, tool_schemas)`` samples the next turn; raises :class:`MaxLengthReachedError`.
ChatFunction = Callable[[list[Message], list[ToolSchema]], Awaitable[ChatResponse]]


class RolloutEnvironment(Protocol):
    """An environment that runs a rollout itself.

    Attributes:
        time_limit: maximum time in seconds between two turns of the policy.
        uses_tools: it passes tool schemas to ``chat``, which the chat template must be able to render.
    """

    time_limit: float
    uses_tools: bool

    async def run_rollout(self, row: dict[str, Any], chat: ChatFunction) -> dict[str, Any]:
        """Run one rollout and return values for the reward functions, by column.

        Messages given to ``chat`` should continue those of the previous call and its response: then tokens
        are appended. Otherwise the rollout forks (:meth:`groupwise.agents.Trajectory.continue_from`).
        """

    def reward_funcs(self) -> list[Callable[..., Any]]:
        """Return the environment's own reward functions."""


@dataclass
class _Rollout:
    """State of one rollout.

    Attributes:
        prompt: messages before the policy's first turn.
        messages: all messages so far, the policy's included.
        columns: values for the reward functions, once the rollout has ended.
        error: the environment has failed the rollout.
        has_ended: ``run_rollout`` has returned or raised.
    """

    prompt: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    trajectory: Trajectory | None = None
    error: AgentError | None = None
    has_ended: bool = False


@dataclass(frozen=True)
class _TurnRequest:
    rollout: _Rollout
    messages: list[Message]
    schemas: list[ToolSchema]
    response: asyncio.Future[ChatResponse]


@dataclass(frozen=True)
class _RolloutEnd:
    index: int
    error: BaseException | None


class EnvironmentDrivenRollouts:
    """Run a :class:`RolloutEnvironment` for every row and sample the turns it requests, in batches.

    Args:
        renderer: renders messages, and tool schemas if the environment uses tools.
        any_rank: as in :class:`groupwise.agents.MultiTurnRollouts`.
    """

    environments = None  # one environment runs all rollouts: reward functions get none per completion

    def __init__(
        self,
        environment: RolloutEnvironment,
        tokenizer: PreTrainedTokenizerBase,
        settings: MultiTurnSettings,
        renderer: Renderer,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self.environment, self.settings, self.renderer = environment, settings, renderer
        self.any_rank = any_rank
        self.parser = TurnParser(tokenizer, renderer.chat_template, with_tools=False)
        self.title = f"environment {type(environment).__name__!r}"
        self.retries = RolloutRetries(settings.max_retries, lambda here: self.any_rank(here))
        self.executor = ToolExecutor()

    def generate_rollouts(
        self,
        rows: list[dict[str, Any]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> RolloutBatch:
        """Run one rollout for each row.

        Args:
            rows: dataset rows; rows of one group are adjacent.
            generation_kwargs: sampler settings in place of the run's, as in ``SamplingOptions``.

        Returns:
            Completions of all turns, with ``loss_mask`` 0 on other messages; the columns that the environment
            returned.

        Raises:
            AgentError: the environment failed, exceeded its time limit, or ended without a turn, and there
                are no retries.
        """
        rollouts: dict[int, _Rollout] = {}

        def attempt(indices: list[int]) -> list[int]:
            rollouts.update(self._attempt({i: rows[i] for i in indices}, backend, generation_kwargs or {}))
            return [index for index in indices if rollouts[index].error is not None]

        metrics = self.retries.run(attempt, len(rows))
        return self._make_batch(rows, [rollouts[index] for index in range(len(rows))], backend, metrics)

    def _attempt(
        self,
        rows: Mapping[int, dict[str, Any]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any],
    ) -> dict[int, _Rollout]:
        """Run the rollouts of some rows by position; failed ones have an ``error``.

        Raises:
            AgentError: a rollout failed, and there are no retries.
        """
        rollouts = {index: _Rollout() for index in rows}
        events: queue.Queue[_TurnRequest | _RolloutEnd] = queue.Queue()

        async def run(index: int) -> None:
            async def chat(messages: list[Message], schemas: list[ToolSchema]) -> ChatResponse:
                response: asyncio.Future[ChatResponse] = asyncio.get_running_loop().create_future()
                events.put(_TurnRequest(rollouts[index], list(messages), list(schemas), response))
                return await response

            error: BaseException | None = None
            try:
                rollouts[index].columns = await self.environment.run_rollout(copied(rows[index]), chat)
            except MaxLengthReachedError:
                pass  # the completion is complete, without columns
            except BaseException as problem:  # SystemExit would end the event loop
                error = problem
            events.put(_RolloutEnd(index, error))

        futures = [self.executor.submit(run(index)) for index in rows]
        try:
            self._serve(events, rollouts, backend, generation_kwargs)
        finally:
            for future in futures:
                future.cancel()
        return rollouts

    def _serve(
        self,
        events: queue.Queue[_TurnRequest | _RolloutEnd],
        rollouts: Mapping[int, _Rollout],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any],
    ) -> None:
        """Sample requested turns until all rollouts have ended, on all ranks.

        Requests that arrive within the duration of the previous generate call share the next one.
        """
        patience = MIN_WAIT
        num_running = len(rollouts)
        while self.any_rank(num_running > 0):
            requests: list[_TurnRequest] = []
            started = time.monotonic()
            while len(requests) < num_running:
                timeout = patience - (time.monotonic() - started) if requests else self.environment.time_limit
                try:
                    event = events.get(timeout=max(timeout, 0.0))
                except queue.Empty:
                    if requests:
                        break
                    self._time_out([rollout for rollout in rollouts.values() if not rollout.has_ended])
                    num_running = 0
                    break
                if isinstance(event, _TurnRequest):
                    requests.append(event)
                    continue
                num_running -= 1
                rollouts[event.index].has_ended = True
                self._end(event, rollouts[event.index])
            ready = [
                (request, trajectory)
                for request in requests
                if (trajectory := self._append_messages(request, backend)) is not None
            ]
            if self.any_rank(bool(ready)):
                started = time.monotonic()
                self._generate(ready, backend, generation_kwargs)
                patience = max(MIN_WAIT, time.monotonic() - started)

    def _end(self, event: _RolloutEnd, rollout: _Rollout) -> None:
        """Set the error of a rollout that has ended; without retries, raise it."""
        try:
            if event.error is not None:
                with boundary(AgentError, f"{self.title}, method 'run_rollout'", sample=event.index):
                    raise as_exception(event.error)
            if rollout.trajectory is None:
                raise AgentError(f"{self.title}: rollout {event.index} ended without a turn of the policy")
        except AgentError as error:
            self.retries.check(error)
            rollout.error = error

    def _time_out(self, rollouts: list[_Rollout]) -> None:
        error = AgentError(
            f"{self.title}: none of {len(rollouts)} rollouts requested a turn or ended within "
            f"{self.environment.time_limit:g} seconds (its time_limit)"
        )
        self.retries.check(error)
        for rollout in rollouts:
            rollout.error = error

    def _append_messages(self, request: _TurnRequest, backend: GenerationBackend) -> Trajectory | None:
        """Append the new messages of a request to its trajectory.

        Returns:
            The trajectory; None if no token remains for a turn, which becomes the error of the request.
        """
        rollout, messages = request.rollout, replace_surrogates(request.messages)
        previous, rollout.messages = rollout.messages, messages
        if rollout.trajectory is None:
            rollout.prompt = messages
            prompt_ids = self.renderer.render_prompt(
                messages, request.schemas, self.settings.max_prompt_length
            )
            rollout.trajectory = start_trajectory(prompt_ids, self.settings, backend, self.title)
            return rollout.trajectory
        new = messages[len(previous) :]
        if not all(map(_same_message, previous, messages)):
            new = []
        trajectory = rollout.trajectory
        if self.renderer.may_fit(new, trajectory.remaining_tokens):
            if self._append_or_fork(trajectory, new, messages, request.schemas):
                return trajectory
        else:
            trajectory.truncated = True
        self.executor.call_soon(_settle, request.response, MaxLengthReachedError())
        return None

    def _append_or_fork(
        self, trajectory: Trajectory, new: list[Message], messages: list[Message], schemas: list[ToolSchema]
    ) -> bool:
        """Append ``new`` messages, or fork to ``messages`` if none is new because the history has changed."""
        if new and trajectory.token_ids:
            try:
                tokens, _ = self.renderer.render_next_messages(new, trajectory.token_ids[-1])
                return trajectory.append_observed(tokens)
            except PrefixMismatchError:
                pass
        return trajectory.continue_from(self.renderer.render_prompt(messages, schemas))

    def _generate(
        self,
        ready: list[tuple[_TurnRequest, Trajectory]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any],
    ) -> None:
        """Sample the turns of all ``ready`` requests in one call of the backend."""
        turns = sample_turns([trajectory for _, trajectory in ready], backend, generation_kwargs)
        for (request, trajectory), (context_ids, token_ids) in zip(ready, turns, strict=True):
            message = self.parser(context_ids, token_ids, request.schemas).message
            request.rollout.messages = [*request.rollout.messages, message]
            self.executor.call_soon(_settle, request.response, ChatResponse(message, trajectory.truncated))

    def _make_batch(
        self,
        rows: list[dict[str, Any]],
        rollouts: list[_Rollout],
        backend: GenerationBackend,
        metrics: Metrics,
    ) -> RolloutBatch:
        dropped = dropped_completion(backend)
        trajectories = [None if rollout.error else rollout.trajectory for rollout in rollouts]
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.columns)
        num_forks = float(sum(each.num_forks for each in trajectories if each is not None))
        return RolloutBatch(
            rows=rows,
            prompts=[rollout.prompt for rollout in rollouts],
            prompt_ids=[dropped.token_ids if each is None else each.prompt_ids for each in trajectories],
            completions=[dropped if each is None else each.completion() for each in trajectories],
            texts=[rollout.messages[len(rollout.prompt) :] for rollout in rollouts],
            extra={name: [rollout.columns.get(name) for rollout in rollouts] for name in names},
            metrics={**metrics, "tools/fork_frequency": Mean(num_forks, float(len(rollouts)))},
        )


def _settle(future: asyncio.Future[ChatResponse], value: ChatResponse | Exception) -> None:
    if future.done():  # cancelled
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def _same_message(one: Message, other: Message) -> bool:
    """Compare role, content and tool calls of two messages; other keys are ignored."""

    def key(message: Message) -> tuple[object, ...]:
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        content = message.get("content") or ""
        return message["role"], content, [(call["name"], call["arguments"]) for call in calls]

    return key(one) == key(other)
