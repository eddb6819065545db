"""Names and defaults of TRL that this library has otherwise: refused names, and defaults that differ."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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

#: TRL's default by field, where it means the same as ours ("auto" pads on Neuron devices only).
TRL_SPELLINGS: Mapping[str, object] = MappingProxyType(
    {"pad_to_multiple_of": "auto", "top_k": 0, "use_transformers_paged": False}
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
        "continuous_batching_config": "GRPOConfig(transformers_continuous_batching_config=…)",
        "environment_factories": "the argument environment_factory of the trainer",
        "vllm_generation": "trainer.backend",
    }
)

#: Private attributes of TRL's trainer that do not exist here; a subclass may have one of its own.
MISSING_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "_metrics": "record_metric",
        "_logs": "log_extra in a reward function",
        "_step": "trainer.state.global_step",
        "_buffered_inputs": "trainer.buffer",
    }
)


def is_trl_default(name: str, value: object) -> bool:
    """Return True if TRL's default of this field differs from ours and equals ``value``."""
    return any(name in table and value == table[name] for table in (TRL_DEFAULTS, TRL_SPELLINGS))
