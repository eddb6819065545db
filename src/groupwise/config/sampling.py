"""Sampler settings derived from a configuration: backend, truncation, arguments of the sampler."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

from groupwise.errors import ConfigError, nearest_name
from groupwise.records import SamplerSettings

if TYPE_CHECKING:
    from groupwise.config.fields import GRPOFields

#: Keys of ``generation_kwargs`` that are moved to the field of the same meaning, which log-probs use.
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

#: Settings that remove tokens from the sampling distribution, and their neutral value; None is neutral too.
TRUNCATING: dict[str, object] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
}


def chosen_backend(config: GRPOFields) -> str:
    """Return the name of the generation backend: transformers, colocate or server."""
    return config.vllm_mode if config.use_vllm else "transformers"


def sampler_settings(config: GRPOFields) -> SamplerSettings:
    """Return the sampler settings of a generation that begins now; each may change during a run."""
    return SamplerSettings(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty,
    )


def corrects_for_sampler(config: GRPOFields, *, placeholder_logps: bool) -> bool:
    """Return True if the loss has the importance-sampling correction.

    Args:
        placeholder_logps: the sampler's log-probs may be placeholders, as those of a ``rollout_func`` often
            are. Without vLLM they are then only logged, unless
            ``rollout_func_importance_sampling_correction`` is set.
    """
    are_real = config.use_vllm or not placeholder_logps or config.rollout_func_importance_sampling_correction
    return config.vllm_importance_sampling_correction and are_real


def _truncations(config: GRPOFields) -> dict[str, object]:
    """Return the settings that truncate the sampling distribution, fields and ``generation_kwargs``."""
    kwargs = cast("dict[str, object]", config.generation_kwargs or {})
    given = {
        name: getattr(config, name) if name in SAMPLING_FIELDS else kwargs.get(name) for name in TRUNCATING
    }
    return {name: value for name, value in given.items() if value not in (None, TRUNCATING[name])}


def truncating(config: GRPOFields) -> str:
    """Return the settings that truncate the sampling distribution: ``"top_p=0.9, top_k=50"``."""
    return ", ".join(f"{name}={value}" for name, value in _truncations(config).items())


def truncated_logprob_bound(config: GRPOFields) -> float:
    """Return the most by which truncation raises the log-prob of a sampled token.

    Truncation divides its probability by the kept mass: at least ``top_p``, and unknown with other settings.
    """
    return -math.log(config.top_p) if _truncations(config).keys() <= {"top_p"} else math.inf


def check_names(field: str, given: Iterable[str], known: Collection[str], library: str) -> None:
    """Raise ConfigError, with the nearest known name, if a key of the setting ``field`` is unknown."""
    for name in given:
        if name not in known:
            nearest = nearest_name(name, known)
            raise ConfigError(f"{field}[{name!r}] is unknown to {library}; nearest valid: {nearest!r}")


def json_dict(setting: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return a setting that may be given as JSON; the config has parsed it by now. None is an empty dict."""
    return cast("dict[str, Any]", setting or {})
