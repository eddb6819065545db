"""The trainer: what happens in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from groupwise import reporting
from groupwise.agents.build import AgentSetup, check_agents, check_chat_template, make_agents
from groupwise.agents.environment_rows import add_environment_rows
from groupwise.config.arguments import check_arguments
from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.entropy import EntropyControl
from groupwise.core.metrics import Mean
from groupwise.data.batches import ExperienceBuffer, as_columns
from groupwise.data.budget import micro_batch_budget
from groupwise.data.build import check_data, prepare_data
from groupwise.data.dynamic_sampling import DynamicBatch, DynamicSamplingSettings, Feed, LeftoverGroups
from groupwise.data.image_checks import check_vision
from groupwise.data.lookahead import Pipeline, staleness
from groupwise.data.rebalancing import WindowStats, cache_sized, rows_needing_logps
from groupwise.generation.build import check_backend, make_backend
from groupwise.generation.weight_iterator import PolicyWeights, gatherable
from groupwise.hf import checkpointing
from groupwise.hf.base import BaseTrainer
from groupwise.hf.callbacks import SyncRefModelCallback
from groupwise.mixins import (
    AdvantageMixin,
    BatchingMixin,
    LogprobMixin,
    LossMixin,
    RewardMixin,
    RolloutMixin,
)
from groupwise.mixins.loss import check_loss_override, objective_settings
from groupwise.policy.build import (
    make_logprob_computer,
    make_logprob_mismatch_check,
    prepare_policy,
    router_aux_loss_coef,
    speed_up,
)
from groupwise.policy.liger import LigerLoss
from groupwise.policy.loading import load_processing_class
from groupwise.policy.loss import ObjectiveLoss, PolicyLoss
from groupwise.policy.reference import make_reference
from groupwise.records import (
    Experience,
    MicroBatch,
    Mode,
    RewardBatch,
    RewardFunction,
    RolloutBatch,
    RolloutFunction,
    RolloutRequest,
    Row,
    TokenBatch,
)
from groupwise.reporting.evaluation import EvaluationMetrics
from groupwise.reporting.metrics import MetricBuffer, length_metrics
from groupwise.reporting.table import completion_rows
from groupwise.rewards.build import RewardSetup, check_rewards, load_rewards


class GRPOTrainer(
    RolloutMixin,
    RewardMixin,
    AdvantageMixin,
    LogprobMixin,
    LossMixin,
    BatchingMixin,
    BaseTrainer,
):
    """Group relative policy optimisation on top of ``transformers.Trainer``.

    Args:
        model: hub id, directory, ``PreTrainedModel`` or ``PeftModel`` (causal LM, or vision-language model).
        reward_funcs: one or a list of callables, async callables, sequence-classification models or ids of
            such.
        args: the configuration; by default it writes to ``"<model name>-GRPO"``.
        train_dataset, eval_dataset: rows with a ``prompt`` (text or chat messages); other columns reach the
            rewards, ``image`` or ``images`` also the model. The evaluation set may be a dictionary of
            datasets.
        processing_class: tokenizer or processor; by default the model's.
        reward_processing_classes: None, one, or one per reward; by default each reward model's own tokenizer.
        callbacks, optimizers: as in ``Trainer``.
        quantization_config, peft_config: as in transformers and PEFT.
        tools: sync or async functions with type hints and docstrings, which the policy may call.
        environment_factory: makes environments for the rollouts, or names and what makes theirs.
        rollout_func: ``rollout_func(prompts, trainer)`` replaces generation.

    Raises:
        ConfigError: settings, data or models that cannot be trained with.
    """

    args: GRPOConfig  # type: ignore[assignment]
    model: PreTrainedModel  # type: ignore[assignment]
    zero_grad_at_zero_advantage = True  # of compute_loss, see LossMixin

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardFunction | str | PreTrainedModel | list[Any] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: Any = None,
    ) -> None:
        args = check_arguments(type(self), model, args)
        agents = check_agents(tools, environment_factory, rollout_func)
        train_dataset, eval_dataset = add_environment_rows(train_dataset, eval_dataset, agents, args)
        check_data(train_dataset, eval_dataset, args)
        check_backend(args)
        rewards = check_rewards(reward_funcs, reward_processing_classes, args, agents.reward_funcs)
        processing_class = load_processing_class(processing_class, model, args)
        check_chat_template(agents, processing_class, args)
        data = prepare_data(train_dataset, eval_dataset, args, model, processing_class)
        policy = prepare_policy(model, args, quantization_config, peft_config)
        check_vision(policy, processing_class, args, train_dataset, eval_dataset)
        self.reference = make_reference(policy, args, fresh_adapter=peft_config is not None)
        super().__init__(
            model=policy,
            args=args,
            train_dataset=data.train_dataset,
            eval_dataset=data.eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        set_seed(args.seed, device_specific=True)  # ranks must not sample the same completions
        self.prepared_data = data
        self._set_rewards(rewards)
        self._set_policy_state(rollout_func, agents)
        self._set_run_state()

    def _set_rewards(self, rewards: RewardSetup) -> None:
        loaded = load_rewards(rewards, self.args, self.accelerator)
        self.reward_funcs = loaded.functions
        self.reward_callables = loaded.callables
        self.reward_func_names = loaded.names
        self.reward_processing_classes = loaded.processing_classes
        self.reward_weights = torch.tensor(loaded.weights)

    def _set_policy_state(self, rollout_func: RolloutFunction | None, agents: AgentSetup) -> None:
        args = self.args
        if self.reference.model is not None:
            self.reference.model = self.accelerator.prepare_model(self.reference.model, evaluation_mode=True)
        speed_up([self.model, self.reference.model], args, self.accelerator)
        self.rollout_func = rollout_func
        self.backend = make_backend(
            lambda: gatherable(self.accelerator, self.model_wrapped), args, self.processing_class
        )
        self.tools = [tool.function for tool in agents.all_tools]
        self.agents = make_agents(
            agents, args, self.processing_class, self.backend, self.model, self.accelerator
        )
        self.pipeline = Pipeline(args, self.train_dataset, one_turn=not (self.agents or rollout_func))
        self.logprob_computer = make_logprob_computer(self.model, args, self.accelerator)
        self.logprob_mismatch = make_logprob_mismatch_check(self.logprob_computer, args, self.accelerator)
        self.router_aux_loss_coef = router_aux_loss_coef(self.model, args)
        self.aux_loss_enabled = self.router_aux_loss_coef != 0.0
        self.micro_batch_budget = micro_batch_budget(type(self), args, aux_loss=self.aux_loss_enabled)
        check_loss_override(type(self), args)
        self.objective_settings = objective_settings(args)
        self.policy_loss: PolicyLoss = (
            LigerLoss(
                self.router_aux_loss_coef,
                self.logprob_computer.head,
                args.max_completion_length,
                lambda: self.objective_settings,
            )
            if args.use_liger_kernel
            else ObjectiveLoss(self.router_aux_loss_coef, self.compute_logprobs, self.compute_policy_loss)
        )
        self.entropy_control = EntropyControl(args.entropy_coef)
        self.num_generations, self.temperature, self.beta = args.num_generations, args.temperature, args.beta

    def _set_run_state(self) -> None:
        args = self.args
        passes = args.eval_pass_at_k or [], args.eval_pass_threshold
        self.evaluation = EvaluationMetrics(*passes, self.reward_func_names, args.multi_objective_aggregation)
        self._restore(None)
        self.window_entropy = Mean(0.0, 0.0)
        self.window_stats = WindowStats()
        self.num_parameters = self.model.num_parameters(exclude_embeddings=True)
        reporting.show_rewards_in_progress(self)
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(self.reference, self.args, self.accelerator))

    # One step, in the order in which it happens.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch | None], None]:
        """Return the micro-batches of one optimizer step; the buffer is refilled when it is empty."""
        window: list[Experience] = []
        # No server generates: nothing of this step has been trained, and the last one is saved.
        with self.rollback_on_failure(ConnectionError, then=self.save_last_completed_step):
            # The range comes first: zip must not take rows that it then drops.
            for _, rows in zip(range(num_batches), epoch_iterator, strict=False):
                self.restore_pending_rng()  # Trainer would restore it after this hook, too late for sampling
                if self.buffer.is_empty:
                    num_groups = self.args.generation_batch_size // self.args.num_generations
                    self.buffer.fill(self.make_train_experience(rows), self.args.num_iterations, num_groups)
                window += self.buffer.take(1)
        if not window:
            return [], None
        micro_batches = self.set_token_weights(window, self.compute_entropy_masks(window))
        batches, self.window_stats = self.rebalance_micro_batches(micro_batches, self.logprob_computer.layout)
        self.metrics["train"].record(self.window_stats.metrics())
        return [None if batch is None else self.logprob_computer.prepare(batch) for batch in batches], None

    def make_train_experience(self, rows: list[Row]) -> list[Experience]:
        """Generate, reward and weigh the completions of one generation batch."""
        batch = DynamicBatch(self.feed.leftover_groups, DynamicSamplingSettings.from_config(self.args))
        while not batch.is_full:  # the same decision on every rank; one round unless dynamic_sampling
            if self.feed.source is not None:
                rows = self.next_rows(batch.num_to_sample)
            batch.add(*self.sample(self.make_request(rows)))
        self.metrics["train"].record(batch.metrics)
        rollouts, rewards, surplus = batch.finish()
        self.feed.leftover_groups = self.add_behavior_logps(surplus)  # before the policy changes
        return self.make_experience(rollouts, rewards, self.args.per_device_train_batch_size)

    def make_request(self, rows: list[Row]) -> RolloutRequest:
        return RolloutRequest(rows, self.num_generations, on_partial_rollout=self.start_partial_rewards())

    def sample(self, request: RolloutRequest) -> tuple[RolloutBatch, RewardBatch]:
        """Generate completions and compute their rewards."""
        metrics = self.metrics[request.mode]
        with metrics.timer.measure("sync"):
            self.backend.sync_weights(
                PolicyWeights(gatherable(self.accelerator, self.model_wrapped)),
                step=self.state.global_step,
            )
        with metrics.timer.measure("generate"):
            if request.mode == "train":
                for step, later in self.pipeline.upcoming(self.state.global_step, self.state.max_steps):
                    self.prefetch_rollouts(RolloutRequest(later, self.num_generations), step=step)
            rollouts = self.generate_rollouts(request)
            self.backend.release()
        with metrics.timer.measure("reward"):
            rewards = self.compute_rewards(rollouts)
        completions = rollouts.completions[: rewards.num_valid]
        lengths = length_metrics(rollouts.prompt_ids[: rewards.num_valid], completions)
        behind = staleness(completions, self.state.global_step)
        metrics.record({**lengths, **behind, **rollouts.metrics, **rewards.metrics})
        if request.mode == "eval":
            self.evaluation.add(rollouts, rewards)
        return rollouts, rewards

    def make_experience(
        self, rollouts: RolloutBatch, rewards: RewardBatch, micro_batch_size: int
    ) -> list[Experience]:
        """Experience of this rank: tokens with advantages, old and reference log-probs, by micro-batch."""
        metrics = self.metrics[rollouts.mode]
        with metrics.timer.measure("logprobs"):
            tokens = self.collate(rollouts)
            if rollouts.mode == "train":
                fresh = [c.sampled_at(self.state.global_step) for c in rollouts.completions]
                metrics.record(self.logprob_mismatch.check(self.model, tokens, fresh))
            on_policy = not self.needs_old_logps(tokens, rollouts.mode)
            # The KL is a part of every reward, so its log-probs come before any advantage.
            logps = self.old_and_ref_logps(tokens, on_policy=False) if self.args.kl_in_reward else None
            rewards = self.apply_kl_penalty(rewards, tokens, logps)
            advantages_BX = as_columns(rewards.local_rows(self.compute_advantages(rewards)), tokens)
            only = rows_needing_logps(tokens, advantages_BX, self.micro_batch_budget, micro_batch_size)
            logps = logps or self.old_and_ref_logps(tokens, only, on_policy=on_policy)
        if self.args.log_completions:
            where = self.reward_func_names, self.state.global_step
            metrics.rows += completion_rows(
                rollouts, rewards, advantages_BX, *where, multimodal=self.args.log_multimodal
            )
        experience = Experience(**{**vars(tokens), **logps._asdict()}, advantages_BX=advantages_BX)
        return experience.split(micro_batch_size)

    def needs_old_logps(self, tokens: TokenBatch, mode: Mode) -> bool:
        """Return True if the policy changes before the update, or if Liger's loss needs ℓ_old."""
        # Liger's loss takes the sampler correction as a factor, which needs ℓ_old; so do leftover groups.
        for_liger = tokens.sampler_logps_BT is not None or self.args.dynamic_sampling
        if self.args.use_liger_kernel and for_liger:
            return True
        return mode == "train" and not self.is_exactly_on_policy()

    def add_behavior_logps(self, surplus: LeftoverGroups) -> LeftoverGroups:
        """Compute the log-probs of leftover groups under the policy that sampled them, this rank's share."""
        rollouts = surplus.local_rollouts(DynamicSamplingSettings.from_config(self.args))
        if rollouts is None:
            return surplus
        logps_BT = self.old_and_ref_logps(self.collate(rollouts), on_policy=False).old_logps_BT
        lengths = [len(completion.token_ids) for completion in rollouts.completions]
        own = [row[:length] for row, length in zip(logps_BT.tolist(), lengths, strict=True)]
        return surplus.with_behavior_logps(gather_object(own))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Loss and gradients of one micro-batch; None is one that the window does not need."""
        last, loss = self.accelerator.sync_gradients, torch.zeros((), device=self.accelerator.device)
        if inputs is not None:
            with self.metrics["train"].timer.measure("train", wait=last):
                loss = super().training_step(model, inputs, num_items_in_batch)
        if last:
            self._end_window()
        return self.loss_to_log(loss, last=last)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one micro-batch under the current policy."""
        output = self.policy_loss(model, inputs)
        book = self.metrics["train" if model.training else "eval"]
        book.record(output.metrics)
        if model.training:
            # The losses of a window add up, so a window counts once however it is cut.
            book.record({"loss": Mean(output.loss.detach(), inputs.sequence_weight_B1.sum())})
            if output.bonus_entropy is not None:
                self.window_entropy = self.window_entropy.merge(output.bonus_entropy)
        return (output.loss, output) if return_outputs else output.loss

    def num_tokens(self, inputs: MicroBatch) -> int:
        return inputs.num_tokens()

    def split_in_half(self, inputs: MicroBatch) -> list[MicroBatch]:
        if self.micro_batch_budget.fixed:  # the loss is not a sum over rows
            return [inputs]
        return [self.logprob_computer.prepare(half) for half in inputs.split(-(-len(inputs) // 2))]

    def split_for_cache(self, inputs: MicroBatch) -> list[MicroBatch]:
        if self.micro_batch_budget.fixed or self.accelerator.device.type != "cpu":
            return [inputs]
        return [
            self.logprob_computer.prepare(part) for part in cache_sized(inputs, self.logprob_computer.layout)
        ]

    def mark_window(self) -> Callable[[], None]:
        state = self.metrics["train"].metrics, self.window_entropy

        def restore() -> None:
            self.metrics["train"].metrics, self.window_entropy = state

        return restore

    def _end_window(self) -> None:
        book = self.metrics["train"]
        book.record(self.update_entropy_coef(self.window_entropy))
        self.window_entropy = Mean(0.0, 0.0)
        work = self.window_stats
        book.record(book.timer.close_step(work.tokens, 6.0 * self.num_parameters * work.computed_tokens))

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Generate, reward and evaluate the loss of one evaluation batch."""
        gradient_state = self.accelerator.gradient_state
        # The last batch is padded so that all ranks get the same number of rows; those do not count.
        num_valid = gradient_state.remainder if gradient_state.end_of_dataloader else 0
        request = RolloutRequest(
            inputs,
            self.args.num_generations_eval,  # type: ignore[arg-type]
            num_valid=num_valid if num_valid > 0 else None,
            mode="eval",
            generation_kwargs=self.args.eval_generation_kwargs or {},  # type: ignore[arg-type]
            on_partial_rollout=self.start_partial_rewards(),
        )
        with torch.no_grad():
            rollouts, rewards = self.sample(request)
            window = self.make_experience(rollouts, rewards, len(inputs))
            num_padding_rows = len(inputs) - rewards.num_valid
            (batch,) = self.set_token_weights(window, self.compute_entropy_masks(window), num_padding_rows)
            loss = self.compute_loss(model, batch)
        # The losses of the ranks average to that of the batch, which counts by its rows.
        share = len(rewards.rewards.rewards_NF) / self.args.world_size
        self.metrics["eval"].record({"loss": Mean(loss.detach() * share, share)})
        return loss.detach(), None, None

    def floating_point_ops(self, inputs: Any) -> int:
        """6 operations per parameter and token: forward and backward."""
        return 0 if inputs is None else 6 * self.num_parameters * inputs.num_tokens()

    # Checkpoints.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; ``resume_from_checkpoint`` (True or a directory) continues exactly where it was made."""
        directory = checkpointing.find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        self._restore(directory)
        self.metrics["train"].timer.restart()
        return super().train(directory, *args, **kwargs)

    def _restore(self, directory: str | None) -> None:
        """Take over the state that ``Trainer`` does not keep; None starts afresh."""
        self.feed = Feed(self.prepared_data.new_source())
        self.buffer = ExperienceBuffer()
        self.metrics = {"train": MetricBuffer(), "eval": MetricBuffer()}
        self.pending_rng_checkpoint = directory
        if directory is None:
            return
        state = checkpointing.load_state(directory, self.args.process_index, self.args.world_size)
        checkpointing.warn_if_prompt_order_changed(state["order"], self.args, self.train_dataset)
        self.buffer = ExperienceBuffer.from_state(state["buffer"], self.accelerator.device)
        for name, keeper in self._stateful_components().items():
            keeper.load_state_dict(state[name])
        self.entropy_control = EntropyControl(*state["entropy_control"])
        checkpointing.load_reference(directory, self.reference.model, sync_ref_model=self.args.sync_ref_model)

    def _stateful_components(self) -> dict[str, Any]:
        """What has a state of its own, by its name in checkpoints."""
        named = {"backend": self.backend, "feed": self.feed, "first_evaluation": self.evaluation}
        return {**named, **{f"{mode}_book": book for mode, book in self.metrics.items()}}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.backend.invalidate_weights()  # other weights at, maybe, the same step
        self.reference.complete_load(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.backend.invalidate_weights()

    def save_rollout_state(self, directory: str) -> None:
        state = {name: keeper.state_dict() for name, keeper in self._stateful_components().items()}
        state["buffer"] = self.buffer.state_dict()
        state["order"] = checkpointing.prompt_order_settings(self.args, self.train_dataset)
        state["entropy_control"] = astuple(self.entropy_control)
        checkpointing.save_state(directory, self.args.process_index, self.args.world_size, state)
        if self.args.sync_ref_model and self.args.should_save:
            checkpointing.save_reference(directory, self.accelerator.unwrap_model(self.reference.model))

    # What scripts and callbacks read.

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The reference model, if it is one of its own."""
        return self.reference.model

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the newest batch, one per completion, if there are any."""
        return None if self.agents is None else self.agents.environments

    @property
    def entropy_coef(self) -> float:
        """The current coefficient of the entropy bonus."""
        return self.entropy_control.coef
