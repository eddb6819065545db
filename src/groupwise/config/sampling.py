"""Sampler settings derived from a configuration: backend, truncation, arguments of the sampler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig

#: Keys of ``generation_kwargs`` and the field of the same meaning, which the trainer's log-probs use.
SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "cache_implementation": "cache_implementation",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
}


def chosen_backend(config: GRPOConfig) -> str:
    """Return the name of the generation backend: transformers, continuous, colocate or server."""
    own = "continuous" if config.use_transformers_continuous_batching else "transformers"
    return config.vllm_mode if config.use_vllm else own


def sampler_settings(config: GRPOConfig) -> dict[str, float]:
    """Return the sampler settings that may change during a run, as arguments of any backend."""
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or 0,
        "min_p": config.min_p or 0.0,
        "repetition_penalty": config.repetition_penalty,
    }


def corrects_for_sampler(config: GRPOConfig, *, has_rollout_func: bool) -> bool:
    """Return True if the loss has the importance-sampling correction.

    Log-probs of a ``rollout_func`` are often placeholders: without vLLM they are only logged, unless
    ``rollout_func_importance_sampling_correction`` is set.
    """
    trusted = config.use_vllm or not has_rollout_func or config.rollout_func_importance_sampling_correction
    return config.vllm_importance_sampling_correction and trusted


def truncating(config: GRPOConfig) -> str:
    """Return the settings that truncate the sampling distribution: ``"top_p=0.9, top_k=50"``."""
    on = {"top_p": config.top_p < 1, "top_k": bool(config.top_k), "min_p": bool(config.min_p)}
    return ", ".join(f"{name}={getattr(config, name)}" for name, used in on.items() if used)


def truncated_logprob_bound(config: GRPOConfig) -> float:
    """Return the most by which truncation raises the log-prob of a sampled token.

    Truncation divides its probability by the kept mass: at least ``top_p``, and unknown with top_k or min_p.
    """
    return math.inf if config.top_k or config.min_p else -math.log(config.top_p)
