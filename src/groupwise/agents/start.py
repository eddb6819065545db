"""Entry points of the trainer: they load tools, environments and turns only for a run that has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from groupwise.agents.loop import AgentLoop, Rollout, Steps, TurnRequest, empty_prompt
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import any_rank
from groupwise.errors import ConfigError
from groupwise.generation.base import GenerationBackend
from groupwise.policy.introspection import context_length
from groupwise.records import RolloutFunction
from groupwise.threads import CallExecutor
from groupwise.tokenization.text import ProcessingClass

if TYPE_CHECKING:
    from groupwise.agents.environment_driven import RolloutEnvironment
    from groupwise.agents.environments import EnvironmentFactory
    from groupwise.agents.multi_turn import MultiTurnRollouts


class SingleTurn(AgentLoop):
    """Rollouts without tools and environments: one turn of the policy, which the trainer samples itself."""

    is_multi_turn = has_later_turns = provides_tasks = False

    def __init__(self, renders_prompts: bool) -> None:
        self.executor, self.renders_prompts = CallExecutor(), renders_prompts

    def run_rollout(self, rollout: Rollout) -> Steps:
        yield TurnRequest(rollout.row["prompt"])


def make_agent_loop(
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | RolloutEnvironment | None,
    rollout_func: RolloutFunction | None,
    config: GRPOConfig,
) -> AgentLoop:
    """Validate tools and environments, before anything is loaded; without them, the loop is single-turn.

    Raises:
        ConfigError: an invalid tool or environment, or arguments that exclude each other.
        AgentError: an environment factory raised.
    """
    if not tools and environment_factory is None:
        return SingleTurn(renders_prompts=rollout_func is None)
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func replaces the loop that calls tools and environments; drop it, or drop tools and "
            "environment_factory and call them in it"
        )
    from groupwise.agents.environment_driven import EnvironmentLoop
    from groupwise.agents.environments import EnvironmentPool
    from groupwise.agents.tool_loop import ToolLoop
    from groupwise.agents.tools import make_tool

    if callable(getattr(environment_factory, "run_rollout", None)):
        if tools:
            raise ConfigError(
                f"environment_factory is a {type(environment_factory).__name__}, which runs rollouts and "
                "calls its tools itself; drop tools"
            )
        return EnvironmentLoop(cast("RolloutEnvironment", environment_factory))
    if callable(getattr(environment_factory, "run_rollouts", None)):
        raise ConfigError(
            f"environment_factory is a {type(environment_factory).__name__}, which runs the rollouts of a "
            "batch; pass it as rollout_func"
        )
    executor = CallExecutor(config.tool_timeout, limited_by="tool_timeout")
    factories = cast("EnvironmentFactory | Mapping[str, EnvironmentFactory] | None", environment_factory)
    common = [make_tool(tool) for tool in tools or []]
    return ToolLoop(
        common,
        None if factories is None else EnvironmentPool(factories, executor),
        executor,
        max_iterations=config.max_tool_calling_iterations,
        scores_rollouts=config.rollout_on_error == "retry",
    )


class EnvironmentRows(Dataset):
    """Rows for environments that provide the tasks: an empty prompt, and a seed shared by a group."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"prompt": empty_prompt(), "seed": index}


def add_environment_rows(
    train_dataset: Any, eval_dataset: Any, loop: AgentLoop, config: GRPOConfig
) -> tuple[Any, Any]:
    """Return the datasets for a run with environments: missing prompts are empty, missing rows are generated.

    Without environments the datasets are returned as they are.

    Args:
        train_dataset: training data; None if the environment provides the tasks.
        eval_dataset: evaluation data. Both may be a dict of datasets.

    Returns:
        Training and evaluation data.

    Raises:
        ConfigError: there is no dataset, and neither the length of training nor the environment of a row can
            be derived without it.
    """
    if not loop.provides_tasks:
        return train_dataset, eval_dataset
    eval_dataset = _with_prompts(eval_dataset)
    if train_dataset is not None:
        return _with_prompts(train_dataset), eval_dataset
    if loop.is_routed:
        raise ConfigError(
            "train_dataset is missing: with several environments its column 'environment' selects the "
            "environment of a row; pass a dataset with it, or a single environment_factory"
        )
    if config.max_steps <= 0:
        raise ConfigError(
            "train_dataset is missing, so the environment provides the tasks, but "
            f"max_steps={config.max_steps} does not limit training; allowed: max_steps > 0; nearest valid: 1"
        )
    batches_per_step = -(-config.gradient_accumulation_steps // config.steps_per_generation)  # type: ignore[operator]
    return EnvironmentRows(config.prompts_per_batch * batches_per_step * config.max_steps), eval_dataset


def _with_prompts(dataset: Any) -> Any:
    if type(dataset) is dict:
        return {name: _with_prompts(rows) for name, rows in dataset.items()}
    columns = getattr(dataset, "column_names", None)
    if not columns or "prompt" in columns:
        return dataset
    return dataset.map(lambda row: {"prompt": empty_prompt(), **row})


def check_template(loop: AgentLoop, processing_class: ProcessingClass, config: GRPOConfig) -> None:
    """Raise ConfigError for a chat template that cannot render the tools and later messages of a rollout."""
    if loop.has_later_turns:
        from groupwise.agents.multi_turn import make_renderer

        make_renderer(loop, processing_class, config)


def make_agents(
    loop: AgentLoop,
    config: GRPOConfig,
    processing_class: ProcessingClass,
    backend: GenerationBackend,
    model: PreTrainedModel,
    accelerator: Accelerator,
) -> MultiTurnRollouts | None:
    """Return the multi-turn rollouts of a run, or None if it has no tools and environments."""
    if not loop.is_multi_turn:
        return None
    from groupwise.agents.multi_turn import MultiTurnRollouts

    # Ranks may call the backend differently often if each has all weights, and no engine is shared.
    is_independent = accelerator.num_processes == 1 or not backend.requires_all_ranks
    context = context_length(model, config)
    return MultiTurnRollouts(
        loop,
        processing_class,
        config,
        backend.end_tokens,
        bool if is_independent else partial(any_rank, accelerator),
        None if context is None else context.tokens,
    )
