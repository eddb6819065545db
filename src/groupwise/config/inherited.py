"""Fields of ``TrainingArguments`` whose default is unchanged: meaning and constraints."""

from __future__ import annotations

from typing import Final

from groupwise.config.settings import OPTIMIZER_STATE, PROMPT_ORDER, SCHEDULE, TRAINER_STATE, Setting

_NO_PREDICTIONS: Final = "an evaluation returns metrics, and no predictions"
_SCRIPT: Final = "For the script: the trainer does not read it."
_TRACKIO: Final = "Of the trackio integration."
_DDP: Final = "Argument of DistributedDataParallel."
_EVAL_LOADER: Final = "Of the evaluation loader; training rows have one loader per process."

#: Fields that newer or older versions of transformers do not have are skipped.
INHERITED: Final[dict[str, Setting]] = {
    # Output and length of the run
    "output_dir": Setting(
        "Directory of checkpoints, logged completions and the model card; a relative path becomes absolute "
        "when the configuration is built."
    ),
    "num_train_epochs": Setting(
        "Passes over the training prompts.", card="always", changes="run", on_resume=SCHEDULE
    ),
    "max_steps": Setting(
        "Optimizer steps; overrides num_train_epochs if positive.",
        card="if_changed",
        changes="run",
        on_resume=SCHEDULE,
    ),
    "per_device_train_batch_size": Setting(
        "Completions per device and micro-batch.", ge=1, example=0, card="always"
    ),
    "gradient_accumulation_steps": Setting(
        "Micro-batches per optimizer step.", ge=1, example=0, card="always"
    ),
    "auto_find_batch_size": Setting(
        "Not supported.",
        example=True,
        unsupported="a generation batch has micro-batches of one size; one that does not fit in memory "
        "is split in any case",
    ),
    # Optimizer
    "lr_scheduler_type": Setting("Learning rate schedule.", card="always", changes="run", on_resume=SCHEDULE),
    "lr_scheduler_kwargs": Setting(
        "Arguments of the learning rate schedule.", changes="run", on_resume=SCHEDULE
    ),
    "warmup_steps": Setting(
        "Warmup steps, or their share of all steps if below 1.",
        card="if_changed",
        changes="run",
        on_resume=SCHEDULE,
    ),
    "optim": Setting("Optimizer.", card="always", changes="run", on_resume=OPTIMIZER_STATE),
    "optim_args": Setting("Arguments of the optimizer.", changes="run", on_resume=OPTIMIZER_STATE),
    "optim_target_modules": Setting(
        "Modules of GaLore and APOLLO optimizers.", changes="run", on_resume=OPTIMIZER_STATE
    ),
    "weight_decay": Setting("Weight decay.", card="if_changed", changes="run", on_resume=OPTIMIZER_STATE),
    "adam_beta1": Setting(
        "First momentum coefficient of Adam.", card="if_changed", changes="run", on_resume=OPTIMIZER_STATE
    ),
    "adam_beta2": Setting(
        "Second momentum coefficient of Adam.", card="if_changed", changes="run", on_resume=OPTIMIZER_STATE
    ),
    "adam_epsilon": Setting(
        "Numerical stability term of Adam.", card="if_changed", changes="run", on_resume=OPTIMIZER_STATE
    ),
    "max_grad_norm": Setting("Largest gradient norm; 0: no clipping.", card="if_changed"),
    "average_tokens_across_devices": Setting(
        "No effect.", ignored="token weights are always counted over all processes"
    ),
    "label_smoothing_factor": Setting(
        "Not supported.", example=0.1, unsupported="the policy loss has no labels to smooth"
    ),
    "neftune_noise_alpha": Setting(
        "Noise on the embeddings in training forwards, which are padded then; generation and old log-probs "
        "have none."
    ),
    "torch_empty_cache_steps": Setting("Micro-batches between two releases of cached device memory."),
    # Precision and speed
    "fp16": Setting("float16 mixed precision.", card="if_changed"),
    "bf16_full_eval": Setting("Convert the model to bfloat16 in an evaluation outside training."),
    "fp16_full_eval": Setting("Convert the model to float16 in an evaluation outside training."),
    "tf32": Setting("TensorFloat-32 products on GPUs."),
    "gradient_checkpointing_kwargs": Setting("Arguments of gradient checkpointing."),
    "torch_compile": Setting("Compile the model for training."),
    "torch_compile_backend": Setting("Backend of torch.compile; switches it on."),
    "torch_compile_mode": Setting("Mode of torch.compile; switches it on."),
    "liger_kernel_config": Setting("Layer kernels of Liger, on a GPU with use_liger_kernel=True."),
    "use_cache": Setting(
        "No effect.", ignored="generation always caches keys and values, and training never does"
    ),
    # Logs and trackers
    "logging_strategy": Setting("When to log: steps, epoch or no."),
    "logging_first_step": Setting("Also log the first step."),
    "log_on_each_node": Setting("Log on every node, not only on the first."),
    "logging_nan_inf_filter": Setting("Leave losses that are not finite out of the logged mean of windows."),
    "include_num_input_tokens_seen": Setting("No effect.", ignored="the metric num_tokens counts the tokens"),
    "log_level": Setting("Log level of transformers in the first process."),
    "log_level_replica": Setting("Log level of transformers in the other processes."),
    "disable_tqdm": Setting("No progress bars."),
    "report_to": Setting("Trackers, which must be installed."),
    "run_name": Setting("Name of the run in trackers."),
    "project": Setting(_TRACKIO),
    "trackio_space_id": Setting(_TRACKIO),
    "trackio_bucket_id": Setting(_TRACKIO),
    "trackio_static_space_id": Setting(_TRACKIO),
    # Evaluation
    "eval_strategy": Setting("When to evaluate: steps, epoch or no."),
    "eval_steps": Setting(
        "Optimizer steps between evaluations; None: logging_steps.", on_resume=TRAINER_STATE
    ),
    "eval_delay": Setting("Steps or epochs before the first evaluation."),
    "eval_on_start": Setting("Evaluate before training."),
    "per_device_eval_batch_size": Setting("Completions per device in evaluation.", ge=1, example=0),
    "prediction_loss_only": Setting("No effect.", ignored=_NO_PREDICTIONS),
    "eval_do_concat_batches": Setting("No effect.", ignored=_NO_PREDICTIONS),
    "eval_use_gather_object": Setting("No effect.", ignored=_NO_PREDICTIONS),
    "eval_accumulation_steps": Setting("No effect.", ignored=_NO_PREDICTIONS),
    "include_for_metrics": Setting("No effect.", ignored=_NO_PREDICTIONS),
    "batch_eval_metrics": Setting("No effect.", ignored=_NO_PREDICTIONS),
    "label_names": Setting("No effect.", ignored=_NO_PREDICTIONS),
    # Checkpoints and the Hub
    "save_strategy": Setting("When to save: steps, epoch, best or no."),
    "save_steps": Setting("Optimizer steps between checkpoints.", on_resume=TRAINER_STATE),
    "save_total_limit": Setting("Number of checkpoints that are kept."),
    "save_only_model": Setting("Save weights alone; such a checkpoint cannot be resumed from."),
    "save_on_each_node": Setting("Save on every node, not only on the first."),
    "enable_jit_checkpoint": Setting("Save a checkpoint when the process receives SIGTERM."),
    "load_best_model_at_end": Setting("Load the best checkpoint when training ends."),
    "metric_for_best_model": Setting(
        "Metric of the best checkpoint.",
        on_resume="which is compared with the best value of the former metric, in the trainer_state.json "
        "of the checkpoint",
    ),
    "greater_is_better": Setting("Direction of metric_for_best_model."),
    "ignore_data_skip": Setting("Resume at the beginning of the epoch's prompts."),
    "restore_callback_states_from_checkpoint": Setting("Restore the state of callbacks on resume."),
    "push_to_hub": Setting("Upload the model and its checkpoints."),
    "hub_token": Setting("Token of the Hub; never saved or printed."),
    "hub_private_repo": Setting("Create the repository as private."),
    "hub_model_id": Setting("Repository of the model."),
    "hub_strategy": Setting("What is uploaded, and when."),
    "hub_always_push": Setting("Upload although the upload before has not finished."),
    "hub_revision": Setting("Branch that is uploaded to."),
    # Data
    "seed": Setting(
        "Seed of sampling, of the order of prompts and of dropout.",
        card="always",
        changes="run",
        on_resume=PROMPT_ORDER,
    ),
    "data_seed": Setting("Seed of the order of prompts; None: seed.", changes="run", on_resume=PROMPT_ORDER),
    "full_determinism": Setting("Deterministic algorithms, which are slower."),
    "dataloader_num_workers": Setting("Processes that read rows ahead."),
    "dataloader_drop_last": Setting(
        "Drop the incomplete last batch of an evaluation. Training drops that of a generation "
        "in any case, except with dynamic_sampling and streams."
    ),
    "dataloader_pin_memory": Setting("No effect: rows are no tensors."),
    "dataloader_persistent_workers": Setting(
        "No effect.", ignored="every evaluation starts its own workers, and those of training persist"
    ),
    "dataloader_prefetch_factor": Setting("Batches that each worker reads ahead; None: 2."),
    "dataloader_multiprocessing_context": Setting(_EVAL_LOADER),
    "dataloader_in_order": Setting(
        "Not supported: False.",
        example=False,
        unsupported="completions of a prompt may be on several processes, which must read the same batches",
    ),
    "train_sampling_strategy": Setting(
        "Not supported; see shuffle_dataset.",
        example="sequential",
        unsupported="prompts are read in random order, or with shuffle_dataset=False in that of the dataset; "
        "micro-batches are balanced by length in any case",
    ),
    "length_column_name": Setting("No effect.", ignored="micro-batches are balanced by their own lengths"),
    # Devices and processes
    "use_cpu": Setting("Train on the CPU."),
    "accelerator_config": Setting(
        "Settings of accelerate. split_batches, dispatch_batches, even_batches=False, num_steps: refused."
    ),
    "parallelism_config": Setting("Data-parallel sizes; cp_size, sp_size and tp_size above 1 are refused."),
    "ddp_find_unused_parameters": Setting(f"{_DDP} None: True for models with images."),
    "ddp_bucket_cap_mb": Setting(_DDP),
    "ddp_broadcast_buffers": Setting(_DDP),
    "ddp_static_graph": Setting(_DDP),
    "ddp_backend": Setting("Communication backend."),
    "ddp_timeout": Setting("Seconds that a collective may take."),
    "fsdp": Setting("Fully sharded data parallelism."),
    "fsdp_config": Setting("Settings of FSDP."),
    "deepspeed": Setting("Configuration of DeepSpeed."),
    "local_rank": Setting("Set by the launcher."),
    # Debugging and scripts
    "debug": Setting("Debugging aids of transformers."),
    "skip_memory_metrics": Setting("False: measure memory in train() and evaluate(), which is slow."),
    "do_train": Setting(_SCRIPT),
    "do_eval": Setting(_SCRIPT),
    "do_predict": Setting(_SCRIPT),
    "resume_from_checkpoint": Setting(f"{_SCRIPT} Pass it to train()."),
}
