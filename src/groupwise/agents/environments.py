"""The user's environments: instances created once, reset for each rollout, with tools and rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from groupwise.agents.parsing import ToolSchema
from groupwise.agents.tools import Content, Tool, ToolExecutor, ToolSet, is_async, make_tool, time_limit_of
from groupwise.errors import AgentError, ConfigError, RewardError, boundary
from groupwise.tokenization.prompts import Message, Prompt, content_blocks, content_text, is_conversational

_NOT_TOOLS = ("reset", "get_reward")


class Environment(Protocol):
    """An environment: ``reset``, public methods as tools, and optionally ``get_reward() -> float | None``.

    ``reset`` is called with the columns of the row before each rollout, and returns an observation (None,
    text or content blocks). ``reset``, ``get_reward`` and the tools may be async.
    """

    @property
    def reset(self) -> Callable[..., Any]: ...


EnvironmentFactory = Callable[[], Environment]


def empty_prompt() -> list[Message]:
    """Return the prompt of rows that have none; the environment's observation becomes its text."""
    return [{"role": "user", "content": ""}]


@dataclass
class _EnvironmentType:
    """Instances of one factory.

    Attributes:
        title: name of the environment in messages.
        instances: all instances created so far; a batch uses as many as it has rollouts of this type.
        schemas: tool schemas by the name of the public method.
    """

    factory: EnvironmentFactory
    title: str
    cls: type
    instances: list[Environment]
    schemas: dict[str, ToolSchema] = field(default_factory=dict)

    def instance(self, index: int) -> Environment:
        while index >= len(self.instances):
            self.instances.append(_create(self.factory, self.title))
        return self.instances[index]

    def tools(self, instance: Environment) -> list[Tool]:
        return [
            Tool(name, getattr(instance, name), schema, instance) for name, schema in self.schemas.items()
        ]


class EnvironmentPool:
    """Environment instances of a run.

    Args:
        factory: callable that returns an instance, or a dict of them by name; the ``environment`` column of a
            row selects the name.

    Raises:
        ConfigError: ``factory`` does not return environments, or a public method cannot be a tool.
        AgentError: a factory raised.
    """

    def __init__(self, factory: EnvironmentFactory | Mapping[str, EnvironmentFactory]) -> None:
        self.is_routed = isinstance(factory, Mapping)
        factories: dict[Any, EnvironmentFactory] = (
            dict(factory) if isinstance(factory, Mapping) else {None: factory}
        )
        if not factories:
            raise ConfigError("environment_factory is an empty dict; give it at least one name and factory")
        self.types = {name: _create_type(name, each) for name, each in factories.items()}

    def tools(self) -> list[Tool]:
        """Return the tools of the first instance of every type."""
        return [tool for each in self.types.values() for tool in each.tools(each.instances[0])]

    def tool_sets(self, common: Sequence[Tool]) -> list[ToolSet]:
        """Return, for each type, the tools of its rollouts: ``common`` ones and its own.

        Raises:
            ConfigError: two tools of a rollout have the same name.
        """
        return [ToolSet([*common, *each.tools(each.instances[0])]) for each in self.types.values()]

    def reward_funcs(self) -> list[Callable[..., Any]]:
        """Return one reward function per class with ``get_reward``; it returns None for other rollouts."""
        classes = {
            each.cls: each for each in self.types.values() if callable(getattr(each.cls, "get_reward", None))
        }
        return [_reward_func(cls, each.title) for cls, each in classes.items()]

    def acquire(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Environment, list[Tool]]]:
        """Return an instance and its tools for each row; every batch reuses the same instances.

        Raises:
            ConfigError: a row selects an unknown environment.
        """
        used: dict[str | None, int] = {}
        acquired = []
        for index, row in enumerate(rows):
            name = self._name(row, index)
            environment_type = self.types[name]
            instance = environment_type.instance(used.get(name, 0))
            used[name] = used.get(name, 0) + 1
            acquired.append((instance, environment_type.tools(instance)))
        return acquired

    def reset(
        self, instances: Sequence[Environment], rows: Sequence[Mapping[str, Any]], executor: ToolExecutor
    ) -> list[Content | None]:
        """Reset all instances concurrently and return their observations.

        Raises:
            AgentError: a ``reset`` failed; names the environment, the method and the row.
        """
        columns = [self._columns(row) for row in rows]
        calls = [partial(each.reset, **row) for each, row in zip(instances, columns, strict=True)]
        limit = max(time_limit_of(instance.reset) for instance in instances)
        observations = executor.run_all(calls, limit, "reset of the environments")
        for index, observation in enumerate(observations):
            title = self.types[self._name(rows[index], index)].title
            with boundary(AgentError, f"{title}, method 'reset'", sample=index, row=columns[index]):
                if isinstance(observation, TimeoutError | asyncio.TimeoutError):
                    raise TimeoutError(f"it took longer than {limit:g} seconds")
                if isinstance(observation, BaseException):
                    raise observation
                if not isinstance(observation, str | list | None):
                    raise TypeError(
                        f"it returned {type(observation).__name__}; allowed: None, str, a list of content "
                        "blocks"
                    )
        return observations

    def _name(self, row: Mapping[str, Any], index: int) -> str | None:
        name = row.get("environment") if self.is_routed else None
        if name not in self.types:
            raise ConfigError(
                f"row {index} has environment={name!r}; allowed: the names in environment_factory, "
                f"{', '.join(map(repr, self.types))} (column 'environment')"
            )
        return name

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if not (self.is_routed and key == "environment")}


def _create(factory: EnvironmentFactory, title: str) -> Environment:
    with boundary(AgentError, f"environment_factory of {title}"):
        return factory()


def _create_type(name: str | None, factory: EnvironmentFactory) -> _EnvironmentType:
    """Create the first instance and derive the tools from its class."""
    title = "the environment" if name is None else f"environment {name!r}"
    if not callable(factory):
        raise ConfigError(
            f"environment_factory of {title} is {factory!r} ({type(factory).__name__}); allowed: a class or "
            "function that returns an instance, or a dict of such"
        )
    instance = _create(factory, title)
    cls = type(instance)
    title = f"environment {cls.__name__!r}" if name is None else title
    if not callable(getattr(cls, "reset", None)):
        raise ConfigError(
            f"{title} ({cls.__name__}) has no method 'reset'; it is called before every rollout"
        )
    # Looked up on the class: getattr on the instance would evaluate its properties.
    methods = [name for name, _ in inspect.getmembers(cls, inspect.isfunction)]
    methods = [name for name in methods if not name.startswith("_") and name not in _NOT_TOOLS]
    tools = [make_tool(getattr(instance, method), instance) for method in methods]
    schemas = {method: tool.schema for method, tool in zip(methods, tools, strict=True)}
    return _EnvironmentType(factory, title, cls, [instance], schemas)


def _reward_func(cls: type, title: str) -> Callable[..., Any]:
    """Return a reward function that calls ``get_reward`` of the instances of one class."""

    def entering(index: int) -> Any:
        return boundary(RewardError, f"{title}, method 'get_reward'", sample=index)

    if is_async(cls.get_reward):  # type: ignore[attr-defined]

        async def get_reward(index: int, environment: Any) -> float | None:
            with entering(index):
                return await environment.get_reward()

        async def gather_rewards(environments: list[Any], **_: object) -> list[float | None]:
            calls = {i: get_reward(i, e) for i, e in enumerate(environments) if type(e) is cls}
            rewards = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
            return [rewards.get(i) for i in range(len(environments))]

        reward_func: Callable[..., Any] = gather_rewards
    else:

        def get_rewards(environments: list[Any], **_: object) -> list[float | None]:
            rewards: list[float | None] = []
            for index, environment in enumerate(environments):
                is_own = type(environment) is cls
                with entering(index):
                    rewards.append(environment.get_reward() if is_own else None)
            return rewards

        reward_func = get_rewards
    reward_func.__name__ = cls.__name__
    return reward_func


def add_observation(prompt: Prompt, observation: Content | None) -> Prompt:
    """Return a copy of the prompt with an observation appended to its last user message.

    A prompt without a user message gets one.
    """
    if observation is None:
        return prompt
    if not is_conversational(prompt):
        return str(prompt) + content_text(observation)
    index = next((i for i in reversed(range(len(prompt))) if prompt[i]["role"] == "user"), None)
    if index is None:
        return [*prompt, {"role": "user", "content": observation}]
    content = prompt[index]["content"]
    if isinstance(content, list) != isinstance(observation, list):
        content, observation = content_blocks({"content": content}), content_blocks({"content": observation})
    return [*prompt[:index], {**prompt[index], "content": content + observation}, *prompt[index + 1 :]]
