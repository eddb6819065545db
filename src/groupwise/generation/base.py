"""Contract, registry and construction of generation backends."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend, sampler_settings, truncating
from groupwise.errors import ConfigError, nearest_name, warn_once
from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import Completion, SamplingOptions
from groupwise.records.fast_paths import FastPath
from groupwise.records.images import ImageInputs
from groupwise.registry import Registry
from groupwise.tokenization.images import image_suppress_tokens
from groupwise.tokenization.text import ProcessingClass

logger = logging.getLogger(__name__)

#: Settings of the run: no field of ``SamplingOptions`` is set.
RUN_SETTINGS = SamplingOptions()


class GenerationBackend(ABC):
    """Sampler of completions. All methods but ``generate`` have defaults, for a backend without own weights.

    Attributes:
        end_tokens: token ids that end a completion.
        version: optimizer step of the weights it samples from; None forces the next ``sync_weights``.
        context_length: maximum number of prompt and completion tokens; None: the model's own limit.
        generator: random numbers of the samples that this process draws; None: torch's global generator.
        supports_images: ``SamplingOptions.images`` is respected; prompts with images are refused otherwise.
    """

    end_tokens: frozenset[int]
    version: int | None = None
    context_length: int | None = None
    generator: torch.Generator | None = None
    supports_images: bool = False

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        """Sample one completion per prompt.

        Args:
            prompts: B token lists without padding; the rows of a group are adjacent.
            sampling: settings of this call. Calling its ``on_finished`` for prompts that are finished before
                the others is optional.

        Returns:
            B completions in the order of ``prompts``. Equal prompts give independent samples. A completion
            ends with its first end token, or has ``truncated=True``.

        Raises:
            BackendError: generation failed; a ``ConnectionError`` too if a server is unavailable.
        """

    def fast_paths(self, policy: Any) -> list[FastPath]:
        """Return the states of the backend's fast paths, for the line at the beginning of a run.

        Args:
            policy: below wrappers.
        """
        return [FastPath("decoding", type(self).__name__)]

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """Return True if completions have ``sampling_mask`` with top_p, top_k or min_p.

        Otherwise the trainer's log-probs are of the full distribution, which biases the importance ratio.

        Args:
            generation_kwargs: sampler settings of a request, see ``SamplingOptions``.
        """
        return False

    @property
    def requires_all_ranks(self) -> bool:
        """True if ``generate`` contains collectives, so that all ranks must call it equally often."""
        return True

    def prefetch(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, *, step: int) -> None:
        """Start generating the completions that ``generate`` will return at optimizer step ``step``."""

    def sync_weights(self, source: PolicyWeights, *, step: int) -> None:
        """Load the policy's weights of optimizer step ``step``; a no-op if ``version == step``.

        Args:
            source: weights of the policy. A backend may keep it until the next call and read it again, for
                example for a restarted server.
            step: number of optimizer steps that led to these weights.
        """
        self.version = step

    def invalidate_weights(self) -> None:
        """Make the next ``sync_weights`` load the weights at any step, as after loading a checkpoint."""
        self.version = None

    def release(self) -> None:
        """Free memory that is not needed before the next ``sync_weights``."""

    def disconnect(self) -> None:
        """Close the connections and remove the files of ``sync_weights``, which opens them again.

        Called when ``train`` ends, also with an error.
        """

    def snapshot(self) -> Any:
        """Return the state that a checkpoint needs: completions, numbers, strings and containers of them."""

    def restore(self, snapshot: Any) -> None:
        """Return to the state of a snapshot, of this process or from a checkpoint."""

    def close(self) -> None:
        """Release processes, connections and memory. May be called more than once."""


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


def check_names(field: str, given: Iterable[str], known: Collection[str], library: str) -> None:
    """Raise ConfigError, with the nearest known name, if a key of the setting ``field`` is unknown."""
    for name in given:
        if name not in known:
            nearest = nearest_name(name, known)
            raise ConfigError(f"{field}[{name!r}] is unknown to {library}; nearest valid: {nearest!r}")


def json_dict(setting: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return a setting that may be given as JSON; the config has parsed it by now. None is an empty dict."""
    return cast("dict[str, Any]", setting or {})


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
