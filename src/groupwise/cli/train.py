"""``groupwise train``: train with the settings of a YAML file and flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from groupwise.cli.run_file import RunArguments, as_config_error, read_run
from groupwise.cli.sources import (
    check_model,
    import_object,
    iterative_arguments,
    load_datasets,
    lora_config,
    resolve_rewards,
)
from groupwise.config.grpo_config import GRPOConfig
from groupwise.recipes.iterative import IterativeGRPO
from groupwise.trainer import GRPOTrainer


def run(arguments: Sequence[str]) -> int:
    """Train, then save the model and its model card."""
    settings, config = read_run(arguments, "train")
    given = config.resume_from_checkpoint
    resume = True if str(given).lower() == "true" else given
    if settings.iterative is None:
        trainer = make_trainer(settings, config)
        trainer.train(resume_from_checkpoint=resume)
    else:
        runner = _build(settings, config, partial(IterativeGRPO, **iterative_arguments(settings)))
        trainer = runner.trainer
        runner.train(resume_from_checkpoint=resume)
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=settings.dataset)  # also saves the model
    else:
        trainer.save_model()
        trainer.create_model_card(dataset_name=settings.dataset)
    return 0


def make_trainer(settings: RunArguments, config: GRPOConfig) -> GRPOTrainer:
    """Build the trainer of a run; everything that is cheap to check is checked before the model is loaded."""
    trainer: GRPOTrainer = _build(settings, config, GRPOTrainer)
    return trainer


def _build(settings: RunArguments, config: GRPOConfig, build: Callable[..., Any]) -> Any:
    rewards = resolve_rewards(settings)
    tools = [import_object(path) for path in settings.tools] if settings.tools else None
    rollout_func = import_object(settings.rollout_func) if settings.rollout_func else None
    environment = import_object(settings.environment) if settings.environment else None
    adapter = lora_config(settings)
    check_model(settings, config)
    train_dataset, eval_dataset = load_datasets(settings)
    with as_config_error("setting up"):
        return build(
            settings.model,
            rewards,
            config,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            peft_config=adapter,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment,
        )
