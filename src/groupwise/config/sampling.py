"""Sampler settings derived from a configuration: the backend and the truncation of its distribution."""

from __future__ import annotations

from groupwise.config.grpo_config import GRPOConfig


def chosen_backend(config: GRPOConfig) -> str:
    """What generates: "transformers", its "continuous" batching, or the mode in which vLLM does."""
    own = "continuous" if config.use_transformers_continuous_batching else "transformers"
    return config.vllm_mode if config.use_vllm else own


def truncating(config: GRPOConfig) -> str:
    """The settings by which the sampler truncates its distribution, with their values."""
    on = {"top_p": config.top_p < 1, "top_k": bool(config.top_k), "min_p": bool(config.min_p)}
    return ", ".join(f"{name}={getattr(config, name)}" for name, used in on.items() if used)
