"""``groupwise train``: train with the settings of a YAML file and flags."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from groupwise.commands.cli.run_file import RunArguments, as_config_error, read_run
from groupwise.commands.cli.sources import iterative_arguments, load_datasets, trainer_arguments
from groupwise.commands.iterative.iterative import IterativeGRPO
from groupwise.config.grpo_config import GRPOConfig
from groupwise.policy.introspection import load_config
from groupwise.trainer import GRPOTrainer


def run(arguments: Sequence[str]) -> int:
    """Train, save the model and its card; print where the model is, and the command of its report."""
    settings, config = read_run(arguments, "train")
    given = config.resume_from_checkpoint
    resume = True if str(given).lower() == "true" else given
    trainer = make_trainer(settings, config)
    trainer.train(resume_from_checkpoint=resume)
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=settings.dataset)  # also saves the model
    elif not trainer.run_directory.has_result():
        trainer.save_model()
        trainer.create_model_card(dataset_name=settings.dataset)
    if trainer.is_world_process_zero():
        directory = os.path.relpath(str(config.output_dir))
        print(f"model:  {directory}\nreport: {shlex.join(['groupwise', 'report', directory])}")
    return 0


def make_trainer(settings: RunArguments, config: GRPOConfig, first: Sequence[int] = ()) -> GRPOTrainer:
    """Build the trainer of a run; everything that is cheap to check is checked before the model is loaded.

    Args:
        first: numbers of the rows that the training set begins with.
    """
    arguments = {name: load() for name, load in trainer_arguments(settings, config).items()}
    iterative = None if settings.iterative is None else iterative_arguments(settings)
    load_config(settings.model, config)  # refuses a wrong id before the datasets are loaded
    train_dataset, eval_dataset = load_datasets(settings)
    if first and train_dataset is not None and not isinstance(train_dataset, dict):  # a mixture has no order
        train_dataset = train_dataset.select(list(dict.fromkeys([*first, *range(len(train_dataset))])))
    with as_config_error("setting up"):
        arguments |= {"args": config, "train_dataset": train_dataset, "eval_dataset": eval_dataset}
        if iterative is not None:  # its callback trains the reward model
            return IterativeGRPO(settings.model, **arguments, **iterative).trainer
        return GRPOTrainer(settings.model, **arguments)
