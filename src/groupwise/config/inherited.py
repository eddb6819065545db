"""Fields of ``TrainingArguments`` with an unchanged default and a constraint or meaning of their own here."""

from __future__ import annotations

from functools import partial
from typing import Final

from groupwise.config.conditions import PADDED_ROWS
from groupwise.config.settings import OPTIMIZER_STATE, PROMPT_ORDER, SCHEDULE, TRAINER_STATE, Setting

_of_schedule = partial(Setting, changes="run", on_resume=SCHEDULE)
_of_optimizer = partial(Setting, changes="run", on_resume=OPTIMIZER_STATE)

#: Fields that newer or older versions of transformers do not have are skipped.
INHERITED: Final[dict[str, Setting]] = {
    # Output and length of the run
    "output_dir": Setting("A relative path becomes absolute when the configuration is built."),
    "num_train_epochs": _of_schedule("Passes over the training prompts.", card="always"),
    "max_steps": _of_schedule(card="if_changed"),
    "per_device_train_batch_size": Setting(
        "Completions per device and micro-batch.", ge=1, example=0, card="always"
    ),
    "gradient_accumulation_steps": Setting(
        "Micro-batches per optimizer step.", ge=1, example=0, card="always"
    ),
    "auto_find_batch_size": Setting(
        example=True,
        unsupported="a generation batch has micro-batches of one size; one that does not fit in memory "
        "is split in any case",
    ),
    # Optimizer
    "lr_scheduler_type": _of_schedule(card="always"),
    "lr_scheduler_kwargs": _of_schedule(),
    "warmup_steps": _of_schedule(card="if_changed"),
    "optim": _of_optimizer(card="always"),
    "optim_args": _of_optimizer(),
    "optim_target_modules": _of_optimizer(),
    **dict.fromkeys(
        ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), _of_optimizer(card="if_changed")
    ),
    "max_grad_norm": Setting(card="if_changed"),
    "average_tokens_across_devices": Setting(ignored="token weights are always counted over all processes"),
    "label_smoothing_factor": Setting(example=0.1, unsupported="the policy loss has no labels to smooth"),
    "neftune_noise_alpha": Setting(
        "Noise on the embeddings in training forwards, which are padded then; generation and old log-probs "
        "have none.",
        requires=(PADDED_ROWS,),
        example=5.0,
    ),
    # Precision and speed
    "fp16": Setting(card="if_changed"),
    "liger_kernel_config": Setting("Layer kernels of Liger, on a GPU with use_liger_kernel=True."),
    "use_cache": Setting(ignored="generation always caches keys and values, and training never does"),
    # Logs and evaluation
    "include_num_input_tokens_seen": Setting(ignored="the metric num_tokens counts the tokens"),
    "eval_steps": Setting(on_resume=TRAINER_STATE),
    "per_device_eval_batch_size": Setting("Completions per device in evaluation.", ge=1, example=0),
    **dict.fromkeys(
        (
            *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "label_names"),
            *("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
        ),
        Setting(ignored="an evaluation returns metrics, and no predictions"),
    ),
    # Checkpoints and the Hub
    "save_steps": Setting(on_resume=TRAINER_STATE),
    "metric_for_best_model": Setting(
        on_resume="which is compared with the best value of the former metric, in the trainer_state.json "
        "of the checkpoint",
    ),
    "ignore_data_skip": Setting("Resume at the beginning of the epoch's prompts."),
    "hub_token": Setting("Never saved or printed."),
    # Data
    "seed": Setting(
        "Seed of sampling, of the order of prompts and of dropout.",
        card="always",
        changes="run",
        on_resume=PROMPT_ORDER,
    ),
    "data_seed": Setting("Seed of the order of prompts; None: seed.", changes="run", on_resume=PROMPT_ORDER),
    "dataloader_num_workers": Setting("Processes that read rows ahead."),
    "dataloader_drop_last": Setting(
        "Drop the incomplete last batch of an evaluation. Training drops that of a generation "
        "in any case, except with dynamic_sampling and streams."
    ),
    "dataloader_pin_memory": Setting("No effect: rows are no tensors."),  # Trainer changes it on a CPU
    "dataloader_persistent_workers": Setting(
        ignored="every evaluation starts its own workers, and those of training persist"
    ),
    "dataloader_multiprocessing_context": Setting(
        "Of the evaluation loader; training rows have one loader per process."
    ),
    "dataloader_in_order": Setting(
        example=False,
        unsupported="completions of a prompt may be on several processes, which must read the same batches",
    ),
    "train_sampling_strategy": Setting(
        "See shuffle_dataset.",
        example="sequential",
        unsupported="prompts are read in random order, or with shuffle_dataset=False in that of the dataset; "
        "micro-batches are balanced by length in any case",
    ),
    "length_column_name": Setting(ignored="micro-batches are balanced by their own lengths"),
    # Processes
    "accelerator_config": Setting(
        "Settings of accelerate. split_batches, dispatch_batches, even_batches=False, num_steps: refused."
    ),
    "parallelism_config": Setting("Data-parallel sizes; cp_size, sp_size and tp_size above 1 are refused."),
    "ddp_find_unused_parameters": Setting("None: True for models with images."),
    # For the script: the trainer does not read it
    "resume_from_checkpoint": Setting("For the script: pass it to train()."),
}
