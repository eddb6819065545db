"""Rollouts that an environment drives itself: it asks the policy for turns, message by message."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupwise.agents.loop import PATIENCE, AgentSettings, join_collective_generate, open_transcript
from groupwise.agents.parsing import TurnParser
from groupwise.agents.tools import Runner
from groupwise.agents.transcript import Transcript
from groupwise.core.metrics import Mean
from groupwise.errors import AgentError, boundary
from groupwise.generation.base import GenerationBackend
from groupwise.records import RolloutBatch, SamplingOptions
from groupwise.tokenization.rendering import DriftError, Renderer


class OutOfRoomError(Exception):
    """The completion has reached its limit: the policy has no further turn."""


@dataclass(frozen=True)
class Reply:
    """A turn of the policy.

    message: as chat templates read it, with ``tool_calls`` if there are any.
    truncated: the limit cut it.
    """

    message: dict[str, Any]
    truncated: bool


#: (messages so far, schemas of tools) to the policy's next turn; raises OutOfRoomError.
Chat = Callable[[list[dict[str, Any]], list[Any]], Awaitable[Reply]]


class Driver(Protocol):
    """An environment that leads the conversation.

    time_limit: seconds that it may take between two turns of the policy.
    uses_tools: whether it shows tools to the policy, which its chat template has to know then.
    """

    time_limit: float
    uses_tools: bool

    async def drive(self, row: dict[str, Any], chat: Chat) -> dict[str, Any]:
        """Play one rollout and return values for the reward functions, by column.

        Messages given to ``chat`` should continue those given before, replies included: then tokens are only
        appended. Where they do not, the rollout forks (:meth:`groupwise.agents.Transcript.follow`).
        """

    def rewards(self) -> list[Callable[..., Any]]:
        """Reward functions that the environment brings, if any."""


@dataclass
class _Talk:
    """One rollout.

    opening: the messages before the policy's first turn.
    messages: all so far, the policy's included.
    """

    opening: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    transcript: Transcript | None = None


@dataclass(frozen=True)
class _Request:
    talk: _Talk
    messages: list[dict[str, Any]]
    schemas: list[Any]
    answer: asyncio.Future[Reply]


@dataclass(frozen=True)
class _End:
    index: int
    error: Exception | None


class EnvironmentDrivenRollouts:
    """Runs a :class:`Driver` for every row and answers what it asks, in batches.

    Args:
        renderer: shows tools, if the driver uses any.
        any_rank: as in :class:`groupwise.agents.Agents`.
    """

    current: list[Any] | None = None

    def __init__(
        self,
        driver: Driver,
        tokenizer: Any,
        settings: AgentSettings,
        renderer: Renderer,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self.driver, self.settings, self.renderer, self.any_rank = driver, settings, renderer, any_rank
        self.parser = TurnParser(tokenizer, renderer.chat_template, needed=False)
        self.title = f"environment {type(driver).__name__!r}"
        self.runner = Runner()

    def generate_rollouts(
        self,
        rows: list[dict[str, Any]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> RolloutBatch:
        """One rollout for each row.

        Raises:
            AgentError: the driver failed, took too long, or never asked for a turn.
        """
        talks = [_Talk() for _ in rows]
        columns: list[dict[str, Any]] = [{} for _ in rows]
        events: queue.Queue[_Request | _End] = queue.Queue()

        async def play(index: int) -> None:
            async def chat(messages: list[dict[str, Any]], schemas: list[Any]) -> Reply:
                answer = asyncio.get_running_loop().create_future()
                events.put(_Request(talks[index], list(messages), list(schemas), answer))
                return await answer

            error = None
            try:
                columns[index] = await self.driver.drive(rows[index], chat)
            except OutOfRoomError:
                pass  # the completion is as long as it may be
            except Exception as problem:
                error = problem
            events.put(_End(index, error))

        futures = [self.runner.submit(play(index)) for index in range(len(rows))]
        try:
            self._serve(events, len(rows), backend, generation_kwargs or {})
        finally:
            for future in futures:
                future.cancel()
        return self._batch(rows, talks, columns)

    def _serve(
        self,
        events: queue.Queue[_Request | _End],
        live: int,
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any],
    ) -> None:
        """Answer until every rollout has ended; those that ask in time share a call of the backend."""
        patience = PATIENCE
        while self.any_rank(live > 0):
            requests: list[_Request] = []
            started = time.monotonic()
            while len(requests) < live:
                left = patience - (time.monotonic() - started) if requests else self.driver.time_limit
                try:
                    event = events.get(timeout=max(left, 0.0))
                except queue.Empty:
                    if requests:
                        break
                    raise AgentError(
                        f"{self.title}: none of {live} rollouts asked for a turn or ended within "
                        f"{self.driver.time_limit:g} seconds (its time_limit)"
                    ) from None
                if isinstance(event, _Request):
                    requests.append(event)
                    continue
                live -= 1
                if event.error is not None:
                    with boundary(AgentError, f"{self.title}, method 'drive'", sample=event.index):
                        raise event.error
            ready = [request for request in requests if self._extend(request, backend)]
            if self.any_rank(bool(ready)):
                started = time.monotonic()
                self._generate(ready, backend, generation_kwargs)
                patience = max(PATIENCE, time.monotonic() - started)

    def _extend(self, request: _Request, backend: GenerationBackend) -> bool:
        """Bring the tokens up to the messages; where they do not fit, the answer is an error."""
        talk, given = request.talk, request.messages
        if talk.transcript is None:
            talk.opening = talk.messages = given
            prompt_ids = self.renderer.prompt(given, request.schemas, self.settings.max_prompt_length)
            talk.transcript = open_transcript(prompt_ids, self.settings, backend, self.title)
            return True
        known, talk.messages = talk.messages, given
        new = given[len(known) :]
        continued = bool(new) and all(map(_same, known, given))
        if self._follow(talk.transcript, new if continued else [], request):
            return True
        self.runner.call(_settle, request.answer, OutOfRoomError())
        return False

    def _follow(self, transcript: Transcript, new: list[dict[str, Any]], request: _Request) -> bool:
        """Append the messages that are new; without any, follow the conversation as it is rendered now."""
        if new and transcript.token_ids:
            try:
                return transcript.observed(self.renderer.observation(new, transcript.token_ids[-1]))
            except DriftError:
                pass
        return transcript.follow(self.renderer.whole(request.messages, request.schemas))

    def _generate(
        self, ready: list[_Request], backend: GenerationBackend, generation_kwargs: Mapping[str, Any]
    ) -> None:
        if not ready:
            join_collective_generate(backend)
            return
        transcripts = [request.talk.transcript for request in ready if request.talk.transcript is not None]
        contexts = [transcript.context for transcript in transcripts]
        rooms = [transcript.room for transcript in transcripts]
        completions = backend.generate(contexts, SamplingOptions(rooms, None, generation_kwargs))
        for request, transcript, completion in zip(ready, transcripts, completions, strict=True):
            turn = self.parser(transcript.context, completion.token_ids, request.schemas)
            transcript.sampled(completion)
            request.talk.messages = [*request.talk.messages, turn.message]
            self.runner.call(_settle, request.answer, Reply(turn.message, transcript.truncated))

    def _batch(
        self, rows: list[dict[str, Any]], talks: list[_Talk], columns: list[dict[str, Any]]
    ) -> RolloutBatch:
        transcripts = [talk.transcript for talk in talks if talk.transcript is not None]
        if len(transcripts) < len(talks):
            index = next(i for i, talk in enumerate(talks) if talk.transcript is None)
            raise AgentError(f"{self.title}: rollout {index} ended without asking the policy for a turn")
        names = dict.fromkeys(name for each in columns for name in each)
        forks = float(sum(transcript.forks for transcript in transcripts))
        return RolloutBatch(
            rows=rows,
            prompts=[talk.opening for talk in talks],
            prompt_ids=[transcript.prompt_ids for transcript in transcripts],
            completions=[transcript.completion() for transcript in transcripts],
            texts=[talk.messages[len(talk.opening) :] for talk in talks],
            extra={name: [each.get(name) for each in columns] for name in names},
            metrics={"tools/fork_frequency": Mean(forks, float(len(talks)))},
        )


def _settle(answer: asyncio.Future[Reply], value: Reply | Exception) -> None:
    if answer.done():  # cancelled: nobody waits any more
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
    else:
        answer.set_result(value)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages say the same, whatever else they carry."""

    def said(message: dict[str, Any]) -> Any:
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        content = message.get("content") or ""
        return message["role"], content, [(call["name"], call["arguments"]) for call in calls]

    return said(one) == said(other)
