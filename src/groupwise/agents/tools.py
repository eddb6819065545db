"""Tools that the policy may call, and their execution: concurrent, with a time limit, errors as results."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers.utils import get_json_schema

from groupwise.agents.parsing import ToolCall, ToolSchema
from groupwise.errors import AgentError, ConfigError

#: Default time limit of a call in seconds.
TIME_LIMIT = 60.0

#: Maximum number of concurrent calls.
MAX_CONCURRENT_CALLS = 64

#: Content of a message: text or content blocks.
Content = str | list[dict[str, Any]]

#: Seconds after the time limit of every call at which the event loop must be blocked.
BLOCKED_MARGIN = 10.0

_LIMIT_NAME = "time_limit"

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


def time_limit(seconds: float) -> Callable[[F], F]:
    """Decorate a tool or a method of an environment with the time limit of its calls.

    >>> @time_limit(5.0)
    ... def search(query: str) -> str: ...
    """

    def mark(function: F) -> F:
        setattr(function, _LIMIT_NAME, seconds)
        return function

    return mark


def time_limit_of(function: Callable[..., object]) -> float:
    """Return the time limit of a function's calls in seconds."""
    return getattr(function, _LIMIT_NAME, TIME_LIMIT)


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        name: name in tool calls.
        function: the function, sync or async.
        schema: JSON schema for the prompt.
        owner: environment whose method the function is; calls of one owner are sequential.
    """

    name: str
    function: Callable[..., Any]
    schema: ToolSchema
    owner: object = None

    @property
    def time_limit(self) -> float:
        return time_limit_of(self.function)


@dataclass(frozen=True)
class ToolResult:
    """Result of a call: content of the tool message, and True in ``failed`` for an error."""

    content: Content
    failed: bool = False


def make_tool(function: Callable[..., Any], owner: object = None) -> Tool:
    """Create a tool from a function's type hints and Google-style docstring, or from its ``json_schema``.

    Raises:
        ConfigError: ``function`` is not a function, or it lacks type hints or a docstring.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None:
        raise ConfigError(
            f"tools holds {function!r} ({type(function).__name__}); allowed: functions and methods"
        )
    try:
        schema = getattr(function, "json_schema", None)  # set by adapters
        return Tool(name, function, schema or get_json_schema(function), owner)
    except Exception as problem:  # own exceptions, and anything that evaluating annotations raises
        kind = f"method of {type(owner).__name__}" if owner is not None else "tool"
        raise ConfigError(
            f"{kind} {name!r} cannot be described to the model: {problem}; it needs type hints for every "
            "argument and a Google-style docstring with an 'Args:' section"
        ) from problem


class ToolSet(dict[str, Tool]):
    """The tools of one rollout by name.

    Raises:
        ConfigError: two tools have the same name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__({tool.name: tool for tool in tools})
        if len(self) < len(tools):
            names = [tool.name for tool in tools]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(
                f"several tools are called {', '.join(map(repr, repeated))}; give each its own name"
            )

    @property
    def schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self.values()]


class ToolExecutor:
    """Execute calls in the event loop of a daemon thread: async functions there, others in threads.

    The loop lives as long as the run, because async clients are bound to the loop in which they were created.
    Python cannot stop a thread: after the time limit a sync call keeps running and its result is discarded.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore: asyncio.Semaphore | None = None

    def submit_calls(self, calls: Sequence[ToolCall], tools: ToolSet) -> Future[list[ToolResult]]:
        """Start the tool calls of one turn.

        Calls of one environment's methods are sequential, others concurrent.

        Returns:
            Future of the results, in the order of the calls.
        """
        return self.submit(self._run_calls(calls, tools))

    def run_all(self, functions: Sequence[Callable[[], Any]], limit: float, what: str) -> list[Any]:
        """Call functions without arguments concurrently; return their results or exceptions.

        Args:
            limit: time limit of each call in seconds.
            what: name of the calls, for messages.

        Raises:
            AgentError: the calls did not end within their limits.
        """

        async def gather() -> list[Any]:
            calls = [self._limited(function, limit, is_async(function)) for function in functions]
            return await asyncio.gather(*calls, return_exceptions=True)

        return wait_for(self.submit(gather()), limit * (1 + len(functions) // MAX_CONCURRENT_CALLS), what)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the thread of the event loop."""
        self._running_loop().call_soon_threadsafe(function, *arguments)

    async def _run_calls(self, calls: Sequence[ToolCall], tools: ToolSet) -> list[ToolResult]:
        results: dict[int, ToolResult] = {}

        async def run_sequentially(indices: list[int]) -> None:
            for index in indices:
                results[index] = await self._run_call(calls[index], tools)

        sequences: dict[int, list[int]] = {}
        for index, call in enumerate(calls):
            owner = tools[call.name].owner if call.name in tools else None
            sequences.setdefault(-index - 1 if owner is None else id(owner), []).append(index)
        await asyncio.gather(*map(run_sequentially, sequences.values()))
        return [results[index] for index in range(len(calls))]

    async def _run_call(self, call: ToolCall, tools: ToolSet) -> ToolResult:
        """Execute one call; an error becomes its result, so that the policy can react to it."""
        if call.error is not None:
            return _failure(call.error)
        tool = tools.get(call.name)
        if tool is None:
            return _failure(f"Tool {call.name} not found. Available: {', '.join(tools) or 'none'}.")
        try:
            result = await self._limited(
                lambda: tool.function(**call.arguments), tool.time_limit, is_async(tool.function)
            )
        except (asyncio.TimeoutError, TimeoutError):
            return _failure(f"{call.name} took longer than {tool.time_limit:g} seconds.")
        except Exception as problem:
            return _failure(str(problem) or type(problem).__name__)
        is_blocks = isinstance(result, list) and all(isinstance(b, dict) and "type" in b for b in result)
        return ToolResult(result if is_blocks and result else str(result))

    async def _limited(self, function: Callable[[], Any], limit: float, returns_coroutine: bool) -> Any:
        if self._semaphore is None:
            self._semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        async with self._semaphore:
            return await asyncio.wait_for(function() if returns_coroutine else _in_thread(function), limit)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon thread: a call that never ends must not keep the process from exiting.
            threading.Thread(target=self._loop.run_forever, name="groupwise-tools", daemon=True).start()
        return self._loop


def is_async(function: Callable[..., object]) -> bool:
    """Return True if calling ``function`` returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _in_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Call ``function`` in a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # the time limit has cancelled it
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            loop.call_soon_threadsafe(settle, function(), None)
        except BaseException as problem:  # SystemExit in a tool must not end the thread without a result
            error = problem
            if not isinstance(problem, Exception) or isinstance(problem, StopIteration):  # futures refuse it
                error = RuntimeError(f"{type(problem).__name__}: {problem}")
            loop.call_soon_threadsafe(settle, None, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_for(future: Future[T], seconds: float, what: str) -> T:
    """Return the result of a future that limits itself to ``seconds``.

    Raises:
        AgentError: there is no result 10 s after the limit, because something blocks the event loop.
    """
    try:
        return future.result(seconds + BLOCKED_MARGIN)
    except FutureTimeoutError:
        raise AgentError(
            f"{what} did not end within {seconds + BLOCKED_MARGIN:g} seconds: an async function blocks the "
            "event loop of the tools (time.sleep, requests); use await, or make it a plain function"
        ) from None


def _failure(message: str) -> ToolResult:
    return ToolResult(str({"error": message}), failed=True)
