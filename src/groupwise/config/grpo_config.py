"""The configuration of a GRPO run: every setting with its default and its meaning."""

# ruff: noqa: RUF009 - `_opt` returns a `dataclasses.field`
from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import os
import types
import typing
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available

from groupwise.config.conflicts import OLD_NAMES, SAMPLING_FIELDS
from groupwise.config.redact import masked
from groupwise.config.rules import default_of
from groupwise.config.validation import check

logger = logging.getLogger(__name__)


def _opt(default: Any, doc: str, **argument: Any) -> Any:
    """A dataclass field whose doc is also its command-line help; ``argument`` goes to ``add_argument``."""
    return dataclasses.field(default=default, metadata={"help": doc, **argument})


_SWITCH = {"nargs": "?", "const": True}  # `--flag` alone means True, also where the default is None


@dataclass(repr=False)
class GRPOConfig(TrainingArguments):
    """Settings of :class:`groupwise.GRPOTrainer`: those of ``TrainingArguments`` and the fields below.

    Parses with ``HfArgumentParser`` from flags, YAML and dicts; dict and list fields also take JSON strings.
    Building it fills in what is left open, then checks everything at once. What was filled in stays: a copy
    by ``dataclasses.replace`` keeps, for example, the resolved ``epsilon_high`` unless that is replaced too.

    Raises:
        ConfigError: listing every violated rule of ``groupwise.config.validation``.
    """

    # Changed defaults of TrainingArguments
    learning_rate: float = _opt(1e-6, "Initial learning rate.")
    logging_steps: float = _opt(10, "Optimizer steps between logs; below 1, a share of all steps.")
    gradient_checkpointing: bool = _opt(True, "Recompute activations in the backward pass to save memory.")
    remove_unused_columns: bool = _opt(False, "Drop dataset columns before the rewards could see them.")
    bf16: bool | None = _opt(  # type: ignore[assignment]
        None,
        "bfloat16 mixed precision. None: on if fp16 is off and the device computes bfloat16 natively.",
        **_SWITCH,
    )

    # Model
    model_init_kwargs: dict[str, Any] | str | None = _opt(
        None, "Keyword arguments (dict or JSON) for from_pretrained when the policy is given by name."
    )
    trust_remote_code: bool = _opt(False, "Run code shipped with models, tokenizers and reward models.")
    disable_dropout: bool = _opt(False, "Set every dropout probability of the policy to 0.")
    cast_lm_head_to_fp32: bool = _opt(
        False, "Logits of policy and reference in float32; tied embeddings keep their activation dtype."
    )
    router_aux_loss_coef: float | None = _opt(
        None, "Weight of the load-balancing loss of a mixture of experts. None: the model config's value."
    )

    # Batches
    num_generations: int = _opt(8, "Completions per prompt (G), at least 2; divides generation_batch_size.")
    num_generations_eval: int | None = _opt(
        None, "Completions per prompt in evaluation, at least 1. None: num_generations."
    )
    max_completion_length: int = _opt(256, "Most tokens generated per completion.")
    max_prompt_length: int | None = _opt(
        None, "MicroBatchBudget longer prompts from the left. None: prompts stay whole."
    )
    pad_to_multiple_of: int | None = _opt(None, "Pad prompts and completions to a multiple of this length.")
    shuffle_dataset: bool = _opt(True, "Shuffle the training prompts.")
    generation_batch_size: int | None = _opt(
        None, "Completions generated at a time, over all processes. Give this or steps_per_generation."
    )
    steps_per_generation: int | None = _opt(
        None,
        "Micro-batches per generation batch, which holds per_device_train_batch_size x processes x this many "
        "completions. None: gradient_accumulation_steps.",
    )

    # Generation
    temperature: float = _opt(1.0, "Sampling temperature; the trainer's log-probabilities use it too.")
    top_p: float = _opt(1.0, "Sample from the smallest set of tokens with this much probability. 1: all.")
    top_k: int | None = _opt(None, "Sample from this many most probable tokens. None or 0: all.")
    min_p: float | None = _opt(None, "Drop tokens less probable than this share of the most probable one.")
    repetition_penalty: float = _opt(1.0, "Above 1: discourage tokens already present. 1: off.")
    generation_kwargs: dict[str, Any] | str | None = _opt(
        None, "Further sampler arguments (dict or JSON); they override the fields above."
    )
    chat_template_kwargs: dict[str, Any] | str | None = _opt(
        None, "Further arguments (dict or JSON) for the chat template."
    )
    cache_implementation: str | None = _opt(None, "Key-value cache class of transformers' generate.")
    use_transformers_continuous_batching: bool = _opt(
        False, "Generate with the continuous batching of transformers."
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = _opt(
        None, "Settings (dict or JSON) of the continuous batching."
    )
    ds3_gather_for_generation: bool = _opt(
        True, "Accepted for scripts: under ZeRO-3 generation gathers the weights layer by layer."
    )

    # vLLM
    use_vllm: bool = _opt(False, "Generate with vLLM.")
    vllm_mode: str = _opt("colocate", "colocate: the engine runs in the trainer's processes; server: apart.")
    vllm_model_impl: str = _opt("vllm", "Model implementation in the engine: vllm or transformers.")
    vllm_enable_sleep_mode: bool = _opt(False, "Colocate: free the engine's memory while training.")
    vllm_structured_outputs_regex: str | None = _opt(None, "Regular expression every completion matches.")
    vllm_server_base_url: str | None = _opt(None, "Server: its address; overrides host and port.")
    vllm_server_host: str = _opt("0.0.0.0", "Server: host name or IP address.")
    vllm_server_port: int = _opt(8000, "Server: port.")
    vllm_server_timeout: float = _opt(240.0, "Server: seconds to wait for it before a ConnectionError.")
    vllm_group_port: int = _opt(51216, "Server: port where the weight transfer meets.")
    vllm_gpu_memory_utilization: float = _opt(0.3, "Colocate: share of the GPU memory for the engine.")
    vllm_max_model_length: int | None = _opt(None, "Colocate: most tokens of prompt and completion together.")
    vllm_tensor_parallel_size: int = _opt(1, "Colocate: processes that share one engine.")
    vllm_engine_kwargs: dict[str, Any] | str | None = _opt(
        None, "Colocate: further arguments (dict or JSON) for the engine."
    )
    vllm_importance_sampling_correction: bool = _opt(
        True, "Reweight for the gap between the log-probabilities of the sampler and those of the trainer."
    )
    vllm_importance_sampling_mode: str = _opt(
        "sequence_mask", "token_truncate, token_mask, sequence_truncate or sequence_mask."
    )
    vllm_importance_sampling_clip_max: float | None = _opt(3.0, "Largest correction. None: no upper bound.")
    vllm_importance_sampling_clip_min: float | None = _opt(None, "Smallest correction. None: no lower bound.")

    logprob_mismatch_check: str = _opt(
        "warn", "Compare the log-probs of a separate sampler with the trainer's: off, warn or error."
    )
    logprob_mismatch_steps: int = _opt(20, "Generations between two comparisons, beside the first two.")

    # Loss
    beta: float = _opt(0.0, "Weight of the KL to the reference model. 0: no reference model in memory.")
    kl_estimator: str = _opt("k3", "Estimator of the KL per token: k1, k2, k3 or k3_k2grad.")
    kl_in_reward: bool = _opt(False, "Subtract the KL from the reward instead of adding it to the loss.")
    use_bias_correction_kl: bool = _opt(False, "Multiply the KL by the importance ratio (DeepSeek-V3.2).")
    num_iterations: int = _opt(1, "Optimization passes over each generation batch (mu).")
    epsilon: float = _opt(0.2, "Clip range of the ratio below 1, and above it unless epsilon_high is set.")
    epsilon_high: float | None = _opt(
        None, "Clip range above 1; in cispo the largest ratio itself. None: epsilon."
    )
    delta: float | None = _opt(None, "Upper bound of the unclipped ratio (INTELLECT-2). None: no bound.")
    loss_type: str = _opt(
        "dapo", "grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo, or a registered objective."
    )
    importance_sampling_level: str = _opt("token", "Ratio per token, or per sequence (GSPO).")
    sapo_temperature_pos: float = _opt(1.0, "sapo: gate temperature for positive advantages.")
    sapo_temperature_neg: float = _opt(1.05, "sapo: gate temperature for the other advantages.")
    vespo_k_pos: float = _opt(2.0, "vespo: power of the weight for positive advantages.")
    vespo_lambda_pos: float = _opt(3.0, "vespo: decay of the weight for positive advantages.")
    vespo_k_neg: float = _opt(3.0, "vespo: power of the weight for negative advantages.")
    vespo_lambda_neg: float = _opt(2.0, "vespo: decay of the weight for negative advantages.")
    off_policy_mask_threshold: float | None = _opt(
        None, "Drop sequences of negative advantage whose mean log-ratio to the sampler exceeds this."
    )
    mask_truncated_completions: bool = _opt(False, "Leave completions without an end token out of the loss.")
    top_entropy_quantile: float = _opt(1.0, "Share of the tokens, by highest entropy, that enter the loss.")
    sync_ref_model: bool = _opt(False, "Move the reference model towards the policy during training.")
    ref_model_mixup_alpha: float = _opt(0.6, "Share of the policy in a reference update. 1: replace it.")
    ref_model_sync_steps: int = _opt(512, "Optimizer steps between reference updates.")
    entropy_coef: float = _opt(0.0, "Weight of the entropy bonus; its first value under adaptive control.")
    use_adaptive_entropy: bool = _opt(False, "Steer entropy_coef towards entropy_target (Skywork-OR1).")
    entropy_coef_min: float = _opt(0.0, "Adaptive control: smallest weight.")
    entropy_coef_max: float = _opt(1.0, "Adaptive control: largest weight.")
    entropy_coef_delta: float = _opt(0.005, "Adaptive control: change per optimizer step.")
    entropy_target: float = _opt(0.2, "Adaptive control: the bonus applies up to this entropy (nats).")

    # Rewards and advantages
    reward_weights: list[float] | None = _opt(None, "One weight per reward function. None: all 1.")
    scale_rewards: str = _opt("group", "Divide by the std of the group, of the batch, or none. True: group.")
    multi_objective_aggregation: str = _opt("sum_then_normalize", "Or normalize_then_sum: each reward alone.")
    advantage_baseline: str = _opt("group_mean", "Or leave_one_out: the mean of the group's others.")
    reward_timeout: float | None = _opt(None, "Seconds a reward call may take. None: no limit.")
    reward_on_error: str = _opt("raise", "What a failing reward does: raise, or none (no reward).")
    eval_pass_at_k: list[int] | None = _opt(
        None, "Values of k: evaluation reports pass@k, maj@k and avg@n with intervals and gains."
    )
    eval_pass_threshold: float = _opt(0.0, "A completion passes when its reward is above this.")
    eval_generation_kwargs: dict[str, Any] | str | None = _opt(
        None,
        "Sampler settings (dict or JSON) that are different in evaluation: temperature (0: greedy), top_p, "
        "top_k, min_p, repetition_penalty.",
    )

    # Agents
    max_tool_calling_iterations: int | None = _opt(None, "Most tool-calling turns per completion.")

    # Efficiency
    use_liger_kernel: bool = _opt(False, "Liger's layers and Liger's fused loss.")
    logprob_head: str = _opt("auto", "How log-probabilities are computed: auto, dense or chunked.")
    sequence_layout: str = _opt("auto", "Shape of model inputs: auto, padded, packed or shared_prefix.")
    skip_zero_advantage: bool = _opt(True, "Do not compute rows that cannot contribute to the gradient.")
    dynamic_sampling: bool = _opt(False, "Resample groups whose rewards do not vary (DAPO).")
    dynamic_sampling_max_rounds: int = _opt(10, "Most generation rounds to fill a batch.")
    rollout_staleness: int = _opt(0, "vLLM server: batches generated ahead while training. 0: on-policy.")

    # Logging
    log_completions: bool = _opt(False, "Log prompts and completions as a table and a parquet file.")
    num_completions_to_print: int | None = _opt(None, "Rows of the printed table. None: all.")
    log_unique_prompts: bool = _opt(False, "Log one completion per prompt.")
    log_multimodal: bool = _opt(True, "Include images in logged completions.")
    log_completions_hub_repo: str | None = _opt(None, "Hub dataset to upload the completions to.")

    # Old names
    use_transformers_paged: bool | None = _opt(
        None, "Old name of use_transformers_continuous_batching.", **_SWITCH
    )
    vllm_guided_decoding_regex: str | None = _opt(None, "Old name of vllm_structured_outputs_regex.")
    vllm_importance_sampling_cap: float | None = _opt(None, "Old name of vllm_importance_sampling_clip_max.")
    use_liger_loss: bool | None = _opt(None, "Old name of use_liger_kernel.", **_SWITCH)
    wandb_log_unique_prompts: bool | None = _opt(None, "Old name of log_unique_prompts.", **_SWITCH)

    def __post_init__(self) -> None:
        _read_strings(self)
        _move_old_names(self)
        _resolve_precision(self)
        # newer transformers read the setting under this name and warn about the old one, even for our default
        if getattr(self, "activation_checkpointing", True) is None:
            self.activation_checkpointing = self.gradient_checkpointing
        super().__post_init__()
        _resolve_sampling(self)
        _resolve_defaults(self)
        _resolve_batches(self)
        check(self)

    def to_dict(self) -> dict[str, Any]:
        """As in ``TrainingArguments``, which rewrites nested dicts in place: here those of a copy."""
        return super(GRPOConfig, copy.copy(self)).to_dict()

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy takes over: no tokens, as ``training_args.bin`` is pushed with a model."""
        return masked(vars(self))


# inherited fields that the batch sizes depend on
_CHECKED_TOO = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")


@functools.cache
def field_types() -> dict[str, frozenset[Any]]:
    """The types each checked field accepts: ``{"beta": {float}, "top_k": {int, NoneType}, ...}``."""
    kinds = {}
    for name, hint in typing.get_type_hints(GRPOConfig).items():
        if name in GRPOConfig.__annotations__ or name in _CHECKED_TOO:
            union = typing.get_origin(hint) in (typing.Union, types.UnionType)
            members = typing.get_args(hint) if union else (hint,)
            kinds[name] = frozenset(typing.get_origin(member) or member for member in members)
    return kinds


def _read_strings(config: GRPOConfig) -> None:
    """Strings (YAML, shell) become what their field declares; unreadable ones stay, to be reported."""
    for name, kinds in field_types().items():
        value = getattr(config, name)
        if isinstance(value, str):
            setattr(config, name, _read_string(value, kinds))
    if isinstance(config.reward_weights, list):
        config.reward_weights = [_read_string(weight, {float}) for weight in config.reward_weights]


def _read_string(value: Any, kinds: frozenset[Any] | set[Any]) -> Any:
    if not isinstance(value, str) or not kinds & {dict, list, bool, int, float}:
        return value
    if kinds & {dict, list}:
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    if bool in kinds:
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        return int(value) if int in kinds else float(value)
    except ValueError:
        return value


def _move_old_names(config: GRPOConfig) -> None:
    """An old name hands its value to the new one, unless the new one was set to something else."""
    for old, new in OLD_NAMES.items():
        value = getattr(config, old)
        if value is None:
            continue
        warnings.warn(
            f"{old} is the old name of {new} and goes away in the next release", FutureWarning, stacklevel=4
        )
        if getattr(config, new) in (default_of(config, new), value):
            setattr(config, new, value)
            setattr(config, old, None)


def _device_type(use_cpu: bool) -> str:
    """Where ``Trainer`` will compute, found without claiming the device."""
    if use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes"):
        return "cpu"
    if is_torch_xla_available():
        return "xla"
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    others = [name for name in ("xpu", "npu", "mlu", "musa", "hpu") if hasattr(torch, name)]
    return next((name for name in others if getattr(torch, name).is_available()), "cpu")


def computes_bf16_natively(device_type: str) -> bool:
    """Whether bfloat16 is computed by the hardware rather than emulated; unknown devices count as no.

    CUDA: the current device. CPU: AVX512_BF16 or AMX.
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == "cpu":
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return False


@functools.cache
def _say_float32(device_type: str) -> None:
    logger.warning(
        "bf16 is off, training in float32: the %s device does not compute bfloat16 natively", device_type
    )


def _resolve_precision(config: GRPOConfig) -> None:
    """Decide ``bf16=None``. Comes before ``TrainingArguments`` derives ``mixed_precision`` from it."""
    if config.bf16 is not None:
        return
    # `accelerate launch --mixed_precision` reaches this process through the environment only
    launched_with = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if config.fp16 or launched_with not in ("no", "bf16"):
        config.bf16 = False
        return
    device_type = _device_type(config.use_cpu)
    config.bf16 = launched_with == "bf16" or computes_bf16_natively(device_type)
    if not config.bf16:
        _say_float32(device_type)
    elif device_type == "cpu":
        config.use_cpu = True  # TrainingArguments accepts bf16 on a CPU only when told that it is one


def _resolve_sampling(config: GRPOConfig) -> None:
    """A sampler argument becomes the value of its field, so that the trainer computes with the same."""
    if not isinstance(config.generation_kwargs, dict):
        return
    for key, name in SAMPLING_FIELDS.items():
        if key in config.generation_kwargs and getattr(config, name) == default_of(config, name):
            setattr(config, name, config.generation_kwargs[key])


def _resolve_defaults(config: GRPOConfig) -> None:
    """Derive from sound values only: a bad one is then reported once, under the name the user gave it."""
    if config.epsilon_high is None and isinstance(config.epsilon, int | float) and config.epsilon >= 0:
        config.epsilon_high = config.epsilon
    if config.num_generations_eval is None and _is_positive(config.num_generations):
        config.num_generations_eval = config.num_generations
    if config.top_k is None:
        config.top_k = 0
    scale = config.scale_rewards
    if isinstance(scale, bool) or str(scale).lower() in ("true", "false"):
        config.scale_rewards = "group" if str(scale).lower() == "true" else "none"


def _resolve_batches(config: GRPOConfig) -> None:
    """Derive ``generation_batch_size`` or ``steps_per_generation`` from the other one."""
    if not (
        _is_positive(config.per_device_train_batch_size) and _is_positive(config.gradient_accumulation_steps)
    ):
        return
    if config.steps_per_generation is None and config.generation_batch_size is None:
        config.steps_per_generation = config.gradient_accumulation_steps
    per_step = config.per_device_train_batch_size * config.world_size
    size, steps = config.generation_batch_size, config.steps_per_generation
    if size is None and _is_positive(steps):
        config.generation_batch_size = per_step * steps
    elif steps is None and _is_positive(size) and size % per_step == 0:
        config.steps_per_generation = size // per_step


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and value > 0
