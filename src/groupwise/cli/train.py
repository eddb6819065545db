"""``groupwise train``: train with the settings of a YAML file and flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, cast

from groupwise.cli.run_file import RunArguments, as_config_error, read_run
from groupwise.cli.sources import (
    check_model,
    import_object,
    load_datasets,
    lora_config,
    resolve_reward,
    resolve_rewards,
)
from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError, boundary, nearest_name
from groupwise.recipes.iterative import IterativeGRPO
from groupwise.recipes.iterative_config import IterativeConfig
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
        runner = _build(settings, config, partial(IterativeGRPO, **iterative_settings(settings)))
        trainer = runner.trainer
        runner.train(resume_from_checkpoint=resume)
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=settings.dataset)  # also saves the model
    else:
        trainer.save_model()
        trainer.create_model_card(dataset_name=settings.dataset)
    return 0


def iterative_settings(settings: RunArguments) -> dict[str, Any]:
    """Return the arguments of ``IterativeGRPO`` that ``GRPOTrainer`` does not have.

    Raises:
        ConfigError: unknown settings, or a label function that cannot be imported.
    """
    given = dict(cast("dict[str, Any]", settings.iterative))
    label_func = given.pop("label_func", None)
    known = [field.name for field in fields(IterativeConfig)]
    for name in given:
        if name not in known:
            nearest = nearest_name(name, [*known, "label_func"])
            raise ConfigError(f"iterative has the unknown key {name!r}; nearest: {nearest!r}")
    with boundary(ConfigError, "iterative", arguments=given):
        iterative = IterativeConfig(**given)
    return {
        "iterative": iterative,
        "label_func": None if label_func is None else resolve_reward(label_func),
    }


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
