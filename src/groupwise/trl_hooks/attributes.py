"""Attributes and helpers of TRL's trainer that hooks read and call, beside the hooks themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from groupwise.compat.trl import SAMPLER_ATTRIBUTES, UnreadAttribute
from groupwise.config.sampling import sampler_settings
from groupwise.core.entropy import EntropyControl
from groupwise.core.ratios import off_policy_keep
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings, vespo_gate
from groupwise.errors import ConfigError, shortened
from groupwise.generation.base import GenerationBackend
from groupwise.generation.settings import generation_settings
from groupwise.tokenization.text import text_tokenizer
from groupwise.trl_hooks.inputs import Inputs
from groupwise.trl_hooks.state import InputsBuffer


class ReadOnlyGenerationConfig(GenerationConfig):
    """Sampler settings that hooks read: an assignment is an error, since the sampler would not read it.

    ``copy.copy`` and ``copy.deepcopy`` return a ``GenerationConfig``, which may change.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"trainer.generation_config.{name}={shortened(value)} is not read by the sampler: use "
            f"{SAMPLER_ATTRIBUTES}; for a generate call of your own, change a copy (copy.deepcopy)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return GenerationConfig, (), dict(vars(self))  # class, arguments and attributes of a copy


def _end_tokens(trainer: Any) -> tuple[int, ...]:
    """Return the tokens that end a completion, that of the tokenizer first."""
    first = trainer._tokenizer.eos_token_id
    return (first, *sorted(trainer.backend.end_tokens - {first}))


def _generation_kwargs(trainer: Any) -> Mapping[str, Any]:
    """Return the read-only arguments of ``model.generate`` for a hook that samples itself."""
    args = trainer.args
    of_run = generation_settings(args, trainer.model, trainer._tokenizer)
    return MappingProxyType({**of_run, **vars(sampler_settings(args)), "min_p": args.min_p})


def _generation_config(trainer: Any) -> GenerationConfig:
    """Return the configuration of ``model.generate`` for a hook that samples itself."""
    config = GenerationConfig(**{"disable_compile": True, **trainer.generation_kwargs})
    config.__class__ = ReadOnlyGenerationConfig  # its constructor assigns
    return config


def _environment_factories(trainer: Any) -> None:
    """Return None: the trainer has no environments.

    Raises:
        AttributeError: it has.
    """
    if trainer.agents is not None and trainer.agents.loop.provides_tasks:
        raise AttributeError(
            "trainer.environment_factories does not exist in groupwise.trl_hooks: _generate resets the "
            "environments; call super()._generate_and_score_completions(inputs)"
        )


class TrlAttributes:
    """Attributes under TRL's names."""

    args: Any
    processing_class: Any
    backend: GenerationBackend
    buffer: InputsBuffer
    entropy_control: EntropyControl
    is_fsdp_enabled: bool
    tools: list[Any]

    _is_vlm = False
    _last_loaded_step = None
    _entropy_window_stats = None  # for a loss that adapts the entropy coefficient itself
    _current_train_step_time = 0.0  # for a training_step that measures itself

    generation_config = UnreadAttribute(_generation_config)
    generation_kwargs = UnreadAttribute(_generation_kwargs)
    eos_token_ids = UnreadAttribute(_end_tokens)
    chat_template = UnreadAttribute(lambda trainer: None)
    continuous_batching_config = UnreadAttribute(lambda trainer: None)
    environment_factories = UnreadAttribute(_environment_factories)

    @property
    def _tokenizer(self) -> Any:
        return text_tokenizer(self.processing_class)

    @property
    def _standalone_tools(self) -> list[Any]:
        return self.tools

    @property
    def _entropy_bonus_enabled(self) -> bool:
        return self.args.has_entropy_bonus

    @property
    def _last_world_entropy(self) -> float:
        """Mean token entropy of the last window; infinite before the first one."""
        return math.inf if self.entropy_control.entropy is None else self.entropy_control.entropy

    @_last_world_entropy.setter
    def _last_world_entropy(self, entropy: float) -> None:
        self.entropy_control = replace(self.entropy_control, entropy=entropy)

    @property
    def _dist(self) -> Any:
        if self.is_fsdp_enabled:
            raise AttributeError(
                "trainer._dist does not exist in groupwise.trl_hooks under FSDP: sample with "
                "trainer.backend.generate(prompt_ids), which gathers the parameters"
            )
        return SimpleNamespace(summon_full_params=lambda module, **options: nullcontext())

    @property
    def _step(self) -> int:
        """Number of micro-batches trained on, which selects the next one."""
        return self.buffer.step

    @_step.setter
    def _step(self, step: int) -> None:
        self.buffer.step = step

    @property
    def _buffered_inputs(self) -> list[Inputs] | None:
        """Micro-batches of the newest generation batch; None before the first."""
        return self.buffer.entries or None

    @_buffered_inputs.setter
    def _buffered_inputs(self, entries: list[Inputs]) -> None:
        self.buffer.fill(entries, self.args.num_iterations)

    @staticmethod
    def get_off_policy_mask(
        advantages: torch.Tensor,
        per_token_logps: torch.Tensor,
        sampling_per_token_logps: torch.Tensor,
        mask: torch.Tensor,
        off_policy_threshold: float,
    ) -> torch.Tensor:
        """Compute the off-policy mask of DeepSeek-V3.2.

        Args:
            advantages: (B, 1) or (B, T); the others are (B, T).

        Returns:
            1 keeps and 0 drops, of the shape of ``advantages``.
        """
        return off_policy_keep(
            advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold
        ).to(mask.dtype)

    @staticmethod
    @torch.no_grad()
    def get_gamma_weights(
        advantages: torch.Tensor,
        log_ratio_per_token: torch.Tensor,
        mask: torch.Tensor,
        importance_sampling_ratio: torch.Tensor | None,
        k_pos: float = 2.0,
        lambda_pos: float = 3.0,
        k_neg: float = 3.0,
        lambda_neg: float = 2.0,
    ) -> torch.Tensor:
        """Compute the gate φ of VESPO.

        Args:
            advantages: (B, 1) or (B, T).
            log_ratio_per_token, mask: (B, T).
            importance_sampling_ratio: sampler correction, (B, T) or (B, 1); None: there is none.

        Returns:
            (B, 1), or (B, T) for token-wise advantages.
        """
        correction = importance_sampling_ratio
        inputs = SurrogateInputs(
            logps_BT=log_ratio_per_token,
            old_logps_BT=torch.zeros_like(log_ratio_per_token),
            log_ratio_BT=log_ratio_per_token,
            ratio_BX=log_ratio_per_token.exp(),
            log_correction_BX=None if correction is None else correction.log(),
            advantages_BX=advantages,
            loss_mask_BT=mask.to(log_ratio_per_token.dtype),
            group_ids_B=torch.arange(len(mask), device=mask.device),
        )
        return vespo_gate(
            inputs,
            SurrogateSettings(
                vespo_k_pos=k_pos, vespo_lambda_pos=lambda_pos, vespo_k_neg=k_neg, vespo_lambda_neg=lambda_neg
            ),
        )
