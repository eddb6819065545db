"""Entering the user's reward functions, and checking what comes out."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from numbers import Real
from typing import Any, NamedTuple

import torch

from groupwise.errors import RewardError, boundary
from groupwise.records import RolloutBatch
from groupwise.rewards.runtime.models import RewardModel

logger = logging.getLogger(__name__)

#: What a reward function may return per completion, after :func:`checked_rewards`.
Reward = float | list[tuple[int, float]]

_RESERVED = ("prompt", "completion", "completion_ids")


def reward_name(function: Any) -> str:
    """How a reward function or model is called in metrics and messages."""
    if isinstance(function, torch.nn.Module):
        path = str(function.config._name_or_path)  # type: ignore[union-attr]
        return path.rstrip("/").split("/")[-1] or type(function).__name__
    if isinstance(function, functools.partial):
        return reward_name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def unique_names(names: Sequence[str]) -> list[str]:
    """The names with ``_2``, ``_3``, … appended where one repeats, so that no metric hides another."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return unique


def reward_arguments(rollout: RolloutBatch) -> dict[str, Any]:
    """Keyword arguments every reward function gets: the rollout and all dataset columns, as lists."""
    columns = {key: None for row in rollout.rows for key in row if key not in _RESERVED}
    return {
        **{key: [row.get(key) for row in rollout.rows] for key in columns},
        **rollout.extra,
        "prompts": rollout.prompts,
        "completions": rollout.texts,
        "completion_ids": [completion.token_ids for completion in rollout.completions],
    }


class RewardCalls(NamedTuple):
    """What the reward functions gave for a rollout.

    rewards_FB: one list per function with one reward per completion, NaN for None.
    failures: the functions that failed, by position.
    seconds_F: what each function took; NaN where it was not heard of again.
    """

    rewards_FB: list[list[Reward]]
    failures: dict[int, RewardError]
    seconds_F: list[float]


def call_rewards(
    functions: Sequence[Callable[..., Any]],
    names: Sequence[str],
    rollout: RolloutBatch,
    *,
    timeout: float | None = None,
    on_error: str = "raise",
    **shared: Any,
) -> RewardCalls:
    """Call every reward function on a rollout: the async ones together, beside the others one by one.

    Args:
        timeout: seconds that a call may take. Async functions are cancelled. The others run in a thread of
            their own then; a thread cannot be stopped, so one that takes longer goes on unheard. Reward
            models stay in the caller's thread and have no limit: all ranks of a sharded one must finish.
        on_error: "raise", or "none": a function that fails gives None for all completions of this call, and
            the first failure of each function is logged as a warning.
        shared: further keyword arguments for all of them.

    Raises:
        RewardError: with "raise", a function raised, took too long, or returned something else than one
            finite number or None (or list of step rewards) per completion.
    """
    arguments = {**reward_arguments(rollout), **shared}
    titles = [f"reward function {name!r}" for name in names]
    waiting = {i: (f, titles[i]) for i, f in enumerate(functions) if is_async(f)}
    latest = None if timeout is None else time.monotonic() + timeout
    seconds_F = [math.nan] * len(functions)
    futures = _start_together(waiting, arguments, timeout, seconds_F)
    outputs: dict[int, Any] = {}
    for i, function in enumerate(functions):
        if i not in futures:
            started = time.monotonic()
            outputs[i] = _error_or(call_function, function, titles[i], arguments, timeout)
            seconds_F[i] = time.monotonic() - started
    for i, future in futures.items():
        left = None if latest is None else max(latest - time.monotonic(), 0.0)
        outputs[i] = _error_or(_result, future, titles[i], left, timeout)
    rewards_FB: list[list[Reward]] = []
    failures: dict[int, RewardError] = {}
    for i, name in enumerate(names):
        output = outputs[i]
        if not isinstance(output, RewardError):
            output = _error_or(checked_rewards, output, name, rollout)
        if isinstance(output, RewardError):
            if on_error == "raise":
                raise output
            _warn_once(name, output)
            failures[i], output = output, [math.nan] * len(rollout)
        rewards_FB.append(output)
    return RewardCalls(rewards_FB, failures, list(seconds_F))  # a copy: a call given up may still end


def _error_or(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RewardError as error:
        return error


_warned: set[str] = set()


def _warn_once(name: str, error: RewardError) -> None:
    if name not in _warned:
        _warned.add(name)
        logger.warning("%s; it gives no rewards for this batch, and later failures are only num_valid", error)


def is_async(function: Any) -> bool:
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_function(function: Any, title: str, arguments: dict[str, Any], timeout: float | None) -> Any:
    def call() -> Any:
        with boundary(RewardError, title):
            return function(**arguments)

    if timeout is None or isinstance(function, RewardModel):
        return call()
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    start_thread(run)
    return _result(future, title, timeout, timeout)


def _result(future: Future[Any], title: str, left: float | None, timeout: float | None) -> Any:
    try:
        return future.result(left)
    except FutureTimeoutError:
        raise _late(title, timeout) from None


def _late(title: str, timeout: float | None) -> RewardError:
    return RewardError(f"{title} took longer than reward_timeout={timeout} seconds")


def _start_together(
    calls: dict[int, tuple[Any, str]],
    arguments: dict[str, Any],
    timeout: float | None,
    seconds_F: list[float],
) -> dict[int, Future[Any]]:
    """Start async functions in an event loop in a thread, because the caller's may have one already
    (notebooks do), and note what each takes."""
    futures: dict[int, Future[Any]] = {i: Future() for i in calls}

    async def one(i: int) -> None:
        started = time.monotonic()
        try:
            output = await await_function(*calls[i], arguments, timeout)
        except Exception as error:
            seconds_F[i] = time.monotonic() - started
            futures[i].set_exception(error)
        else:
            seconds_F[i] = time.monotonic() - started
            futures[i].set_result(output)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i) for i in calls))

    def run() -> None:
        try:
            asyncio.run(all_of_them())
        except BaseException as error:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)

    if calls:
        start_thread(run)
    return futures


def start_thread(function: Callable[[], None]) -> None:
    """Run a function beside the caller, with the caller's gradient mode and GPU: a thread has its own."""
    grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        torch.set_grad_enabled(grad)
        if device is not None:
            torch.cuda.set_device(device)
        function()

    # A daemon: a call that never ends must not keep the process from ending.
    threading.Thread(target=run, daemon=True).start()


async def await_function(function: Any, title: str, arguments: dict[str, Any], timeout: float | None) -> Any:
    with boundary(RewardError, title):
        task = asyncio.ensure_future(function(**arguments))
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if done:
            return task.result()
    task.cancel()
    raise _late(title, timeout)


def checked_rewards(output: Any, name: str, rollout: RolloutBatch) -> list[Reward]:
    """The output of one reward function as numbers, NaN for None.

    Raises:
        RewardError: naming the function, the row, its prompt and its completion.
    """
    if isinstance(output, torch.Tensor) or hasattr(output, "tolist"):
        output = output.tolist()
    if not isinstance(output, (list, tuple)):
        raise RewardError(
            f"reward function {name!r} returned {type(output).__name__} ({output!r:.80}); it must return a "
            f"list with one number or None for each of the {len(rollout)} completions"
        )
    if len(output) != len(rollout):
        raise RewardError(
            f"reward function {name!r} returned {len(output)} rewards for {len(rollout)} completions; "
            "it must return one number or None for each"
        )
    return [_checked_reward(value, name, row, rollout) for row, value in enumerate(output)]


def _checked_reward(value: Any, name: str, row: int, rollout: RolloutBatch) -> Reward:
    if value is None:
        return math.nan
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):
        value = value.item() if getattr(value, "ndim", 0) == 0 else value.tolist()
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, (list, tuple)) and all(_is_step(step, row, rollout) for step in value):
        return [(int(end), float(reward)) for end, reward in value]
    raise RewardError(
        f"reward function {name!r} returned {value!r:.80} ({type(value).__name__}) for row {row}; allowed: a "
        "finite number, None, or a list of (index of the step's last token, reward); "
        f"prompt: {rollout.prompts[row]!r:.300}; completion: {rollout.texts[row]!r:.300}"
    )


def _is_step(step: Any, row: int, rollout: RolloutBatch) -> bool:
    if not isinstance(step, (list, tuple)) or len(step) != 2:
        return False
    end, reward = step
    in_range = isinstance(end, int) and 0 <= end < len(rollout.completions[row].token_ids)
    return in_range and isinstance(reward, Real) and math.isfinite(reward)
