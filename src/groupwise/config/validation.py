"""Validation of a configuration: all violations in one error, a warning per setting without effect.

Constraints of a single setting, and what it requires of others, are its `Setting` in ``fields.py``; what is
left is a function here: it yields a message per violation, or the text of a warning. They run once every
value is valid by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Any

from transformers.integrations import integration_utils

from groupwise.compat.trl import is_trl_default
from groupwise.config.conditions import COLOCATE
from groupwise.config.fields import GRPOFields
from groupwise.config.redact import masked
from groupwise.config.sampling import truncating
from groupwise.config.settings import (
    Setting,
    default_of,
    field_violations,
    has_type,
    raise_for,
    type_names,
    types_of,
    violation,
)
from groupwise.core import surrogates
from groupwise.core.objectives import OBJECTIVES
from groupwise.errors import nearest_name, shortened, warn_once

logger = logging.getLogger(__name__)


def check(config: GRPOFields) -> None:
    """Raise one error for all violations; warn, once each, about settings without effect and cautions.

    Raises:
        ConfigError: one line per violation.
    """
    raise_for(violations(config), type(config).__name__)
    for message in warnings_of(config):
        warn_once(logger, message)


def check_changes(config: GRPOFields, changed: Collection[str]) -> None:
    """Raise one error for all violations after some settings changed; warn about those without effect.

    Raises:
        ConfigError: one line per violation.
    """
    raise_for(violations(config, changed), f"{', '.join(sorted(changed))} changed during the run")
    for name in sorted(changed):
        unless = config.SETTINGS[name].no_effect_unless
        if unless is not None and not unless.holds(config):
            warn_once(logger, f"{name} was changed, but has no effect unless {unless.text}")


def violations(config: GRPOFields, changed: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return the messages of all violations by the name of the setting or of the rule.

    Args:
        changed: settings that changed during a run; requirements of others are checked if they last. None:
            the configuration is being built.

    Returns:
        of single values, else of relations between them.
    """
    found = {
        name: messages
        for name, messages in field_violations(config).items()
        if changed is None or name in changed
    }
    if found:  # relations are between values that are valid by themselves
        return found
    for name, setting in config.SETTINGS.items():
        found[name] = [
            message
            for condition in setting.requires
            if changed is None or name in changed or condition.lasts
            for message in condition.violations(name, setting.default, config)
        ]
    found |= {relation.__name__: list(relation(config)) for relation in RULES}
    return {name: messages for name, messages in found.items() if messages}


def warnings_of(config: GRPOFields) -> list[str]:
    """Return the messages about a valid configuration: settings without effect, and cautions.

    A setting has no effect if its condition does not hold; its default, and TRL's, are not mentioned.
    """
    messages = list(delta_inside_clip_range(config))
    ignored: dict[str, list[str]] = {}  # by reason: an old name, and settings of a switch, have one in common
    for name, setting in config.SETTINGS.items():
        value, unless = getattr(config, name), setting.no_effect_unless
        if value == default_of(config, name) or is_trl_default(name, value):
            continue
        if setting.ignored:
            ignored.setdefault(setting.ignored, []).append(f"{name}={shortened(masked(value, name))}")
        elif unless is not None and not unless.holds(config):
            messages.append(f"{name}={shortened(masked(value, name))} has no effect unless {unless.text}")
    return messages + [f"{', '.join(given)} is ignored: {reason}" for reason, given in ignored.items()]


# Names and parsed values


def old_and_new_name_differ(c: GRPOFields) -> Iterator[str]:
    for old, setting in c.SETTINGS.items():
        new = setting.renamed_to
        if new is not None and getattr(c, old) is not None:
            given = f"{old}={getattr(c, old)!r} is the old name of {new}={getattr(c, new)!r}"
            yield violation(given, f"{new} alone", f"{new}={getattr(c, new)!r}")


def report_to_is_installed(c: GRPOFields) -> Iterator[str]:
    known = list(integration_utils.INTEGRATION_TO_CALLBACK)
    installed = integration_utils.get_available_reporting_integrations()
    never_listed = ("azure_ml", "flyte")  # transformers lists azure_ml only without MLflow, flyte never
    for name in c.report_to or ():
        if name not in known:
            nearest = repr(nearest_name(name, known))
            yield violation(f"report_to={name!r} is unknown", ", ".join(known), nearest)
        elif name not in (*installed, *never_listed):
            given = f"report_to={name!r} needs a package that is not installed"
            extra = {"tensorboard": "dashboards", "wandb": "dashboards", "trackio": "trackio"}.get(name)
            package = f"'groupwise[{extra}]'" if extra else name
            yield violation(given, ", ".join(installed) or "none", f"'none', or run pip install {package}")


def loss_kwargs_of_objective(c: GRPOFields) -> Iterator[str]:
    settings = OBJECTIVES[c.loss_type].settings
    if settings is None:
        if c.loss_kwargs is not None:
            given = f"loss_kwargs={shortened(c.loss_kwargs)} with loss_type={c.loss_type!r}, "
            given += "which has no hyperparameters"
            takes = [name for name, entry in OBJECTIVES.items() if entry.settings]
            yield violation(given, f"loss_type {' or '.join(takes) or 'of a registered objective'}", "None")
        return
    hints = typing.get_type_hints(settings)
    fields = {item.name: item for item in dataclasses.fields(settings)}
    kwargs = typing.cast("dict[str, object]", c.loss_kwargs or {})
    for key, value in kwargs.items():
        given = f"loss_kwargs[{key!r}]={shortened(value)}"
        if key not in fields:
            unknown = f"{given} is unknown to loss_type={c.loss_type!r}"
            yield violation(unknown, ", ".join(fields), repr(nearest_name(key, fields)))
        elif not has_type(value, types_of(hints[key])):
            default, names = fields[key].default, type_names(types_of(hints[key]))
            nearest = f"a {names}" if default is dataclasses.MISSING else f"{default!r} (the default)"
            yield violation(f"{given} is of type {type(value).__name__}", names, nearest)
        elif any(number != number for number in (value if isinstance(value, list) else [value])):
            yield violation(f"{given} is not a number", "numbers", f"a value of {key}")
    for key, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and key not in kwargs:
            lacking = f"loss_kwargs={shortened(c.loss_kwargs)} lacks {key!r}"
            yield violation(lacking, ", ".join(fields), f"a value of {key}")


# Batches


def _multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` on either side of ``value``: "16 or 24"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _divisors(value: int, near: int, low: int) -> str:
    """Return the divisors of ``value``, at least ``low``, on either side of ``near``: "6 or 12"."""
    divisors = [n for n in range(low, value + 1) if value % n == 0]
    around = {*[n for n in divisors if n < near][-1:], *[n for n in divisors if n > near][:1]}
    return " or ".join(str(n) for n in sorted(around))


def generation_batch_size_in_whole_micro_batches(c: GRPOFields) -> Iterator[str]:
    size, steps, unit = c.generation_batch_size, c.steps_per_generation, c.completions_per_micro_batch
    if size is not None and steps is not None and size != steps * unit:
        given = f"generation_batch_size={size} and steps_per_generation={steps} are both given and disagree"
        yield violation(given, "one, the other None", f"generation_batch_size={steps * unit}")
    elif size is not None and steps is None and size % unit != 0:
        yield violation(
            f"generation_batch_size={size} is not divisible by {unit}, which is per_device_train_batch_size="
            f"{c.per_device_train_batch_size} x {c.world_size} process(es)",
            f"multiples of it and of num_generations={c.num_generations}",
            _multiples(size, math.lcm(unit, c.num_generations)),
        )


def generation_batch_size_in_whole_groups(c: GRPOFields) -> Iterator[str]:
    size, group = c.generation_batch_size, c.num_generations
    if size is not None and size % group != 0:
        groups = _divisors(size, near=group, low=2)
        yield violation(
            f"generation_batch_size={size} (per_device_train_batch_size x processes x steps_per_generation) "
            f"is not divisible by num_generations={group}",
            "whole groups",
            f"generation_batch_size {_multiples(size, math.lcm(group, c.completions_per_micro_batch))}"
            + (f", or num_generations {groups}" if groups else ""),
        )


def eval_batch_in_whole_groups(c: GRPOFields) -> Iterator[str]:
    if c.eval_strategy != "no":
        yield from cut_eval_groups(c)


def cut_eval_groups(config: GRPOFields) -> Iterator[str]:
    """Yield the violation of a batch of an evaluation, which a script may start with eval_strategy="no"."""
    each, processes = config.per_device_eval_batch_size, config.world_size
    if (group := config.num_generations_eval) is not None and each * processes % group != 0:
        yield violation(
            f"per_device_eval_batch_size={each} x {processes} process(es) is not divisible by "
            f"num_generations_eval={group}",
            "whole groups",
            f"per_device_eval_batch_size {_multiples(each, group // math.gcd(group, processes))}, or "
            f"num_generations_eval {_divisors(each * processes, group, low=1)}",
        )


def dataset_weights_above_zero(c: GRPOFields) -> Iterator[str]:
    for name, weight in typing.cast("dict[str, Any]", c.dataset_weights or {}).items():
        if not has_type(weight, frozenset({float})) or not 0 < weight < math.inf:
            yield violation(f"dataset_weights[{name!r}]={shortened(weight)}", "finite numbers > 0", "1.0")


_PROMPT_FILTER = {
    "min": Setting(ge=0, le=1, types=frozenset({float})),
    "max": Setting(ge=0, le=1, types=frozenset({float})),
    "again_after": Setting(ge=1, types=frozenset({int})),
    "reward": Setting(types=frozenset({str})),
}


def prompt_filter_of_rates(c: GRPOFields) -> Iterator[str]:
    given = typing.cast("dict[str, Any]", c.prompt_filter or {})
    for key, value in given.items():
        name = f"prompt_filter[{key!r}]"
        if key not in _PROMPT_FILTER:
            nearest = repr(nearest_name(str(key), _PROMPT_FILTER))
            yield violation(f"{name} is unknown", ", ".join(_PROMPT_FILTER), nearest)
        elif message := _PROMPT_FILTER[key].violation(name, value, dataclasses.MISSING):
            yield message
    low, high = given.get("min", 0), given.get("max", 1)
    if all(has_type(value, frozenset({float})) for value in (low, high)) and 0 <= high < low <= 1:
        yield violation(f"prompt_filter has min={low} above max={high}", "min <= max", f"'min': {high}")


# Processes


def accelerator_config_of_rows(c: GRPOFields) -> Iterator[str]:
    given = c.accelerator_config
    refused = {
        "dispatch_batches": (True, "accelerate can only send tensors to other processes, and rows are none"),
        "split_batches": (True, "it would split the completions of a prompt over evaluation batches"),
        "even_batches": (False, "all processes must evaluate equally many completions"),
    }
    for name, (value, reason) in refused.items():
        if getattr(given, name, None) is value:
            yield violation(
                f"accelerator_config={{{name!r}: {value}}}: {reason}",
                f"{name}={not value}",
                f"{name}={not value}",
            )
    steps = (getattr(given, "gradient_accumulation_kwargs", None) or {}).get("num_steps", 1)
    if steps != 1:
        yield violation(
            f"accelerator_config={{'num_steps': {steps}}} changes gradient_accumulation_steps after the "
            "generation batch was derived from it",
            "gradient_accumulation_steps",
            f"gradient_accumulation_steps={steps}",
        )


def parallelism_of_one_sequence(c: GRPOFields) -> Iterator[str]:
    yield from unsupported_parallelism(c.parallelism_config)


def unsupported_parallelism(given: object) -> Iterator[str]:
    """Yield a message for each size of a ``ParallelismConfig`` that splits a sequence or a layer."""
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(given, name, None) or 1
        if size > 1:
            yield violation(
                f"parallelism_config=({name}={size}): log-probs are computed from whole sequences and layers",
                f"{name}=1; dp_replicate_size and dp_shard_size are free",
                f"{name}=1",
            )


# Generation


#: Sampler arguments that must keep a value: each row of a batch has one completion, as a list of tokens.
_ONE_COMPLETION: dict[str, object] = {
    **{"num_return_sequences": 1, "n": 1, "return_dict_in_generate": False},
    **{"token_healing": False, "is_assistant": False},
}


def generation_kwargs_of_one_completion(c: GRPOFields) -> Iterator[str]:
    kwargs = typing.cast("dict[str, object]", c.generation_kwargs or {})
    for key, value in _ONE_COMPLETION.items():
        if kwargs.get(key) not in (None, value):
            given = (
                f"generation_kwargs={{{key!r}: {shortened(kwargs[key])}}} changes the result of the sampler"
            )
            yield violation(given, f"{value}; num_generations sets the completions per prompt", f"no {key!r}")


def eval_generation_kwargs_are_sampler_settings(c: GRPOFields) -> Iterator[str]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    for key, value in typing.cast("dict[str, object]", c.eval_generation_kwargs or {}).items():
        if key not in names:
            given = f"eval_generation_kwargs={{{key!r}: {shortened(value)}}} is not a sampler setting"
            yield violation(given, ", ".join(names), repr(nearest_name(str(key), names)))
        elif (key, value) != ("temperature", 0):  # greedy decoding, in evaluation only
            setting = dataclasses.replace(c.SETTINGS[key], types=c.SETTINGS[key].types - {type(None)})
            message = setting.violation(f"eval_generation_kwargs[{key!r}]", value, getattr(c, key))
            yield from [message] if message else []


def regex_syntax(c: GRPOFields) -> Iterator[str]:
    pattern = c.vllm_structured_outputs_regex or ""
    try:
        re.compile(pattern)
    except re.error as error:
        given = f"vllm_structured_outputs_regex={pattern!r} is not a regular expression: {error}"
        yield violation(given, "regular expressions", f"{re.escape(pattern)!r} (matches the text itself)")


def vllm_max_model_length_holds_completions(c: GRPOFields) -> Iterator[str]:
    limit, needed = c.vllm_max_model_length, (c.max_prompt_length or 1) + c.max_completion_length
    if COLOCATE.holds(c) and limit is not None and limit < needed:
        given = (
            f"vllm_max_model_length={limit} is too short for a prompt and max_completion_length="
            f"{c.max_completion_length}"
        )
        yield violation(given, f"{needed} or more", f"{needed}")


# Loss


def delta_inside_clip_range(c: GRPOFields) -> Iterator[str]:
    if c.delta is None or c.epsilon_high is None:
        return
    if OBJECTIVES[c.loss_type].surrogate is surrogates.clipped and c.delta <= 1 + c.epsilon_high:
        yield (
            f"delta={c.delta} is inside the clip range, which ends at 1 + epsilon_high={c.epsilon_high}: the "
            "ratio is bounded by delta for every advantage, and epsilon_high has no effect; usual values are "
            "above 1 + epsilon_high"
        )


def entropy_coef_bounds(c: GRPOFields) -> Iterator[str]:
    low, high, coef = c.entropy_coef_min, c.entropy_coef_max, c.entropy_coef
    if low > high:
        given = f"entropy_coef_min={low} is above entropy_coef_max={high}"
        yield violation(given, "min <= max", f"entropy_coef_min={high}")
    elif c.use_adaptive_entropy and not low <= coef <= high:
        given = f"entropy_coef={coef} is outside the bounds of use_adaptive_entropy"
        yield violation(given, f"from {low} to {high}", f"{low if coef < low else high}")


def truncation_with_liger(c: GRPOFields) -> Iterator[str]:
    if c.use_liger_kernel and (used := truncating(c)):
        given = f"use_liger_kernel=True with {used}: Liger's log-probs are of the full distribution"
        yield violation(given, "settings that do not truncate sampling", "use_liger_kernel=False")


#: Violations are errors.
RULES: tuple[Callable[[GRPOFields], Iterator[str]], ...] = (
    old_and_new_name_differ,
    report_to_is_installed,
    loss_kwargs_of_objective,
    generation_batch_size_in_whole_micro_batches,
    generation_batch_size_in_whole_groups,
    eval_batch_in_whole_groups,
    dataset_weights_above_zero,
    prompt_filter_of_rates,
    accelerator_config_of_rows,
    parallelism_of_one_sequence,
    generation_kwargs_of_one_completion,
    eval_generation_kwargs_are_sampler_settings,
    regex_syntax,
    vllm_max_model_length_holds_completions,
    entropy_coef_bounds,
    truncation_with_liger,
)
