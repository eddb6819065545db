"""Every setting of a GRPO run with its default, meaning and constraints, and the arithmetic of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final

from transformers import TrainingArguments

from groupwise.config import conditions as when
from groupwise.config.settings import (
    OPTIMIZER_STATE,
    PROMPT_ORDER,
    SAMPLER,
    SCHEDULE,
    TRAINER_STATE,
    Setting,
    on,
    with_settings,
)
from groupwise.core.advantages import ADVANTAGES, AGGREGATIONS
from groupwise.core.kl import KL_ESTIMATORS
from groupwise.core.objectives import OBJECTIVES
from groupwise.core.ratios import CORRECTION_MODES, RATIO_LEVELS

Json = dict[str, Any] | str | None  # JSON text is parsed when the configuration is built

#: Files of ``output_dir`` that ``push_to_hub`` does not upload, by their name in ``hub_include``.
UNPUBLISHED: Final[dict[str, tuple[str, ...]]] = {
    "rollouts": ("rollouts*",),
    "completions": ("completions*",),
    "metrics": ("metrics*.jsonl", "report*.html", "*events.out.tfevents*"),
    "settings": ("settings.json",),
    "reward_models": ("reward-model-*",),  # of version 0.1, with the examples that they were trained on
}

# Settings with the same effect of a change, or of one feature.
_of_schedule = partial(Setting, changes="run", on_resume=SCHEDULE)
_of_optimizer = partial(Setting, changes="run", on_resume=OPTIMIZER_STATE)
_of_step = partial(Setting, card="if_changed", changes="step")
_of_generation = partial(Setting, card="if_changed", changes="generation", on_resume=SAMPLER)
_of_correction = partial(_of_step, no_effect_unless=when.CORRECTION)
_of_vespo = partial(_of_step, no_effect_unless=when.VESPO)
_of_adaptive_entropy = partial(_of_step, no_effect_unless=on("use_adaptive_entropy"))
_of_colocate = partial(Setting, no_effect_unless=when.COLOCATE)
_of_server = partial(Setting, no_effect_unless=when.SERVER)
#: Reason why transformers' continuous batching is not used.
_OWN_LOOP = (
    "without vLLM, groupwise's own decoding loop samples, which is exact and, on a CPU, about three times as "
    "fast as transformers' continuous batching"
)

#: Fields of ``TrainingArguments`` with an unchanged default and a constraint or meaning of their own here;
#: those that a version of transformers lacks are skipped.
INHERITED: Final[dict[str, Setting]] = {
    # Output and length of the run
    "output_dir": Setting("A relative path becomes absolute when the configuration is built."),
    "num_train_epochs": _of_schedule("Passes over the training prompts.", card="always"),
    "max_steps": _of_schedule(ge=-1, card="if_changed"),
    "per_device_train_batch_size": Setting("Completions per device and micro-batch.", ge=1, card="always"),
    "gradient_accumulation_steps": Setting("Micro-batches per optimizer step.", ge=1, card="always"),
    "auto_find_batch_size": Setting(
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
    "label_smoothing_factor": Setting(unsupported="the policy loss has no labels to smooth"),
    "neftune_noise_alpha": Setting(
        "Noise on the embeddings in training forwards, which are padded then; generation and old log-probs "
        "have none.",
        requires=(when.PADDED_ROWS,),
    ),
    # Precision and speed
    "fp16": Setting(card="if_changed"),
    "liger_kernel_config": Setting("Layer kernels of Liger, on a GPU with use_liger_kernel=True."),
    "use_cache": Setting(ignored="generation always caches keys and values, and training never does"),
    # Logs and evaluation
    "include_num_input_tokens_seen": Setting(ignored="the metric num_tokens counts the tokens"),
    "eval_steps": Setting(on_resume=TRAINER_STATE),
    "per_device_eval_batch_size": Setting("Completions per device in evaluation.", ge=1),
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
        ge=0,
        le=2**32 - 1,
        card="always",
        changes="run",
        on_resume=PROMPT_ORDER,
    ),
    "data_seed": Setting(
        "Seed of the order of prompts; None: seed.", ge=0, changes="run", on_resume=PROMPT_ORDER
    ),
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
        unsupported="completions of a prompt may be on several processes, which must read the same batches",
    ),
    "train_sampling_strategy": Setting(
        "See shuffle_dataset.",
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


@dataclass(repr=False)
@with_settings(INHERITED)
class GRPOFields(TrainingArguments):
    """Fields of :class:`groupwise.GRPOConfig`, not resolved and not validated."""

    SETTINGS: ClassVar[Mapping[str, Setting]]

    # fmt: off

    # Changed defaults of TrainingArguments
    learning_rate: Annotated[float, Setting(
        "Initial learning rate.", ge=0, card="always", changes="run", on_resume=OPTIMIZER_STATE)] = 1e-6
    logging_steps: Annotated[float, Setting(
        "Optimizer steps between logs; a value below 1 is a fraction of all steps.",
        on_resume=TRAINER_STATE)] = 10
    gradient_checkpointing: Annotated[bool, Setting(
        "Recompute activations in the backward pass to save memory.", card="if_changed")] = True
    activation_memory_fraction: Annotated[float, Setting(
        "Share of the memory that the first optimizer step leaves free. Gradient checkpointing keeps "
        "activations in it instead of recomputing them. 0: recompute every layer.", ge=0, le=1,
        no_effect_unless=when.on("gradient_checkpointing"))] = 0.5
    remove_unused_columns: Annotated[bool, Setting(
        "Drop dataset columns that the model does not take; reward functions do not receive them.")] = False
    report_to: Annotated[None | str | list, Setting(  # noqa: RUF036
        # HfArgumentParser takes the second type for the flag; TrainingArguments makes "none" an empty list.
        'Trackers of the metrics; "none": none. None: trackio where it is installed, with its database on '
        "this machine, but none under CI (environment variable CI).")] = None
    bf16: Annotated[bool | None, Setting(
        "bfloat16 mixed precision. None: on if fp16 is off and the device computes bfloat16 natively.",
        card="always")] = None  # type: ignore[assignment]

    # Model
    model_init_kwargs: Annotated[Json, Setting(
        "Keyword arguments (dict or JSON) of from_pretrained, if the model is given by name.")] = None
    trust_remote_code: Annotated[bool, Setting(
        "Run code shipped with models, tokenizers and reward models.")] = False
    disable_dropout: Annotated[bool, Setting(
        "Set every dropout probability of the policy to 0.", card="if_changed")] = False
    cast_lm_head_to_fp32: Annotated[bool, Setting(
        "Logits of policy and reference in float32; tied embeddings keep their activation dtype.",
        card="if_changed")] = False
    router_aux_loss_coef: Annotated[float | None, Setting(
        "Weight of the load-balancing loss of a mixture of experts. None: the value of the model config.",
        ge=0, card="if_changed")] = None
    router_aux_loss_scope: Annotated[str, Setting(
        "Tokens that balance experts: of a micro-batch, or of all micro-batches and ranks of an update.",
        choices=("micro_batch", "global_batch"), requires=(when.UPDATE_BALANCE,),
        card="if_changed")] = "micro_batch"
    router_replay: Annotated[str, Setting(
        "Replay the routing of experts in the loss. R2: that of old log-probs; R3: that of the sampler.",
        choices=("disabled", "R2", "R3"), requires=when.ROUTER_REPLAY, card="if_changed")] = "disabled"

    # Batches
    num_generations: Annotated[int, Setting(
        "Completions per prompt (G); divides generation_batch_size.", ge=2, card="always",
        on_resume=PROMPT_ORDER)] = 8
    num_generations_eval: Annotated[int | None, Setting(
        "Completions per prompt in evaluation. None: num_generations.", ge=1, changes="step")] = None
    max_completion_length: Annotated[int, Setting(
        "Maximum number of tokens generated per completion.", ge=1, card="always")] = 256
    max_prompt_length: Annotated[int | None, Setting(
        "Truncate longer prompts from the left. None: no truncation.", ge=1, card="if_changed")] = None
    pad_to_multiple_of: Annotated[int | str | None, Setting(
        "Pad prompts and completions to a multiple of this length. auto: 128 on Neuron, off elsewhere.", ge=1,
        choices=("auto",))] = None
    shuffle_dataset: Annotated[bool, Setting(
        "Shuffle the training prompts.", card="if_changed", on_resume=PROMPT_ORDER)] = True
    dataset_weights: Annotated[Json, Setting(
        "Weights (dict or JSON) of the sources of a train_dataset={name: rows}: rows are drawn from a source "
        "in proportion. None: by size; streams take turns.", on_resume=PROMPT_ORDER)] = None
    prompt_filter: Annotated[Json, Setting(
        "Skip training prompts by the solve rate of their last group: dict or JSON of min and max, "
        "again_after (steps after which a prompt outside them is sampled again; default: never) and reward "
        "(function whose mean is the rate; default: the weighted sum of all).", card="if_changed",
        on_resume=PROMPT_ORDER)] = None
    generation_batch_size: Annotated[int | None, Setting(
        "Completions generated at a time by all processes. Set this or steps_per_generation.", ge=1,
        card="always", on_resume=PROMPT_ORDER)] = None
    steps_per_generation: Annotated[int | None, Setting(
        "Micro-batches per generation batch: per_device_train_batch_size x processes x this many "
        "completions. None: gradient_accumulation_steps.", ge=1, on_resume=PROMPT_ORDER)] = None

    # Generation
    temperature: Annotated[float, Setting(
        "Sampling temperature, also of the trainer's log-probs.", gt=0, card="always",
        changes="generation", on_resume=SAMPLER)] = 1.0
    top_p: Annotated[float, _of_generation(
        "Nucleus sampling: keep the smallest set of tokens with this total probability. 1: off. Log-probs "
        "are those of the truncated distribution where the sampler reports the sampling mask.", gt=0,
        le=1)] = 1.0
    top_k: Annotated[int | None, _of_generation(
        "Keep this many of the most probable tokens. None, 0 or -1: off. Truncates like top_p.", ge=0)] = None
    min_p: Annotated[float | None, _of_generation(
        "Drop tokens less probable than this fraction of the most probable one. None or 0: off. Truncates "
        "like top_p.", ge=0, le=1)] = None
    repetition_penalty: Annotated[float, _of_generation(
        "Penalty on tokens that are already present. 1: off.", gt=0)] = 1.0
    generation_kwargs: Annotated[Json, Setting(
        "Further sampler arguments (dict or JSON). One with a field above is moved there and overrides it, "
        "also for the trainer's log-probs.")] = None
    chat_template_kwargs: Annotated[Json, Setting(
        "Further arguments (dict or JSON) of the chat template.")] = None
    cache_implementation: Annotated[str | None, Setting(
        "Key-value cache of generate. auto: groupwise's own with its decoding loop, where that applies. A "
        "name such as dynamic or static: that cache of transformers, with transformers' loop and PyTorch's "
        "linear layers. None: auto; in groupwise.trl_hooks dynamic, which on a CPU samples the completions "
        "of TRL on the same seed and is slower.",
        no_effect_unless=when.NOT_VLLM)] = None
    use_transformers_continuous_batching: Annotated[bool, Setting(ignored=_OWN_LOOP)] = False
    transformers_continuous_batching_config: Annotated[Json, Setting(ignored=_OWN_LOOP)] = None
    ds3_gather_for_generation: Annotated[bool, Setting(
        "Under ZeRO-3, gather the whole policy on every device once per generation. False: layer by layer in "
        "every forward, which takes less memory and is slower.", requires=(when.NOT_VLLM,))] = True

    # vLLM
    use_vllm: Annotated[bool, Setting("Generate with vLLM.", card="if_changed")] = False
    vllm_mode: Annotated[str, Setting(
        "colocate: engine in the trainer's processes. server: separate processes.",
        choices=("colocate", "server"), card="if_changed")] = "colocate"
    vllm_model_impl: Annotated[str, _of_colocate(
        "Model implementation of the engine.", choices=("vllm", "transformers"))] = "vllm"
    vllm_enable_sleep_mode: Annotated[bool, _of_colocate(
        "Free the memory of the engine during training.")] = False
    vllm_structured_outputs_regex: Annotated[str | None, Setting(
        "Regular expression that every completion matches.", no_effect_unless=when.VLLM)] = None
    vllm_server_base_url: Annotated[str | None, _of_server(
        "Address of the server; overrides host and port.")] = None
    vllm_server_host: Annotated[str, _of_server("Host name or IP address of the server.")] = "0.0.0.0"
    vllm_server_port: Annotated[int, _of_server("Port of the server.", ge=1, le=65535)] = 8000
    vllm_server_timeout: Annotated[float, _of_server(
        "Seconds to wait for the server before a ConnectionError.", gt=0)] = 240.0
    vllm_group_port: Annotated[int, _of_server(
        "Port of the process group that transfers weights to the server.", ge=1, le=65535)] = 51216
    vllm_gpu_memory_utilization: Annotated[float, _of_colocate(
        "Fraction of the GPU memory for the engine.", gt=0, le=1)] = 0.3
    vllm_max_model_length: Annotated[int | None, _of_colocate(
        "Maximum number of tokens of prompt and completion together.", ge=1)] = None
    vllm_tensor_parallel_size: Annotated[int, _of_colocate(
        "Processes that share one engine.", ge=1, requires=(when.DIVIDES_PROCESSES,))] = 1
    vllm_engine_kwargs: Annotated[Json, _of_colocate(
        "Further arguments (dict or JSON) of the engine.")] = None
    vllm_weight_check: Annotated[str, Setting(
        "Compare all weights that vLLM computes with to the trainer's after every sync, the first, or never.",
        choices=("every_sync", "first", "off"), no_effect_unless=when.VLLM)] = "every_sync"
    vllm_importance_sampling_correction: Annotated[bool, _of_step(
        "Importance-sampling correction for the difference between the log-probs of sampler and "
        "trainer.")] = True
    vllm_importance_sampling_mode: Annotated[str, _of_correction(
        "Correct per token or per sequence; truncate the ratio at the bounds, or mask it beyond them.",
        choices=CORRECTION_MODES, requires=(when.BOUNDS_OF_TRUNCATION,))] = "sequence_mask"
    vllm_importance_sampling_clip_max: Annotated[float | None, _of_correction(
        "Upper bound of the correction. None: no bound.", gt=0)] = 3.0
    vllm_importance_sampling_clip_min: Annotated[float | None, _of_correction(
        "Lower bound of the correction. None: no bound.", ge=0, requires=(when.BELOW_CLIP_MAX,))] = None
    rollout_func_importance_sampling_correction: Annotated[bool, _of_step(
        "Correct for the log-probs that a rollout_func returns without vLLM, too.",
        no_effect_unless=when.CORRECTION_WITHOUT_VLLM)] = False
    logprob_mismatch_check: Annotated[str, Setting(
        "Compare the log-probs of a separate sampler with those of the trainer, and those that the policy "
        "samples with to its plain forward; where these differ, it samples in another way. off: neither.",
        choices=("off", "warn", "error"))] = "warn"
    logprob_mismatch_steps: Annotated[int, Setting(
        "Generations between two comparisons, after the first two generations.", ge=1)] = 20

    # Loss
    beta: Annotated[float, Setting(
        "Weight of the KL to the reference model. 0: no reference model in memory.", ge=0, card="always",
        changes="step")] = 0.0
    kl_estimator: Annotated[str, _of_step(
        "Estimator of the KL per token.", choices=KL_ESTIMATORS, no_effect_unless=when.KL)] = "k3"
    kl_in_reward: Annotated[bool, _of_step(
        "Subtract the KL from the reward instead of adding it to the loss.",
        requires=(when.KL, when.SUM_OF_REWARDS))] = False
    use_bias_correction_kl: Annotated[bool, _of_step(
        "Multiply the KL by the importance ratio (DeepSeek-V3.2).", requires=(when.KL_IN_LOSS,),
        no_effect_unless=when.KL)] = False
    num_iterations: Annotated[int, Setting(
        "Optimization epochs over each generation batch (mu).", ge=1, card="always", changes="generation",
        on_resume=PROMPT_ORDER)] = 1
    epsilon: Annotated[float, Setting(
        "Clip range of the ratio below 1, and above 1 unless epsilon_high is set.", ge=0, card="always",
        changes="step")] = 0.2
    epsilon_high: Annotated[float | None, Setting(
        "Clip range of the ratio above 1; for cispo the upper bound of the ratio. None: epsilon.", ge=0,
        card="always", changes="step")] = None
    delta: Annotated[float | None, _of_step(
        "Upper bound of the unclipped ratio (INTELLECT-2). None: no bound.", gt=0,
        no_effect_unless=when.CLIPPED_RATIO)] = None
    loss_type: Annotated[str, Setting(
        "Objective; register_objective adds further ones.", choices=OBJECTIVES, card="always",
        changes="step")] = "dapo"
    loss_kwargs: Annotated[Json, Setting(
        "Hyperparameters (dict or JSON) of a registered objective, validated by its dataclass.",
        changes="step")] = None
    importance_sampling_level: Annotated[str, Setting(
        "Ratio per token, or per sequence (GSPO).", choices=RATIO_LEVELS, card="always",
        changes="step")] = "token"
    sapo_temperature_pos: Annotated[float, _of_step(
        "Gate temperature for positive advantages.", gt=0, no_effect_unless=when.SAPO)] = 1.0
    sapo_temperature_neg: Annotated[float, _of_step(
        "Gate temperature for the other advantages.", gt=0, no_effect_unless=when.SAPO)] = 1.05
    vespo_k_pos: Annotated[float, _of_vespo("Power of the weight for positive advantages.", gt=0)] = 2.0
    vespo_lambda_pos: Annotated[float, _of_vespo("Decay of the weight for positive advantages.", gt=0)] = 3.0
    vespo_k_neg: Annotated[float, _of_vespo("Power of the weight for negative advantages.", gt=0)] = 3.0
    vespo_lambda_neg: Annotated[float, _of_vespo("Decay of the weight for negative advantages.", gt=0)] = 2.0
    off_policy_mask_threshold: Annotated[float | None, _of_step(
        "Mask sequences of negative advantage whose mean log-ratio to the sampler exceeds this.",
        ge=0)] = None
    mask_truncated_completions: Annotated[bool, _of_step(
        "Mask completions without an end token in the loss.")] = False
    top_entropy_quantile: Annotated[float, _of_step(
        "Fraction of the tokens, those of highest entropy, in the policy loss. 0: only the highest.", ge=0,
        le=1)] = 1.0
    sync_ref_model: Annotated[bool, Setting(
        "Move the reference model towards the policy during training.", requires=(when.KL,),
        card="if_changed")] = False
    ref_model_mixup_alpha: Annotated[float, Setting(
        "Weight of the policy in an update of the reference model. 1: copy the policy.", ge=0, le=1,
        no_effect_unless=on("sync_ref_model"), card="if_changed")] = 0.6
    ref_model_sync_steps: Annotated[int, Setting(
        "Optimizer steps between updates of the reference model.", ge=1,
        no_effect_unless=on("sync_ref_model"), card="if_changed")] = 512
    entropy_coef: Annotated[float, _of_step(
        "Weight of the entropy bonus; the initial weight under adaptive control.")] = 0.0
    use_adaptive_entropy: Annotated[bool, _of_step(
        "Control entropy_coef so that the entropy stays at entropy_target (Skywork-OR1).")] = False
    entropy_coef_min: Annotated[float, _of_adaptive_entropy("Smallest weight of the entropy bonus.")] = 0.0
    entropy_coef_max: Annotated[float, _of_adaptive_entropy("Largest weight of the entropy bonus.")] = 1.0
    entropy_coef_delta: Annotated[float, _of_adaptive_entropy(
        "Change of the weight per optimizer step.", gt=0)] = 0.005
    entropy_target: Annotated[float, _of_adaptive_entropy(
        "Entropy in nats up to which the bonus applies.", ge=0)] = 0.2

    # Rewards and advantages
    reward_weights: Annotated[list[float] | None, _of_step(
        "One weight per reward function. None: all 1.")] = None
    scale_rewards: Annotated[str, Setting(
        "Standard deviation that advantages are divided by. True: group. False: none.",
        choices=("group", "batch", "none"), card="always", changes="step")] = "group"
    multi_objective_aggregation: Annotated[str, _of_step(
        "Combination of several reward functions: normalize the weighted sum, or sum normalized rewards; "
        "register_aggregation adds further ones.", choices=AGGREGATIONS)] = "sum_then_normalize"
    advantage_baseline: Annotated[str, Setting(
        "Baseline of the advantage: mean of the group, or of the other completions in it; register_advantage "
        "adds further ones.", choices=ADVANTAGES, card="always", changes="step")] = "group_mean"
    reward_timeout: Annotated[float | None, Setting(
        "Time limit of a reward call in seconds. None: no limit.", gt=0, changes="step")] = None
    reward_on_error: Annotated[str, _of_step(
        "Failing reward function: raise an error, or treat the rewards as missing.",
        choices=("raise", "none"))] = "raise"
    eval_pass_at_k: Annotated[list[int] | None, Setting(
        "Values of k: evaluation reports pass@k, maj@k and avg@n with confidence intervals.", ge=1,
        requires=(when.K_OF_GENERATIONS,), changes="step")] = None
    eval_pass_threshold: Annotated[float, Setting(
        "A completion passes if its reward is above this.",
        no_effect_unless=when.PASS_AT_K, changes="step")] = 0.0
    eval_max_samples: Annotated[int | None, Setting(
        "Most rows read of an evaluation set or stream. None: all.", ge=1, changes="step")] = None
    eval_generation_kwargs: Annotated[Json, Setting(
        "Sampler settings (dict or JSON) of evaluation: temperature (0: greedy), top_p, top_k, min_p, "
        "repetition_penalty.", changes="step")] = None

    # Agents
    max_tool_calling_iterations: Annotated[int | None, Setting(
        "Maximum number of tool-calling turns per completion.", ge=1, card="if_changed")] = None
    tool_timeout: Annotated[float | None, Setting(
        "Time limit in seconds of a call of a tool, reset or get_reward. None: no limit.", gt=0)] = None
    rollout_on_error: Annotated[str, Setting(
        "Failing environment: raise an error, or retry in a fresh environment and then drop the completion "
        "from its group.", choices=("raise", "retry"), card="if_changed")] = "raise"
    rollout_retries: Annotated[int, Setting(
        "Retries of a failed rollout before its completion is dropped.", ge=0, no_effect_unless=when.RETRY,
        card="if_changed")] = 2
    rollout_credit: Annotated[str, Setting(
        "Sequences that the loss normalizes where a rollout has rows that do not continue each other: the "
        "rollout, or each such row.", choices=("rollout", "row"), no_effect_unless=when.SEQUENCES,
        card="if_changed")] = "rollout"

    # Efficiency
    use_liger_kernel: Annotated[bool, Setting(
        "Use Liger's layers and Liger's fused loss.", requires=when.LIGER, card="if_changed")] = False
    logprob_head: Annotated[str, Setting(
        "Implementation of the log-prob head.", choices=("auto", "dense", "chunked"),
        card="if_changed")] = "auto"
    sequence_layout: Annotated[str, Setting(
        "Layout of the model inputs.", choices=("auto", "padded", "packed", "shared_prefix", "forked"),
        card="if_changed")] = "auto"
    skip_zero_advantage: Annotated[bool, _of_step("Skip rows that cannot contribute to the gradient.")] = True
    dynamic_sampling: Annotated[bool, Setting(
        "Resample groups whose rewards do not vary (DAPO).", card="if_changed",
        on_resume=PROMPT_ORDER)] = False
    dynamic_sampling_max_rounds: Annotated[int, Setting(
        "Maximum number of generation rounds per batch.", ge=1, no_effect_unless=on("dynamic_sampling"),
        card="if_changed")] = 10
    rollout_staleness: Annotated[int, Setting(
        "Batches that a vLLM server generates ahead of training. 0: on-policy.", ge=0,
        requires=when.STALENESS, card="if_changed")] = 0

    # Logging
    metrics_by: Annotated[str | None, Setting(
        "Column of the dataset whose values have metrics of their own, such as reward/<value>; 32 values at "
        "most, the others are joined. None: the source of a mixture.")] = None
    terminal_metrics: Annotated[list[str] | None, Setting(
        "Further metrics in the line that the terminal shows for each log.")] = None
    log_completions: Annotated[bool, Setting(
        "Log prompts and completions as a table and a parquet file; with logging_strategy='no', those of the "
        "last generation at the end.", changes="step")] = False
    num_completions_to_print: Annotated[int | None, Setting(
        "Rows of the printed table, from the best to the worst of a group. None: 4.", ge=0,
        no_effect_unless=on("log_completions"), changes="step")] = None
    log_unique_prompts: Annotated[bool, Setting(
        "Log one completion per prompt.", no_effect_unless=on("log_completions"), changes="step")] = False
    log_multimodal: Annotated[bool, Setting(
        "Include images in logged completions.", no_effect_unless=on("log_completions"),
        changes="step")] = True
    log_completions_hub_repo: Annotated[str | None, Setting(
        "Hub dataset that the completions are uploaded to.", requires=(on("log_completions"),),
        changes="step")] = None
    save_rollouts: Annotated[bool, Setting(
        "Save every generation and step in output_dir/rollouts, for groupwise replay.")] = False
    hub_include: Annotated[list[str] | None, Setting(
        "Files of output_dir that push_to_hub uploads beside the model. None: none of these.",
        choices=tuple(UNPUBLISHED))] = None

    # Old names
    use_transformers_paged: Annotated[bool, Setting(ignored=_OWN_LOOP)] = False
    vllm_guided_decoding_regex: Annotated[str | None, Setting(
        renamed_to="vllm_structured_outputs_regex")] = None
    vllm_importance_sampling_cap: Annotated[float | None, Setting(
        renamed_to="vllm_importance_sampling_clip_max")] = None
    use_liger_loss: Annotated[bool | None, Setting(renamed_to="use_liger_kernel")] = None
    wandb_log_unique_prompts: Annotated[bool | None, Setting(
        renamed_to="log_unique_prompts")] = None
    # fmt: on

    @property
    def completions_per_micro_batch(self) -> int:
        """Number of completions of a micro-batch, all ranks together."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def prompts_per_batch(self) -> int:
        """Number of prompts P of a generation batch, all ranks together."""
        return self.generation_batch_size // self.num_generations  # type: ignore[operator]

    @property
    def micro_batches_per_generation(self) -> int:
        """Number of micro-batches of a rank that are trained on a generation batch, reuse included."""
        return self.steps_per_generation * self.num_iterations  # type: ignore[operator]

    @property
    def optimizer_steps_per_generation(self) -> int:
        """Number of optimizer steps that train on a generation batch, rounded up."""
        return -(-self.micro_batches_per_generation // self.gradient_accumulation_steps)

    @property
    def trains_on_policy(self) -> bool:
        """True if every generation batch is used up within one optimizer step."""
        return self.gradient_accumulation_steps % self.micro_batches_per_generation == 0

    @property
    def splits_generation(self) -> bool:
        """True if an optimizer step trains on a part of a generation: then all ranks agree on its rows."""
        return self.gradient_accumulation_steps % self.steps_per_generation != 0  # type: ignore[operator]

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the loss has an entropy bonus, of a fixed or an adaptive coefficient."""
        return self.use_adaptive_entropy or self.entropy_coef != 0.0

    @property
    def generations_per_eval_prompt(self) -> int:
        """Completions per prompt of an evaluation."""
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval
