"""Entering the user's reward functions, and checking what comes out."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any

import torch

from groupwise.errors import RewardError, boundary
from groupwise.stages import RolloutBatch

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


def call_rewards(
    functions: Sequence[Callable[..., Any]], names: Sequence[str], rollout: RolloutBatch, **shared: Any
) -> list[list[Reward]]:
    """Call every reward function on a rollout; the async ones run together, beside the others.

    Args:
        shared: further keyword arguments for all of them.

    Returns:
        one list per function with one reward per completion, NaN for None.

    Raises:
        RewardError: a function raised, or returned something else than one finite number or None (or list of
            step rewards) per completion.
    """
    arguments = {**reward_arguments(rollout), **shared}
    is_async = [_is_async(function) for function in functions]
    outputs: dict[int, Any] = {}
    with ThreadPoolExecutor(max_workers=1) as pool:
        # A thread of its own, because the caller's may already run an event loop (notebooks do).
        waiting = [i for i, flag in enumerate(is_async) if flag]
        if waiting:
            calls = {i: (functions[i], names[i]) for i in waiting}
            pending = pool.submit(asyncio.run, _call_together(calls, arguments))
        for i, function in enumerate(functions):
            if not is_async[i]:
                with boundary(RewardError, f"reward function {names[i]!r}"):
                    outputs[i] = function(**arguments)
        if waiting:
            outputs.update(pending.result())
    return [checked_rewards(outputs[i], names[i], rollout) for i in range(len(functions))]


def _is_async(function: Any) -> bool:
    if isinstance(function, functools.partial):
        return _is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _call_together(calls: dict[int, tuple[Any, str]], arguments: dict[str, Any]) -> dict[int, Any]:
    async def call(function: Any, name: str) -> Any:
        with boundary(RewardError, f"reward function {name!r}"):
            return await function(**arguments)

    results = await asyncio.gather(*(call(function, name) for function, name in calls.values()))
    return dict(zip(calls, results, strict=True))


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
