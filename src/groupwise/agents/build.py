"""Build tools, environments and multi-turn rollouts from the trainer's arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from accelerate import Accelerator
from transformers import PreTrainedModel

from groupwise.agents.environment_driven import EnvironmentDrivenRollouts, RolloutEnvironment
from groupwise.agents.environments import EnvironmentFactory, EnvironmentPool
from groupwise.agents.executor import ToolExecutor
from groupwise.agents.multi_turn import MultiTurnRollouts, MultiTurnSettings
from groupwise.agents.tools import Tool, ToolSet, make_tool
from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_checks import context_length
from groupwise.distributed import any_rank
from groupwise.errors import ConfigError
from groupwise.generation.base import GenerationBackend, text_tokenizer
from groupwise.records import RolloutFunction
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.prompts import ProcessingClass, Prompt, with_text_content
from groupwise.tokenization.rendering import Renderer
from groupwise.tokenization.tool_calls import TurnParser

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentSetup:
    """Tools and environments of a run; empty for single-turn rollouts.

    Attributes:
        tools: tools of every rollout.
        pool: environments; None without.
        rollout_environment: environment that runs rollouts itself, in place of ``tools`` and ``pool``.
    """

    tools: list[Tool] = field(default_factory=list)
    pool: EnvironmentPool | None = None
    rollout_environment: RolloutEnvironment | None = None

    @property
    def all_tools(self) -> list[Tool]:
        """Common tools, and those of the first instance of every environment type."""
        return [*self.tools, *(self.pool.tools() if self.pool is not None else [])]

    @property
    def is_multi_turn(self) -> bool:
        """True if the run has tools or environments."""
        return bool(self.tools) or self.pool is not None or self.rollout_environment is not None

    @property
    def as_rendered(self) -> Callable[[Prompt], Prompt] | None:
        """Return a prompt as the chat template gets it; None if the environment has its own prompts."""
        if self.rollout_environment is not None:
            return None
        return with_text_content if self.is_multi_turn else lambda prompt: prompt

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        """Reward functions of the environments."""
        source = self.rollout_environment or self.pool
        return [] if source is None else source.reward_funcs()


def check_agents(
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | RolloutEnvironment | None,
    rollout_func: RolloutFunction | None,
    tool_timeout: float | None = None,
) -> AgentSetup:
    """Validate tools and environments, before anything is loaded.

    Args:
        tool_timeout: seconds per call of a tool, ``reset`` or ``get_reward``; None: no limit.

    Raises:
        ConfigError: an invalid tool or environment, or arguments that exclude each other.
        AgentError: an environment factory raised.
    """
    if not tools and environment_factory is None:
        return AgentSetup()
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func replaces the loop that calls tools and environments; drop it, or drop tools and "
            "environment_factory and call them in it"
        )
    if callable(getattr(environment_factory, "run_rollout", None)):
        if tools:
            raise ConfigError(
                f"environment_factory is a {type(environment_factory).__name__}, which runs rollouts and "
                "calls its tools itself; drop tools"
            )
        return AgentSetup(rollout_environment=cast(RolloutEnvironment, environment_factory))
    common = [make_tool(tool) for tool in tools or []]
    if environment_factory is None:
        ToolSet(common)
        return AgentSetup(common)
    factories = cast("EnvironmentFactory | Mapping[str, EnvironmentFactory]", environment_factory)
    pool = EnvironmentPool(factories, ToolExecutor(tool_timeout))
    pool.tool_sets(common)
    return AgentSetup(common, pool)


def make_renderer(
    setup: AgentSetup,
    processing_class: ProcessingClass,
    config: GRPOConfig,
    end_tokens: frozenset[int] = frozenset(),
) -> Renderer | None:
    """Return the renderer of tool schemas and later messages, or None if a rollout has one turn.

    Raises:
        ConfigError: the chat template cannot be used, with the reason.
    """
    if not setup.all_tools and setup.rollout_environment is None:
        return None
    template_kwargs = _template_kwargs(config)
    tokenizer = text_tokenizer(processing_class)
    chat_template = getattr(processing_class, "chat_template", None)
    if chat_template and tokenizer is not processing_class:
        template_kwargs.setdefault("chat_template", chat_template)
    no_images = setup.rollout_environment is not None
    processor = processing_class if is_processor(processing_class) and not no_images else None
    with_tools = bool(setup.all_tools) or getattr(setup.rollout_environment, "uses_tools", False)
    renderer = Renderer(tokenizer, end_tokens, template_kwargs, with_tools=with_tools, processor=processor)
    TurnParser(tokenizer, renderer.chat_template, with_tools=with_tools)
    return renderer


def make_agents(
    setup: AgentSetup,
    config: GRPOConfig,
    processing_class: ProcessingClass,
    backend: GenerationBackend,
    model: PreTrainedModel,
    accelerator: Accelerator,
) -> MultiTurnRollouts | EnvironmentDrivenRollouts | None:
    """Return the multi-turn rollouts of a run, or None if it has no tools and environments."""
    if not setup.is_multi_turn:
        return None

    if config.rollout_staleness:
        logger.warning(
            "rollout_staleness=%d has no effect with tools and environments: their rollouts are not "
            "generated ahead",
            config.rollout_staleness,
        )
    # Ranks may call the backend differently often if each has all weights, and no engine is shared.
    is_independent = accelerator.num_processes == 1 or not backend.requires_all_ranks
    context = context_length(model, config)
    tokenizer = text_tokenizer(processing_class)
    settings = MultiTurnSettings(
        config.max_completion_length,
        config.max_tool_calling_iterations,
        config.max_prompt_length,
        _template_kwargs(config),
        None if context is None else context.tokens,
        config.tool_timeout,
        config.rollout_retries if config.rollout_on_error == "retry" else None,
    )
    renderer = make_renderer(setup, processing_class, config, backend.end_tokens)
    sync = bool if is_independent else partial(any_rank, accelerator)
    if setup.rollout_environment is not None:
        assert renderer is not None
        return EnvironmentDrivenRollouts(setup.rollout_environment, tokenizer, settings, renderer, sync)
    processor = processing_class if is_processor(processing_class) else None
    return MultiTurnRollouts(setup.tools, setup.pool, tokenizer, settings, renderer, sync, processor)


def _template_kwargs(config: GRPOConfig) -> dict[str, Any]:
    """Return a copy of ``chat_template_kwargs``, which the built configuration holds as a dict."""
    return dict(cast("dict[str, Any] | None", config.chat_template_kwargs) or {})
