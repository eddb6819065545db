"""Calls of reward functions: arguments, time limits, and checks of the returned rewards."""

from __future__ import annotations

import functools
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedModel

from groupwise.compat.transformers import name_or_path
from groupwise.errors import RewardError, boundary
from groupwise.records import RolloutBatch, copied
from groupwise.rewards.process import ProcessRewardModel
from groupwise.threads import EventLoop, await_call, is_async, start_thread
from groupwise.tokenization.prompts import prompts_equal

logger = logging.getLogger(__name__)

#: Reward of one completion after :func:`checked_rewards`: a number (NaN for None), or step rewards as
#: (index of the step's last token, reward).
Reward = float | list[tuple[int, float]]

T = TypeVar("T")

#: Largest magnitude of a reward: the squares of a batch of larger ones overflow in float32, their standard
#: deviation is infinite, and every advantage is 0.
MAX_REWARD = 1e16

#: Errors of code that takes a text for messages, or messages for a text.
_OF_TYPES = (TypeError, AttributeError)

#: Dataset columns that are passed under another name.
_RESERVED = ("prompt", "completion", "completion_ids")


def reward_name(function: object) -> str:
    """Return the name of a reward function or model in metrics and messages."""
    if isinstance(function, ProcessRewardModel):
        return reward_name(function.model)
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    if isinstance(function, PreTrainedModel):
        return name_or_path(function.config).rstrip("/").split("/")[-1] or type(function).__name__
    if isinstance(function, functools.partial):
        return reward_name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def reward_names(functions: Sequence[object]) -> list[str]:
    """Return names for metrics; ``_2``, ``_3``, … are appended to repeated ones."""
    counts: Counter[str] = Counter()
    unique = []
    for name in map(reward_name, functions):
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return unique


def reward_arguments(rollouts: RolloutBatch) -> dict[str, Any]:
    """Return the columns that reward functions receive as keyword arguments, B entries each.

    Lists and dictionaries are copies: a function that changes its arguments cannot change the prompts and
    tokens that are trained on or the arguments of another function.
    """
    columns = {key: None for row in rollouts.rows for key in row if key not in _RESERVED}
    return {
        **{key: [copied(row.get(key)) for row in rollouts.rows] for key in columns},
        **{key: [copied(value) for value in values] for key, values in rollouts.extra.items()},
        "prompts": copied(rollouts.prompts),
        "completions": copied(rollouts.texts),
        "completion_ids": [list(completion.token_ids) for completion in rollouts.completions],
    }


class RewardCalls(NamedTuple):
    """Results of all reward functions for one batch.

    rewards_FB: one list per function with one reward per completion, NaN for None.
    failures: errors by position of the function.
    seconds_F: duration of each call; NaN if it did not return.
    """

    rewards_FB: list[list[Reward]]
    failures: dict[int, RewardError]
    seconds_F: list[float]


def call_rewards(
    functions: Sequence[Callable[..., Any]],
    names: Sequence[str],
    rollouts: RolloutBatch,
    *,
    timeout: float | None = None,
    on_error: str = "raise",
    completion_logprobs: Callable[[Any], list[list[float]]] | None = None,
    **shared: object,
) -> RewardCalls:
    """Call every reward function: async functions concurrently, the others one after the other meanwhile.

    Args:
        timeout: seconds per call. Async functions are cancelled; for others see :func:`call_function`.
        on_error: "raise", or "none": a function that fails returns None for all completions of this call, and
            its first failure is logged as a warning.
        completion_logprobs: argument of functions with ``takes_logprobs``: maps a model, None for the policy,
            to the log-probs of the completion tokens under it.
        shared: further keyword arguments of all functions.

    Raises:
        RewardError: with "raise", a function raised, exceeded the time limit, or did not return one finite
            number, None or list of step rewards per completion.
    """

    def arguments(function: Callable[..., Any]) -> dict[str, Any]:
        given = {**reward_arguments(rollouts), **shared}  # fresh lists for every function
        if getattr(function, "takes_row_ids", False):  # PartialReward matches rows by id
            given["row_ids"] = rollouts.row_ids
        if getattr(function, "takes_logprobs", False):
            given["completion_logprobs"] = completion_logprobs
        return given

    outcomes = _call_all(functions, [f"reward function {name!r}" for name in names], arguments, timeout)
    rewards_FB, failures = [], {}
    for i, (name, (output, _)) in enumerate(zip(names, outcomes, strict=True)):
        failed = isinstance(output, RewardError)
        if failed:
            output.args = (f"{output}{_failed_row(output.__cause__, rollouts)}",)
        rewards = output if failed else _error_or(checked_rewards, output, name, rollouts)
        if isinstance(rewards, RewardError):
            if on_error == "raise":
                raise rewards
            if name not in _warned:
                _warned.add(name)
                logger.warning(
                    "%s; its rewards of this batch are None, and later failures are only counted", rewards
                )
            failures[i], rewards = rewards, [math.nan] * len(rollouts)
        rewards_FB.append(rewards)
    return RewardCalls(rewards_FB, failures, [seconds for _, seconds in outcomes])


#: Names of functions whose failure was logged.
_warned: set[str] = set()


def _call_all(
    functions: Sequence[Callable[..., Any]],
    titles: Sequence[str],
    arguments: Callable[[Callable[..., Any]], dict[str, Any]],
    timeout: float | None,
) -> list[tuple[Any, float]]:
    """Return the output or error of each function, and the seconds of its call (NaN: it did not return)."""

    async def in_background(i: int, given: dict[str, Any]) -> tuple[Any, float]:
        started = time.monotonic()
        try:
            output = await await_function(functions[i], titles[i], given, timeout)
        except RewardError as error:
            output = error
        return output, time.monotonic() - started

    outcomes: dict[int, tuple[Any, float]] = {}
    asynchronous = [i for i, function in enumerate(functions) if is_async(function)]
    deadline = None if timeout is None else time.monotonic() + timeout
    # In a thread: the caller's may already run an event loop, as in notebooks.
    loop = EventLoop("groupwise-rewards") if asynchronous else None
    try:
        futures = {i: loop.submit(in_background(i, arguments(functions[i]))) for i in asynchronous if loop}
        for i, function in enumerate(functions):
            if i not in futures:
                started = time.monotonic()
                output = _error_or(call_function, function, titles[i], arguments(function), timeout)
                outcomes[i] = output, time.monotonic() - started
        for i, future in futures.items():
            # Again with the limit: code that blocks the event loop blocks its own time limit, too.
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                with _time_limit(titles[i], timeout):
                    outcomes[i] = future.result(left)
            except RewardError as error:
                outcomes[i] = error, math.nan
    finally:
        if loop is not None:
            loop.close()
    return [outcomes[i] for i in range(len(functions))]


def _error_or(function: Callable[..., T], *arguments: object) -> T | RewardError:
    try:
        return function(*arguments)
    except RewardError as error:
        return error


def call_function(
    function: Callable[..., T], title: str, arguments: dict[str, Any], timeout: float | None
) -> T:
    """Call a synchronous reward function; with a timeout in a thread.

    Python cannot stop a thread: after the limit the call keeps running and its result is discarded. Functions
    with ``runs_in_caller_thread``, such as reward models, run in the caller's thread without a limit, because
    all ranks of a sharded model must finish.

    Raises:
        RewardError: the function raised or exceeded the time limit.
    """

    def call() -> T:
        with boundary(RewardError, title):
            return function(**arguments)

    if timeout is None or getattr(function, "runs_in_caller_thread", False):
        return call()
    with _time_limit(title, timeout):
        return start_thread(call).result(timeout)


@contextmanager
def _time_limit(title: str, timeout: float | None) -> Iterator[None]:
    """Name the function and the setting in the error of a call that took too long."""
    try:
        yield
    except (TimeoutError, FutureTimeoutError):  # two classes before Python 3.11
        raise RewardError(f"{title} took longer than reward_timeout={timeout} seconds") from None


async def await_function(
    function: Callable[..., Any], title: str, arguments: dict[str, Any], timeout: float | None
) -> object:
    """Await an async reward function and cancel it at the time limit.

    Raises:
        RewardError: the function raised or exceeded the time limit.
    """

    async def call() -> object:
        with boundary(RewardError, title):
            return await function(**arguments)

    try:
        with _time_limit(title, timeout):
            return await await_call(call, timeout)
    except RuntimeError as error:
        raise RewardError(f"{title} raised {error}") from None


def checked_rewards(output: object, name: str, rollouts: RolloutBatch) -> list[Reward]:
    """Convert the output of one reward function to numbers, NaN for None.

    Raises:
        RewardError: naming the function, the row, its prompt and its completion. A function that returns
            step rewards must not also return numbers.
    """
    if hasattr(output, "tolist"):  # tensors and arrays
        output = output.tolist()
    if not isinstance(output, (list, tuple)):
        raise RewardError(
            f"reward function {name!r} returned {type(output).__name__} ({output!r:.80}); it must return a "
            f"list with one number or None for each of the {len(rollouts)} completions"
        )
    if len(output) != len(rollouts):
        raise RewardError(
            f"reward function {name!r} returned {len(output)} rewards for {len(rollouts)} completions; "
            "it must return one number or None for each"
        )
    rewards = [_checked_reward(value, name, row, rollouts) for row, value in enumerate(output)]
    numbers = [row for row, reward in enumerate(rewards) if isinstance(reward, float) and reward == reward]
    if numbers and any(isinstance(reward, list) for reward in rewards):
        raise RewardError(
            f"reward function {name!r} returned step rewards for some completions and the number "
            f"{rewards[numbers[0]]} for row {numbers[0]}; return None or an empty list for a completion "
            f"without steps{_sample(numbers[0], rollouts)}"
        )
    return rewards


def _checked_reward(value: object, name: str, row: int, rollouts: RolloutBatch) -> Reward:
    if value is None:
        return math.nan
    if hasattr(value, "item") and hasattr(value, "tolist"):
        value = value.item() if getattr(value, "ndim", 0) == 0 else value.tolist()
    if _is_reward(value):
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, (list, tuple)) and all(_is_step(step, row, rollouts) for step in value):
        return [(int(end), float(reward)) for end, reward in value]
    shown = "an integer of many digits" if isinstance(value, int) else f"{value!r:.80}"
    raise RewardError(
        f"reward function {name!r} returned {shown} ({type(value).__name__}) for row {row}; allowed: a "
        f"finite number of magnitude up to {MAX_REWARD:.0e}, None, or a list of (index of the step's last "
        f"token, reward){_sample(row, rollouts)}"
    )


def _sample(row: int, rollouts: RolloutBatch) -> str:
    return f"; prompt: {rollouts.prompts[row]!r:.300}; completion: {rollouts.texts[row]!r:.300}"


def _failed_row(error: BaseException | None, rollouts: RolloutBatch) -> str:
    """Return the form of the completions after an error of types, and the row whose values were in use.

    No row if the variables of the failed calls do not tell rows with different completions apart.
    """
    if error is None:  # a time limit
        return ""
    columns = reward_arguments(rollouts).values()
    rows = set(range(len(rollouts)))
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, (str, list, dict)):  # equal numbers are no sign of a row
                found = {row for row in rows if any(prompts_equal(column[row], value) for column in columns)}
                rows = found or rows
    form, row = "string" if isinstance(rollouts.texts[0], str) else "list of messages", min(rows)
    hint = f"; a completion is a {form}, like its prompt" if isinstance(error, _OF_TYPES) else ""
    is_known = len(rows) < len(rollouts) and all(rollouts.texts[i] == rollouts.texts[row] for i in rows)
    return f"{hint}; row {row}{_sample(row, rollouts)}" if is_known else hint


def _is_reward(value: object) -> bool:
    # False for NaN and infinities; exact for integers that no float can hold.
    return isinstance(value, Real) and abs(value) <= MAX_REWARD  # type: ignore[operator]


def _is_step(step: object, row: int, rollouts: RolloutBatch) -> bool:
    if not isinstance(step, (list, tuple)) or len(step) != 2:
        return False
    end, reward = step
    in_range = isinstance(end, int) and 0 <= end < len(rollouts.completions[row].token_ids)
    return in_range and _is_reward(reward)
