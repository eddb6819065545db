"""Tools and environments, checked before the model loads and put together when there is a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import Dataset

from groupwise.agents import Agents, Driver, EnvironmentDrivenRollouts, Environments, Renderer, Tool, Toolbox
from groupwise.agents.environments import EMPTY_PROMPT
from groupwise.agents.loop import AgentSettings
from groupwise.agents.parsing import TurnParser
from groupwise.agents.tools import make_tool
from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_checks import context_length
from groupwise.errors import ConfigError
from groupwise.generation.base import GenerationBackend
from groupwise.tokenization.images import is_processor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentSetup:
    """What rollouts of several turns need; empty where there are none.

    tools: those given, ready to be called.
    environments: None without.
    driver: an environment that leads the conversation itself, in place of both.
    """

    tools: list[Tool] = field(default_factory=list)
    environments: Environments | None = None
    driver: Driver | None = None

    @property
    def wanted(self) -> bool:
        return bool(self.tools) or self.environments is not None or self.driver is not None

    @property
    def all_tools(self) -> list[Tool]:
        return [*self.tools, *(self.environments.tools() if self.environments is not None else [])]

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """Rewards that environments give themselves."""
        source = self.driver if self.driver is not None else self.environments
        return [] if source is None else source.rewards()


def check_agents(tools: Any, environment_factory: Any, rollout_func: Any) -> AgentSetup:
    """Look at tools and environments before anything is loaded.

    Raises:
        ConfigError: something that is no tool or environment, or that does not go together.
        AgentError: an environment cannot be made.
    """
    if not tools and environment_factory is None:
        return AgentSetup()
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func replaces the loop that calls tools and environments; drop it, or drop tools and "
            "environment_factory and call them in it"
        )
    if callable(getattr(environment_factory, "drive", None)):
        if tools:
            raise ConfigError(
                f"environment_factory is a {type(environment_factory).__name__}, which calls its tools "
                "itself; drop tools"
            )
        return AgentSetup(driver=environment_factory)
    common = [make_tool(tool) for tool in tools or []]
    environments = None if environment_factory is None else Environments(environment_factory)
    Toolbox(common)
    if environments is not None:
        environments.toolboxes(common)
    return AgentSetup(common, environments)


def check_chat_template(setup: AgentSetup, processing_class: Any, config: GRPOConfig) -> None:
    """Refuse a chat template that cannot be used for several turns, before the model loads.

    Raises:
        ConfigError: with the reason.
    """
    make_renderer(setup, processing_class, config)


def template_settings(config: GRPOConfig) -> dict[str, Any]:
    """A copy of ``chat_template_kwargs``, which is a dictionary once the configuration is built."""
    return dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]


def make_renderer(
    setup: AgentSetup, processing_class: Any, config: GRPOConfig, end_tokens: frozenset[int] = frozenset()
) -> Renderer | None:
    """What writes prompts with tools and the turns after them; None where nothing can be called."""
    if not setup.all_tools and setup.driver is None:
        return None
    settings = template_settings(config)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(processing_class, "chat_template", None) and tokenizer is not processing_class:
        settings.setdefault("chat_template", processing_class.chat_template)
    reads_images = is_processor(processing_class) and setup.driver is None
    processor = processing_class if reads_images else None
    shows_tools = bool(setup.all_tools) or getattr(setup.driver, "uses_tools", False)
    renderer = Renderer(tokenizer, end_tokens, settings, shows_tools=shows_tools, processor=processor)
    TurnParser(tokenizer, renderer.chat_template, needed=shows_tools)
    return renderer


def make_agents(
    setup: AgentSetup,
    config: GRPOConfig,
    processing_class: Any,
    backend: GenerationBackend,
    model: Any,
    accelerator: Accelerator,
) -> Agents | EnvironmentDrivenRollouts | None:
    """The loop over turns; None where completions are single turns."""
    if not setup.wanted:
        return None

    def any_rank(here: bool) -> bool:
        return accelerator.reduce(torch.tensor(int(here), device=accelerator.device), "sum").item() > 0

    if config.rollout_staleness:
        logger.warning(
            "rollout_staleness=%d has no effect with tools and environments: their rollouts begin when they "
            "are needed",
            config.rollout_staleness,
        )
    # Alone, or with a copy of the weights of its own, a process need not keep up with the others.
    alone = accelerator.num_processes == 1 or not backend.requires_all_ranks
    context = context_length(model, config)
    common: Any = (
        getattr(processing_class, "tokenizer", processing_class),
        AgentSettings(
            config.max_completion_length,
            config.max_tool_calling_iterations,
            config.max_prompt_length,
            template_settings(config),
            None if context is None else context.tokens,
        ),
        make_renderer(setup, processing_class, config, backend.end_tokens),
        bool if alone else any_rank,
    )
    if setup.driver is not None:
        return EnvironmentDrivenRollouts(setup.driver, *common)
    processor = processing_class if is_processor(processing_class) else None
    return Agents(setup.tools, setup.environments, *common, processor=processor)  # type: ignore[misc]


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


def own_data(train_dataset: Any, eval_dataset: Any, setup: AgentSetup, config: GRPOConfig) -> tuple[Any, Any]:
    """The data; where an environment brings the tasks, rows need no prompt and training data may be missing.

    Raises:
        ConfigError: no dataset where it is not known how long to train, or which environment a row is for.
    """
    if setup.driver is None and setup.environments is None:
        return train_dataset, eval_dataset
    if isinstance(eval_dataset, dict):
        eval_dataset = {name: _with_prompts(dataset) for name, dataset in eval_dataset.items()}
    else:
        eval_dataset = _with_prompts(eval_dataset)
    if train_dataset is not None:
        return _with_prompts(train_dataset), eval_dataset
    if setup.environments is not None and setup.environments.routed:
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
    prompts_per_batch = config.generation_batch_size // config.num_generations
    return _EnvironmentRows(prompts_per_batch * per_step * config.max_steps), eval_dataset


def _with_prompts(dataset: Any) -> Any:
    columns = getattr(dataset, "column_names", None)
    if not columns or "prompt" in columns:
        return dataset
    return dataset.map(lambda row: {"prompt": [dict(message) for message in EMPTY_PROMPT], **row})
