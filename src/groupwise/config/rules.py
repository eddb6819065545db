"""Relations between settings: one function per rule, with an example that violates that rule alone."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from transformers.integrations import integration_utils

from groupwise.config.conditions import COLOCATE, SERVER, uses_surrogate
from groupwise.config.liger import LIGER_LIMITS
from groupwise.config.settings import has_type, type_names, types_of, violation
from groupwise.core import surrogates
from groupwise.core.advantages import AGGREGATIONS
from groupwise.core.objectives import OBJECTIVES
from groupwise.errors import nearest_name

if TYPE_CHECKING:
    from groupwise.config.grpo_config import GRPOConfig

Check = Callable[["GRPOConfig"], Iterator[str]]


@dataclass(frozen=True)
class Rule:
    """Relation between several settings.

    name: name of the function.
    check: yields a message per violation. It reads only settings that are valid by themselves.
    example: arguments that violate this rule and no other.
    """

    name: str
    check: Check
    example: Mapping[str, object]


RULES: list[Rule] = []
CAUTIONS: list[Rule] = []  # their messages are logged as warnings


def _add_to(rules: list[Rule], /, **example: object) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        rules.append(Rule(check.__name__, check, example))
        return check

    return add


#: Decorators that add a function to ``RULES`` or ``CAUTIONS``, with its example.
rule, caution = partial(_add_to, RULES), partial(_add_to, CAUTIONS)


# Names and parsed values


@rule(vllm_importance_sampling_cap=2.0, vllm_importance_sampling_clip_max=4.0)
def old_and_new_name_differ(c: GRPOConfig) -> Iterator[str]:
    for old, setting in c.SETTINGS.items():
        new = setting.renamed_to
        if new is not None and getattr(c, old) is not None:
            given = f"{old}={getattr(c, old)!r} is the old name of {new}={getattr(c, new)!r}"
            yield violation(given, f"{new} alone", f"{new}={getattr(c, new)!r}")


@rule(report_to="tensorbord")
def report_to_is_installed(c: GRPOConfig) -> Iterator[str]:
    known = list(integration_utils.INTEGRATION_TO_CALLBACK)
    installed = integration_utils.get_available_reporting_integrations()
    never_listed = ("azure_ml", "flyte")  # transformers lists azure_ml only without MLflow, flyte never
    for name in c.report_to or ():
        if name not in known:
            nearest = repr(nearest_name(name, known))
            yield violation(f"report_to={name!r} is unknown", ", ".join(known), nearest)
        elif name not in (*installed, *never_listed):
            given = f"report_to={name!r} needs a package that is not installed"
            yield violation(given, ", ".join(installed) or "none", "'none', or install it")


@rule(loss_kwargs={"tau": 1.0})
def loss_kwargs_of_objective(c: GRPOConfig) -> Iterator[str]:
    settings = OBJECTIVES[c.loss_type].settings
    if settings is None:
        if c.loss_kwargs is not None:
            given = (
                f"loss_kwargs={c.loss_kwargs!r} with loss_type={c.loss_type!r}, which has no hyperparameters"
            )
            takes = [name for name, entry in OBJECTIVES.items() if entry.settings]
            yield violation(given, f"loss_type {' or '.join(takes) or 'of a registered objective'}", "None")
        return
    hints = typing.get_type_hints(settings)
    fields = {item.name: item for item in dataclasses.fields(settings)}
    kwargs = typing.cast("dict[str, object]", c.loss_kwargs or {})
    for key, value in kwargs.items():
        if key not in fields:
            given = f"loss_kwargs[{key!r}]={value!r} is unknown to loss_type={c.loss_type!r}"
            yield violation(given, ", ".join(fields), repr(nearest_name(key, fields)))
        elif not has_type(value, types_of(hints[key])):
            given = f"loss_kwargs[{key!r}]={value!r} is of type {type(value).__name__}"
            default, names = fields[key].default, type_names(types_of(hints[key]))
            nearest = f"a {names}" if default is dataclasses.MISSING else f"{default!r} (the default)"
            yield violation(given, names, nearest)
        elif any(number != number for number in (value if isinstance(value, list) else [value])):
            yield violation(f"loss_kwargs[{key!r}]={value!r} is not a number", "numbers", f"a value of {key}")
    for key, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and key not in kwargs:
            yield violation(
                f"loss_kwargs={c.loss_kwargs!r} lacks {key!r}", ", ".join(fields), f"a value of {key}"
            )


@rule(reward_weights=[])
def reward_weights_are_numbers(c: GRPOConfig) -> Iterator[str]:
    weights = c.reward_weights
    if weights is not None and not (weights and all(has_type(w, frozenset({float})) for w in weights)):
        given = f"reward_weights={weights} is not a list of numbers"
        yield violation(given, "one number per reward function", "None (all 1)")


@rule(eval_pass_at_k=[1, 16])
def pass_at_k_of_generations(c: GRPOConfig) -> Iterator[str]:
    ks, most = c.eval_pass_at_k, c.num_generations_eval
    if ks is not None and not (ks and all(type(k) is int and 1 <= k <= (most or k) for k in ks)):
        given = f"eval_pass_at_k={ks} has a k that cannot be estimated"
        yield violation(given, f"integers from 1 to num_generations_eval={most}", f"[1, {most}]")


# Batches


def _micro_batch(c: GRPOConfig) -> int:
    """Return the number of completions of one micro-batch of all processes."""
    return c.per_device_train_batch_size * c.world_size


def _multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` on either side of ``value``: "16 or 24"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _divisors(value: int, near: int, low: int) -> str:
    """Return the divisors of ``value``, at least ``low``, on either side of ``near``: "6 or 12"."""
    divisors = [n for n in range(low, value + 1) if value % n == 0]
    around = {*[n for n in divisors if n < near][-1:], *[n for n in divisors if n > near][:1]}
    return " or ".join(str(n) for n in sorted(around))


@rule(generation_batch_size=8, steps_per_generation=4)
def generation_batch_size_and_steps_per_generation(c: GRPOConfig) -> Iterator[str]:
    size, steps = c.generation_batch_size, c.steps_per_generation
    if size is not None and steps is not None and size != steps * _micro_batch(c):
        given = f"generation_batch_size={size} and steps_per_generation={steps} are both given and disagree"
        yield violation(given, "one, the other None", f"generation_batch_size={steps * _micro_batch(c)}")


@rule(generation_batch_size=12, num_generations=4)
def generation_batch_size_in_whole_micro_batches(c: GRPOConfig) -> Iterator[str]:
    size, unit = c.generation_batch_size, _micro_batch(c)
    if size is not None and c.steps_per_generation is None and size % unit != 0:
        yield violation(
            f"generation_batch_size={size} is not divisible by {unit}, which is per_device_train_batch_size="
            f"{c.per_device_train_batch_size} x {c.world_size} process(es)",
            f"multiples of it and of num_generations={c.num_generations}",
            _multiples(size, math.lcm(unit, c.num_generations)),
        )


@rule(per_device_train_batch_size=12, num_generations=8)
def generation_batch_size_in_whole_groups(c: GRPOConfig) -> Iterator[str]:
    size, group = c.generation_batch_size, c.num_generations
    if size is not None and size % group != 0:
        groups = _divisors(size, near=group, low=2)
        yield violation(
            f"generation_batch_size={size} (per_device_train_batch_size x processes x steps_per_generation) "
            f"is not divisible by num_generations={group}",
            "whole groups",
            f"generation_batch_size {_multiples(size, math.lcm(group, _micro_batch(c)))}"
            + (f", or num_generations {groups}" if groups else ""),
        )


@rule(eval_strategy="steps", per_device_eval_batch_size=6)
def eval_batch_in_whole_groups(c: GRPOConfig) -> Iterator[str]:
    each, processes, group = c.per_device_eval_batch_size, c.world_size, c.num_generations_eval
    if c.eval_strategy != "no" and group is not None and each * processes % group != 0:
        yield violation(
            f"per_device_eval_batch_size={each} x {processes} process(es) is not divisible by "
            f"num_generations_eval={group}",
            "whole groups",
            f"per_device_eval_batch_size {_multiples(each, group // math.gcd(group, processes))}, or "
            f"num_generations_eval {_divisors(each * processes, group, low=1)}",
        )


# Processes


@rule(accelerator_config={"dispatch_batches": True})
def accelerator_config_of_rows(c: GRPOConfig) -> Iterator[str]:
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


@rule(parallelism_config=SimpleNamespace(cp_size=2))
def parallelism_of_one_sequence(c: GRPOConfig) -> Iterator[str]:
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
_ONE_COMPLETION = {
    "num_return_sequences": 1,
    "n": 1,
    "return_dict_in_generate": False,
}


@rule(generation_kwargs={"num_return_sequences": 2})
def generation_kwargs_of_one_completion(c: GRPOConfig) -> Iterator[str]:
    kwargs = typing.cast("dict[str, object]", c.generation_kwargs or {})
    for key, value in _ONE_COMPLETION.items():
        if kwargs.get(key, value) != value:
            given = f"generation_kwargs={{{key!r}: {kwargs[key]!r}}} changes the result of the sampler"
            yield violation(given, f"{value}; num_generations sets the completions per prompt", f"no {key!r}")


@rule(eval_generation_kwargs={"temprature": 0.6})
def eval_generation_kwargs_are_sampler_settings(c: GRPOConfig) -> Iterator[str]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    for key, value in typing.cast("dict[str, object]", c.eval_generation_kwargs or {}).items():
        if key not in names:
            given = f"eval_generation_kwargs={{{key!r}: {value!r}}} is not a sampler setting"
            yield violation(given, ", ".join(names), repr(nearest_name(str(key), names)))
        elif (key, value) != ("temperature", 0):  # greedy decoding, in evaluation only
            setting = dataclasses.replace(c.SETTINGS[key], types=frozenset({float}))
            message = setting.violation(f"eval_generation_kwargs[{key!r}]", value, getattr(c, key))
            yield from [message] if message else []


@rule(use_vllm=True, use_transformers_continuous_batching=True)
def two_generation_engines(c: GRPOConfig) -> Iterator[str]:
    if c.use_vllm and c.use_transformers_continuous_batching:
        given = "use_vllm=True and use_transformers_continuous_batching=True are both set"
        yield violation(given, "one of them", "use_transformers_continuous_batching=False")


# vLLM


@rule(use_vllm=True, vllm_structured_outputs_regex="(yes|no")
def regex_syntax(c: GRPOConfig) -> Iterator[str]:
    pattern = c.vllm_structured_outputs_regex or ""
    try:
        re.compile(pattern)
    except re.error as error:
        given = f"vllm_structured_outputs_regex={pattern!r} is not a regular expression: {error}"
        yield violation(given, "regular expressions", f"{re.escape(pattern)!r} (matches the text itself)")


@rule(use_vllm=True, vllm_max_model_length=256, max_completion_length=256)
def vllm_max_model_length_holds_completions(c: GRPOConfig) -> Iterator[str]:
    limit, needed = c.vllm_max_model_length, (c.max_prompt_length or 1) + c.max_completion_length
    if COLOCATE.holds(c) and limit is not None and limit < needed:
        given = (
            f"vllm_max_model_length={limit} is too short for a prompt and max_completion_length="
            f"{c.max_completion_length}"
        )
        yield violation(given, f"{needed} or more", f"{needed}")


@rule(use_vllm=True, ds3_gather_for_generation=False)
def sharded_generation_with_vllm(c: GRPOConfig) -> Iterator[str]:
    if c.use_vllm and not c.ds3_gather_for_generation:
        given = (
            "ds3_gather_for_generation=False samples with the training weights, use_vllm=True with its own"
        )
        yield violation(given, "one of them", "ds3_gather_for_generation=True")


@rule(use_vllm=True, vllm_tensor_parallel_size=1000003)
def tensor_parallel_over_processes(c: GRPOConfig) -> Iterator[str]:
    if COLOCATE.holds(c) and c.world_size % c.vllm_tensor_parallel_size != 0:
        size = c.vllm_tensor_parallel_size
        given = f"vllm_tensor_parallel_size={size} does not divide the {c.world_size} process(es)"
        yield violation(given, f"divisors of {c.world_size}", "1")


_STALE: dict[str, object] = {"use_vllm": True, "vllm_mode": "server", "rollout_staleness": 1}


@rule(rollout_staleness=1)
def staleness_without_server(c: GRPOConfig) -> Iterator[str]:
    if c.rollout_staleness > 0 and not SERVER.holds(c):
        given = f"rollout_staleness={c.rollout_staleness} requires a server that generates during training"
        yield violation(given, SERVER.text, "rollout_staleness=0")


@rule(**_STALE, gradient_accumulation_steps=2, steps_per_generation=1)
def staleness_within_a_step(c: GRPOConfig) -> Iterator[str]:
    steps, accumulation = c.steps_per_generation, c.gradient_accumulation_steps
    if c.rollout_staleness > 0 and (steps or 1) * c.num_iterations % accumulation != 0:
        given = (
            f"rollout_staleness={c.rollout_staleness} with steps_per_generation={steps} x num_iterations="
            f"{c.num_iterations} generates within an optimizer step of gradient_accumulation_steps="
            f"{accumulation} micro-batches"
        )
        yield violation(
            given, "multiples of gradient_accumulation_steps", f"steps_per_generation={accumulation}"
        )


@rule(**_STALE, vllm_importance_sampling_correction=False)
def staleness_without_correction(c: GRPOConfig) -> Iterator[str]:
    if c.rollout_staleness > 0 and not c.vllm_importance_sampling_correction:
        yield violation(
            f"rollout_staleness={c.rollout_staleness} samples from older weights, which "
            "vllm_importance_sampling_correction=False does not correct",
            "vllm_importance_sampling_correction=True, or rollout_staleness=0",
            "vllm_importance_sampling_correction=True",
        )


@rule(**_STALE, dynamic_sampling=True)
def staleness_with_dynamic_sampling(c: GRPOConfig) -> Iterator[str]:
    if c.rollout_staleness > 0 and c.dynamic_sampling:
        given = (
            f"rollout_staleness={c.rollout_staleness} needs the next prompts in advance, which "
            "dynamic_sampling=True decides during the step"
        )
        yield violation(given, "one of them", "rollout_staleness=0")


# Loss


@caution(delta=1.1)
def delta_inside_clip_range(c: GRPOConfig) -> Iterator[str]:
    if c.delta is None or c.epsilon_high is None or not uses_surrogate(c, surrogates.clipped):
        return
    if c.delta <= 1 + c.epsilon_high:
        yield (
            f"delta={c.delta} is inside the clip range, which ends at 1 + epsilon_high={c.epsilon_high}: the "
            "ratio is bounded by delta for every advantage, and epsilon_high has no effect; usual values are "
            "above 1 + epsilon_high"
        )


@caution(importance_sampling_level="sequence")
def sequence_ratio_with_token_sum(c: GRPOConfig) -> Iterator[str]:
    objective = OBJECTIVES[c.loss_type]
    sums_tokens = objective.normalizer in ("token_mean", "local_token_mean", "constant_length")
    reads_ratio = objective.surrogate in (surrogates.clipped, surrogates.cispo)
    if c.importance_sampling_level == "sequence" and sums_tokens and reads_ratio:
        yield (
            f"importance_sampling_level='sequence' with loss_type={c.loss_type!r}: the loss is a sum over "
            "tokens, so that a sequence counts in proportion to its length; loss_type='grpo' weighs "
            "sequences equally (GSPO)"
        )


@rule(kl_in_reward=True, beta=0.04, multi_objective_aggregation="normalize_then_sum")
def kl_in_reward_normalized_away(c: GRPOConfig) -> Iterator[str]:
    if c.kl_in_reward and c.beta > 0 and AGGREGATIONS[c.multi_objective_aggregation].normalize_first:
        yield violation(
            "kl_in_reward=True needs one reward to subtract the KL from, but multi_objective_aggregation="
            f"{c.multi_objective_aggregation!r} normalizes each reward function first",
            "multi_objective_aggregation='sum_then_normalize', or kl_in_reward=False",
            "kl_in_reward=False",
        )


@rule(use_bias_correction_kl=True, kl_in_reward=True, beta=0.04)
def bias_correction_with_kl_in_reward(c: GRPOConfig) -> Iterator[str]:
    if c.use_bias_correction_kl and c.kl_in_reward and c.beta > 0:
        given = "use_bias_correction_kl=True corrects the KL in the loss, which kl_in_reward=True removes"
        yield violation(given, "one of them", "use_bias_correction_kl=False")


@rule(vllm_importance_sampling_clip_min=4.0)
def correction_bounds(c: GRPOConfig) -> Iterator[str]:
    low, high = c.vllm_importance_sampling_clip_min, c.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low > high:
        given = f"vllm_importance_sampling_clip_min={low} is above vllm_importance_sampling_clip_max={high}"
        yield violation(given, "min <= max", f"vllm_importance_sampling_clip_min={high}")


@rule(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=None)
def truncation_without_bounds(c: GRPOConfig) -> Iterator[str]:
    low, high = c.vllm_importance_sampling_clip_min, c.vllm_importance_sampling_clip_max
    mode = c.vllm_importance_sampling_mode
    if c.vllm_importance_sampling_correction and mode.endswith("_truncate") and low is None and high is None:
        given = f"vllm_importance_sampling_mode={mode!r} has no bounds to truncate to"
        yield violation(given, "a clip_max or a clip_min", "vllm_importance_sampling_clip_max=3.0")


@rule(entropy_coef_min=2.0)
def entropy_coef_bounds(c: GRPOConfig) -> Iterator[str]:
    if c.entropy_coef_min > c.entropy_coef_max:
        given = f"entropy_coef_min={c.entropy_coef_min} is above entropy_coef_max={c.entropy_coef_max}"
        yield violation(given, "min <= max", f"entropy_coef_min={c.entropy_coef_max}")


@rule(use_adaptive_entropy=True, entropy_coef=1.5)
def entropy_coef_outside_bounds(c: GRPOConfig) -> Iterator[str]:
    low, high = c.entropy_coef_min, c.entropy_coef_max
    bounded = min(max(c.entropy_coef, low), high)
    if c.use_adaptive_entropy and low <= high and bounded != c.entropy_coef:
        given = f"entropy_coef={c.entropy_coef} is outside the bounds of use_adaptive_entropy"
        yield violation(given, f"from {low} to {high}", f"{bounded}")


@rule(neftune_noise_alpha=5.0, sequence_layout="packed")
def noise_of_packed_sequences(c: GRPOConfig) -> Iterator[str]:
    if c.neftune_noise_alpha is not None and c.sequence_layout not in ("auto", "padded"):
        yield violation(
            f"neftune_noise_alpha={c.neftune_noise_alpha} with sequence_layout={c.sequence_layout!r}: the "
            "noise is scaled by the length of a row, which has many sequences there",
            "sequence_layout='padded', or 'auto', which then means it",
            "sequence_layout='auto'",
        )


@rule(use_liger_kernel=True, entropy_coef=0.1)
def beyond_liger(c: GRPOConfig) -> Iterator[str]:
    for limit in LIGER_LIMITS:
        if c.use_liger_kernel and limit.exceeded(c):
            given = f"use_liger_kernel=True with {limit.given.format(c=c)}: {limit.reason}"
            yield violation(given, limit.allowed, limit.nearest)
