"""Iterative GRPO (DeepSeekMath, Algorithm 1): reference refresh, and training of the reward model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, gather_object, set_seed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from groupwise.commands.iterative.iterative_config import IterativeConfig
from groupwise.commands.iterative.reward_training import EXAMPLES, Example, train_reward_model, with_replay
from groupwise.compat.transformers import CHECKPOINT
from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.dataset_checks import is_streaming
from groupwise.distributed import is_sharded
from groupwise.errors import ConfigError, RewardError
from groupwise.files import read_json
from groupwise.hf import checkpointing
from groupwise.records import RolloutBatch
from groupwise.rewards.runtime.calling import call_rewards
from groupwise.rewards.runtime.models import RewardModel, reward_name
from groupwise.trainer import GRPOTrainer

logger = logging.getLogger(__name__)


class _StopAfterIteration(TrainerCallback):
    """Save and stop at the last optimizer step of an iteration."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == self.last_step:
            control.should_training_stop = control.should_save = True


class IterativeGRPO:
    """Outer loop over ``GRPOTrainer``, with one learning-rate schedule for the whole run.

    An iteration is a part of one run: the trainer stops at a checkpoint, the reward model is trained on
    completions of the current policy, and the trainer resumes exactly. The reward model after iteration k is
    in ``reward-model-k`` beside the checkpoints, with its examples; ``reward-model-0`` is the initial one.

    Args:
        model: as for ``GRPOTrainer``.
        reward_funcs: as for ``GRPOTrainer``.
        args: as for ``GRPOTrainer``.
        trainer_arguments: its other arguments.
        iterative: settings of the outer loop.
        label_func: called as a reward function; its values label completions for the reward model, the only
            sequence-classification model in ``reward_funcs``. None: the reward functions stay as they are.
        trainer_class: ``GRPOTrainer`` or a subclass.

    Raises:
        ConfigError: settings that exclude each other, or no reward model to train.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *,
        iterative: IterativeConfig,
        label_func: Callable[..., Any] | None = None,
        trainer_class: type[GRPOTrainer] = GRPOTrainer,
        **trainer_arguments: Any,
    ) -> None:
        if args is None:
            raise ConfigError("args is missing; iterations need a GRPOConfig with max_steps")
        if label_func is not None and not callable(label_func):
            raise ConfigError(f"label_func={label_func!r} is not callable; give a function")
        self.iterative, self.label_func = iterative, label_func
        args = iterative.with_reference_refresh(args)
        self.trainer = trainer_class(model, reward_funcs, args, **trainer_arguments)
        self.steps = args.max_steps // iterative.iterations
        self.history: list[Example] = []
        self.reward_metrics: list[dict[str, Any]] = []  # of each update of the reward model
        if label_func is not None:
            self.scorer = self._find_reward_model()
            self.scorer.model.float()  # small updates are lost in half precision

    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Run all iterations; ``resume_from_checkpoint`` (True or a directory) continues exactly."""
        trainer = self.trainer
        with trainer.run_directory.open(resume_from_checkpoint, saves=True) as checkpoint:
            iteration, steps_done = divmod(trainer.run_directory.step or 0, self.steps)
            if self.label_func is not None:
                self._restore_reward_model(iteration, steps_done, checkpoint)
            if iteration == self.iterative.iterations:
                trainer.train(resume_from_checkpoint=checkpoint)  # loads the policy
            for current in range(iteration + 1, self.iterative.iterations + 1):
                checkpoint = self._train_policy(current * self.steps, checkpoint)
                if trainer.state.global_step < current * self.steps:
                    return  # a callback or a signal stopped the run
                if self.label_func is not None:
                    self._update_reward_model(current)

    def _train_policy(self, last_step: int, checkpoint: str | None) -> str:
        """Train up to ``last_step``; return the checkpoint that was saved there."""
        stop = _StopAfterIteration(last_step)
        self.trainer.add_callback(stop)
        try:
            self.trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            self.trainer.remove_callback(stop)
        return str(Path(str(self.trainer.args.output_dir), f"{CHECKPOINT}-{last_step}"))

    # The reward model.

    def _find_reward_model(self) -> RewardModel:
        trainer, settings = self.trainer, self.iterative
        models = [function for function in trainer.reward_callables if isinstance(function, RewardModel)]
        if len(models) != 1:
            raise ConfigError(
                f"label_func trains a sequence-classification model, and reward_funcs has {len(models)}; "
                "give exactly one, or drop label_func"
            )
        if is_sharded(trainer.accelerator):
            raise ConfigError(
                "label_func does not work with FSDP and DeepSpeed, which shard the reward model"
            )
        dataset: Any = trainer.train_dataset
        world_size = trainer.args.world_size
        if dataset is None or is_streaming(dataset):
            raise ConfigError("label_func needs a train_dataset that is no stream: prompts are drawn from it")
        if settings.reward_prompts % world_size or settings.reward_prompts > len(dataset):
            raise ConfigError(
                f"reward_prompts={settings.reward_prompts} is not allowed with {world_size} processes and "
                f"{len(dataset)} rows in train_dataset; give a multiple of {world_size} up to {len(dataset)}"
            )
        return models[0]

    def _directory(self, iteration: int) -> Path:
        return Path(str(self.trainer.args.output_dir), f"reward-model-{iteration}")

    def _restore_reward_model(self, iteration: int, steps_done: int, checkpoint: str | None) -> None:
        """Load the reward model that belongs to a checkpoint, or save the initial one of a new run."""
        if checkpoint is None:
            self._move_aside_after(-1)
            self.history, self.reward_metrics = [], []
            self._save_reward_model(0)
            return
        # At the end of an iteration, the run may have stopped before its reward model was trained.
        is_pending = steps_done == 0 and not self._directory(iteration).is_dir()
        self._load_reward_model(iteration - 1 if is_pending else iteration)
        self._move_aside_after(iteration)
        if is_pending:
            self.trainer.load_checkpoint_weights(checkpoint)
            self._update_reward_model(iteration)

    def _load_reward_model(self, iteration: int) -> None:
        directory = self._directory(iteration)
        if not directory.is_dir():
            raise ConfigError(f"{str(directory)!r} is missing: the checkpoint cannot be resumed without it")
        if found := checkpointing.damage(directory):
            raise ConfigError(f"{str(directory)!r} is damaged: {found}; copy it again, or start a new run")
        checkpointing.load_converted(str(directory), self.scorer.model)
        state = read_json(directory / "examples.json", {"history": list, "metrics": list})
        self.history = [Example(*values) for values in state["history"]]
        self.reward_metrics = state["metrics"]

    def _save_reward_model(self, iteration: int) -> None:
        """Write model, tokenizer and history, and rename the directory when it is complete."""
        model = self.scorer.model
        with self.trainer.run_directory.staged(self._directory(iteration)) as staged:
            if self.trainer.args.should_save:
                model.save_pretrained(staged)
                self.scorer.tokenizer.save_pretrained(staged)
                state = {"history": self.history, "metrics": self.reward_metrics}
                (staged / "examples.json").write_text(json.dumps(state), encoding="utf-8")

    def _move_aside_after(self, iteration: int) -> None:
        """Move reward models of later iterations, and checkpoints, that this run does not continue."""
        directory, found = self._directory(0).parent, re.compile(r"reward-model-(\d+)")
        numbers = {path: found.fullmatch(path.name) for path in sorted(directory.glob("reward-model-*"))}
        self.trainer.run_directory.move_aside(
            [path for path, number in numbers.items() if number and int(number[1]) > iteration]
        )

    def _update_reward_model(self, iteration: int) -> None:
        """Train the reward model on completions of the current policy and a share of the history."""
        settings, accelerator = self.iterative, self.trainer.accelerator
        # The same draws in a resumed run; the trainer restores its own random state from its checkpoint.
        set_seed(self.trainer.args.seed + iteration, device_specific=True)
        self.trainer.rng.seed(self.trainer.args.seed + iteration + self.trainer.args.process_index)
        fresh = self._sample_examples(iteration)
        examples = with_replay(fresh, self.history, settings.replay_share, self.trainer.args.seed + iteration)
        metrics = train_reward_model(self.scorer, examples, settings)
        if accelerator.num_processes > 1:  # every rank trained on all examples; dropout may differ
            for tensor in self.scorer.model.state_dict().values():
                tensor.copy_(broadcast(tensor))
        self.history = [*self.history, *fresh]
        self.reward_metrics = [
            *self.reward_metrics,
            {"iteration": iteration, "num_fresh": len(fresh), **metrics},
        ]
        logger.info("reward model after iteration %d: %s", iteration, metrics)
        self._save_reward_model(iteration)

    def _sample_examples(self, iteration: int) -> list[Example]:
        """Sample and label completions of the current policy. Returns the examples of all ranks."""
        trainer, args = self.trainer, self.trainer.args
        trainer.refresh_settings(new_run=True)
        dataset: Any = trainer.train_dataset
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed + iteration))
        own = order[: self.iterative.reward_prompts].tolist()[args.process_index :: args.world_size]
        size = max(trainer.args.prompts_per_batch // args.world_size, 1)
        trainer.sync_sampler("train")
        examples = []
        for start in range(0, len(own), size):
            rows = [dataset[i] for i in own[start : start + size] for _ in range(trainer.num_generations)]
            request = replace(trainer.make_request(rows), on_partial_rollout=None)
            examples += self._examples_of(trainer.generate_rollouts(request))
        trainer.backend.release()
        trainer.backend.disconnect()
        return gather_object(examples)

    def _examples_of(self, rollouts: RolloutBatch) -> list[Example]:
        assert self.label_func is not None
        name = reward_name(self.label_func)
        calls = call_rewards(
            [self.label_func],
            [name],
            rollouts,
            loop=self.trainer.event_loop,
            trainer_state=self.trainer.state,
            log_extra=lambda *_: None,
            log_metric=lambda *_: None,
        )
        examples = []
        for start in range(0, len(rollouts), rollouts.num_generations):
            rows = range(start, start + rollouts.num_generations)
            labels = {i: self._checked_label(calls.rewards_FB[0][i], name) for i in rows}
            kept = [i for i in rows if labels[i] == labels[i] and not rollouts.completions[i].dropped]
            texts = [self.scorer.text(rollouts.prompts[i], rollouts.texts[i]) for i in kept]
            examples += EXAMPLES[self.iterative.reward_objective](texts, [labels[i] for i in kept])
        return examples

    def _checked_label(self, label: object, name: str) -> float:
        if not isinstance(label, float):
            raise RewardError(f"label_func {name!r} returned step rewards; return one number per completion")
        if self.iterative.reward_objective == "pointwise" and not (label != label or 0 <= label <= 1):
            raise RewardError(f"label_func {name!r} returned {label}; pointwise labels are from 0 to 1")
        return label
