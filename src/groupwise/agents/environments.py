"""The user's environments: instances that are reused and reset, their tools, rewards and rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from groupwise.agents.tools import Content, Tool, make_tool, may_open_images
from groupwise.errors import AgentError, ConfigError, RewardError, boundary
from groupwise.records import copied
from groupwise.threads import CallExecutor, Invocation
from groupwise.tokenization.prompts import Prompt, is_conversational
from groupwise.tokenization.text import content_blocks, content_text, is_content_blocks

_NOT_TOOLS = ("reset", "get_reward")


class Environment(Protocol):
    """An environment: ``reset``, public methods as tools, and optionally ``get_reward() -> float | None``.

    ``get_reward`` may return a list with a number or None per turn; a parameter ``completion`` receives the
    messages, one of the assistant for each turn. ``reset`` is called with the columns of the row before each
    rollout, and returns an observation (None, text or content blocks). ``reset``, ``get_reward`` and the
    tools may be async.
    """

    @property
    def reset(self) -> Callable[..., Any]: ...


EnvironmentFactory = Callable[[], Environment]


class EnvironmentType:
    """Instances of one factory; the public methods of their class are tools.

    Args:
        name: key of the factory in ``environment_factory``; None: it is the only one.

    Attributes:
        title: name of the environment in messages.
        first: the first instance, and ``cls`` its class.
        idle: instances that belong to no batch.
        schemas: tool schemas by the name of the public method.
    """

    def __init__(self, name: str | None, factory: EnvironmentFactory) -> None:
        self.title = "the environment" if name is None else f"environment {name!r}"
        if not callable(factory):
            raise ConfigError(
                f"environment_factory of {self.title} is {factory!r} ({type(factory).__name__}); allowed: a "
                "class or function that returns an instance, or a dict of such"
            )
        self.factory = factory
        self.cls: Any = None  # not known yet
        self.first = self.create()
        self.cls, self.idle = type(self.first), [self.first]
        if name is None:
            self.title = f"environment {self.cls.__name__!r}"
        if not callable(getattr(self.cls, "reset", None)):
            raise ConfigError(
                f"{self.title} ({self.cls.__name__}) has no method 'reset'; it is called before every rollout"
            )
        # Looked up on the class: getattr on the instance would evaluate its properties.
        methods = [name for name, _ in inspect.getmembers(self.cls, inspect.isfunction)]
        self.schemas = {
            name: make_tool(getattr(self.first, name), self.first).schema
            for name in methods
            if not name.startswith("_") and name not in _NOT_TOOLS
        }

    @property
    def has_reward(self) -> bool:
        return callable(getattr(self.cls, "get_reward", None))

    def create(self) -> Any:
        """Call the factory.

        Raises:
            AgentError: the factory raised.
            ConfigError: it returned an instance of another class than at first.
        """
        with boundary(AgentError, f"environment_factory of {self.title}"):
            instance = self.factory()
        if self.cls not in (None, type(instance)):
            raise ConfigError(
                f"environment_factory of {self.title} returned a {type(instance).__name__}, at first a "
                f"{self.cls.__name__}; allowed: one class, defined outside of the factory; for several, "
                "pass a dict of factories by name, and select one in the column 'environment'"
            )
        return instance

    def tools(self, instance: object) -> list[Tool]:
        """Return the public methods of an instance as tools."""
        return [
            Tool(name, getattr(instance, name), schema, instance) for name, schema in self.schemas.items()
        ]


@dataclass(eq=False)
class Slot:
    """Place of one rollout in the pool.

    columns: columns of the row that ``reset`` is called with.
    instance: environment of the rollout until the slot is released; None: its next attempt creates one.
    """

    environment_type: EnvironmentType
    columns: dict[str, Any]
    instance: Any = None


class EnvironmentPool:
    """Environment instances of a run.

    Args:
        factory: callable that returns an instance, or a dict of them by name; the ``environment`` column of a
            row selects the name.
        executor: calls ``reset``, ``get_reward`` and the tools.

    Attributes:
        rewards: finished calls of ``get_reward``, by id of the instance, until its slot is released.

    Raises:
        ConfigError: ``factory`` does not return environments, or a public method cannot be a tool.
        AgentError: a factory raised.
    """

    def __init__(
        self,
        factory: EnvironmentFactory | Mapping[str, EnvironmentFactory],
        executor: CallExecutor | None = None,
    ) -> None:
        self.executor = executor or CallExecutor()
        self.is_routed = isinstance(factory, Mapping)
        factories: dict[Any, EnvironmentFactory] = (
            dict(factory) if isinstance(factory, Mapping) else {None: factory}
        )
        if not factories:
            raise ConfigError("environment_factory is an empty dict; give it at least one name and factory")
        self.types = {name: EnvironmentType(name, each) for name, each in factories.items()}
        self.rewards: dict[int, Future[Any]] = {}

    def reward_funcs(self) -> list[Callable[..., Any]]:
        """Return one reward function per class with ``get_reward``; it returns None for other rollouts."""
        classes = {each.cls: each for each in self.types.values() if each.has_reward}
        return [_reward_func(cls, each.title, self) for cls, each in classes.items()]

    def acquire(self, rows: Sequence[Mapping[str, Any]]) -> list[Slot]:
        """Return a slot for each row, with an idle instance if there is one.

        Raises:
            ConfigError: a row selects an unknown environment.
        """
        slots = []
        for index, row in enumerate(rows):
            name = row.get("environment") if self.is_routed else None
            if name not in self.types:
                raise ConfigError(
                    f"row {index} has environment={name!r}; allowed: the names in environment_factory, "
                    f"{', '.join(map(repr, self.types))} (column 'environment')"
                )
            kind = self.types[name]
            columns = {key: value for key, value in row.items() if not self.is_routed or key != "environment"}
            slots.append(Slot(kind, columns, kind.idle.pop(0) if kind.idle else None))
        return slots

    def release(self, slots: Sequence[Slot]) -> None:
        """Let later batches reset the instances of these slots, but not one with an unfinished call."""
        for slot in slots:
            if slot.instance is not None:
                self.rewards.pop(id(slot.instance), None)
                if self.executor.unfinished.pop(id(slot.instance), None) is None:
                    slot.environment_type.idle.append(slot.instance)
                slot.instance = None  # slots may be released twice


def check_observation(observation: Any, reset: Callable[..., Any]) -> None:
    """Raise TypeError if ``reset`` returned something that cannot be the content of a message."""
    if not isinstance(observation, str | list | None):
        raise TypeError(
            f"it returned {type(observation).__name__}; allowed: None, str, a list of content blocks"
        )
    if is_content_blocks(observation) and not may_open_images(observation, reset):
        raise TypeError(
            "it returned an image block with a path or a URL, which is not opened; return an image object, "
            "or decorate it with groupwise.agents.allow_image_paths if its observations can be trusted with "
            "the trainer's files"
        )


def reward_call(environment: Any, completion: Prompt) -> Invocation:
    """Return the call of ``get_reward``, with the messages of the rollout if it has a parameter for them."""
    function = environment.get_reward
    if "completion" in inspect.signature(function).parameters:
        function = functools.partial(function, completion=copied(completion))
    return Invocation(function, environment)


def _reward_func(cls: type, title: str, pool: EnvironmentPool) -> Callable[..., Any]:
    """Return a reward function: the results of ``get_reward`` of one class, called where it was not yet."""

    def get_rewards(environments: list[Any], completions: Sequence[Prompt], **_: object) -> list[Any]:
        own: dict[int, Any] = {i: each for i, each in enumerate(environments) if type(each) is cls}
        missing = {id(each): (each, completions[i]) for i, each in own.items()}
        missing = {key: each for key, each in missing.items() if key not in pool.rewards}
        called = pool.executor.run_all([reward_call(*each) for each in missing.values()])
        futures = pool.rewards | dict(zip(missing, called, strict=True))
        rewards: list[Any] = [None] * len(environments)
        for index, environment in own.items():
            with boundary(RewardError, f"{title}, method 'get_reward'", sample=index):
                rewards[index] = futures[id(environment)].result()
        return rewards

    get_rewards.__name__ = cls.__name__
    get_rewards.runs_in_caller_thread = True  # type: ignore[attr-defined]  # as the tools of the environment
    return get_rewards


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
