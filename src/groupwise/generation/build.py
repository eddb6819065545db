"""What samples completions."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend, truncating
from groupwise.errors import ConfigError
from groupwise.generation.base import GenerationBackend
from groupwise.tokenization.images import is_processor, sampled_never

logger = logging.getLogger(__name__)

# the module that holds its check_settings and make_backend; loaded when it is chosen
_BACKENDS = {
    "transformers": "transformers_generate",
    "continuous": "continuous_batching",
    "colocate": "vllm.colocate",
    "server": "vllm.server",
}


def check_backend(config: GRPOConfig) -> None:
    """Refuse settings that the chosen backend cannot follow, before anything is loaded."""
    _backend_module(config).check_settings(config)


def _backend_module(config: GRPOConfig) -> Any:
    return importlib.import_module(f"groupwise.generation.{_BACKENDS[chosen_backend(config)]}")


def make_backend(
    policy: Callable[[], PreTrainedModel], config: GRPOConfig, processing_class: Any
) -> GenerationBackend:
    """What samples completions under this configuration.

    Args:
        policy: returns the unwrapped policy; training may wrap it anew.
    """
    _warn_about_truncated_sampling(config)
    if is_processor(processing_class) and chosen_backend(config) != "transformers":
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, and prompts with images are generated "
            "by the policy's own generate only: set use_vllm=False and "
            "use_transformers_continuous_batching=False, or pass the tokenizer alone to train on text"
        )
    never = sampled_never(policy(), processing_class)
    return _backend_module(config).make_backend(policy, config, processing_class, never)


def _warn_about_truncated_sampling(config: GRPOConfig) -> None:
    if used := truncating(config):
        logger.warning(
            "%s: completions are sampled from a truncated distribution while log-probs are those of the full "
            "one, which biases the importance ratio; top_p=1.0 with top_k=0 and min_p=None has no such bias",
            used,
        )
