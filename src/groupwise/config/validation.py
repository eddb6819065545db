"""What a configuration must satisfy: one named rule per constraint, all violations reported together.

A new constraint is one more :class:`Rule` in ``config_rules``, ``config_conflicts``,
``config_vllm`` or ``config_liger``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from groupwise.config.conflicts import COMBINATION_RULES, is_surrogate
from groupwise.config.liger import LIGER_RULES
from groupwise.config.rules import (
    BATCH_RULES,
    CHOICE_RULES,
    RANGE_RULES,
    SAMPLING_RULES,
    Rule,
    default_of,
    join_lines,
)
from groupwise.config.vllm import VLLM_RULES
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig

logger = logging.getLogger(__name__)


def check(config: GRPOConfig) -> None:
    """Raise one error for everything that is wrong; warn, once each, about settings that have no effect.

    Raises:
        ConfigError: with one line per violation.
    """
    found = violations(config)
    if found:
        lines = "".join(f"\n  - {message}" for message in found.values())
        raise ConfigError(f"{type(config).__name__}: {len(found)} invalid setting(s){lines}")
    for names, used, reason in WITHOUT_EFFECT:
        changed = [name for name in names if getattr(config, name) != default_of(config, name)]
        if changed and not used(config):
            _warn_once(f"{', '.join(changed)} set, but without effect: {reason}")


def violations(config: GRPOConfig) -> dict[str, str]:
    """Rule name -> message for every broken rule."""
    found = {rule.name: rule.message(config) for rule in VALUE_RULES if rule.violated(config)}
    broken = {*_mistyped(config), *_not_finite(config)}
    view = _Readable(config, broken)
    for rule in RULES[len(VALUE_RULES) :]:
        try:
            if rule.violated(view):
                found[rule.name] = rule.message(view)
        except _UnreadableError:
            continue
    return found


class _UnreadableError(Exception):
    """A rule read a field that is already reported for its type or for not being finite."""


class _Readable:
    """The configuration as rules see it: reading one of ``broken`` ends the rule."""

    def __init__(self, config: GRPOConfig, broken: Iterable[str]) -> None:
        self._config, self._broken = config, frozenset(broken)

    def __getattr__(self, name: str) -> Any:
        if name in self._broken:
            raise _UnreadableError(name)
        return getattr(self._config, name)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _mistyped(config: GRPOConfig) -> dict[str, str]:
    from groupwise.config.grpo_config import field_types

    found = {}
    for name, kinds in field_types().items():
        value = getattr(config, name)
        if not _is_of(value, kinds):
            allowed = " or ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))
            found[name] = (
                f"{name}={value!r} is of type {type(value).__name__}; allowed: {allowed}{_hint(config, name)}"
            )
    return found


def _is_of(value: Any, kinds: frozenset[Any]) -> bool:
    if isinstance(value, str) and dict in kinds:
        return False  # a JSON object has been read by now
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        return True
    # bool counts as a number in Python, not here
    return bool in kinds if isinstance(value, bool) else isinstance(value, tuple(kinds))


def _not_finite(config: GRPOConfig) -> dict[str, str]:
    found = {}
    for name in [item.name for item in dataclasses.fields(config)]:
        value = getattr(config, name)
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            found[name] = f"{name}={value} is not finite; allowed: finite numbers{_hint(config, name)}"
    return found


def _hint(config: GRPOConfig, name: str) -> str:
    return f"; nearest valid: {default_of(config, name)!r} (the default)"


VALUE_RULES = (
    Rule("field_types", lambda c: bool(_mistyped(c)), lambda c: join_lines(_mistyped(c)), {"beta": "much"}),
    Rule(
        "finite_numbers",
        lambda c: bool(_not_finite(c)),
        lambda c: join_lines(_not_finite(c)),
        {"epsilon": math.nan},
    ),
)

RULES = (
    *VALUE_RULES,
    *RANGE_RULES,
    *SAMPLING_RULES,
    *CHOICE_RULES,
    *BATCH_RULES,
    *COMBINATION_RULES,
    *VLLM_RULES,
    *LIGER_RULES,
)


def _uses(*surrogates: str) -> Callable[[Any], bool]:
    """True for these surrogates and for registered ones, which may read every field."""
    others = {"clipped", "cispo", "sapo", "vespo"} - set(surrogates)
    return lambda config: not any(is_surrogate(config, name) for name in others)


# (fields, whether they are used, why not)
WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("cache_implementation",), lambda c: not c.use_vllm, "vLLM has a cache of its own"),
    (
        (
            "vllm_enable_sleep_mode",
            "vllm_model_impl",
            "vllm_gpu_memory_utilization",
            "vllm_max_model_length",
            "vllm_tensor_parallel_size",
            "vllm_engine_kwargs",
        ),
        lambda c: c.use_vllm and c.vllm_mode == "colocate",
        "no engine runs in the trainer's process (use_vllm with vllm_mode='colocate')",
    ),
    (
        (
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
        ),
        lambda c: c.use_vllm and c.vllm_mode == "server",
        "no server is asked (use_vllm with vllm_mode='server')",
    ),
    (("delta",), _uses("clipped"), "loss_type has no clipped ratio"),
    (("sapo_temperature_pos", "sapo_temperature_neg"), _uses("sapo"), "loss_type is not 'sapo'"),
    (
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        _uses("vespo"),
        "loss_type is not 'vespo'",
    ),
    (("kl_estimator",), lambda c: c.beta != 0, "beta is 0"),
    (
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        lambda c: c.sync_ref_model,
        "sync_ref_model is False",
    ),
    (
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        lambda c: c.use_adaptive_entropy,
        "use_adaptive_entropy is False",
    ),
    (
        (
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
        ),
        lambda c: c.vllm_importance_sampling_correction,
        "vllm_importance_sampling_correction is False",
    ),
    (("eval_pass_threshold",), lambda c: c.eval_pass_at_k is not None, "eval_pass_at_k is None"),
    (("dynamic_sampling_max_rounds",), lambda c: c.dynamic_sampling, "dynamic_sampling is False"),
    (
        ("num_completions_to_print", "log_unique_prompts", "log_multimodal"),
        lambda c: c.log_completions,
        "log_completions is False",
    ),
)
