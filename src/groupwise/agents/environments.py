"""Instances of the user's environments: made once, reset for every rollout, asked for tools and rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from groupwise.agents.tools import Runner, Tool, Toolbox, is_async, make_tool, time_limit_of
from groupwise.errors import AgentError, ConfigError, RewardError, boundary

#: The prompt of rows that have none: the environment's observation becomes its text.
EMPTY_PROMPT = [{"role": "user", "content": ""}]

_RESERVED = ("reset", "get_reward")


@dataclass
class _Kind:
    """One kind of environment.

    instances: all that were made; a batch takes as many as it has rollouts of this kind.
    methods: names of the public methods, which are tools.
    """

    factory: Callable[[], Any]
    title: str
    cls: type
    instances: list[Any]
    methods: list[str]
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, index: int) -> Any:
        while index >= len(self.instances):
            self.instances.append(_make(self.factory, self.title))
        return self.instances[index]

    def tools(self, instance: Any) -> list[Tool]:
        return [Tool(name, getattr(instance, name), self.schemas[name], instance) for name in self.methods]


class Environments:
    """The environments of a run.

    Args:
        factory: makes an instance, or names and what makes theirs; then the ``environment`` column of a row
            says which one it uses.

    Raises:
        ConfigError: something that cannot make an environment, or methods that cannot be tools.
        AgentError: a factory failed.
    """

    def __init__(self, factory: Any) -> None:
        self.routed = isinstance(factory, dict)
        named = factory if self.routed else {None: factory}
        if not named:
            raise ConfigError("environment_factory is an empty dict; give it at least one name and factory")
        self.kinds: dict[Any, _Kind] = {name: _probe(name, each) for name, each in named.items()}

    def tools(self) -> list[Tool]:
        """Those of every kind of environment, on its first instance."""
        return [tool for kind in self.kinds.values() for tool in kind.tools(kind.instances[0])]

    def toolboxes(self, common: Sequence[Tool]) -> list[Toolbox]:
        """Those a rollout of each kind of environment has, ``common`` tools included."""
        return [Toolbox([*common, *kind.tools(kind.instances[0])]) for kind in self.kinds.values()]

    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each class that has ``get_reward``; None for rollouts of other classes."""
        classes = {
            kind.cls: kind for kind in self.kinds.values() if callable(getattr(kind.cls, "get_reward", None))
        }
        return [_reward_function(cls, kind.title) for cls, kind in classes.items()]

    def lend(self, rows: Sequence[dict[str, Any]]) -> list[tuple[Any, list[Tool]]]:
        """An instance for each row, and its tools; the instances are the same ones in every batch."""
        taken: dict[Any, int] = {}
        lent = []
        for index, row in enumerate(rows):
            name = self._name(row, index)
            taken[name] = taken.get(name, -1) + 1
            kind = self.kinds[name]
            instance = kind.take(taken[name])
            lent.append((instance, kind.tools(instance)))
        return lent

    def reset(self, instances: Sequence[Any], rows: Sequence[dict[str, Any]], runner: Runner) -> list[Any]:
        """What each environment shows at first: None, text or content blocks. All are reset together.

        Raises:
            AgentError: naming the environment, the method and the row.
        """
        given = [self._columns(row) for row in rows]
        jobs = [partial(instance.reset, **row) for instance, row in zip(instances, given, strict=True)]
        limit = max(time_limit_of(instance.reset) for instance in instances)
        results = runner.run_all(jobs, limit, "reset of the environments")
        for index, result in enumerate(results):
            title = self.kinds[self._name(rows[index], index)].title
            with boundary(AgentError, f"{title}, method 'reset'", sample=index, row=given[index]):
                if isinstance(result, TimeoutError | asyncio.TimeoutError):
                    raise TimeoutError(f"it took longer than {limit:g} seconds")
                if isinstance(result, BaseException):
                    raise result
                if not isinstance(result, str | list | None):
                    raise TypeError(
                        f"it returned {type(result).__name__}; allowed: None, str, a list of content blocks"
                    )
        return results

    def _name(self, row: dict[str, Any], index: int) -> Any:
        name = row.get("environment") if self.routed else None
        if name not in self.kinds:
            raise ConfigError(
                f"row {index} has environment={name!r}; the environment_factory knows "
                f"{', '.join(map(repr, self.kinds))} (column 'environment')"
            )
        return name

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if not (self.routed and key == "environment")}


def _make(factory: Callable[[], Any], title: str) -> Any:
    with boundary(AgentError, f"environment_factory of {title}"):
        return factory()


def _probe(name: Any, factory: Any) -> _Kind:
    """Make the first instance and look at what it can do."""
    title = "the environment" if name is None else f"environment {name!r}"
    if not callable(factory):
        raise ConfigError(
            f"environment_factory of {title} is {factory!r} ({type(factory).__name__}); allowed: a class or "
            "function that returns an instance, or a dict of such"
        )
    instance = _make(factory, title)
    cls = type(instance)
    title = f"environment {cls.__name__!r}" if name is None else title
    if not callable(getattr(cls, "reset", None)):
        raise ConfigError(
            f"{title} ({cls.__name__}) has no method 'reset'; it is called before every rollout"
        )
    # Looked up on the class: properties of an instance are not to be evaluated.
    public = [n for n, _ in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")]
    methods = [n for n in public if n not in _RESERVED]
    tools = [make_tool(getattr(instance, method), instance) for method in methods]
    return _Kind(factory, title, cls, [instance], methods, {tool.name: tool.schema for tool in tools})


def _reward_function(cls: Any, title: str) -> Callable[..., Any]:
    """Calls ``get_reward`` of the instances of one class; async ones run together."""

    def entering(index: int) -> Any:
        return boundary(RewardError, f"{title}, method 'get_reward'", sample=index)

    if is_async(cls.get_reward):

        async def one(index: int, environment: Any) -> float | None:
            with entering(index):
                return await environment.get_reward()

        async def ask_together(environments: list[Any], **_: Any) -> list[float | None]:
            mine = {i: one(i, e) for i, e in enumerate(environments) if type(e) is cls}
            answers = dict(zip(mine, await asyncio.gather(*mine.values()), strict=True))
            return [answers.get(i) for i in range(len(environments))]

        ask: Callable[..., Any] = ask_together
    else:

        def ask_in_turn(environments: list[Any], **_: Any) -> list[float | None]:
            answers: list[float | None] = []
            for index, environment in enumerate(environments):
                with entering(index):
                    answers.append(environment.get_reward() if type(environment) is cls else None)
            return answers

        ask = ask_in_turn
    ask.__name__ = cls.__name__
    return ask


def with_observation(prompt: Any, observation: Any) -> Any:
    """The prompt with what the environment shows behind its last user message; the given prompt stays."""
    if observation is None:
        return prompt
    if isinstance(prompt, str):
        return prompt + as_text(observation)
    place = next((i for i in reversed(range(len(prompt))) if prompt[i]["role"] == "user"), None)
    if place is None:
        return [*prompt, {"role": "user", "content": observation}]
    content = prompt[place]["content"]
    if isinstance(content, list) != isinstance(observation, list):
        content, observation = as_blocks(content), as_blocks(observation)
    return [*prompt[:place], {**prompt[place], "content": content + observation}, *prompt[place + 1 :]]


def as_plain(prompt: Any) -> Any:
    """The prompt with text for contents, as chat templates of text models take it.

    Raises:
        ConfigError: a block is no text.
    """
    if isinstance(prompt, str):
        return prompt
    return [{**message, "content": as_text(message.get("content") or "")} for message in prompt]


def as_blocks(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def as_text(content: Any) -> str:
    """Content blocks as one string.

    Raises:
        ConfigError: a block is no text.
    """
    if isinstance(content, str):
        return content
    other = [block.get("type") for block in content if block.get("type") != "text"]
    if other:
        raise ConfigError(
            f"content block of type {other[0]!r}, but tools and environments take text only; "
            "allowed: type 'text'"
        )
    return "".join(block["text"] for block in content)
