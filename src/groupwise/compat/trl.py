"""Names of TRL's trainer that scripts override and read, what replaces them, and its other defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from groupwise.errors import ConfigError

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
    {"report_to": "none", "pad_to_multiple_of": "auto", "top_k": 0, "use_transformers_paged": False}
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
        "vllm_generation": "trainer.backend, whose generate(prompt_ids, SamplingOptions()) and "
        "sync_weights(...) do the same",
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


class MissingAttribute:
    """Attribute of TRL's trainer that does not exist here: reading it, also of the class, is an error.

    A subclass may have an attribute of its own with this name.

    Args:
        way_out: attributes, settings or arguments to use instead.
    """

    def __init__(self, way_out: str) -> None:
        self.way_out = way_out

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        subject = "GRPOTrainer" if trainer is None else "trainer"
        raise AttributeError(f"{subject}.{self.name} does not exist; use {self.way_out}")


class UnreadAttribute(MissingAttribute):
    """Attribute of ``UNREAD_ATTRIBUTES``: an assignment is an error too.

    Args:
        read: returns the value that hooks read; None: there is none.
    """

    def __init__(self, read: Callable[[Any], Any] | None = None) -> None:
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.way_out = name, UNREAD_ATTRIBUTES[name]

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None or self.read is None:
            return super().__get__(trainer, owner)
        return self.read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise ConfigError(f"trainer.{self.name} is not read: use {self.way_out}")


def refuse_names(trainer_class: Trainer) -> Trainer:
    """Class decorator: reading a name of the tables above that the trainer does not have is an error."""
    for name, way_out in {**REFUSED_METHODS, **MISSING_ATTRIBUTES, **UNREAD_ATTRIBUTES}.items():
        if not hasattr(trainer_class, name):
            unread = name in UNREAD_ATTRIBUTES
            attribute = UnreadAttribute() if unread else MissingAttribute(f"{way_out}, or {TRL_HOOKS}")
            attribute.__set_name__(trainer_class, name)
            setattr(trainer_class, name, attribute)
    return trainer_class
