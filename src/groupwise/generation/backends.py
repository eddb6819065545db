"""Registry, checks and construction of generation backends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend, sampler_settings, truncating
from groupwise.errors import ConfigError, warn_once
from groupwise.generation.base import GenerationBackend
from groupwise.records.images import ImageInputs
from groupwise.registry import Registry
from groupwise.tokenization.images import image_suppress_tokens
from groupwise.tokenization.text import ProcessingClass

logger = logging.getLogger(__name__)


def check_images(backend: GenerationBackend, images: Sequence[ImageInputs] | None) -> None:
    """Raise ConfigError if a prompt has images and ``backend`` would not pass them to the model."""
    if not backend.supports_images and any(inputs.arrays for inputs in images or ()):
        raise images_unsupported("a prompt has images", type(backend).__name__)


def images_unsupported(problem: str, backend: str) -> ConfigError:
    """Return the error for images that a backend does not pass to the model."""
    return ConfigError(
        f"{problem}, but the backend {backend!r} samples from text alone; set use_vllm=False to "
        "generate with the policy, or drop the images"
    )


class BackendFactory(Protocol):
    """Constructor of a backend.

    Args:
        policy: returns the unwrapped policy; call it at every generation, since training may wrap it again.
        suppress_tokens: token ids that must not be sampled (image placeholders).
    """

    def __call__(
        self,
        policy: Callable[[], PreTrainedModel],
        config: GRPOConfig,
        processing_class: ProcessingClass,
        suppress_tokens: Sequence[int] = (),
    ) -> GenerationBackend: ...


@dataclass(frozen=True)
class BackendEntry:
    """Entry of the registry.

    Attributes:
        factory: constructs the backend after the policy was loaded.
        check_config: raises ConfigError for settings that the backend does not support, before anything is
            loaded; None: nothing to check.
        supports_images: as in :class:`GenerationBackend`, known before the backend is constructed.
        check_images: raises ConfigError if a run with images cannot use the backend; None: nothing to check.
    """

    factory: BackendFactory
    check_config: Callable[[GRPOConfig], None] | None = None
    supports_images: bool = False
    check_images: Callable[[GRPOConfig], None] | None = None


#: Backends by name; the built-in ones are chosen by ``use_vllm`` and ``vllm_mode``.
BACKENDS: Registry[BackendEntry] = Registry(
    "backend",
    {
        "transformers": "groupwise.generation.transformers_backend:ENTRY",
        "colocate": "groupwise.generation.vllm.colocate:ENTRY",
        "server": "groupwise.generation.vllm.server:ENTRY",
    },
)


def register_backend(
    name: str, factory: BackendFactory, check_config: Callable[[GRPOConfig], None] | None = None
) -> None:
    """Register a generation backend, which ``GRPOTrainer(..., backend=name)`` then uses.

    Args:
        name: new name.
        factory: called as ``factory(policy, config, processing_class, suppress_tokens)`` once the policy is
            loaded; see :class:`BackendFactory`.
        check_config: called with the config before anything is loaded; raises ConfigError for settings that
            the backend does not support.

    >>> register_backend("mine", MyBackend)
    >>> GRPOTrainer(model, reward, args, dataset, backend="mine")
    """
    BACKENDS.register(name, BackendEntry(factory, check_config))


def check_backend(
    config: GRPOConfig, backend: str | GenerationBackend | None = None, *, with_images: bool = False
) -> None:
    """Check that the chosen backend supports the configuration, before anything is loaded.

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
        entry = BACKENDS[name]
        supports_images = entry.supports_images
        if entry.check_config is not None:
            entry.check_config(config)
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
    entry = BACKENDS[backend or chosen_backend(config)]
    return entry.factory(policy, config, processing_class, image_suppress_tokens(policy(), processing_class))


def warn_of_truncation(config: GRPOConfig, backend: GenerationBackend, missing_mask_reason: str = "") -> bool:
    """Return True, and warn once, if completions are truncated samples without a sampling mask.

    The trainer's log-probs are then those of the full distribution.

    Args:
        missing_mask_reason: why completions lack the mask even if the backend reports it; "": they have it.
    """
    used = truncating(config)
    if not used:  # a backend of servers connects to answer the next question
        return False
    if backend.reports_sampling_mask(vars(sampler_settings(config))) and not missing_mask_reason:
        return False
    reason = missing_mask_reason or f"{type(backend).__name__} does not report the sampling mask"
    warn_once(
        logger,
        "%s: completions are sampled from a truncated distribution, but log-probs are those of the full "
        "one, which biases the importance ratio, because %s. The metric sampling/truncated_mass shows "
        "by how much, if the sampler reports log-probs; without these settings the ratio is unbiased",
        *(used, reason),
    )
    return True
