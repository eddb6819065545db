"""GRPOTrainer: one optimizer step from top to bottom, and the construction of its parts.

``docs/reading.md`` lists the files of the algorithm in reading order; this is the first.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import gather_object, set_seed
from torch import nn
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback

from groupwise.agents.loop import AgentLoop
from groupwise.agents.start import add_environment_rows, check_template, make_agent_loop, make_agents
from groupwise.compat.trl import REFUSED_METHODS, TRL_HOOKS, refuse_unread
from groupwise.config.changes import (
    TrainerAttributes,
    check_step,
    checked,
    take_snapshot,
    warn_of_changes_on_resume,
)
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import sampler_settings
from groupwise.core.entropy import EntropyControl
from groupwise.core.metrics import Mean
from groupwise.cpu import cache_sized, install_cpu_training, linears_path, threads_paths, trim_heap
from groupwise.data.budget import MicroBatchBudget, micro_batch_budget, reason_for_all_rows
from groupwise.data.buffer import ExperienceBuffer
from groupwise.data.dataset_checks import (
    check_curriculum,
    check_data,
    functions_by_source,
    has_image_columns,
    mix_sources,
    scored_columns,
)
from groupwise.data.dynamic_sampling import DynamicBatch
from groupwise.data.evaluation import num_valid_rows
from groupwise.data.exchange import all_to_all_objects, in_row_order
from groupwise.data.loaders import prepare_data
from groupwise.data.prompt_source import PromptSource
from groupwise.data.rebalancing import SHARES_PROMPTS, rebalance, rows_needing_logps
from groupwise.data.window import AccumulationWindow
from groupwise.distributed import is_sharded
from groupwise.errors import ConfigError, check_counts
from groupwise.generation.backends import check_backend, make_backend, warn_of_truncation
from groupwise.generation.base import GenerationBackend
from groupwise.hf import checkpointing
from groupwise.hf.arguments import (
    check_arguments,
    check_methods,
    check_source,
    rewards_read_rows,
    warn_of_rollout_settings,
    with_known_arguments,
)
from groupwise.hf.base import BaseTrainer
from groupwise.hf.step_state import Attribute, Stateful
from groupwise.mixins import AdvantageMixin, LogprobMixin, LossMixin, RewardMixin, RolloutMixin
from groupwise.mixins.advantage import checked_advantages
from groupwise.mixins.loss import check_loss_override, objective_settings
from groupwise.policy.introspection import (
    check_adapter,
    check_model,
    flops_per_token,
    has_adapter,
    router_aux_loss_coef,
)
from groupwise.policy.layout_choice import make_logprob_computer
from groupwise.policy.loading import check_image_model, check_loading, load_processing_class, prepare_policy
from groupwise.policy.logprob_mismatch import LogprobMismatchCheck
from groupwise.policy.recomputation import recomputation_path
from groupwise.policy.reference import SeparateReference
from groupwise.policy.reference_choice import make_reference
from groupwise.policy.weight_iterator import PolicyWeights, gatherable
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
    SamplerSettings,
    align_advantages,
)
from groupwise.records.fast_paths import FastPath
from groupwise.reporting.evaluation import EvaluatedCompletion
from groupwise.reporting.metrics import MetricBuffer, entropy_by_value, metrics_by_value, rollout_metrics
from groupwise.reporting.table import completion_rows
from groupwise.reporting.terminal import show_phase
from groupwise.rewards.runtime.loading import (
    RewardLoader,
    check_columns,
    check_rewards,
    load_reward_model,
    with_default_weights,
)
from groupwise.rewards.runtime.models import reward_names
from groupwise.tokenization.text import text_tokenizer

if TYPE_CHECKING:
    from groupwise.policy.liger import LigerLoss

logger = logging.getLogger(__name__)


@refuse_unread
class GRPOTrainer(
    RolloutMixin,
    RewardMixin,
    AdvantageMixin,
    LogprobMixin,
    LossMixin,
    TrainerAttributes,
    BaseTrainer,
):
    """Group relative policy optimisation on top of ``transformers.Trainer``.

    Args:
        model: hub id, directory, ``PreTrainedModel`` or ``PeftModel`` (causal LM, or vision-language model).
        reward_funcs: one or a list of callables, async callables, sequence-classification models, process
            reward models (token classification), or ids of such; or a dict of them by source of a mixture.
        args: the configuration; by default it writes to ``"<model name>-GRPO"``.
        train_dataset: rows with a ``prompt`` (text or chat messages); other columns reach the rewards,
            ``image`` or ``images`` also the model. Datasets by the name of their source are mixed.
        eval_dataset: the same for evaluations, or a dictionary of datasets.
        processing_class: tokenizer or processor; by default the model's.
        reward_processing_classes: None, one, or one per reward; by default each reward model's own tokenizer.
        callbacks: as in ``Trainer``.
        optimizers: as in ``Trainer``.
        quantization_config: as in transformers.
        peft_config: adapter to train, as in PEFT; the reference is the policy at its start.
        tools: sync or async functions with type hints and docstrings, which the policy may call.
        environment_factory: makes environments for the rollouts, or names and what makes theirs.
        rollout_func: ``rollout_func(prompts, trainer)`` replaces generation.
        backend: a ``GenerationBackend``, or the name of a registered one; None: the settings choose.
        compute_metrics: called at the end of an evaluation, as in ``Trainer``, with lists of all completions
            (``predictions``), their dataset rows (``label_ids``) and prompts (``inputs``).
        curriculum: ``curriculum(rates, step)`` returns a weight for each training prompt; see the page Data.

    Raises:
        ConfigError: settings, data or models that cannot be trained with.
    """

    args: GRPOConfig  # type: ignore[assignment]
    model: PreTrainedModel  # type: ignore[assignment]
    zero_grad_at_zero_advantage = True  # of compute_loss, see LossMixin
    config_class = GRPOConfig  # of a trainer without args
    missing_sampling_mask_reason = ""  # why completions lack the mask, for a warning; "": they have it
    buffer_class = ExperienceBuffer
    metrics_class = MetricBuffer
    prompts: PromptSource
    buffer: ExperienceBuffer
    window: AccumulationWindow
    liger_loss: LigerLoss | None  # None: log-probs, then the objective

    @with_known_arguments
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
        backend: str | GenerationBackend | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        curriculum: Callable[..., Any] | None = None,
    ) -> None:
        self.check_overrides()
        args = check_arguments(model, args, self.config_class)
        check_adapter(model, peft_config)
        check_loss_override(type(self), args)
        agents = make_agent_loop(tools, environment_factory, rollout_func, args)
        train_dataset, eval_dataset = add_environment_rows(train_dataset, eval_dataset, agents, args)
        reward_funcs, reward_sources = functions_by_source(reward_funcs, train_dataset)
        train_dataset, eval_dataset, self.metrics_column = mix_sources(train_dataset, eval_dataset, args)
        check_data(train_dataset, eval_dataset, args)
        check_backend(args, backend, with_images=has_image_columns(train_dataset, eval_dataset))
        reward_funcs, reward_processing_classes = check_rewards(
            reward_funcs,
            reward_processing_classes,
            args,
            agents.reward_funcs,
            multi_turn=agents.is_multi_turn,
        )
        if rewards_read_rows(self):
            datasets = args.eval_max_samples, train_dataset, eval_dataset
            for functions, columns in scored_columns(reward_funcs, reward_sources, *datasets):
                if rollout_func is None and not agents.is_multi_turn:  # their rollouts add columns
                    check_columns(functions, columns)
        self.curriculum = curriculum
        check_curriculum(args, curriculum, train_dataset, reward_names(reward_funcs))
        processing_class = load_processing_class(processing_class, model, args)
        check_template(agents, processing_class, args)
        check_loading(model, args, quantization_config, peft_config)
        data = prepare_data(
            train_dataset, eval_dataset, args, model, processing_class, agents.renders_prompts
        )
        set_seed(args.seed)  # all ranks initialise the same adapters
        policy = prepare_policy(model, args, quantization_config, peft_config)
        check_image_model(policy, processing_class)
        self.reference = make_reference(policy, args, fresh_adapter=peft_config is not None)
        # In TRL's order: on one seed, the new head of a reward model is drawn after the policy's adapter.
        reward_funcs = [load_reward_model(function, args) for function in reward_funcs]
        names = [names for _, names in reward_sources]  # of the first functions; environments score all rows
        self.reward_sources = list(zip(reward_funcs, names, strict=False))
        super().__init__(
            model=policy,
            args=args,
            train_dataset=train_dataset,  # as given: self.prompts reads checked rows of it
            eval_dataset=eval_dataset,
            data=data,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            compute_metrics=compute_metrics,
        )
        self._settings_before = take_snapshot(args)
        self.reward_funcs, self.reward_processing_classes = reward_funcs, reward_processing_classes
        self.reward_func_names: list[str] = []  # follow from the functions
        self.reward_weights = with_default_weights(args, reward_funcs)
        self._set_up(rollout_func, agents, backend)

    def _load_rewards(self) -> None:
        """Load the reward functions that were replaced, and derive what follows from them."""
        loader = self.reward_loader
        if loader.load(
            self.reward_funcs, self.reward_func_names, self.reward_processing_classes, self.reward_weights
        ):
            # Copies: scripts may also change the lists in place.
            self.reward_funcs, self.reward_callables = list(loader.functions), loader.callables
            self.reward_func_names = list(loader.names)
            self.reward_processing_classes = list(loader.processing_classes)
            self.reward_weights = loader.weights_F.clone()

    def _set_up(
        self, rollout_func: RolloutFunction | None, agents: AgentLoop, backend: str | GenerationBackend | None
    ) -> None:
        """Build the parts that need the policy on its device, then the state of a run."""
        args, accelerator = self.args, self.accelerator
        self.reward_loader = RewardLoader(
            args, accelerator, self.model, text_tokenizer(self.processing_class)
        )
        self._load_rewards()
        if self.reference.model is not None:  # sharded like the policy; no gradients, no optimizer state
            self.reference.model = accelerator.prepare_model(self.reference.model, evaluation_mode=True)
        self.onednn_linears = not (is_sharded(accelerator) or args.torch_compile)  # which rewrite them
        if accelerator.device.type == "cpu":
            install_cpu_training([self.model, self.reference.model], onednn_linears=self.onednn_linears)
        self.frozen_weights: list[FastPath] = []
        if has_adapter(self.model):
            from groupwise.policy.frozen_weights import hold_frozen_weights

            self.frozen_weights.append(hold_frozen_weights(self.model, accelerator))
        self.rollout_func = rollout_func
        self.event_loop = agents.executor.loop  # of tools and environments, and of rewards
        weakref.finalize(self, self.event_loop.close)
        self.backend = make_backend(
            lambda: gatherable(self.model_wrapped), args, self.processing_class, backend
        )
        self.tools = [tool.function for tool in agents.all_tools]
        self.agents = make_agents(agents, args, self.processing_class, self.backend, self.model, accelerator)
        warn_of_rollout_settings(args, rollout_func is None, self.may_have_placeholder_logps(), self.agents)
        self.logprob_computer = make_logprob_computer(self.model, args, accelerator)
        self.logprob_mismatch = LogprobMismatchCheck(
            self.logprob_computer, accelerator, args.logprob_mismatch_check, args.logprob_mismatch_steps
        )
        self.router_aux_loss_coef = router_aux_loss_coef(self.model, args)
        self.aux_loss_enabled = self.router_aux_loss_coef != 0.0
        self.liger_loss = None
        if args.use_liger_kernel:
            from groupwise.policy.liger import LigerLoss

            head, length = self.logprob_computer.head, args.max_completion_length
            self.liger_loss = LigerLoss(self.aux_loss_enabled, head, length)
        self.flops_per_token = flops_per_token(self.model)
        set_seed(args.seed, device_specific=True)  # ranks must not sample the same completions
        self.rng.seed(args.seed + args.process_index)
        self.backend.generator = self.rng.generator
        self._reset_run_state(None)

    def check_overrides(self) -> None:
        """Refuse overrides of methods that this trainer does not call; on the instance, before it trains.

        Raises:
            ConfigError: there are some; the message names the methods to override instead.
        """
        check_methods(self, REFUSED_METHODS, f"A subclass written for TRL: {TRL_HOOKS}")
        check_source(self)

    def may_have_placeholder_logps(self) -> bool:
        """Return True if log-probs of completions may be placeholders: those of a ``rollout_func``."""
        return self.rollout_func is not None

    # One optimizer step, in the order in which it happens.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[AccumulationWindow], None]:
        """Begin an optimizer step (a hook of ``Trainer``); the first ``training_step`` makes the batches.

        ``Trainer`` calls ``on_step_begin`` between the two: settings assigned there act in this step.
        ``self.prompts`` reads rows where TRL reads them: ``epoch_iterator`` is not advanced.

        Returns:
            the window ``num_batches`` times: ``Trainer`` counts the entries, and synchronises gradients with
            the last one.
        """
        # The mark contains it, and sampling draws from it; Trainer would restore it only after this hook.
        self._load_rng_state(self.pending_rng_checkpoint)
        self.step_state.begin_step()  # a failure, and a checkpoint before the update, return to this state
        self.window = AccumulationWindow.to_be_made(num_batches)
        return [self.window] * num_batches, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of one micro-batch of the window; the first call makes the window."""
        if not self.window.is_made:
            self.begin_update()  # modes of model and optimizer: sampling needs those of the forward
            self.window = self.make_window(self.window.size)  # generate, reward, weigh, rebalance
        batch = self.window.take()  # B rows; None where rebalancing needed fewer micro-batches
        last = self.accelerator.sync_gradients  # the optimizer steps next
        loss = torch.zeros((), device=self.accelerator.device)
        if batch is not None:
            with self.metrics["train"].phase("train", wait=last):
                loss = super().training_step(model, batch, num_items_in_batch)
        if last:
            # A window counts once in the logs: computed rows with their own weight, skipped ones with loss 0.
            names = ("loss", "policy_loss") if self.args.has_entropy_bonus else ("loss",)
            skipped = Mean(0.0, self.window.stats.skipped_weight)
            self.metrics["train"].record(dict.fromkeys(names, skipped))
            self.metrics["train"].record(self.update_entropy_coef(self.window.entropy))
            self._end_window()
        return self.loss_to_log(loss, last=last)

    def make_window(self, size: int) -> AccumulationWindow:
        """Make the micro-batches of an optimizer step from the buffer; if it is empty, generate first."""
        self.refresh_settings()
        with self.rollback_on_failure():  # also the prompts that a failed generation has taken
            window: list[Experience] = []  # one entry of B rows per micro-batch of this rank
            while len(window) < size:  # a window may span generations, and a generation windows
                if self.buffer.is_empty:
                    # All of the generation is trained on before the policy changes, unless it begins in the
                    # middle of a window: a resumed run may have another accumulation.
                    on_policy = self.args.micro_batches_per_generation <= size - len(window)
                    # A changed temperature waits for the next window: rebalancing joins rows of this one.
                    sampler = window[0].sampler if window else sampler_settings(self.args)
                    experience = self.make_train_experience(sampler, on_policy=on_policy)
                    self.buffer.fill(experience, self.args.num_iterations, self.args.prompts_per_batch)
                window += self.buffer.take(size - len(window))
            made = self.make_micro_batches(window)
        self.metrics["train"].record(made.stats.metrics())
        return made

    def make_train_experience(self, sampler: SamplerSettings, *, on_policy: bool) -> list[Experience]:
        """Generate, reward and weigh the completions of one generation batch; one entry per micro-batch."""
        self.sync_sampler("train")  # behaviour policy = current policy, unless rollout_staleness > 0
        if self.args.dynamic_sampling:  # B completions of this rank, N rewards, whole groups
            rollouts, rewards = self.sample_until_full(sampler)
        else:
            self.prefetch_rollouts(sampler)  # rollout_staleness: a server generates later ones meanwhile
            rollouts, rewards = self.sample_prompts(self.args.prompts_per_batch, sampler)
        self.backend.release()  # memory of a colocated engine goes to training
        # Before training, which may fail: a saved generation can be replayed.
        self.call_callbacks("on_generation_end", rollouts=rollouts, rewards=rewards)
        size = self.args.per_device_train_batch_size
        entries = self.make_experience(rollouts, rewards, size, on_policy=on_policy)
        return in_row_order(entries, self.args) if self.args.splits_generation else entries

    def sample_until_full(self, sampler: SamplerSettings) -> tuple[RolloutBatch, RewardBatch]:
        """Sample rounds of prompts until every group of the batch has reward variance (DAPO, section 3.2)."""
        batch = DynamicBatch(self.args)
        while not batch.is_full:  # the same decision on every rank
            batch.add(*self.sample_prompts(batch.num_to_sample, sampler))
        self.metrics["train"].record(batch.metrics)
        self.prefetch_rollouts(sampler, first=0)  # only now are the next generation's prompts known
        return batch.finish()

    def sample_prompts(self, num_prompts: int, sampler: SamplerSettings) -> tuple[RolloutBatch, RewardBatch]:
        """Sample the next prompts: B completions of this rank, rewards of all N."""
        rows = self.prompts.take(num_prompts, self.state.global_step)  # B rows of this rank, G per prompt
        request = replace(self.make_request(rows, sampler), seeds=self.row_seeds(len(rows)))
        rollouts, rewards = self.sample(request)
        # The rewards of all ranks: the next prompts may depend on them, and are the same on every rank.
        self.metrics["train"].record(self.prompts.add_rewards(rewards, self.reward_func_names))
        return rollouts, rewards

    def sync_sampler(self, mode: Mode) -> None:
        """Transfer the policy's weights to the backend, unless it has those of this optimizer step."""
        with self.metrics[mode].phase("sync"):
            weights = PolicyWeights(gatherable(self.model_wrapped))
            self.backend.sync_weights(weights, step=self.state.global_step)

    def make_request(
        self, rows: list[Row], sampler: SamplerSettings | None = None, *, mode: Mode = "train"
    ) -> RolloutRequest:
        """Build the request for rollouts of these rows of this rank, in training or in an evaluation.

        Args:
            sampler: sampler settings of the generation; None: it begins now, with those of ``self.args``.
        """
        args, sampler, evaluates = self.args, sampler or sampler_settings(self.args), mode == "eval"
        # In an evaluation completions may have a temperature of their own; log-probs have the sampler's.
        other: dict[str, Any] = (evaluates and args.eval_generation_kwargs) or {}  # type: ignore[assignment]
        return RolloutRequest(
            rows,
            args.generations_per_eval_prompt if evaluates else args.num_generations,
            # The last evaluation batch is padded so that all ranks get as many rows; padding does not count.
            num_valid=num_valid_rows(rows, self.accelerator.gradient_state) if evaluates else None,
            mode=mode,
            sampler=sampler,
            generation_kwargs={**vars(sampler), **other},
            on_partial_rollout=self.start_partial_rewards(),
        )

    def sample(self, request: RolloutRequest) -> tuple[RolloutBatch, RewardBatch]:
        """Generate completions, B rows of this rank, and compute the rewards of all ranks, N rows."""
        metrics = self.metrics[request.mode]
        with metrics.phase("generate"):
            rollouts = self.generate_rollouts(request)
            check_counts("generate_rollouts", len(request.rows), completions=len(rollouts))
            rollouts, dropped_N = self.drop_failed(rollouts)  # of all ranks, or None; no reward and no loss
        with metrics.phase("reward"), self.rng.user_code():
            rewards = self.compute_rewards(rollouts).without(dropped_N)  # (N, F), NaN where there is none
        rollouts = rollouts.drop_from(rewards.num_valid)  # rows that pad an evaluation batch
        metrics.record(rollout_metrics(rollouts, self.state.global_step))
        metrics.record(rewards.metrics)
        if column := self.metrics_column:
            aggregation = self.args.multi_objective_aggregation
            metrics.record(metrics_by_value(rollouts, rewards, column, aggregation))
        return rollouts, rewards

    def make_experience(
        self, rollouts: RolloutBatch, rewards: RewardBatch, micro_batch_size: int, *, on_policy: bool
    ) -> list[Experience]:
        """Turn rollouts and rewards into tokens with advantages and log-probs, split into micro-batches.

        With ``on_policy`` the policy does not change before it trains on them: ℓ_old = sg(ℓ), not computed.
        """
        metrics = self.metrics[rollouts.mode]
        with metrics.phase("logprobs"):
            tokens = self.collate(rollouts)  # prompts (B, L) padded left, completions (B, T) padded right
            if rollouts.mode == "train":  # in evaluation the sampler may have another temperature
                metrics.record(self.check_logprob_mismatch(rollouts, tokens))
            # With kl_in_reward the KL is part of every reward, so log-probs come before advantages.
            logps = self.old_and_ref_logps(tokens) if self.args.kl_in_reward else None
            rewards = self.apply_kl_penalty(rewards, tokens, logps)
            # (N,) or (N, T) of all ranks -> (B,) or (B, T) of this one
            advantages = rewards.local_rows(checked_advantages(self.compute_advantages(rewards), rewards))
            # A row that rebalancing will skip has no loss to compare with: 2 forwards per row are saved.
            advantages_BX = align_advantages(advantages, tokens).to(tokens.loss_mask_BT.device)
            only = rows_needing_logps(tokens, advantages_BX, self.micro_batch_budget, micro_batch_size)
            logps = logps or self.old_and_ref_logps(tokens, only, on_policy=on_policy)
        if self.args.log_completions:
            rows = completion_rows(
                rollouts,
                rewards,
                advantages,
                self.reward_func_names,
                self.state.global_step,
                multimodal=self.args.log_multimodal,
            )
            logged = rollouts.mode == "eval" or self.args.logging_strategy != "no"
            metrics.rows = [*metrics.rows, *rows] if logged else rows  # else the newest, for the last log
        return Experience.from_tokens(tokens, advantages, logps).split(micro_batch_size)

    def make_micro_batches(self, window: list[Experience]) -> AccumulationWindow:
        """Weigh the tokens of an accumulation window and rebalance it; as many entries as before."""
        self.check_layout(window[0])  # of a resumed run
        window = self.add_missing_ref_logps(window)  # of a generation that is older than the reference
        entropy_masks = self.compute_entropy_masks(window)  # (B, T) each; all loss tokens by default
        weighed = self.set_token_weights(window, entropy_masks)  # w_it, from exact counts over all ranks
        self.call_callbacks("on_window_begin", window=weighed)
        # Rows without a gradient are dropped, the others are spread evenly over ranks and micro-batches. A
        # rank receives the lengths of all rows, from which all make the same plan, then the rows of its own.
        computer, budget = self.logprob_computer, self.micro_batch_budget
        all_to_all = partial(all_to_all_objects, device=self.accelerator.device)
        batches, stats = rebalance(weighed, computer.layout, budget, gather_object, all_to_all)
        # The sequences are packed, if the layout does; None where fewer micro-batches suffice.
        made = [None if b is None else computer.prepare(b) for b in batches]
        if self.balances_updates:  # experts, over all micro-batches: counts before the first loss
            from groupwise.policy.experts import balance_update

            compute = partial(self.compute_logprobs, self.model_wrapped)
            balance_update(self.logprob_computer, compute, made, self.accelerator)
        return AccumulationWindow(made, stats)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of one micro-batch; the losses of a window add up to the loss of the window."""
        if self.liger_loss is not None:
            # Hidden states to the loss inside the head: log-probs (B, T) are never in memory.
            output, aux_loss = self.liger_loss(model, inputs, self.objective_settings)
            logps_BT = None
        else:
            logprobs = self.compute_logprobs(model, inputs, with_entropy=True)  # (B, T), differentiable
            output = self.compute_policy_loss(inputs, logprobs)  # Σ w_it (ℓ_it + β KL_it), a scalar
            logps_BT, aux_loss = logprobs.logps_BT, logprobs.aux_loss
            if logprobs.routing is not None:  # of experts, replayed
                output = replace(output, metrics={**output.metrics, **logprobs.routing.metrics()})
            if inputs.metric_values is not None and logprobs.entropy_BT is not None:  # by source
                by_value = entropy_by_value(inputs, logprobs.entropy_BT)
                output = replace(output, metrics={**output.metrics, **by_value})
        output = self.add_aux_loss(output, aux_loss, inputs)  # of a mixture of experts
        self.check_gradient(output.loss, "compute_policy_loss or compute_logprobs")
        if model.training:
            trim_heap(self.accelerator.device)  # before the backward pass, which has the peak
        metrics = self.metrics["train" if model.training else "eval"]
        if not (model.training and self.window.stats.has_no_gradient):  # a row of weight 0 has no metrics
            metrics.record(output.metrics)
        if model.training:
            # Weighted by its share of the window, so that a window counts once however it is split.
            metrics.record({"loss": Mean(output.loss.detach(), inputs.sequence_weight_B1.sum())})
            self.call_callbacks("on_loss", batch=inputs, logps_BT=logps_BT, loss=output.loss)
            if output.bonus_entropy is not None:
                self.window.entropy = self.window.entropy.merge(output.bonus_entropy)
        return (output.loss, output) if return_outputs else output.loss

    def _end_window(self) -> None:
        """Record the times of the window."""
        metrics, stats = self.metrics["train"], self.window.stats
        flops = self.flops_per_token * stats.computed_tokens  # forward and backward
        fell_back = {"layout_fell_back": Mean(1.0)} if self.logprob_computer.fell_back else {}
        metrics.record(metrics.timer.close_step(stats.tokens, flops) | fell_back)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Generate, reward and evaluate the loss of one evaluation batch, B rows of this rank."""
        request = self.make_request(inputs, mode="eval")
        with torch.no_grad():
            self.sync_sampler("eval")
            rollouts, rewards = self.sample(request)
            self.backend.release()
            self.evaluation.add(rollouts, rewards, self.args, self.compute_metrics, self.metrics_column)
            window = self.make_experience(rollouts, rewards, len(inputs), on_policy=True)
            (batch,) = self.set_token_weights(window, self.compute_entropy_masks(window))
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, batch)
        # The losses of the ranks average to that of the batch, which counts by its rows.
        share = len(rewards.rewards_NF) / self.args.world_size  # N / ranks; padding rows are not in N
        self.metrics["eval"].record({"loss": Mean(loss.detach() * share, share)})
        return loss.detach(), None, None

    # Splits of micro-batches, and out-of-memory recovery (see BaseTrainer).

    @property
    def micro_batch_budget(self) -> MicroBatchBudget:
        """Limits of a micro-batch, and which rows may be skipped, under the present settings."""
        return micro_batch_budget(
            self,
            self.args,
            # A balancing loss of a micro-batch is no sum over its rows; that of an update is.
            aux_loss=self.aux_loss_enabled and not self.balances_updates,
            has_reference=self.reference.exists,
        )

    def split_micro_batch(self, inputs: MicroBatch, *, for_cache: bool) -> list[MicroBatch]:
        """Return the halves of ``inputs``, or with ``for_cache`` parts that run faster one after the other.

        The losses of the parts add up to that of ``inputs``, which is returned alone if it cannot be split.
        """
        on_cpu, computer = self.accelerator.device.type == "cpu", self.logprob_computer
        if self.micro_batch_budget.fixed or (for_cache and not on_cpu):  # fixed: no sum over rows
            return [inputs]
        # Else B rows -> ⌈B/2⌉ and ⌊B/2⌋. Token weights are those of the window, so that the losses add up.
        shared = computer.layout in SHARES_PROMPTS
        parts = cache_sized(inputs, shared=shared) if for_cache else inputs.split(-(-len(inputs) // 2))
        return [computer.prepare(part) for part in parts]

    def window_state(self) -> list[Stateful]:
        """Return the components that a window changes besides gradients."""
        return [self.metrics["train"], Attribute(self.window, "entropy")]

    def floating_point_ops(self, inputs: Any) -> int:
        """Estimate the operations of forward and backward; attention scores are left out."""
        batch = self.window.current  # Trainer passes the window
        return 0 if batch is None else int(self.flops_per_token * batch.num_tokens())

    # Settings and state of a run.

    def fast_paths(self) -> list[FastPath]:
        """Return what computes each part of the run, and why it is not the fast way."""
        args, accelerator = self.args, self.accelerator
        uses = args.optimizer_steps_per_generation
        off_policy = "" if args.trains_on_policy else f"a generation is used in {uses} optimizer steps"
        all_rows = reason_for_all_rows(self, args, has_reference=self.reference.exists)
        if self.micro_batch_budget.fixed:
            all_rows = "the balancing loss, or Liger's, is no sum over rows"
        paths = [
            *self.backend.fast_paths(self.model),
            *self.logprob_computer.paths,
            *self.frozen_weights,
            FastPath("old log-probs", "computed" if off_policy else "not needed", off_policy),
            FastPath("rows without gradient", "computed" if all_rows else "skipped", all_rows),
            recomputation_path(args, accelerator),
        ]
        if accelerator.device.type == "cpu":
            paths += [linears_path(self.model, onednn_linears=self.onednn_linears), *threads_paths()]
        return paths

    def refresh_settings(self, *, new_run: bool = False) -> None:
        """Apply settings and reward functions that a script or callback changed since the last step.

        Raises:
            ConfigError: a changed setting is invalid or contradicts another one.
        """
        args = self.args
        # Names of the settings whose change acts; one that cannot change is reported and taken back.
        changed = check_step(args, self._settings_before, new_run=new_run or not self.is_in_train)
        if args.beta > 0 and not self.reference.exists:
            raise ConfigError(
                f"beta={args.beta} needs a reference model, and a trainer built with beta=0 has none; "
                "build it with GRPOConfig(beta=…), after which beta may change at any step, also to 0 and "
                "back, or assign trainer.ref_model first"
            )
        if "reward_weights" in changed:
            self.reward_weights = with_default_weights(args, self.reward_funcs)
        self._load_rewards()
        if "entropy_coef" in changed:  # the measured entropy is kept: it decides whether the bonus applies
            self.entropy_control = replace(self.entropy_control, coef=args.entropy_coef)
        reason = self.missing_sampling_mask_reason
        if self.rollout_func is not None and not reason:
            reason = "a rollout_func returns completions without the sampling mask"
        self.objective_settings = objective_settings(
            args,
            placeholder_logps=self.may_have_placeholder_logps(),
            truncation_unknown=warn_of_truncation(args, self.backend, reason),
        )
        self._settings_before = take_snapshot(args)  # at the end: an error is raised again by the next step

    def make_prompt_source(self) -> PromptSource:
        """Build the source of training prompts at its beginning, from the loader or sampler of a subclass."""
        make_sampler = partial(self._get_train_sampler, self.train_dataset)
        own_loader = type(self).get_train_dataloader is not BaseTrainer.get_train_dataloader
        make_loader = self.get_train_dataloader if own_loader else None
        return self.prepared_data.prompt_source(
            self.train_dataset, make_sampler, make_loader, self.curriculum
        )

    def _reset_run_state(self, directory: str | None) -> None:
        """Start a run from its beginning, or from the checkpoint in ``directory``."""
        records = EntropyControl, EvaluatedCompletion  # in the states, beside those of a step
        states = checkpointing.load_states(
            directory, self.args, self._settings_before, self.accelerator, *records
        )
        self.buffer = self.buffer_class(self.accelerator.device)
        self.refresh_settings(new_run=True)
        self.entropy_control = EntropyControl(self.args.entropy_coef)
        self.metrics = {"train": self.metrics_class(), "eval": self.metrics_class()}
        for mode, buffer in self.metrics.items():
            buffer.timer.show = partial(show_phase, self, mode)
        self.window = AccumulationWindow.to_be_made(0)
        self._components = {
            "buffer": self.buffer,
            "entropy_control": Attribute(self, "entropy_control"),
            "train_metrics": self.metrics["train"],
            "eval_metrics": self.metrics["eval"],
            "evaluation": self.evaluation,
            "backend": self.backend,
            "rng": self.rng,
        }
        if self.train_dataset is not None:
            self._components["prompts"] = self.prompts = self.make_prompt_source()
        if self.agents is not None:
            self.agents.restore({})
            self._components["agents"] = self.agents
        self.step_state.reset()
        self.backend.invalidate_weights()  # weights of an earlier run may belong to the same step
        self.pending_rng_checkpoint = directory
        if directory is None:
            return
        state = checkpointing.state_of_rank(states, self._components, self.args)
        saved = state["settings"]
        warn_of_changes_on_resume(saved, self.args, self.train_dataset, self.applied_on_resume)
        self.resumed_optimizer = state["optimizer"]
        state.setdefault("agents", {})  # of a run without them
        if self.args.ignore_data_skip:  # the epoch begins again at its first prompt
            state["prompts"]["index"] = 0
        self.step_state.restore(state)
        if saved["entropy_coef"] != self.args.entropy_coef:  # a changed setting wins over the adapted value
            self.entropy_control = replace(self.entropy_control, coef=self.args.entropy_coef)
        checkpointing.load_reference(directory, self.reference.model, sync_ref_model=self.args.sync_ref_model)

    # Public attributes.

    @property
    def entropy_coef(self) -> float:
        """Coefficient of the entropy bonus, the current one under adaptive control."""
        changed = self.args.entropy_coef != self._settings_before["entropy_coef"]
        return self.args.entropy_coef if changed else self.entropy_control.coef

    @entropy_coef.setter
    def entropy_coef(self, coef: float) -> None:
        self.args.entropy_coef = checked(self.args, "entropy_coef", coef, "entropy_coef")

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """Reference model, if it is a separate model."""
        return self.reference.model

    @ref_model.setter
    def ref_model(self, model: PreTrainedModel) -> None:
        check_model(model, "ref_model")
        reference = SeparateReference(self.accelerator.prepare_model(model, evaluation_mode=True))
        if isinstance(self.reference, SeparateReference):
            self.reference.model = reference.model  # the callback of sync_ref_model holds the reference
        else:
            self.reference = reference

    @property
    def environments(self) -> list[Any] | None:
        """Environments of the newest batch, one per completion, if there are any."""
        return None if self.agents is None else self.agents.environments

    def record_metric(
        self, name: str, value: float | torch.Tensor, reduction: Literal["mean", "sum", "min", "max"] = "mean"
    ) -> None:
        """Add a value to the metric ``name`` of the next log, reduced over steps and ranks.

        Every rank should record the same names. During an evaluation it becomes ``eval_<name>``.

        Raises:
            ValueError: ``name`` is a metric of the trainer, the value is not finite, or the reduction is
                unknown.
        """
        self.metrics[self._mode].record_metric(name, value, reduction)
