"""``groupwise train``: train with the settings of a YAML file and flags."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.cli.run_file import RunArguments, as_config_error, read_run
from groupwise.cli.sources import check_model, import_object, load_datasets, lora_config, resolve_rewards
from groupwise.config.grpo_config import GRPOConfig
from groupwise.trainer import GRPOTrainer


def run(arguments: Sequence[str]) -> int:
    """Train, then save the model and its model card."""
    settings, config = read_run(arguments, "train")
    trainer = make_trainer(settings, config)
    resume = config.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=settings.dataset)  # also saves the model
    else:
        trainer.save_model()
        trainer.create_model_card(dataset_name=settings.dataset)
    return 0


def make_trainer(settings: RunArguments, config: GRPOConfig) -> GRPOTrainer:
    """Build the trainer of a run; everything that is cheap to check is checked before the model is loaded."""
    rewards = resolve_rewards(settings)
    tools = [import_object(path) for path in settings.tools] if settings.tools else None
    rollout_func = import_object(settings.rollout_func) if settings.rollout_func else None
    environment = import_object(settings.environment) if settings.environment else None
    adapter = lora_config(settings)
    check_model(settings, config)
    train_dataset, eval_dataset = load_datasets(settings)
    with as_config_error("setting up"):
        return GRPOTrainer(
            settings.model,
            rewards,
            config,
            train_dataset,
            eval_dataset,
            peft_config=adapter,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment,
        )
