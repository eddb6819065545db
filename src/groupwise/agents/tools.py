"""Functions that a policy may call, and calling them: together, with a time limit, and never fatally."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from groupwise.agents.parsing import Call
from groupwise.errors import AgentError, ConfigError

logger = logging.getLogger(__name__)

#: Seconds that a call may take where the function does not say otherwise.
TIME_LIMIT = 60.0

#: Calls that run at the same time.
CONCURRENT = 64

_LIMIT_NAME = "time_limit"


def time_limit(seconds: float) -> Callable[[Any], Any]:
    """A decorator: calls of this tool, or of this method of an environment, may take that long.

    >>> @time_limit(5.0)
    ... def search(query: str) -> str: ...
    """

    def mark(function: Any) -> Any:
        setattr(function, _LIMIT_NAME, seconds)
        return function

    return mark


def time_limit_of(function: Any) -> float:
    """Seconds that a call may take."""
    return getattr(function, _LIMIT_NAME, TIME_LIMIT)


@dataclass(frozen=True)
class Tool:
    """A function a policy may call.

    owner: the environment whose method it is; calls of one owner run one after the other.
    schema: how it is described to the model.
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    owner: Any = None

    @property
    def time_limit(self) -> float:
        return time_limit_of(self.function)


@dataclass(frozen=True)
class Outcome:
    """What a call gave: content of the message to the model, and whether it is an error."""

    content: Any
    failed: bool = False


def make_tool(function: Callable[..., Any], owner: Any = None) -> Tool:
    """Describe a function to a model, from its type hints and its docstring, or by its ``json_schema``.

    Raises:
        ConfigError: it is no function, or lacks one of them.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None:
        raise ConfigError(
            f"tools holds {function!r} ({type(function).__name__}); allowed: functions and methods"
        )
    try:
        schema = getattr(function, "json_schema", None)  # of tools that others describe
        return Tool(name, function, schema or get_json_schema(function), owner)
    except Exception as problem:  # of its own kinds, and whatever evaluating annotations raises
        where = f"method of {type(owner).__name__}" if owner is not None else "tool"
        raise ConfigError(
            f"{where} {name!r} cannot be described to the model: {problem}; it needs type hints for every "
            "argument and a Google-style docstring with an 'Args:' section"
        ) from problem


class Toolbox(dict[str, Tool]):
    """The tools of one rollout by name.

    Raises:
        ConfigError: two have the same name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__({tool.name: tool for tool in tools})
        if len(self) < len(tools):
            names = [tool.name for tool in tools]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(
                f"several tools are called {', '.join(map(repr, twice))}; give each its own name"
            )

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.values()]

    def unknown(self, name: str) -> str:
        return f"Tool {name} not found. Available: {', '.join(self) or 'none'}."


class Runner:
    """Runs calls in an event loop of its own thread: async tools there, the others in threads.

    The loop stays for the run, because async clients are bound to the loop that they were made in. A thread
    cannot be stopped: a call that takes too long goes on unheard.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gate: asyncio.Semaphore | None = None

    def start(self, calls: Sequence[Call], tools: Toolbox) -> Future[list[Outcome]]:
        """Start the calls of one turn; their outcomes come in the order of the calls.

        Calls of an environment's methods run one after the other, those of other tools all together.
        """
        return asyncio.run_coroutine_threadsafe(self._turn(calls, tools), self._running_loop())

    def run_all(self, jobs: Sequence[Callable[[], Any]], limit: float, what: str) -> list[Any]:
        """Results of functions without arguments, all started together; exceptions are results too.

        Raises:
            AgentError: they did not all end in time.
        """

        async def together() -> list[Any]:
            return await asyncio.gather(*(self._limited(job, limit) for job in jobs), return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(together(), self._running_loop())
        return wait_for(future, limit * (1 + len(jobs) // CONCURRENT), what)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the event loop's thread, soon."""
        self._running_loop().call_soon_threadsafe(function, *arguments)

    async def _turn(self, calls: Sequence[Call], tools: Toolbox) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(calls)

        async def chain(places: list[int]) -> None:
            for place in places:
                outcomes[place] = await self._call(calls[place], tools)

        chains: dict[int, list[int]] = {}
        for place, call in enumerate(calls):
            owner = tools[call.name].owner if call.name in tools else None
            chains.setdefault(-place - 1 if owner is None else id(owner), []).append(place)
        await asyncio.gather(*map(chain, chains.values()))
        return outcomes  # type: ignore[return-value]

    async def _call(self, call: Call, tools: Toolbox) -> Outcome:
        """One call. Whatever goes wrong is told to the model: it may do better in its next turn."""
        if call.error is not None:
            return _failure(call.error)
        tool = tools.get(call.name)
        if tool is None:
            return _failure(tools.unknown(call.name))
        try:
            result = await self._limited(
                lambda: tool.function(**call.arguments), tool.time_limit, tool.function
            )
        except (asyncio.TimeoutError, TimeoutError):
            return _failure(f"{call.name} took longer than {tool.time_limit:g} seconds.")
        except Exception as problem:
            return _failure(str(problem) or type(problem).__name__)
        blocks = isinstance(result, list) and all(isinstance(b, dict) and "type" in b for b in result)
        return Outcome(result if blocks and result else str(result))

    async def _limited(self, job: Callable[[], Any], limit: float, function: Any = None) -> Any:
        assert self._gate is not None
        async with self._gate:
            awaitable = job() if is_async(function or job) else _in_thread(job)
            return await asyncio.wait_for(awaitable, limit)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._gate = asyncio.Semaphore(CONCURRENT)
            # A daemon: a call that never ends must not keep the process from ending.
            threading.Thread(target=self._loop.run_forever, name="groupwise-tools", daemon=True).start()
        return self._loop


def is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _in_thread(job: Callable[[], Any]) -> Awaitable[Any]:
    """The result of a function that runs in a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(set_value: Callable[[Any], None], value: Any) -> None:
        if not answer.done():  # nobody waits for a late one
            set_value(value)

    def run() -> None:
        try:
            value, set_value = job(), answer.set_result
        except BaseException as error:  # an exit in a tool must not end a thread silently
            usable = isinstance(error, Exception) and not isinstance(
                error, StopIteration
            )  # futures take no such
            value = error if usable else RuntimeError(f"{type(error).__name__}: {error}")
            set_value = answer.set_exception
        loop.call_soon_threadsafe(deliver, set_value, value)

    threading.Thread(target=run, daemon=True).start()
    return answer


def wait_for(future: Future[Any], seconds: float, what: str) -> Any:
    """The result of a future that limits itself; the margin is for a loop that something blocks.

    Raises:
        AgentError: naming what was waited for.
    """
    try:
        return future.result(seconds + 10.0)
    except FutureTimeoutError:
        raise AgentError(
            f"{what} did not end within {seconds + 10.0:g} seconds: an async function blocks the event loop "
            "of the tools (time.sleep, requests); make it await, or make it a plain function"
        ) from None


def _failure(message: str) -> Outcome:
    return Outcome(str({"error": message}), failed=True)
