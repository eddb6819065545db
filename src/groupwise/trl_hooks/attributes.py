"""Attributes and helpers of TRL's trainer that hooks read and call, beside the hooks themselves."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from groupwise.core.masks import off_policy_keep
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings, vespo_gate
from groupwise.generation.base import GenerationBackend, json_dict, text_tokenizer
from groupwise.trl_hooks.inputs import Inputs
from groupwise.trl_hooks.state import InputsBuffer


class TrlAttributes:
    """Attributes under TRL's names."""

    settings: Any
    processing_class: Any
    backend: GenerationBackend
    buffer: InputsBuffer

    _is_vlm = False
    chat_template = None

    @property
    def _tokenizer(self) -> Any:
        return text_tokenizer(self.processing_class)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a completion, that of the tokenizer first."""
        first = self._tokenizer.eos_token_id
        return [first, *sorted(self.backend.end_tokens - {first})]

    @property
    def generation_kwargs(self) -> dict[str, Any]:
        """Arguments of ``model.generate`` for a hook that samples itself."""
        args, tokenizer = self.settings, self._tokenizer
        return {
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": self.eos_token_ids,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": max(args.top_k or 0, 0),
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "cache_implementation": args.cache_implementation,
            **json_dict(args.generation_kwargs),
        }

    @property
    def generation_config(self) -> GenerationConfig:
        """Configuration of ``model.generate`` for a hook that samples itself."""
        return GenerationConfig(**self.generation_kwargs, disable_compile=True)

    @property
    def vllm_generation(self) -> Any:
        """Not available.

        Raises:
            AttributeError: with the counterpart.
        """
        raise AttributeError(
            "trainer.vllm_generation does not exist in groupwise.trl_hooks; its counterpart is "
            "trainer.backend, whose generate(prompt_ids, SamplingOptions()) and sync_weights(...) do the same"
        )

    @property
    def _buffered_inputs(self) -> list[Inputs] | None:
        """Micro-batches of the newest generation batch; None before the first."""
        return self.buffer.entries or None

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
