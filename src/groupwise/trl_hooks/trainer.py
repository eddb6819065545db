"""``GRPOTrainer`` with the hooks of TRL 1.16, for overrides, ``super()`` calls and replaced methods."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer

from groupwise import trainer as pipeline
from groupwise.config.sampling import sampler_settings
from groupwise.core.entropy import entropy_threshold
from groupwise.core.metrics import Mean, masked_mean
from groupwise.core.objectives import OBJECTIVES, correction
from groupwise.core.weights import NORMALIZERS, WindowCounts
from groupwise.data.evaluation import num_valid_rows
from groupwise.data.loaders import GenerationBatches
from groupwise.distributed import rows_of_rank
from groupwise.errors import ConfigError, RewardError, check_counts
from groupwise.generation.base import RUN_SETTINGS
from groupwise.generation.transformers_backend import TransformersBackend
from groupwise.hf.arguments import check_methods, is_overridden
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.records import (
    Completion,
    LogprobOutput,
    Mode,
    RewardBatch,
    RolloutBatch,
    RolloutRequest,
    Row,
    SamplingOptions,
    TokenBatch,
)
from groupwise.reporting.metrics import reward_metrics, rollout_metrics
from groupwise.tokenization.images import insert_images
from groupwise.tokenization.text import is_truncated
from groupwise.trl_hooks.attributes import TrlAttributes
from groupwise.trl_hooks.checks import (
    IMAGE_INPUTS,
    NO_REF_LOGPS,
    NOT_CALLED_WITH_TOOLS,
    REFUSED_METHODS,
    check_objective,
    check_settings,
    refuse_images,
    refuse_resampling,
    warn_of_callbacks,
)
from groupwise.trl_hooks.config import GRPOConfig
from groupwise.trl_hooks.inputs import (
    Inputs,
    has_gaps,
    loss_mask,
    make_inputs,
    micro_batch,
    model_inputs,
    shuffle_rows,
    split_rows,
    token_batch,
)
from groupwise.trl_hooks.state import (
    InputsBuffer,
    ListMetricBuffer,
    extend_logs,
    logged_rows,
    make_logs,
)


class GRPOTrainer(TrlAttributes, pipeline.GRPOTrainer):
    """Group relative policy optimisation for subclasses and scripts written for TRL's trainer.

    The step is TRL's: every micro-batch begins with the rows of its generation batch. TRL's hooks are called
    by it and by the verbs of :class:`groupwise.GRPOTrainer`::

        training_step, prediction_step -> _prepare_inputs(rows) -> dictionary of the micro-batch
            _generate_and_score_completions(rows) -> dictionary of the generation batch, once for each
                generate_rollouts -> _generate(prompts) -> _tokenize_prompts, _generate_single_turn
                compute_rewards -> _calculate_rewards(rows, prompts, completions, ids) -> (N, F), all ranks
                make_experience -> _get_per_token_logps_and_entropies
            compute_loss -> _compute_loss(model, dictionary) -> scalar
                _get_per_token_logps_and_entropies, get_high_entropy_mask

    As in TRL, the rows of a generation batch are shuffled before they are split, every micro-batch is
    computed as it is, and the loss is divided per micro-batch. Rows are therefore neither rebalanced nor
    skipped, and a micro-batch that does not fit in memory is an error.

    Args and Raises: as :class:`groupwise.GRPOTrainer`.
    """

    config_class = GRPOConfig
    missing_sampling_mask_reason = (
        "TRL's hooks pass completions without the sampling mask (groupwise.GRPOTrainer records it)"
    )
    buffer_class = InputsBuffer  # type: ignore[assignment]
    metrics_class = ListMetricBuffer
    buffer: InputsBuffer  # type: ignore[assignment]
    metrics: dict[str, ListMetricBuffer]  # type: ignore[assignment]

    _request: RolloutRequest | None = None  # of the rollout in progress
    _rollouts: RolloutBatch | None = None  # returned by the default _generate
    _rewards: RewardBatch | None = None  # returned by the default _calculate_rewards
    _sampling: SamplingOptions | None = None  # of the turn in progress
    _records_rollouts = False  # the caller of _generate records metrics of its rollouts

    def _set_up(self, rollout_func: Any, agents: Any, backend: Any) -> None:
        super()._set_up(rollout_func, agents, backend)
        if backend is None and isinstance(self.backend, TransformersBackend):
            # The completions of TRL on the same seed, unless the user chooses groupwise's decoding loop.
            self.backend.stock_decoding = self.args.cache_implementation != "auto"
        self.backend.generator = None  # as TRL: samples, shuffles and seeds of loaders share the global one
        check_settings(self.args, self.processing_class, self.curriculum)
        self.check_overrides()  # again: now it is known whether there are tools
        #: Columns of the completions table, the newest generation batch; hooks may extend them.
        self._logs = make_logs(self.args.generation_batch_size)
        #: Columns and metrics of hooks that are not in ``_logs`` and ``_metrics`` yet.
        self._pending_extra_logs: defaultdict[str, list[Any]] = defaultdict(list)
        self._pending_metrics: defaultdict[str, list[float]] = defaultdict(list)

    def _reset_run_state(self, directory: str | None) -> None:
        warn_of_callbacks(self.callback_handler.callbacks)
        super()._reset_run_state(directory)
        if directory is not None and not self.args.ignore_data_skip:
            self.buffer.read_rows_again(self.prompts, self.args)

    def refresh_settings(self, *, new_run: bool = False) -> None:
        super().refresh_settings(new_run=new_run)
        check_objective(self.args)

    def check_overrides(self) -> None:
        """Refuse overrides that TRL's step does not call here."""
        has_tools = getattr(self, "agents", None) is not None  # unknown before the trainer is built
        refused = {**REFUSED_METHODS, **(NOT_CALLED_WITH_TOOLS if has_tools else {})}
        check_methods(self, refused, "Settings and records of groupwise.GRPOTrainer replace them")

    def may_have_placeholder_logps(self) -> bool:
        """Return True also for log-probs of a hook: as in TRL, only those of vLLM correct the loss."""
        return super().may_have_placeholder_logps() or isinstance(self.backend, TransformersBackend)

    def check_layout(self, batch: TokenBatch) -> None:
        # A hook may compute a model that no layout does; the trainer's own method checks at its first call.
        if not is_overridden(self, "_get_per_token_logps_and_entropies"):
            super().check_layout(batch)

    def loader_generator(self) -> torch.Generator | None:
        """Return None: as with TRL's loader, a seed is drawn from the global generator at every epoch."""
        return None

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of prompts for ``Trainer``, which counts this loader; iterating it is refused."""
        if isinstance(dataloader.batch_sampler, GenerationBatches):  # not a loader of a subclass
            dataloader.batch_sampler.make_source = refuse_resampling
        return super().num_examples(dataloader)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the order of the rows of an evaluation, that of TRL; groups stay together."""
        size = self.args.generations_per_eval_prompt
        generator = torch.Generator().manual_seed(self.args.seed)
        groups = torch.randperm(len(eval_dataset) // size, generator=generator).tolist()
        return [group * size + row for group in groups for row in range(size)]

    # One optimizer step, in the order in which it happens.

    def get_batch_samples(  # type: ignore[override]
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[list[Row]], Any]:
        """Begin an optimizer step and read the rows of its micro-batches, when TRL's loader reads them.

        Returns:
            per micro-batch the rows of its whole generation batch, B of this rank, as from TRL's loader.
        """
        self.buffer.read_prompts(self.prompts, num_batches, self.args)  # a sampler may depend on rewards
        super().get_batch_samples(epoch_iterator, num_batches, device)
        with self.rollback_on_failure():
            entries = [self.buffer.next_rows(self.prompts, self.args) for _ in range(num_batches)]
        return entries, self._get_num_items_in_batch(entries, device)

    def _begin_window(self) -> None:
        """Apply changed settings, once per optimizer step, after ``on_step_begin``."""
        if not self.window.is_made:
            self.window.is_made = True
            self.begin_update()
            self.refresh_settings()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of one micro-batch.

        Args:
            inputs: rows of its generation batch, or what :meth:`_prepare_inputs` returned for them.

        Returns:
            its loss, detached.
        """
        self._begin_window()
        last, metrics = self.accelerator.sync_gradients, self.metrics["train"]
        with metrics.phase("train", wait=last):
            # Without recovery from out-of-memory errors: rows do not say which micro-batch to repeat.
            loss = Trainer.training_step(self, model, inputs, num_items_in_batch)
        self._step += 1
        if not is_overridden(self, "training_step"):  # else the loss to log is what the override returns
            # The losses of a window add up, and a window counts once; unlike Trainer's sum, this is resumed.
            metrics.record({"loss": Mean(loss.detach(), 1 / self.current_gradient_accumulation_steps)})
        if last:  # the optimizer steps next
            metrics.record(self.window.stats.metrics())
            self._end_window()
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Inputs:  # type: ignore[override]
        """Return the dictionary of the micro-batch that ``_step`` selects, or of an evaluation batch.

        In training, a generation batch is sampled and rewarded, its rows are shuffled and split. The mode is
        that of the model.

        Args:
            generation_batch: rows, B of this rank, G per prompt. A dictionary is returned as it is.
        """
        if isinstance(generation_batch, Mapping):
            return cast(Inputs, generation_batch)
        if not self.model.training:
            with torch.no_grad():
                return self._make_inputs(generation_batch, "eval")
        self._begin_window()
        if self.buffer.is_empty:
            with self.rollback_on_failure():
                inputs = shuffle_rows(self._make_inputs(generation_batch, "train"))
                self.buffer.fill(
                    split_rows(inputs, self.args.steps_per_generation),  # type: ignore[arg-type]
                    self.args.num_iterations,
                )
        self.window.current = inputs = self.buffer.current
        _, mask = model_inputs(inputs)  # (B, L + T)
        stats, tokens = self.window.stats, int(mask.sum())  # every row is computed, with its padding
        self.window.stats = replace(
            stats,
            rows=stats.rows + len(mask),
            tokens=stats.tokens + tokens,
            computed_tokens=stats.computed_tokens + mask.numel(),
            padding_tokens=stats.padding_tokens + mask.numel() - tokens,
        )
        return inputs

    def _make_inputs(self, rows: list[Row], mode: Mode) -> Inputs:
        """Sample and reward completions for dataset rows with the weights of this step."""
        self.sync_sampler(mode)
        self._request = self.make_request(rows, mode=mode)
        inputs = self._generate_and_score_completions(rows)
        self.backend.release()  # memory of a colocated engine goes to training
        return inputs

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Generate, reward and evaluate the loss of one evaluation batch, B rows of this rank."""
        with torch.no_grad():
            batch = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, batch).mean().detach()
        num_valid = num_valid_rows(inputs, self.accelerator.gradient_state)
        # The losses of the ranks average to that of the batch, which counts by its rows.
        share = len(inputs) if num_valid is None else num_valid / self.args.world_size
        self.metrics["eval"].record({"loss": Mean(loss * share, share)})
        return loss, None, None

    # Hooks of generation.

    def generate_rollouts(self, request: RolloutRequest) -> RolloutBatch:
        """Sample one completion per row of ``request`` with :meth:`_generate`.

        Raises:
            ConfigError: :meth:`_generate` returned another number of completions than there are rows.
        """
        self._request, self._rollouts = request, None
        prompts = [insert_images(row) for row in request.rows]
        self._records_rollouts = True
        try:
            prompt_ids, completion_ids, tool_mask, texts, logps, extra, *_ = self._generate(prompts)
        finally:
            self._records_rollouts = False
        check_counts(
            "_generate",
            len(prompts),
            prompts=len(prompt_ids),
            completions=len(completion_ids),
            texts=len(texts),
        )
        columns = {  # a single value counts for all rows
            name: list(values) if isinstance(values, list) else [values] * len(prompts)
            for name, values in (extra or {}).items()
        }
        # An override without super() leaves none.
        base = self._rollouts or RolloutBatch(request.rows, prompts, prompt_ids, [], texts)
        return replace(
            base,
            rows=request.rows,
            prompt_ids=[list(ids) for ids in prompt_ids],
            completions=self._completions(completion_ids, logps, tool_mask or None, base.completions),
            texts=list(texts),
            extra=columns,
            row_ids=range(len(prompts)),
            **request.kept_fields(),
        )

    def _completions(
        self,
        token_ids: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float | None]] | None,
        loss_masks: Sequence[Sequence[int]] | None = None,
        known: Sequence[Completion] = (),
    ) -> list[Completion]:
        """Return one record per row: the sampler's, in ``known``, where a hook has left its tokens alone."""
        completions = []
        for row, given in enumerate(token_ids):
            ids = [int(token) for token in given]
            if known and known[row].token_ids == ids:
                completion = known[row]
            else:
                completion = Completion(ids, truncated=is_truncated(ids, self.backend.end_tokens))
            row_logps = None if logps is None else [torch.nan if v is None else float(v) for v in logps[row]]
            row_mask = None if loss_masks is None else [int(value) for value in loss_masks[row]]
            completions.append(replace(completion, logps=row_logps, loss_mask=row_mask))
        return completions

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Sample completions for ``prompts``, B of this rank; the G copies of a prompt are adjacent.

        Returns:
            B entries each: prompt token ids, completion token ids, masks of 1 for sampled tokens and 0 for
            those of tools (None: all sampled), completions as the rewards receive them, the sampler's
            log-probs (None: it reports none), a dictionary of further columns, images (None), tool images
            (an empty list).
        """
        request = self._request_of(prompts)
        self.sync_sampler(request.mode)
        if self.agents is not None:
            rollouts = self.run_agents(request, self._generate_turn)
        elif self.rollout_func is not None:
            rollouts = self._call_rollout_func(self.rollout_func, request)
        else:
            prompt_ids, images, fields = self._tokenize_prompts(prompts)
            completions = self._sample_turn(prompt_ids, images, fields, request.num_generations)
            rollouts = self.make_rollouts(request, prompt_ids, completions)
        self._rollouts = rollouts
        if not self._records_rollouts:  # called by a hook
            self.metrics[request.mode].record(rollout_metrics(rollouts, self.state.global_step))
        given = rollouts.completions
        return (
            rollouts.prompt_ids,
            [completion.token_ids for completion in given],
            _by_row([completion.loss_mask for completion in given], given, 1),
            rollouts.texts,
            _by_row([completion.logps for completion in given], given, torch.nan),
            {name: values for name, values in rollouts.extra.items() if name != "environments"},
            None,
            [],
        )

    def _request_of(self, prompts: list[Any]) -> RolloutRequest:
        """Return the request of the batch in progress with these prompts in its rows."""
        mode: Mode = "train" if self.model.training else "eval"
        generations = self.num_generations if mode == "train" else self.args.generations_per_eval_prompt
        request = self._request or RolloutRequest([], generations, mode=mode)
        rows: list[Row] = request.rows if len(request.rows) == len(prompts) else [{} for _ in prompts]
        return replace(request, rows=[{**row, "prompt": p} for row, p in zip(rows, prompts, strict=True)])

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Return the token ids of the prompts, images (None) and further model inputs (none)."""
        ids, _ = self.tokenize(self._request_of(prompts).rows)
        return ids, None, {}

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Sample one completion per prompt; with tools, one turn of every rollout.

        Returns:
            completion token ids, up to the end token, and the sampler's log-probs (None: it reports none).
        """
        sampling = self._sampling
        if sampling is None or len(sampling.max_tokens or prompt_ids) != len(prompt_ids):
            kwargs = {} if self._request is None else self._request.generation_kwargs
            sampling = SamplingOptions(generation_kwargs=kwargs)
        completions = self.backend.generate(prompt_ids, sampling)
        ids = [list(completion.token_ids) for completion in completions]
        return ids, _by_row([completion.logps for completion in completions], completions, torch.nan)

    def _generate_turn(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        """Sample one turn with the hook: ``GenerationBackend.generate`` of the agents."""
        self._sampling = sampling
        try:
            given = [list(prompt) for prompt in prompts]
            size = 1 if self._request is None else self._request.num_generations
            # After the first turn the G rollouts of a prompt have different histories.
            grouped = all(ids == given[row - row % size] for row, ids in enumerate(given))
            return self._sample_turn(given, None, {}, size if grouped and len(given) % size == 0 else 1)
        finally:
            self._sampling = None

    def _sample_turn(
        self, prompt_ids: list[list[int]], images: Any, fields: dict[str, Any], group_size: int
    ) -> list[Completion]:
        """Sample with :meth:`_generate_single_turn`, and check that it returned one completion per prompt."""
        ids, logps = self._generate_single_turn(prompt_ids, images, fields, group_size)
        counts = {"completions": len(ids)} | ({} if logps is None else {"lists of log-probs": len(logps)})
        check_counts("_generate_single_turn", len(prompt_ids), **counts)
        return self._completions(ids, logps)

    # Hooks of the rewards.

    def compute_rewards(self, rollouts: RolloutBatch) -> RewardBatch:
        """Compute the rewards of all ranks with :meth:`_calculate_rewards`.

        Raises:
            RewardError: a reward function failed, or the hook returned another number of rows or columns.
        """
        extra = rollouts.extra
        rows = zip(rollouts.rows, *extra.values(), strict=True)
        inputs = [{**row, **dict(zip(extra, values, strict=True))} for row, *values in rows]
        self._rewards = None
        completion_ids = [list(completion.token_ids) for completion in rollouts.completions]
        given = self._calculate_rewards(inputs, rollouts.prompts, rollouts.texts, completion_ids)
        world_size = self.accelerator.num_processes
        expected = (len(rollouts) * world_size, len(self.reward_weights))
        if tuple(given.shape) != expected:
            raise RewardError(
                f"_calculate_rewards returned a tensor of shape {tuple(given.shape)}; it must have shape "
                f"{expected}: the completions of all {world_size} process(es), gathered in rank order, by "
                f"the {expected[1]} reward function(s)"
            )
        rewards_NF = given.detach().float().cpu()[: rollouts.num_valid]
        # An override without super() leaves none.
        none = RewardBatch(rewards_NF, self.reward_weights, rollouts.num_generations, local=slice(0, 0))
        base = self._rewards or none
        steps = {i: values[: rollouts.num_valid] for i, values in base.step_rewards.items()}
        rewards = replace(
            base,
            rewards_NF=rewards_NF,
            step_rewards=steps,
            weights_F=self.reward_weights,
            num_generations=rollouts.num_generations,
            local=rows_of_rank(self.accelerator.process_index, len(rollouts)),
        )
        computed = reward_metrics(rewards, self.reward_func_names, self.args.multi_objective_aggregation)
        return replace(rewards, metrics={**base.metrics, **computed})

    def _calculate_rewards(
        self,
        inputs: list[Row],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """Call the reward functions on this rank's completions.

        Args:
            inputs: dataset rows, with the columns of a ``rollout_func``.

        Returns:
            (N, F) float32 on the training device: the rewards of all ranks, gathered, NaN for None.
        """
        rollouts = RolloutBatch(
            rows=inputs,
            prompts=prompts,
            prompt_ids=[[]] * len(prompts),
            completions=[Completion(list(ids)) for ids in completion_ids_list],
            texts=completions,
            num_generations=self.num_generations if self._request is None else self._request.num_generations,
            mode="train" if self.model.training else "eval",
            extra={} if self.environments is None else {"environments": self.environments},
        )
        with self.rng.user_code():  # a changed copy of TRL's step may call this hook itself
            self._rewards = super().compute_rewards(rollouts)
        return self._rewards.rewards_NF.to(self.accelerator.device)

    def _log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric of the next log, averaged over ranks."""
        self._metrics["train" if self.model.training else "eval"][name].append(float(value))

    def _log_completion_extra(self, column: str, values: list[Any]) -> None:
        """Add a column to the completions table, one value per completion of this rank."""
        self._pending_extra_logs[column].extend(values)

    def _flush_pending(self, mode: str) -> None:
        """Add pending columns of all ranks to ``_logs``, and pending metrics to ``_metrics``."""
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            values = self._pending_extra_logs.get(column, [])
            self._logs["extra"][column].extend(gather_object(values))
        self._pending_extra_logs.clear()
        for name, numbers in self._pending_metrics.items():
            self._metrics[mode][name].extend(numbers)
        self._pending_metrics.clear()

    # Hooks of the generation batch.

    def _generate_and_score_completions(self, inputs: list[Row]) -> Inputs:
        """Generate completions for dataset rows, B of this rank, and compute rewards and advantages.

        Returns:
            this rank's rows as a dictionary of tensors; see :func:`groupwise.trl_hooks.inputs.make_inputs`.
        """
        training = self.model.training
        if training:
            self._begin_window()
        request = self.make_request(inputs, mode="train" if training else "eval")
        rollouts, rewards = self.sample(request)
        if training:
            self.call_callbacks("on_generation_end", rollouts=rollouts, rewards=rewards)
        else:
            self.evaluation.add(rollouts, rewards, self.args, self.compute_metrics, self.metrics_column)
        # TRL's rule for old log-probs, in training and in evaluation: the sampler correction needs them.
        settings, given = self.objective_settings, [completion.logps for completion in rollouts.completions]
        corrects = settings.vllm_importance_sampling_mode is not None and any(v is not None for v in given)
        on_policy = self.args.trains_on_policy and not corrects
        (experience,) = self.make_experience(rollouts, rewards, len(rollouts), on_policy=on_policy)
        metrics = self.metrics[request.mode]
        metrics.rows = []  # the table is made from ``_logs``
        extend_logs(self._logs, rollouts, rewards, experience.advantages_BX.mean(1), self.reward_func_names)
        self._flush_pending(request.mode)
        # The dictionary has the factor, which a hook may change; the loss takes it from there.
        sampler_logps_BT = None if on_policy else experience.sampler_logps_BT  # else without old log-probs
        mask_BT = experience.loss_mask_BT.to(experience.old_logps_BT.dtype)
        correction_BX, values = correction(experience.old_logps_BT, sampler_logps_BT, mask_BT, settings)
        # In TRL means of the means of ranks, however many tokens each has.
        metrics.record({n: Mean(v.value()) if isinstance(v, Mean) else v for n, v in values.items()})
        return make_inputs(
            experience,
            self.accelerator.gather(experience.loss_mask_BT.sum()).sum(),
            correction_BX=correction_BX,
            with_tool_mask=any(completion.loss_mask is not None for completion in rollouts.completions),
        )

    # Hooks of log-probs and loss.

    def _logps_of_rows(
        self, model: nn.Module, tokens: TokenBatch, only: Sequence[int] | None, fill: float = 0.0
    ) -> torch.Tensor:
        """(B, T) log-probs of all rows, by the hook."""
        args = self.args
        size = args.per_device_train_batch_size if self._mode == "train" else args.per_device_eval_batch_size
        logps_BT, _, _ = self._get_per_token_logps_and_entropies(
            model, *tokens.sequences(), tokens.completion_ids_BT.shape[1], batch_size=size
        )
        return logps_BT

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        num_images: Any = None,
        pixel_attention_mask: Any = None,
        spatial_shapes: Any = None,
        num_tiles: Any = None,
        image_sizes: Any = None,
        token_type_ids: Any = None,
        mm_token_type_ids: Any = None,
        image_position_ids: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute log-probs of the last ``logits_to_keep`` tokens at the sampling temperature.

        Args:
            model: policy or reference, wrapped or not.
            input_ids, attention_mask: (B, L + T), prompts and completions.
            logits_to_keep: T.
            batch_size: rows per forward pass; None: all.
            compute_entropy: also compute entropies.
            compute_aux_loss: also compute the balancing loss of a mixture of experts.
            pixel_values: and all others must be None, as images are not supported.

        Returns:
            log-probs and entropies (B, T), float32, 0 where the mask is 0; the balancing loss, a scalar. The
            latter two are None unless requested.
        """
        refuse_images(locals())
        size, sampler = batch_size or len(input_ids), sampler_settings(self.args)
        rows = zip(input_ids.split(size), attention_mask.split(size), strict=True)
        parts = [replace(token_batch(*each, logits_to_keep), sampler=sampler) for each in rows]
        compute: Callable[..., LogprobOutput] = self.logprob_computer
        if has_gaps(attention_mask, logits_to_keep):
            # Masked tokens inside a sequence are hidden from attention, but counted. Other layouts, and a
            # selection of rows, would take them out of the sequence and move the others together.
            compute = partial(compute_padded_logprobs, head=self.logprob_computer.head)
        else:
            parts = [part.select(range(len(part))) for part in parts]  # each without columns of padding
        outputs = [
            compute(model, part, with_entropy=compute_entropy, with_aux_loss=compute_aux_loss)
            for part in parts
        ]

        def joined(values: list[torch.Tensor]) -> torch.Tensor:
            """(B, T), 0 where the mask is 0."""
            padded = [F.pad(part, (0, logits_to_keep - part.shape[1])) for part in values]
            return torch.cat(padded).masked_fill(attention_mask[:, -logits_to_keep:] == 0, 0.0)

        entropies = [output.entropy_BT for output in outputs if output.entropy_BT is not None]
        aux_losses = [output.aux_loss for output in outputs if output.aux_loss is not None]
        return (
            joined([output.logps_BT for output in outputs]),
            joined(entropies) if entropies else None,
            torch.stack(aux_losses).mean() if aux_losses else None,
        )

    def get_high_entropy_mask(
        self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float
    ) -> torch.Tensor:
        """Select the tokens whose entropy is at least the ``threshold`` quantile over all ranks.

        Args:
            entropies, mask: (B, T).
            threshold: quantile between 0 and 1.

        Returns:
            (B, T) bool, False off the mask.
        """
        local = entropies[mask.bool()].float()
        # An entropy is never negative, so padding cannot be mistaken for one.
        gathered = self.accelerator.gather(self.accelerator.pad_across_processes(local, pad_index=-1.0))
        lowest = entropy_threshold(gathered[gathered >= 0], 1 - threshold)
        return (entropies * mask >= lowest.to(entropies)) & mask.bool()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of one micro-batch with :meth:`_compute_loss`.

        Raises:
            ValueError: ``return_outputs=True``, as in TRL.
        """
        if return_outputs:
            raise ValueError("return_outputs=True: this trainer returns no outputs; use return_outputs=False")
        return self.check_gradient(self._compute_loss(model, inputs), "_compute_loss")

    def _compute_loss(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """Compute the loss of one micro-batch, divided as TRL divides it.

        Means over sequences or tokens of the micro-batch are divided by the number of micro-batches of the
        window; ``dapo``, ``cispo`` and ``vespo`` divide by the share of ``num_items_in_batch`` in one window.

        Args:
            inputs: dictionary of the micro-batch, which a hook may have changed.

        Returns:
            scalar, differentiable.

        Raises:
            ConfigError: ``beta`` needs reference log-probs, and the dictionary has none.
        """
        args = self.args
        if args.beta > 0 and not args.kl_in_reward and inputs.get("ref_per_token_logps") is None:
            raise ConfigError(NO_REF_LOGPS.format(beta=args.beta))
        mask_BT = loss_mask(inputs)
        logps_BT, entropy_BT, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            *model_inputs(inputs),
            mask_BT.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None},
        )
        entropy_mask_BT = mask_BT.float()
        if args.top_entropy_quantile < 1.0:
            quantile = 1 - args.top_entropy_quantile
            entropy_mask_BT = entropy_mask_BT * self.get_high_entropy_mask(entropy_BT, mask_BT, quantile)  # type: ignore[arg-type]
        training = self.model.training
        num_batches = self.current_gradient_accumulation_steps if training else 1  # of the window
        entropy_weights_BT = None
        if args.has_entropy_bonus:  # a mean over the micro-batch
            coef = self.entropy_control.applied(args.entropy_target if args.use_adaptive_entropy else None)
            num_tokens = entropy_mask_BT.sum().clamp(min=1)
            entropy_weights_BT = entropy_mask_BT * coef / (num_tokens * num_batches)
        batch = micro_batch(
            inputs,
            token_weights_BT=self._token_weights(inputs, mask_BT, num_batches),
            entropy_mask_BT=(entropy_mask_BT != 0).float(),  # a mask of weights counts once, as token weights
            entropy_weights_BT=entropy_weights_BT,
            share=1 / num_batches,
        )
        output = self.compute_policy_loss(batch, LogprobOutput(logps_BT, entropy_BT, aux_loss))
        output = self.add_aux_loss(output, aux_loss, batch)
        # Those of the sampler were recorded with the generation batch.
        metrics = {name: value for name, value in output.metrics.items() if not name.startswith("sampling/")}
        policy_loss = metrics.get("policy_loss")
        if OBJECTIVES[args.loss_type].normalizer == "token_mean" and isinstance(policy_loss, Mean):
            metrics["policy_loss"] = Mean(policy_loss.total)  # in TRL the part of this micro-batch
        self.metrics["train" if training else "eval"].record(metrics)
        if training and batch.entropy_weights_BT is not None and entropy_BT is not None:
            self.window.entropy = self.window.entropy.merge(masked_mean(entropy_BT, entropy_mask_BT))
        if training and self.accelerator.sync_gradients:  # the last micro-batch of the window
            self.metrics["train"].record(self.update_entropy_coef(self.window.entropy))
            self.window.entropy = Mean(0.0, 0.0)  # a repeated training_step adapts it again, as in TRL
        return output.loss

    def _token_weights(self, inputs: Inputs, mask_BT: torch.Tensor, num_batches: int) -> torch.Tensor:
        """Compute (B, T) weights from the counts that TRL divides by."""
        world_size, name = self.accelerator.num_processes, OBJECTIVES[self.args.loss_type].normalizer
        num_tokens = 0.0
        if name == "token_mean" or "num_items_in_batch" in inputs:
            # Loss tokens of the generation batch on all ranks, rescaled to one window.
            num_tokens = float(inputs["num_items_in_batch"].clamp(min=1.0))
            if self.model.training:
                num_tokens *= num_batches / self.args.steps_per_generation  # type: ignore[operator]
        counts = WindowCounts(
            sequences=len(mask_BT) * num_batches * world_size,
            tokens=num_tokens,  # type: ignore[arg-type]
            micro_batches=num_batches,
            world_size=world_size,
            max_completion_length=self.args.max_completion_length,
        )
        return NORMALIZERS[name](mask_BT.float(), torch.arange(len(mask_BT), device=mask_BT.device), counts)

    def floating_point_ops(self, inputs: Any) -> int:
        batch = self.window.current  # a dictionary
        return 0 if batch is None else int(self.flops_per_token * model_inputs(batch)[0].numel())

    # Logs.

    @property
    def _metrics(self) -> Mapping[str, defaultdict[str, list[float]]]:
        """Values since the last log by mode and name, logged as their mean over all ranks."""
        return MappingProxyType({mode: metrics.lists for mode, metrics in self.metrics.items()})

    @_metrics.setter
    def _metrics(self, lists: Mapping[str, Mapping[str, list[float]]]) -> None:
        for mode, metrics in self.metrics.items():
            metrics.lists.clear()
            metrics.lists.update(lists[mode])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; what an overridden ``log`` added to the metrics of an evaluation is included, as in TRL."""
        metrics = self.metrics["eval"]
        if any(name.startswith("eval_") for name in logs) and any(gather_object([bool(metrics.lists)])):
            names = list(metrics.lists)
            values, _ = metrics.drain(lambda part: gather_object([part]))
            logs.update({f"eval_{name}": values[name] for name in names if name in values})
        super().log(logs, start_time)

    def drain_metrics(self, mode: str, label: str) -> dict[str, float]:
        self._flush_pending(mode)
        if self.args.log_completions and self.is_world_process_zero():
            self.metrics[mode].rows = logged_rows(self._logs, self.state.global_step)
        return super().drain_metrics(mode, label)


def _by_row(
    values: Sequence[list[Any] | None], completions: Sequence[Completion], fill: float
) -> list[list[Any]] | None:
    """Return a list of values per completion, ``fill`` where one has none; None if all have none."""
    if all(row is None for row in values):
        return None
    return [row or [fill] * len(c.token_ids) for row, c in zip(values, completions, strict=True)]
