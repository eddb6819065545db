"""``transformers.Trainer`` with atomic checkpoints, exact resume and recovery from out-of-memory errors."""

from __future__ import annotations

import gc
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy, TrainOutput

from groupwise.compat import transformers as compat_transformers
from groupwise.compat.deepspeed import end_universal
from groupwise.config.changes import resume_settings
from groupwise.config.fields import UNPUBLISHED
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import RankStages, is_sharded
from groupwise.errors import ConfigError, TrainingError, checked_entries
from groupwise.hf import checkpointing
from groupwise.hf.arguments import averages_weights, check_optimizer, check_processes, unwrapped_optimizer
from groupwise.hf.callbacks import FlagAgreementCallback, SyncRefModelCallback
from groupwise.hf.out_of_memory import OutOfMemorySplitter
from groupwise.hf.run_directory import RunDirectory, checkpoints
from groupwise.hf.step_state import Stateful, StepState
from groupwise.policy.introspection import has_adapter
from groupwise.policy.loading import set_ddp_defaults
from groupwise.policy.recomputation import make_recomputation
from groupwise.policy.reference import Reference
from groupwise.random_state import RandomState
from groupwise.records import MicroBatch, Mode
from groupwise.records.fast_paths import FastPath
from groupwise.reporting.callback import GRPOCallback
from groupwise.reporting.evaluation import ComputeMetrics, EvaluationMetrics
from groupwise.reporting.metrics import MetricBuffer
from groupwise.reporting.metrics_file import MetricsFileCallback
from groupwise.reporting.terminal import show_log_lines
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.text import ProcessingClass, text_tokenizer

if TYPE_CHECKING:  # of what the trainer hands over
    from groupwise.data.loaders import TrainerData
    from groupwise.generation.base import GenerationBackend

logger = logging.getLogger(__name__)


class BaseTrainer(Trainer):
    """Everything that is changed about ``transformers.Trainer`` and is not about GRPO.

    Hooks of ``Trainer`` that this class overrides. `Since` is the oldest supported transformers version in
    which the hook was seen with this signature.

    ====================================  =====  ===============================================
    Hook                                  Since  Reason
    ====================================  =====  ===============================================
    ``train``                             5.2    state of an earlier run is dropped
    ``training_step``                     5.2    after an out-of-memory error, smaller pieces
    ``log``                               5.2    training logs also contain the metrics of all ranks
    ``evaluate``                          5.2    one of another dataset leaves the evaluation that is due
    ``predict``                           5.2    its completions are reported without a log
    ``evaluation_loop``                   5.2    its metrics also contain those of generation and rewards
    ``get_train_dataloader``              5.2    its items are counted; a run reads ``prompts``
    ``_get_train_sampler``                5.2    the order is that of groups
    ``num_examples``                      5.2    prompts, not completions
    ``get_eval_dataloader``               5.2    every row comes ``num_generations_eval`` times
    ``get_test_dataloader``               5.2    the same
    ``create_model_card``                 5.2    the card describes GRPO and the settings of the run
    ``_set_signature_columns_if_needed``  5.2    columns of the dataset are not arguments of ``model.forward``
    ``_prepare_inputs``                   5.2    micro-batches are already on the device
    ``_get_grad_norm``                    5.3    stop before an update with non-finite gradients
    ``_get_output_dir``                   5.2    checkpoints are written to a staging directory first
    ``_save_checkpoint``                  5.2    a checkpoint is renamed when it is complete
    ``_save``                             5.2    the tokenizer is saved with the padding side of the model
    ``_save_rng_state``                   5.2    inside a step, the state at its beginning is saved
    ``_push_from_checkpoint``             5.2    upload after the checkpoint is renamed, with ``hub_include``
    ``push_to_hub``                       5.2    only the data that ``hub_include`` names are uploaded
    ``_load_from_checkpoint``             5.2    every adapter is loaded, renamed weights are converted
    ``_load_best_model``                  5.2    the same
    ``_load_optimizer_and_scheduler``     5.2    states of other classes are refused, a finished run ends
    ``_load_rng_state``                   5.2    restored before, not after the first generation
    ====================================  =====  ===============================================
    """

    args: GRPOConfig  # type: ignore[assignment]
    metrics: dict[str, MetricBuffer]
    reward_func_names: list[str]
    _components: dict[str, Stateful]  # by their name in checkpoints
    # Methods of GRPOTrainer.
    split_micro_batch: Callable[..., list[MicroBatch]]
    window_state: Callable[[], list[Stateful]]
    fast_paths: Callable[[], list[FastPath]]
    refresh_settings: Callable[..., None]
    check_overrides: Callable[[], None]
    _reset_run_state: Callable[[str | None], None]
    backend: GenerationBackend
    reference: Reference
    _tag_names: Sequence[str] = ()  # TRL's name: tags of a subclass in its model cards
    _mode: Mode = "train"  # "eval" during an evaluation, for record_metric

    def __init__(
        self,
        model: PreTrainedModel,
        args: GRPOConfig,
        *,
        train_dataset: Any,
        eval_dataset: Any,
        data: TrainerData,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        callbacks: list[TrainerCallback] | None,
        optimizers: tuple[Any, Any],
        compute_metrics: ComputeMetrics | None,
    ) -> None:
        check_optimizer(optimizers[0], model.named_parameters(), optimizers[1])
        saved_use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(
            model=model,
            args=args,
            data_collator=data.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            compute_metrics=compute_metrics,
        )
        # Trainer sets it to False, and checkpoints would have that; every forward here passes the argument.
        if saved_use_cache is not None:
            model.config.use_cache = saved_use_cache
        check_processes(args, getattr(self.accelerator, "parallelism_config", None))
        set_ddp_defaults(self.accelerator, args, model, with_images=is_processor(processing_class))
        compat_transformers.mark_loss_as_scaled(self)  # token weights add up over the accumulation window
        self.prepared_data = data
        self.evaluation = EvaluationMetrics()
        self.pending_rng_checkpoint: str | None = None
        self.resumed_optimizer: list[str] = []  # optimizer_classes() of the checkpoint
        self.applied_on_resume: Collection[str] = ()  # changed settings that a callback applies
        self._digests = checkpointing.ModelDigests()
        self.rng = RandomState(args.device)
        self.run_directory = RunDirectory(args)
        self.stages = RankStages(args.process_index, args.world_size, args.ddp_timeout)
        self.recomputation = make_recomputation(args, self.accelerator)
        self.splitter = OutOfMemorySplitter(
            self.accelerator,
            training_step=super().training_step,
            split=self.split_micro_batch,
            window_state=self.window_state,
            free_activations=lambda: self.recomputation is not None and self.recomputation.halve(),
        )
        self._window_loss: torch.Tensor | None = None
        self._logged_step = 0  # metrics up to this step are logged
        self._unreported: list[tuple[Any, ...]] = []  # completions of the next log
        self.step_state = StepState(lambda: self.state.global_step, lambda: self._components)
        _add_callbacks(self, args)

    # Training.

    def call_callbacks(self, event: str, **records: Any) -> None:
        """Call an event of :class:`groupwise.GRPOCallback`; ``Trainer`` calls those that it knows."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, GRPOCallback):
                getattr(callback, event)(self.args, self.state, self.control, **records)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; ``resume_from_checkpoint`` (True or a directory) continues exactly where it was saved.

        A run that has reached its last step is not trained further: its model is loaded, and no file changes.

        Raises:
            ConfigError: no parameter of the policy is trained.
        """
        self.check_overrides()  # a script may have replaced some
        if not any(parameter.requires_grad for parameter in cast(nn.Module, self.model).parameters()):
            raise ConfigError(
                f"no parameter of the {type(self.model).__name__} requires a gradient, so that training "
                "would change nothing; pass peft_config to train an adapter, or model.requires_grad_(True)"
            )
        with frozen_objects(), self.run_directory.open(resume_from_checkpoint) as directory:
            self.splitter.reset()  # no state of an earlier call
            self._window_loss, self.current_flos, self._logged_step = None, 0, 0
            if directory is not None:
                checkpointing.check_adapters(directory, cast(nn.Module, self.model))
            self._reset_run_state(directory)
            self.call_callbacks("on_run_begin", directory=directory and Path(directory))
            self.run_directory.move_aside()
            if jit := self.pop_callback(JITCheckpointCallback):
                self.add_callback(jit)  # saves when the other callbacks have completed the step
            self.pop_callback(FlagAgreementCallback)
            self.add_callback(FlagAgreementCallback)  # the last one sees all flags
            try:
                output = super().train(directory, trial, ignore_keys_for_eval)
                if averages_weights(self.optimizer):
                    cast(Any, self.optimizer).eval()  # the averages are the result, which save_model() writes
                return output
            except BaseException as error:
                for callback in self.callback_handler.callbacks:
                    if isinstance(callback, JITCheckpointCallback):  # a signal handler
                        callback.on_train_end(self.args, self.state, self.control)
                if not isinstance(error, _FinishedRunError):
                    if self.stages.others:
                        last = max(checkpoints(self.run_directory.path), default="none")
                        logger.error("%s; last checkpoint: %s", self.stages.describe_failure(error), last)
                    raise
            finally:
                if (noise := getattr(self, "neftune_hook_handle", None)) is not None:
                    noise.remove()
                self.is_in_train = False  # an interrupt leaves it True: evaluate() would be within the run
                self.backend.disconnect()
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                self._load_best_model()
                directory = self.state.best_model_checkpoint
            self.run_directory.finished = Path(str(directory))
            at, last = self.state.global_step, self.state.max_steps
            logger.warning("nothing is trained: step %d of %d is done; its model is %s", at, last, directory)
            return TrainOutput(at, 0.0, {})

    def begin_update(self) -> None:
        """Set model and optimizer to training mode before sampling, and check what the optimizer holds."""
        self.stages.enter(f"step {self.state.global_step + 1}")
        self.model_wrapped.train()
        if averages_weights(self.optimizer):
            cast(Any, self.optimizer).train()
        sharded = is_sharded(self.accelerator)  # then the optimizer holds other parameters than the model
        check_optimizer(self.optimizer, () if sharded else cast(nn.Module, self.model).named_parameters())

    def training_step(
        self,
        model: nn.Module,
        inputs: MicroBatch,  # type: ignore[override]
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch and return its loss, detached.

        Raises:
            BackendError: the micro-batch does not fit in memory and cannot be split.
        """
        return self.splitter.training_step(model, inputs, num_items_in_batch)

    def check_gradient(self, loss: torch.Tensor, source: str) -> torch.Tensor:
        """Return the loss of a micro-batch if its backward pass has anything to compute.

        Args:
            source: methods that made the loss.

        Raises:
            TrainingError: it has no gradient.
        """
        if cast(nn.Module, self.model).training and not loss.requires_grad:
            reason = f"{source} detached it (.detach(), .item(), torch.no_grad()); compute it from log-probs"
            if not torch.is_grad_enabled():
                reason = (
                    "gradients are disabled; a callback or an override left torch.set_grad_enabled(False)"
                )
            raise TrainingError(f"the loss of step {self.state.global_step + 1} has no gradient: {reason}")
        return loss

    def loss_to_log(self, loss: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Return the loss that ``Trainer`` adds up: that of the window with its last micro-batch, else zero.

        ``logging_nan_inf_filter`` therefore applies to windows, not to micro-batches.
        """
        self._window_loss = loss if self._window_loss is None else self._window_loss + loss
        if not last:
            return torch.zeros_like(loss).as_subclass(_UncheckedZero)
        window_loss, self._window_loss = self._window_loss, None
        return window_loss

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        """Return the gradient norm, which is the same on every rank.

        Raises:
            TrainingError: it is not finite. The optimizer has not stepped, except under DeepSpeed, and the
                step is not saved.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        full_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 returns a DTensor
        # In fp16 the gradient scaler skips the step and lowers its scale.
        if (
            full_norm is not None
            and not math.isfinite(full_norm)
            and self.accelerator.mixed_precision != "fp16"
        ):
            raise TrainingError(
                f"the gradient norm of step {self.state.global_step + 1} is {float(full_norm)}; training "
                "ends before this step is saved. Usual causes: a learning rate that is too high "
                f"(learning_rate={self.args.learning_rate}), half-precision weights, a custom loss that "
                "divides by zero. train(resume_from_checkpoint=True) continues from the last checkpoint"
            )
        return norm

    # Logs, metrics, model card.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; training logs, also the last one of a run, contain the pending metrics of all ranks.

        Other logs, such as those of a callback, leave the metrics and the log of the step that is due.
        """
        allowed = "a value that a checkpoint can save as JSON"
        entries = checked_entries(logs, "trainer.log", ValueError, convert=_saved_value, allowed=allowed)
        logs.clear()
        logs.update(entries)  # the same dictionary: evaluate returns it
        last = {"train_loss", "total_flos"} <= logs.keys()
        is_own = "loss" in logs and ("learning_rate" in logs or start_time is not None)
        due = self.control.should_log and not is_own
        if is_own or (last and self.state.global_step > self._logged_step):
            self._logged_step = self.state.global_step
            metrics = self.drain_metrics("train", "train")
            if last:
                metrics.pop("loss", None)  # train_loss is the mean over all steps
            logs.update(metrics)
        super().log(logs, start_time)
        self.control.should_log |= due
        self._report_completions()

    def _report_completions(self) -> None:
        if self._unreported:
            from groupwise.reporting.completions import report_completions

            for given in self._unreported:  # below the line of the log
                report_completions(*given)
            self._unreported = []

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate; an evaluation of a given dataset leaves the one that is due."""
        due = self.control.should_evaluate and eval_dataset is not None  # that of another dataset
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        self.control.should_evaluate = due
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """Evaluate as ``evaluate`` does, without a log."""
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        self._report_completions()
        return output

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; the metrics also contain those of all ranks and pass@k, and a failure changes nothing."""
        averaged = averages_weights(self.optimizer)
        if averaged or not self.is_in_train:  # a script may have loaded other weights at the same step
            self.backend.invalidate_weights()
        self._mode = "eval"
        self.stages.enter(f"the evaluation after step {self.state.global_step}")
        try:
            with self.step_state.rollback_on_failure():
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        finally:
            self._mode = "train"
            if averaged:  # training samples from other weights, at the same step
                self.backend.invalidate_weights()
        values = self.drain_metrics("eval", metric_key_prefix)
        values |= self.evaluation.compute(
            metric_key_prefix, self.args, self.reward_func_names, gather_object, self.compute_metrics
        )
        ours = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        num_samples = getattr(dataloader, "num_samples", None)  # of a stream; Trainer cannot count them
        if num_samples is not None:
            output = output._replace(num_samples=num_samples)
        return output._replace(metrics={**(output.metrics or {}), **ours})

    def drain_metrics(self, mode: str, label: str) -> dict[str, float]:
        """Return the pending metrics of all ranks; their completions are reported with the next log."""
        values, rows = self.metrics[mode].drain(lambda part: gather_object([part]))
        if rows and self.is_world_process_zero():
            given = rows, self.state.global_step, self.args, str(self.args.output_dir), label
            self._unreported = [*self._unreported, given]
        return values

    def create_model_card(  # type: ignore[override]
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card, ``README.md``, into the output directory."""
        if self.is_world_process_zero():
            from groupwise.reporting.model_card import write_model_card

            given = [tags] if isinstance(tags, str) else tags or []
            write_model_card(self, model_name, dataset_name, [*self._tag_names, *given])

    # Data.

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader whose items hold this rank's rows of a whole generation batch, as TRL's do.

        An item is repeated once per micro-batch that is trained on it. ``Trainer`` only counts them:
        ``self.prompts`` reads the rows of a run, which a script that iterates the loader does not advance.
        Override to train on the items of a loader of your own.
        """
        make_sampler = partial(self._get_train_sampler, self.train_dataset)
        return self.prepared_data.train_loader(make_sampler, self.loader_generator())

    def loader_generator(self) -> torch.Generator | None:
        """Return the generator that iterating the loader draws a seed from: not the one that samples."""
        return torch.Generator()

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[Any]:
        """Return the order of the prompts; an override yields indices in the order of ``GroupSampler``."""
        return self.prepared_data.group_sampler(self.train_dataset if dataset is None else dataset)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of prompts of the training set, or the number of positions of a stream."""
        dataset: Any = self.train_dataset
        streams = self.prepared_data.is_streaming(dataset)
        return super().num_examples(dataloader) if streams else len(dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader of the evaluation rows, each ``num_generations_eval`` times in a row.

        For a stream these are the batches of this rank, read while they are evaluated.
        """
        self.refresh_settings()
        name, dataset = "eval_dataset", self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            name, dataset = f"eval_dataset[{eval_dataset!r}]", self.eval_dataset[eval_dataset]  # type: ignore[index]
        rows = self.prepared_data.evaluation_rows(dataset, name)
        if not isinstance(rows, Dataset):  # batches of a stream
            return rows  # type: ignore[return-value]  # Trainer only iterates it
        return self._get_dataloader(
            dataset=rows,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=lambda rows: self.prepared_data.checked_eval_sampler(
                self._get_eval_sampler(rows), rows, type(self).__name__
            ),
            dataloader_key=eval_dataset if isinstance(eval_dataset, str) else "eval",
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of ``predict``: the same rows as for an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt", "image", "images"]  # type: ignore[assignment]

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:  # type: ignore[override]
        return inputs

    # Checkpoints.

    def _get_output_dir(self, trial: Any) -> str:
        run = self.run_directory
        return str(run.staging) if run.is_staging else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, rename it when every file is on disk, and delete the oldest ones."""
        args, state, run = self.args, self.state, self.run_directory
        final = Path(self._get_output_dir(trial), f"{compat_transformers.CHECKPOINT}-{state.global_step}")
        self.stages.enter(f"save of step {state.global_step}")
        with run.staged(final) as staged:
            super()._save_checkpoint(model, trial)
            if not args.save_only_model:
                self.save_rollout_state(str(staged))
            self.call_callbacks("on_checkpoint", directory=staged)
            if state.best_model_checkpoint == str(staged):
                state.best_model_checkpoint = str(final)
            if args.should_save:  # again: with the final name of the best checkpoint
                state.save_to_json(str(staged / compat_transformers.TRAINER_STATE))
        run.on_savers(lambda: run.rotate(final, state.best_model_checkpoint))
        if args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def save_rollout_state(self, directory: str) -> None:
        """Add state that ``Trainer`` does not save to the checkpoint in `directory`."""
        args, state = self.args, self.step_state.marks
        state["settings"] = resume_settings(args, self.train_dataset)
        state["optimizer"] = self.optimizer_classes()
        checkpointing.save_state(directory, args.process_index, args.world_size, state)
        digests = self._digests_of(self.model) if args.should_save or is_sharded(self.accelerator) else {}
        if args.should_save:
            checkpointing.save_policy(directory, cast(nn.Module, self.model), digests)
        if args.sync_ref_model and args.should_save:
            checkpointing.save_reference(directory, self.accelerator.unwrap_model(self.reference.model))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        tokenizer: Any = text_tokenizer(cast(ProcessingClass, self.processing_class))
        present = tokenizer.padding_side
        tokenizer.padding_side = getattr(tokenizer, "saved_padding_side", present)
        try:
            super()._save(output_dir, state_dict)
        finally:
            tokenizer.padding_side = present

    def _save_rng_state(self, output_dir: str) -> None:
        now = self.rng.snapshot()
        self.rng.restore(self.step_state.marks["rng"])
        try:
            super()._save_rng_state(output_dir)
        finally:
            self.rng.restore(now)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.run_directory.is_staging:  # _save_checkpoint uploads under the final name
            with compat_transformers.uploads_without(self._unpublished()):
                super()._push_from_checkpoint(checkpoint_folder)

    # The arguments that are shown are those of the installed version.
    @cast("Callable[[Callable[..., Any]], Callable[..., Any]]", wraps(Trainer.push_to_hub))
    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with compat_transformers.uploads_without(self._unpublished()):
            return super().push_to_hub(*args, **kwargs)

    def _unpublished(self) -> list[str]:
        """Return patterns of the files that are not uploaded: data of the run that ``hub_include`` lacks."""
        kept = self.args.hub_include or ()
        return [pattern for name, group in UNPUBLISHED.items() if name not in kept for pattern in group]

    @contextmanager
    def rollback_on_failure(self) -> Iterator[None]:
        """Return to the last completed step if the block fails; if no server is left, save that step."""
        try:
            with self.step_state.rollback_on_failure():
                yield
        except ConnectionError:  # raised on every rank, as saving requires
            self.save_last_completed_step()
            raise

    def save_last_completed_step(self) -> None:
        """Save a checkpoint of the last optimizer step, unless it exists or ``save_strategy`` is "no"."""
        step = self.state.global_step
        if step == 0 or self.args.save_strategy == SaveStrategy.NO:
            return
        directory = Path(self._get_output_dir(None), f"{compat_transformers.CHECKPOINT}-{step}")
        failed = self.stages.stage
        if not checkpointing.is_complete(directory):
            self._save_checkpoint(cast(nn.Module, self.model), None)
        self.stages.enter(failed)
        logger.warning(
            "step %d is saved in %s; continue with train(resume_from_checkpoint=True)", step, directory
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        loaded = cast(nn.Module, self.model if model is None else model)
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self._load_weights(resume_from_checkpoint, loaded, load)

    def _load_best_model(self) -> None:
        load = super()._load_best_model
        self._load_weights(str(self.state.best_model_checkpoint), cast(nn.Module, self.model), load)

    def _load_weights(self, directory: str, model: nn.Module, load: Callable[[], None]) -> None:
        """Load a checkpoint by ``load`` of ``Trainer``, except where it would keep weights of the model.

        It skips some adapters, and logs weights whose names differ from the model's as missing.

        Raises:
            ConfigError: the weights are not those that the checkpoint was written with.
        """
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if not sharded and has_adapter(model):
            checkpointing.load_adapters(directory, model)
        elif not sharded and checkpointing.has_converted_names(directory, model):
            checkpointing.load_converted(directory, cast(PreTrainedModel, model))
        else:
            load()
        compared = cast(nn.Module, self.model) if sharded else model
        checkpointing.check_loaded(directory, compared, self._digests_of(compared))
        self.backend.invalidate_weights()  # other weights, maybe at the same step

    def _digests_of(self, model: Any) -> dict[str, str]:
        """Return the digests of all weights, on all ranks; none under FSDP 1, whose parameters are flat."""
        flat = self.is_fsdp_enabled and not self.accelerator.is_fsdp2
        return {} if flat else self._digests.of(model)

    def optimizer_classes(self) -> list[str]:
        """Return package and class of optimizer and scheduler; other classes cannot load their states."""
        parts = (unwrapped_optimizer(self.optimizer), self.lr_scheduler)
        return [f"{type(part).__module__.split('.')[0]}.{type(part).__qualname__}" for part in parts]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and scheduler.

        Raises:
            ConfigError: they were saved by other classes; the first optimizer step would fail.
            _FinishedRunError: the checkpoint is that of the last step; ``Trainer`` would train another one.
        """
        if checkpoint is not None and self.state.global_step >= self.state.max_steps:
            raise _FinishedRunError  # the weights are loaded, below any wrapper, and no callback was called
        now = self.optimizer_classes()
        if checkpoint is not None and now != self.resumed_optimizer:
            raise ConfigError(
                f"checkpoint {checkpoint!r} has the state of {' and '.join(self.resumed_optimizer)}, which "
                f"{' and '.join(now)} cannot load; resume with the optim and lr_scheduler_type of the "
                "checkpoint, or start a new run with the checkpoint as its model"
            )
        if checkpoint is not None and self.is_deepspeed_enabled:  # which loads weights by itself
            model = cast(nn.Module, self.model)
            checkpointing.check_loaded(checkpoint, model, self._digests_of(model))
            plugin = self.accelerator.state.deepspeed_plugin
            end_universal(self.model_wrapped, plugin, unwrapped_optimizer(self.optimizer))
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the RNG state of the checkpoint that the run resumes from, once."""
        if self.pending_rng_checkpoint is not None:
            super()._load_rng_state(checkpoint)
            self.pending_rng_checkpoint = None


def _add_callbacks(trainer: BaseTrainer, args: GRPOConfig) -> None:
    show_log_lines(trainer, args.terminal_metrics or ())
    trainer.add_callback(MetricsFileCallback(trainer.fast_paths))
    if args.save_rollouts:
        from groupwise.reporting.rollout_files import RolloutFiles

        trainer.add_callback(RolloutFiles(trainer))  # type: ignore[arg-type]
    if trainer.recomputation is not None:
        trainer.add_callback(trainer.recomputation)
    if args.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(trainer.reference, args, trainer.accelerator))


def _saved_value(value: Any) -> Any:
    """Return a value of a log as ``trainer_state.json`` has it: scalars of arrays as numbers."""
    value = value.item() if hasattr(value, "item") else value
    json.dumps(value)
    return value


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Context manager that leaves the objects of before, mostly modules, out of garbage collections.

    A collection that walks them holds the interpreter for 0.3 s, on one rank while the others wait for it.
    Until the end, their reference cycles are not found. Does nothing if the caller has frozen objects, which
    its end would return to the collector.
    """
    is_own = gc.get_freeze_count() == 0
    if is_own:
        gc.collect()  # cycles of an earlier trainer, whose memory this one needs
        gc.freeze()
    try:
        yield
    finally:
        if is_own:
            gc.unfreeze()


class _FinishedRunError(Exception):
    """Leave ``Trainer.train``: the checkpoint is that of the last step."""


class _UncheckedZero(torch.Tensor):
    """Zero that ``Trainer``'s NaN filter accepts without reading it from the device.

    The filter tests the loss of every micro-batch, and each test would wait for the device.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.isnan, torch.isinf):
            return False
        return torch.Tensor.__torch_function__(func, (), args, kwargs)  # the result is a plain tensor
