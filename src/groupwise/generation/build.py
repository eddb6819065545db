"""Construct the generation backend of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend, truncating
from groupwise.errors import ConfigError
from groupwise.generation.base import BACKENDS, GenerationBackend, ProcessingClass
from groupwise.tokenization.images import image_suppress_tokens, is_processor

logger = logging.getLogger(__name__)


def check_backend(config: GRPOConfig, backend: str | GenerationBackend | None = None) -> None:
    """Check the settings of the chosen backend before anything is loaded.

    Args:
        backend: the trainer's argument; None: the backend that ``config`` chooses.

    Raises:
        ConfigError: the name is not registered, or the backend does not support a setting.
    """
    if isinstance(backend, GenerationBackend):
        return
    check_settings = BACKENDS.get(backend or chosen_backend(config)).check_settings
    if check_settings is not None:
        check_settings(config)


def make_backend(
    policy: Callable[[], PreTrainedModel],
    config: GRPOConfig,
    processing_class: ProcessingClass,
    backend: str | GenerationBackend | None = None,
) -> GenerationBackend:
    """Construct the generation backend.

    Args:
        policy: returns the unwrapped policy; training may wrap it again.
        config: settings of the run.
        processing_class: tokenizer or processor.
        backend: the trainer's argument: an instance, a registered name, or None for the backend that
            ``config`` chooses.

    Raises:
        ConfigError: the backend does not support the policy or images.
    """
    _warn_about_truncated_sampling(config)
    if isinstance(backend, GenerationBackend):
        made = backend
    else:
        entry = BACKENDS.get(backend or chosen_backend(config))
        made = entry.factory(
            policy, config, processing_class, image_suppress_tokens(policy(), processing_class)
        )
    if is_processor(processing_class) and not made.supports_images:
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, but {type(made).__name__} does not "
            "support prompts with images; set use_vllm=False and use_transformers_continuous_batching=False "
            "to generate with the policy, or pass the tokenizer alone to train on text"
        )
    return made


def _warn_about_truncated_sampling(config: GRPOConfig) -> None:
    if used := truncating(config):
        logger.warning(
            "%s: completions are sampled from a truncated distribution, but log-probs are those of the full "
            "one, which biases the importance ratio; top_p=1.0 with top_k=0 and min_p=None is unbiased",
            used,
        )
