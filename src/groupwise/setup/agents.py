"""Tools and environments, checked before the model loads and put together when there is a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import AutoProcessor

from groupwise.agents import Agents, Environments, Renderer, Tool, Toolbox
from groupwise.agents.environments import EMPTY_PROMPT
from groupwise.agents.loop import AgentSettings
from groupwise.agents.parsing import TurnParser
from groupwise.agents.tools import make_tool
from groupwise.backends.decoding import runs_in_step
from groupwise.backends.transformers_generate import TransformersBackend
from groupwise.config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.protocols import GenerationBackend
from groupwise.vision import is_processor


@dataclass(frozen=True)
class AgentSetup:
    """What rollouts of several turns need; empty where there are none.

    tools: those given, ready to be called.
    environments: None without.
    processing_class: as given, or loaded early to check its chat template; None leaves that for later.
    """

    tools: list[Tool] = field(default_factory=list)
    environments: Environments | None = None
    processing_class: Any = None

    @property
    def wanted(self) -> bool:
        return bool(self.tools) or self.environments is not None

    @property
    def all_tools(self) -> list[Tool]:
        return [*self.tools, *(self.environments.tools() if self.environments is not None else [])]

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """Rewards that environments give themselves."""
        return self.environments.rewards() if self.environments is not None else []


def check_agents(
    tools: Any,
    environment_factory: Any,
    rollout_func: Any,
    model: Any,
    processing_class: Any,
    config: GRPOConfig,
) -> AgentSetup:
    """Look at tools and environments, and at the chat template that they need.

    Raises:
        ConfigError: no tool or environment, or a chat template that cannot be used for them.
        AgentError: an environment cannot be made.
    """
    if not tools and environment_factory is None:
        return AgentSetup(processing_class=processing_class)
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func replaces the loop that calls tools and environments; drop it, or drop tools and "
            "environment_factory and call them in it"
        )
    common = [make_tool(tool) for tool in tools or []]
    environments = None if environment_factory is None else Environments(environment_factory)
    Toolbox(common)
    if environments is not None:
        environments.toolboxes(common)
    if processing_class is None and isinstance(model, str):
        processing_class = AutoProcessor.from_pretrained(
            model, trust_remote_code=config.trust_remote_code, padding_side="left"
        )
    setup = AgentSetup(common, environments, processing_class)
    if processing_class is not None:
        make_renderer(setup, processing_class, config)
    return setup


def template_settings(config: GRPOConfig) -> dict[str, Any]:
    """A copy of ``chat_template_kwargs``, which is a dictionary once the configuration is built."""
    return dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]


def make_renderer(
    setup: AgentSetup, processing_class: Any, config: GRPOConfig, end_tokens: frozenset[int] = frozenset()
) -> Renderer | None:
    """What writes prompts with tools and the turns after them; None where nothing can be called."""
    if not setup.all_tools:
        return None
    settings = template_settings(config)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(processing_class, "chat_template", None) and tokenizer is not processing_class:
        settings.setdefault("chat_template", processing_class.chat_template)
    processor = processing_class if is_processor(processing_class) else None
    renderer = Renderer(tokenizer, end_tokens, settings, processor=processor)
    TurnParser(tokenizer, renderer.chat_template)
    return renderer


def make_agents(
    setup: AgentSetup,
    config: GRPOConfig,
    processing_class: Any,
    backend: GenerationBackend,
    model: Any,
    accelerator: Accelerator,
) -> Agents | None:
    """The loop over turns; None where completions are single turns."""
    if not setup.wanted:
        return None

    def any_rank(here: bool) -> bool:
        return accelerator.reduce(torch.tensor(int(here), device=accelerator.device), "sum").item() > 0

    # Alone, or with a copy of the weights of its own, a process need not keep up with the others.
    alone = accelerator.num_processes == 1 or (
        isinstance(backend, TransformersBackend) and not runs_in_step(model)
    )
    return Agents(
        setup.tools,
        setup.environments,
        getattr(processing_class, "tokenizer", processing_class),
        AgentSettings(
            config.max_completion_length,
            config.max_tool_calling_iterations,
            config.max_prompt_length,
            template_settings(config),
        ),
        make_renderer(setup, processing_class, config, backend.end_tokens),
        bool if alone else any_rank,
        processing_class if is_processor(processing_class) else None,
    )


class _EnvironmentRows(Dataset):
    """Rows for environments that bring their own data: an empty prompt, and a seed that a group shares."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"prompt": [dict(message) for message in EMPTY_PROMPT], "seed": index}


class _WithPrompt(Dataset):
    """Rows of a dataset without prompts, each with an empty one."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": [dict(message) for message in EMPTY_PROMPT], **self.rows[index]}


def own_data(dataset: Any, setup: AgentSetup, config: GRPOConfig) -> Any:
    """The training data, or rows that stand for them where an environment brings the tasks.

    Raises:
        ConfigError: no dataset where it is not known how long to train, or which environment a row is for.
    """
    if setup.environments is None:
        return dataset
    if dataset is not None:
        columns = getattr(dataset, "column_names", None)
        return (
            _WithPrompt(dataset)
            if columns and "prompt" not in columns and hasattr(dataset, "__len__")
            else dataset
        )
    if setup.environments.routed:
        raise ConfigError(
            "train_dataset is missing: with several environments its column 'environment' says which one a "
            "row is for; pass a dataset with it, or a single environment_factory"
        )
    if config.max_steps <= 0:
        raise ConfigError(
            "train_dataset is missing, so the environment brings the tasks, but "
            f"max_steps={config.max_steps} does not say how long to train; allowed: max_steps > 0; "
            "nearest valid: 1"
        )
    per_step = -(-config.gradient_accumulation_steps // config.steps_per_generation)
    return _EnvironmentRows(
        config.generation_batch_size // config.num_generations * per_step * config.max_steps
    )
