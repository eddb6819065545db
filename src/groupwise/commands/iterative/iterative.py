"""Iterative GRPO (DeepSeekMath, Algorithm 1): reference refresh, and training of the reward model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, set_seed
from transformers import TrainerControl, TrainerState, TrainingArguments

from groupwise.commands.iterative.iterative_config import IterativeConfig
from groupwise.commands.iterative.reward_training import EXAMPLES, Example, train_reward_model, with_replay
from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.dataset_checks import is_streaming
from groupwise.distributed import gather_or_raise, is_sharded
from groupwise.errors import ConfigError, RewardError
from groupwise.files import read_json
from groupwise.hf.checkpointing import load_converted
from groupwise.records import RolloutBatch
from groupwise.reporting.callback import GRPOCallback
from groupwise.rewards.runtime.calling import call_rewards
from groupwise.rewards.runtime.models import RewardModel, reward_name
from groupwise.trainer import GRPOTrainer

logger = logging.getLogger(__name__)

_REWARD_MODEL = "reward-model"  # directory in a checkpoint


class IterativeGRPO(GRPOCallback):
    """A ``GRPOTrainer``, and the callback that trains its reward model at the end of every iteration.

    The reward model is trained on completions of the current policy, before the checkpoint of the step is
    written, which contains it.

    Args:
        model: as for ``GRPOTrainer``.
        reward_funcs: as for ``GRPOTrainer``.
        args: as for ``GRPOTrainer``.
        trainer_arguments: its other arguments.
        iterative: settings of the iterations.
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
        if label_func is None and args.beta == 0:
            raise ConfigError("iterations have no effect with beta=0 and without label_func; set one of them")
        self.iterative, self.label_func = iterative, label_func
        args = iterative.with_reference_refresh(args)
        self.trainer = trainer_class(model, reward_funcs, args, **trainer_arguments)
        self.steps = args.max_steps // iterative.iterations
        self.history: list[Example] = []
        self.reward_metrics: list[dict[str, Any]] = []  # of each update of the reward model
        if label_func is not None:
            self.scorer = self._find_reward_model()
            self.scorer.model.float()  # small updates are lost in half precision
        self.trainer.add_callback(self)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Run all iterations; ``resume_from_checkpoint`` (True or a directory) continues exactly."""
        self.trainer.train(resume_from_checkpoint=resume_from_checkpoint)

    # Events of the trainer.

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        iteration, steps_done = divmod(state.global_step, self.steps)
        if steps_done == 0:
            if self.label_func is not None:
                self._update_reward_model(iteration)
            control.should_save = True  # after the update

    def on_checkpoint(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, directory: Path
    ) -> None:
        if self.label_func is not None and args.should_save:
            saved = directory / _REWARD_MODEL
            self.scorer.model.save_pretrained(saved)
            self.scorer.tokenizer.save_pretrained(saved)
            examples = {"history": self.history, "metrics": self.reward_metrics}
            (saved / "examples.json").write_text(json.dumps(examples), encoding="utf-8")

    def on_run_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, directory: Path | None
    ) -> None:
        self.history, self.reward_metrics = [], []
        if self.label_func is None or directory is None:
            return
        saved = directory / _REWARD_MODEL
        if not saved.is_dir():
            raise ConfigError(
                f"checkpoint {str(directory)!r} has no {_REWARD_MODEL}: it was written without label_func or "
                "by version 0.1; resume as it was written, or start a new run with it as the model"
            )
        load_converted(str(saved), self.scorer.model)
        examples = read_json(saved / "examples.json", {"history": list, "metrics": list})
        self.history = [Example(*values) for values in examples["history"]]
        self.reward_metrics = examples["metrics"]
        objective = self.iterative.reward_objective
        if any((example.other is None) == (objective == "pairwise") for example in self.history):
            raise ConfigError(
                f"checkpoint {str(directory)!r} has examples of another reward_objective than {objective!r}, "
                "which cannot be replayed; resume with that one"
            )

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

    def _update_reward_model(self, iteration: int) -> None:
        """Train the reward model on completions of the current policy and a share of the history."""
        trainer, settings = self.trainer, self.iterative
        trainer.sync_sampler("train")  # before the mark, which has the digest of these weights
        state, seed = trainer.step_state.marks, trainer.args.seed + iteration
        set_seed(seed, device_specific=True)
        trainer.rng.seed(seed + trainer.args.process_index)
        fresh = self._sample_examples(seed)
        examples = with_replay(fresh, self.history, settings.replay_share, seed)
        metrics = train_reward_model(self.scorer, examples, settings)
        if trainer.args.world_size > 1:  # every rank trained on all examples; dropout may differ
            for tensor in self.scorer.model.state_dict().values():
                tensor.copy_(broadcast(tensor))
        self.history = [*self.history, *fresh]
        update = {"iteration": iteration, "num_fresh": len(fresh), **metrics}
        self.reward_metrics = [*self.reward_metrics, update]
        logger.info("reward model after iteration %d: %s", iteration, metrics)
        trainer.step_state.restore(state)  # the update draws no random number of the run, and takes no prompt

    def _sample_examples(self, seed: int) -> list[Example]:
        """Sample and label completions of the current policy. Returns the examples of all ranks."""
        trainer, args = self.trainer, self.trainer.args
        dataset: Any = trainer.train_dataset
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
        own = order[: self.iterative.reward_prompts].tolist()[args.process_index :: args.world_size]
        size = max(args.prompts_per_batch // args.world_size, 1)
        rollouts, examples, failure = list[RolloutBatch](), list[Example](), None
        for start in range(0, len(own), size):
            rows = [dataset[i] for i in own[start : start + size] for _ in range(args.num_generations)]
            request = replace(trainer.make_request(rows), on_partial_rollout=None)
            rollouts.append(trainer.generate_rollouts(request))
        trainer.backend.release()
        try:  # after the collectives of a backend, in which other ranks would wait for this one
            examples = [example for batch in rollouts for example in self._examples_of(batch)]
        except Exception as error:
            failure = error
        return [example for of_rank in gather_or_raise(examples, failure) for example in of_rank]

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
        labels: list[Any] = calls.rewards_FB[0]
        if any(isinstance(label, list) for label in labels):
            raise RewardError(f"label_func {name!r} returned step rewards; return one number per completion")
        wrong = [label for label in labels if label < 0 or label > 1]  # NaN is neither
        if self.iterative.reward_objective == "pointwise" and wrong:
            raise RewardError(f"label_func {name!r} returned {wrong[0]}; pointwise labels are from 0 to 1")
        examples = []
        for start in range(0, len(rollouts), rollouts.num_generations):
            rows = range(start, start + rollouts.num_generations)
            kept = [i for i in rows if labels[i] == labels[i] and not rollouts.completions[i].dropped]
            texts = [self.scorer.text(rollouts.prompts[i], rollouts.texts[i]) for i in kept]
            examples += EXAMPLES[self.iterative.reward_objective](texts, [labels[i] for i in kept])
        return examples
