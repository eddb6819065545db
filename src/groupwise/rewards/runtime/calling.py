"""Calls of reward functions: arguments, time limits, and checks of the returned rewards."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

from groupwise.core.metrics import Mean, Metrics, Sum
from groupwise.errors import RewardError, boundary
from groupwise.records import Completion, RolloutBatch, copied
from groupwise.rewards.process import checked_steps
from groupwise.threads import CallExecutor, EventLoop, Invocation, is_async

logger = logging.getLogger(__name__)

#: Reward of one completion after :func:`checked_rewards`: a number (NaN for None), or step rewards as
#: (index of the step's last token, reward).
Reward = float | list[tuple[int, float]]

#: Largest magnitude of a reward: the squares of a batch of larger ones overflow in float32, their standard
#: deviation is infinite, and every advantage is 0.
MAX_REWARD = 1e16

#: Dataset columns that are passed under another name.
_RESERVED = ("prompt", "completion", "completion_ids")


def reward_arguments(rollouts: RolloutBatch) -> dict[str, Any]:
    """Return the columns that reward functions receive as keyword arguments, B entries each.

    Lists and dictionaries are copies: a function that changes its arguments cannot change the prompts and
    tokens that are trained on or the arguments of another function.
    """
    completions = rollouts.completions
    columns = {key: None for row in rollouts.rows for key in row if key not in _RESERVED}
    ends = {"turn_ends": [*map(_turn_ends, completions)]} if any(c.turn_spans for c in completions) else {}
    return {
        **ends,  # a column of this name replaces it
        **{key: [copied(row.get(key)) for row in rollouts.rows] for key in columns},
        **{key: [copied(value) for value in values] for key, values in rollouts.extra.items()},
        "prompts": copied(rollouts.prompts),
        "completions": copied(rollouts.texts),
        "completion_ids": [list(completion.reward_ids) for completion in completions],
    }


def _turn_ends(completion: Completion) -> list[int | None]:
    """Return the index in ``reward_ids`` of each turn's last token; None for turns of earlier rows."""
    first, stop = completion.last_row or (0, len(completion.token_ids))
    return [end - 1 - first if first < end <= stop else None for _, end in completion.turn_spans]


class RewardCalls(NamedTuple):
    """Results of all reward functions for one batch.

    rewards_FB: one list per function with one reward per completion, NaN for None.
    failures: errors by position of the function.
    seconds_F: duration of each call; NaN if it did not return.
    """

    rewards_FB: list[list[Reward]]
    failures: dict[int, RewardError]
    seconds_F: list[float]

    def metrics(self, names: Sequence[str], *, count_failures: bool) -> Metrics:
        """Return the seconds of calls that returned and, with ``count_failures``, 1 for each that failed."""
        times = zip(names, self.seconds_F, strict=False)  # empty without a call
        found: Metrics = {f"time/reward/{name}": Mean(s) for name, s in times if not math.isnan(s)}
        errors = {f"rewards/{name}/errors": Sum(float(i in self.failures)) for i, name in enumerate(names)}
        return {**found, **errors} if count_failures else found


def call_rewards(
    functions: Sequence[Callable[..., Any]],
    names: Sequence[str],
    rollouts: RolloutBatch,
    *,
    timeout: float | None = None,
    loop: EventLoop | None = None,
    on_error: str = "raise",
    completion_logprobs: Callable[[Any], list[list[float]]] | None = None,
    rows_F: Sequence[Sequence[int] | None] | None = None,
    **shared: Any,
) -> RewardCalls:
    """Call every reward function: async functions concurrently, the others one after the other meanwhile.

    Args:
        timeout: seconds per call, see :class:`CallExecutor`.
        loop: event loop of the run; None: a new one.
        on_error: "raise", or "none": a function that fails returns None for all completions of this call, and
            its first failure is logged as a warning.
        completion_logprobs: argument of functions with ``takes_logprobs``: maps a model, None for the policy,
            to the log-probs of the completion tokens under it.
        rows_F: rows that each function is called with, if there are any; the others get None. None: all.
        shared: further keyword arguments of all functions.

    Raises:
        RewardError: with "raise", a function raised, exceeded the time limit, or did not return one finite
            number, None or list of step rewards per completion.
    """
    times_F: list[list[float]] = [[] for _ in functions]
    invocations, parts, every = [], [], range(len(rollouts))
    scored_F = [every if rows is None else rows for rows in rows_F or [None] * len(names)]
    for function, name, times, scored in zip(functions, names, times_F, scored_F, strict=True):
        takes_logprobs = getattr(function, "takes_logprobs", False)
        # All ranks take part in the forwards of a model: it is called with all rows on each.
        rows = every if takes_logprobs or getattr(function, "runs_in_caller_thread", False) else scored
        part = rollouts if rows is every else rollouts.select(rows)
        parts.append((rows, part))
        arguments = {**reward_arguments(part), **shared}  # fresh lists for every function
        if rows is not every and "log_extra" in shared:
            arguments["log_extra"] = functools.partial(shared["log_extra"], rows=rows)
        if getattr(function, "takes_row_ids", False):  # PartialReward matches rows by id
            arguments["row_ids"] = part.row_ids
        if takes_logprobs:
            arguments["completion_logprobs"] = completion_logprobs
        invocations.append(
            reward_invocation(function, name, arguments, times) if part else Invocation(list, limited=False)
        )
    futures = CallExecutor(timeout, limited_by="reward_timeout", loop=loop).run_all(invocations)
    now = time.monotonic()  # a call that is over its limit may not have ended
    seconds_F = [[*times, now][1] - times[0] if times else math.nan for times in times_F]
    rewards_FB, failures = [], {}
    for i, (name, future) in enumerate(zip(names, futures, strict=True)):
        rows, part = parts[i]
        try:
            rewards = reward_result(future, name, part)
        except RewardError as error:
            if on_error == "raise":
                raise
            if name not in _warned:
                _warned.add(name)
                logger.warning(
                    "%s; its rewards of this batch are None, and later failures are only counted", error
                )
            failures[i], rewards = error, [math.nan] * len(part)
        given = {row: reward for row, reward in zip(rows, rewards, strict=True) if row in scored_F[i]}
        rewards_FB.append([given.get(row, math.nan) for row in every])
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


def reward_result(future: Future[Any], name: str, rollouts: RolloutBatch) -> list[Reward]:
    """Return the checked rewards of a finished call, or raise its error as a RewardError."""
    try:
        output = future.result()
    except Exception as error:  # of the function, or the time limit
        named = f"reward function {name!r} raised {type(error).__name__}: {error}"
        failure = error if isinstance(error, RewardError) else RewardError(named)
        if isinstance(failure.__cause__, (TypeError, AttributeError)):  # it may take a text for messages
            form = "string" if isinstance(rollouts.texts[0], str) else "list of messages"
            failure.args = (f"{failure}; a completion is a {form}, like its prompt",)
        raise failure from failure.__cause__
    return checked_rewards(output, name, rollouts)


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
    where = ""
    if isinstance(value, (list, tuple)):
        steps, wrong = checked_steps(value, rollouts.completions[row], _is_reward)
        if not wrong:
            return steps
        where = f" ({wrong})"
    shown = "an integer of many digits" if isinstance(value, int) else f"{value!r:.80}"
    raise RewardError(
        f"reward function {name!r} returned {shown} ({type(value).__name__}) for row {row}{where}; "
        f"allowed: a finite number of magnitude up to {MAX_REWARD:.0e}, None, or a list of (index of the "
        f"step's last token, a sampled one, reward), or of a number or None per turn{_sample(row, rollouts)}"
    )


def _sample(row: int, rollouts: RolloutBatch) -> str:
    return f"; prompt: {rollouts.prompts[row]!r:.300}; completion: {rollouts.texts[row]!r:.300}"


def _is_reward(value: object) -> bool:
    # False for NaN and infinities; exact for integers that no float can hold.
    return isinstance(value, Real) and abs(value) <= MAX_REWARD  # type: ignore[operator]
