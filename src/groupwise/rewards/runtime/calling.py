"""Calls of reward functions: arguments, time limits, and checks of the returned rewards."""

from __future__ import annotations

import functools
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from groupwise.compat.transformers import name_or_path
from groupwise.errors import RewardError, boundary
from groupwise.records import RolloutBatch, copied
from groupwise.rewards.process import ProcessRewardModel
from groupwise.threads import CallExecutor, EventLoop, Invocation, is_async
from groupwise.tokenization.prompts import prompts_equal

logger = logging.getLogger(__name__)

#: Reward of one completion after :func:`checked_rewards`: a number (NaN for None), or step rewards as
#: (index of the step's last token, reward).
Reward = float | list[tuple[int, float]]

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
        "completion_ids": [list(completion.reward_ids) for completion in rollouts.completions],
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
    loop: EventLoop | None = None,
    on_error: str = "raise",
    completion_logprobs: Callable[[Any], list[list[float]]] | None = None,
    **shared: object,
) -> RewardCalls:
    """Call every reward function: async functions concurrently, the others one after the other meanwhile.

    Args:
        timeout: seconds per call, see :class:`CallExecutor`.
        loop: event loop of the run; None: one of this call.
        on_error: "raise", or "none": a function that fails returns None for all completions of this call, and
            its first failure is logged as a warning.
        completion_logprobs: argument of functions with ``takes_logprobs``: maps a model, None for the policy,
            to the log-probs of the completion tokens under it.
        shared: further keyword arguments of all functions.

    Raises:
        RewardError: with "raise", a function raised, exceeded the time limit, or did not return one finite
            number, None or list of step rewards per completion.
    """
    times_F: list[list[float]] = [[] for _ in functions]
    invocations = []
    for function, name, times in zip(functions, names, times_F, strict=True):
        arguments = {**reward_arguments(rollouts), **shared}  # fresh lists for every function
        if getattr(function, "takes_row_ids", False):  # PartialReward matches rows by id
            arguments["row_ids"] = rollouts.row_ids
        if getattr(function, "takes_logprobs", False):
            arguments["completion_logprobs"] = completion_logprobs
        invocations.append(reward_invocation(function, name, arguments, times))
    executor = CallExecutor(timeout, limited_by="reward_timeout", loop=loop)
    try:
        futures = executor.run_all(invocations)
    finally:
        if loop is None:
            executor.loop.close()
    now = time.monotonic()  # a call that is over its limit may not have ended
    seconds_F = [[*times, now][1] - times[0] if times else math.nan for times in times_F]
    rewards_FB, failures = [], {}
    for i, (name, future) in enumerate(zip(names, futures, strict=True)):
        rewards = reward_result(future, name, rollouts)
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
    return RewardCalls(rewards_FB, failures, seconds_F)


#: Names of functions whose failure was logged.
_warned: set[str] = set()


def reward_invocation(
    function: Callable[..., Any], name: str, arguments: dict[str, Any], times: list[float]
) -> Invocation:
    """Return the call of a reward function for an executor; its errors name the function.

    Functions with ``runs_in_caller_thread``, such as reward models, have no time limit, because all ranks of
    a sharded model must finish.

    Args:
        name: that of the function in messages.
        times: receives the times of the begin and the end of the call.
    """

    @contextmanager
    def recorded() -> Iterator[None]:
        times.append(time.monotonic())
        try:
            with boundary(RewardError, f"reward function {name!r}"):
                yield
        finally:
            times.append(time.monotonic())

    async def call_async() -> Any:
        with recorded():
            return await function(**arguments)

    def call() -> Any:
        with recorded():
            return function(**arguments)

    limited = not getattr(function, "runs_in_caller_thread", False)
    return Invocation(call_async if is_async(function) else call, limited=limited)


def reward_result(future: Future[Any], name: str, rollouts: RolloutBatch) -> list[Reward] | RewardError:
    """Return the checked rewards of a finished call, or its error."""
    try:
        output = future.result()
    except Exception as error:  # of the function, or the time limit
        named = f"reward function {name!r} raised {type(error).__name__}: {error}"
        failure = error if isinstance(error, RewardError) else RewardError(named)
        failure.args = (f"{failure}{_failed_row(failure.__cause__, rollouts)}",)
        return failure
    try:
        return checked_rewards(output, name, rollouts)
    except RewardError as error:
        return error


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
        first, _ = rollouts.completions[row].last_row or (0, 0)  # the function saw the tokens from here on
        return [(first + int(end), float(reward)) for end, reward in value]
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
    in_range = isinstance(end, int) and 0 <= end < len(rollouts.completions[row].reward_ids)
    return in_range and _is_reward(reward)
