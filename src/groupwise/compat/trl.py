"""Names of TRL's trainer and configuration that scripts use, what replaces them, and TRL's other defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from groupwise.errors import ConfigError, nearest_name

Trainer = TypeVar("Trainer", bound=type)

#: Version of TRL that names and defaults are those of.
TRL_VERSION = "1.16.0"

#: The way out for subclasses and scripts written for TRL.
TRL_HOOKS = (
    "'from groupwise.trl_hooks import GRPOConfig, GRPOTrainer', with which code written for TRL runs as it is"
)

#: TRL's default by field, where a run that keeps our default differs from one that keeps TRL's.
TRL_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"max_completion_length": 512, "use_bias_correction_kl": True}
)

#: TRL's default by field, where a run trains the same ("auto" pads on Neuron devices only).
TRL_SPELLINGS: Mapping[str, object] = MappingProxyType(
    {"report_to": "none", "pad_to_multiple_of": "auto", "top_k": 0}
)

#: Methods of TRL's trainer that ``groupwise.GRPOTrainer`` does not call, or not for training, and the
#: counterpart. An override is refused.
REFUSED_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "_generate": "generate_rollouts",
        "_generate_single_turn": "generate_rollouts",
        "_tokenize_prompts": "generate_rollouts",
        "_tool_call_loop": "generate_rollouts",
        "_get_tool_suffix_ids": "generate_rollouts",
        "_calculate_rewards": "compute_rewards",
        "_generate_and_score_completions": "generate_rollouts, compute_rewards and compute_advantages",
        "_prepare_inputs": "make_window",
        "_prepare_input": "make_window",
        "_get_per_token_logps_and_entropies": "compute_logprobs",
        "_compute_loss": "compute_policy_loss",
        "_get_num_items_in_batch": "set_token_weights",
        "get_high_entropy_mask": "compute_entropy_masks",
        "get_off_policy_mask": "compute_policy_loss",
        "get_gamma_weights": "compute_policy_loss",
        "_get_dataloader": "get_train_dataloader and get_eval_dataloader",
        "_remove_unused_columns": "get_train_dataloader and get_eval_dataloader",
        "_log_metric": "log_metric in a reward function",
        "_log_completion_extra": "log_extra in a reward function",
    }
)

#: Attributes and settings of the sampler, for messages about those that it does not read.
SAMPLER_ATTRIBUTES = (
    "trainer.temperature, top_p, top_k, min_p and repetition_penalty, or GRPOConfig(generation_kwargs=…)"
)

#: Attributes of TRL's trainer that are not read here, and those with the same effect; assignments are
#: refused.
UNREAD_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "generation_config": SAMPLER_ATTRIBUTES,
        "generation_kwargs": SAMPLER_ATTRIBUTES,
        "eos_token_ids": "model.generation_config.eos_token_id before the trainer is built",
        "chat_template": "processing_class.chat_template before the trainer is built",
        "continuous_batching_config": "vLLM, or groupwise's own decoding loop, which needs none",
        "environment_factories": "the argument environment_factory of the trainer",
        "vllm_generation": "trainer.backend, whose generate(prompt_ids, SamplingOptions()) and "
        "sync_weights(...) do the same",
    }
)

#: Attributes of TRL's trainer that do not exist here, and their counterparts; a subclass may set its own.
ABSENT_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        **REFUSED_METHODS,
        "_metrics": "record_metric(name, value), or log_metric in a reward function",
        "_logs": "log_extra in a reward function",
        "_step": "state.global_step",
        "_buffered_inputs": "buffer",
    }
)

#: Names of older versions of TRL and transformers, and of scripts built on TRL, and the setting here.
OLD_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "adafactor": "optim: adafactor",
        "dispatch_batches": "accelerator_config: {dispatch_batches: …}",
        "environment_factory": "environment: module:name",
        "evaluation_strategy": "eval_strategy",
        "fsdp_min_num_params": "fsdp_config: {min_num_params: …}",
        "fsdp_transformer_layer_cls_to_wrap": "fsdp_config: {transformer_layer_cls_to_wrap: …}",
        "hub_model_revision": "hub_revision",
        "no_cuda": "use_cpu: true",
        "peft_config": "lora: {r: 16, …}",
        "per_gpu_eval_batch_size": "per_device_eval_batch_size",
        "per_gpu_train_batch_size": "per_device_train_batch_size",
        "push_to_hub_model_id": "hub_model_id",
        "push_to_hub_organization": "hub_model_id: organization/name",
        "push_to_hub_token": "hub_token",
        "split_batches": "accelerator_config: {split_batches: …}",
        "torchdynamo": "torch_compile_backend",
        "tpu_metrics_debug": "debug: tpu_metrics_debug",
        "train_dataset": "dataset",
        "vllm_dtype": "vllm_engine_kwargs: {dtype: …}",
        "vllm_enable_prefix_caching": "vllm_engine_kwargs: {enable_prefix_caching: …}",
        "warmup_ratio": "warmup_steps with the same value; below 1 it is a share of all steps",
    }
)

#: Arguments of the trainer, which a configuration does not take.
ARGUMENTS = (
    *("model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "tools", "rollout_func"),
    *("reward_processing_classes", "quantization_config", "peft_config", "environment_factory", "callbacks"),
)


#: Other names of the trainer's arguments, and the way out.
RENAMED_ARGUMENTS = {
    "tokenizer": "write processing_class",
    "config": "write args",
    "dataset": "write train_dataset",
}


def reason_not_a_setting(name: str, *, in_file: bool = True) -> str:
    """Return what to write instead of a name of older versions or of a script; empty for other names.

    Args:
        in_file: the name is a key of a run file or a flag, not an argument of ``GRPOConfig``.
    """
    if name in ARGUMENTS and not in_file:
        return "pass it to GRPOTrainer"
    return f"write {OLD_NAMES[name]}" if name in OLD_NAMES else ""


def is_trl_default(name: str, value: object) -> bool:
    """Return True if TRL's default of this field differs from ours and equals ``value``."""
    return any(name in table and value == table[name] for table in (TRL_DEFAULTS, TRL_SPELLINGS))


class AbsentAttribute:
    """Attribute of ``ABSENT_ATTRIBUTES``: reading it is an error with the counterpart."""

    def __init__(self, name: str, way_out: str) -> None:
        self.name, self.way_out = name, f"{way_out}. A subclass written for TRL: {TRL_HOOKS}"

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        raise AttributeError(f"trainer.{self.name} does not exist; use {self.way_out}")


class UnreadAttribute(AbsentAttribute):
    """Attribute of ``UNREAD_ATTRIBUTES``: an assignment, which would change nothing, is an error.

    Args:
        read: returns the value that hooks read; None: there is none.
    """

    def __init__(self, read: Callable[[Any], Any] | None = None) -> None:
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.way_out = name, UNREAD_ATTRIBUTES[name]

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return super().__get__(trainer) if trainer is None or self.read is None else self.read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise ConfigError(f"trainer.{self.name} is not read: use {self.way_out}")


def refuse_unread(trainer_class: Trainer) -> Trainer:
    """Class decorator: refuse assignments to ``UNREAD_ATTRIBUTES``, and reads of ``ABSENT_ATTRIBUTES``."""
    for name in UNREAD_ATTRIBUTES:
        attribute = UnreadAttribute()
        attribute.__set_name__(trainer_class, name)
        setattr(trainer_class, name, attribute)
    for name, way_out in ABSENT_ATTRIBUTES.items():
        if not hasattr(trainer_class, name):  # else a method of transformers
            setattr(trainer_class, name, AbsentAttribute(name, way_out))
    return trainer_class


class WithoutKeys:
    """Base of a record that TRL passes as a dictionary: a subscript is an error that names the field."""

    def __getitem__(self, key: object) -> NoReturn:
        field = nearest_name(str(key), getattr(self, "__dataclass_fields__", ()), cutoff=0.6)
        raise TypeError(
            f"{type(self).__name__} has no key {key!r}; its fields are attributes{field and f': {field}'}. A "
            f"subclass written for TRL: {TRL_HOOKS}"
        )
