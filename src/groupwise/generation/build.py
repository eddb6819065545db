"""Construct the generation backend of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend, truncating
from groupwise.generation.base import BACKENDS, GenerationBackend, ProcessingClass, images_unsupported
from groupwise.tokenization.images import image_suppress_tokens


def check_backend(
    config: GRPOConfig, backend: str | GenerationBackend | None = None, *, with_images: bool = False
) -> None:
    """Check the settings of the chosen backend before anything is loaded.

    Args:
        backend: the trainer's argument; None: the backend that ``config`` chooses.
        with_images: a dataset has a column of images.

    Raises:
        ConfigError: the name is not registered, or the backend does not support a setting or images.
    """
    if isinstance(backend, GenerationBackend):
        name, supports_images = type(backend).__name__, backend.supports_images
    else:
        name = backend or chosen_backend(config)
        entry = BACKENDS.get(name)
        supports_images = entry.supports_images
        if entry.check_settings is not None:
            entry.check_settings(config)
        if with_images and entry.check_images is not None:
            entry.check_images(config)
    if with_images and not supports_images:
        raise images_unsupported("a dataset has a column of images", name)


def make_backend(
    policy: Callable[[], PreTrainedModel],
    config: GRPOConfig,
    processing_class: ProcessingClass,
    backend: str | GenerationBackend | None = None,
) -> GenerationBackend:
    """Construct the generation backend.

    Args:
        policy: returns the unwrapped policy; training may wrap it again.
        backend: the trainer's argument: an instance, a registered name, or None for the backend that
            ``config`` chooses.

    Raises:
        ConfigError: the backend does not support the policy.
    """
    if isinstance(backend, GenerationBackend):
        return backend
    entry = BACKENDS.get(backend or chosen_backend(config))
    return entry.factory(policy, config, processing_class, image_suppress_tokens(policy(), processing_class))


def unreported_truncation(
    config: GRPOConfig,
    backend: GenerationBackend,
    generation_kwargs: Mapping[str, Any],
    lost_because: str = "",
) -> str:
    """Return a warning if completions are truncated samples without a sampling mask, else "".

    The trainer's log-probs are then those of the full distribution.

    Args:
        generation_kwargs: sampler settings of requests that replace those of the backend.
        lost_because: reason why completions lose the record even if the backend makes one.
    """
    used = truncating(config)
    if not used:
        return ""
    if not lost_because and backend.reports_sampling_mask(generation_kwargs):
        return ""
    reason = lost_because or f"{type(backend).__name__} does not report the sampling mask"
    return (
        f"{used}: completions are sampled from a truncated distribution, but log-probs are those of the full "
        f"one, which biases the importance ratio, because {reason}. The metric sampling/truncated_mass shows "
        "by how much, if the sampler reports log-probs; without these settings the ratio is unbiased"
    )
