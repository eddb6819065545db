"""The constraints on configuration fields and on their combinations, as tables of named rules."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One constraint.

    name: the field; for a constraint on several fields, what is wrong.
    violated: True when the configuration breaks it.
    message: what was given, what is allowed, the nearest valid value.
    example: arguments that break this rule and no other.
    """

    name: str
    violated: Callable[[Any], bool]
    message: Callable[[Any], str]
    example: Mapping[str, Any]


def rule(
    name: str, violated: Callable[[Any], bool], given: str, allowed: str, nearest: str, **example: Any
) -> Rule:
    """A rule whose message is made of format strings over the configuration ``c``."""
    message = f"{given}; allowed: {allowed}; nearest valid: {nearest}"
    return Rule(name, violated, lambda config: message.format(c=config), example)


def default_of(config: Any, name: str) -> Any:
    """The default of a field in the class of this configuration, which may be a subclass with its own."""
    return config.__dataclass_fields__[name].default


def join_lines(messages: Mapping[str, str]) -> str:
    """The messages of a rule that found several offenders, as the lines of an error."""
    return "\n  - ".join(messages.values())


def _within(name: str, low: float, high: float = math.inf, *, example: float, open_low: bool = False) -> Rule:
    """low <= field <= high, or low < field with ``open_low``. None is always fine."""

    def violated(config: Any) -> bool:
        value = getattr(config, name)
        return value is not None and (value < low or value > high or (open_low and value == low))

    def message(config: Any) -> str:
        value = getattr(config, name)
        allowed = f"{'>' if open_low else '>='} {low}" + (f" and <= {high}" if math.isfinite(high) else "")
        nearest = high if value > high else f"any value above {low}" if open_low else low
        return f"{name}={value} is out of range; allowed: {allowed}; nearest valid: {nearest}"

    return Rule(name, violated, message, {name: example})


RANGE_RULES = (
    _within("learning_rate", 0, example=-1e-6),
    _within("per_device_train_batch_size", 1, example=0),
    _within("per_device_eval_batch_size", 1, example=0),
    _within("gradient_accumulation_steps", 1, example=0),
    _within("logprob_mismatch_steps", 1, example=0),
    _within("router_aux_loss_coef", 0, example=-0.1),
    _within("num_generations", 2, example=1),
    _within("num_generations_eval", 1, example=0),
    _within("max_completion_length", 1, example=0),
    _within("max_prompt_length", 1, example=0),
    _within("pad_to_multiple_of", 1, example=0),
    _within("generation_batch_size", 1, example=-8),
    _within("steps_per_generation", 1, example=0),
    _within("temperature", 0, example=0.0, open_low=True),
    _within("top_p", 0, 1, example=1.5, open_low=True),
    _within("top_k", 0, example=-1),
    _within("min_p", 0, 1, example=-0.1),
    _within("repetition_penalty", 0, example=0.0, open_low=True),
    _within("vllm_server_port", 1, 65535, example=0),
    _within("vllm_server_timeout", 0, example=0.0, open_low=True),
    _within("vllm_group_port", 1, 65535, example=70000),
    _within("vllm_gpu_memory_utilization", 0, 1, example=1.2, open_low=True),
    _within("vllm_max_model_length", 1, example=0),
    _within("vllm_tensor_parallel_size", 1, example=0),
    _within("vllm_importance_sampling_clip_max", 0, example=-3.0, open_low=True),
    _within("vllm_importance_sampling_clip_min", 0, example=-0.5),
    _within("beta", 0, example=-1.0),
    _within("num_iterations", 1, example=0),
    _within("epsilon", 0, example=-0.2),
    _within("epsilon_high", 0, example=-0.2),
    _within("delta", 0, example=0.0, open_low=True),
    _within("sapo_temperature_pos", 0, example=0.0, open_low=True),
    _within("sapo_temperature_neg", 0, example=-1.0, open_low=True),
    _within("vespo_k_pos", 0, example=0.0, open_low=True),
    _within("vespo_lambda_pos", 0, example=0.0, open_low=True),
    _within("vespo_k_neg", 0, example=-1.0, open_low=True),
    _within("vespo_lambda_neg", 0, example=-1.0, open_low=True),
    _within("off_policy_mask_threshold", 0, example=-0.1),
    _within("top_entropy_quantile", 0, 1, example=0.0, open_low=True),
    _within("ref_model_mixup_alpha", 0, 1, example=1.1),
    _within("ref_model_sync_steps", 1, example=0),
    _within("entropy_coef_delta", 0, example=0.0, open_low=True),
    _within("entropy_target", 0, example=-0.2),
    _within("reward_timeout", 0, example=0.0, open_low=True),
    _within("max_tool_calling_iterations", 1, example=0),
    _within("dynamic_sampling_max_rounds", 1, example=0),
    _within("rollout_staleness", 0, example=-1),
    _within("num_completions_to_print", 0, example=-1),
)


def _one_of(name: str, options: Callable[[], Iterable[str]], example: str) -> Rule:
    return Rule(
        name,
        lambda config: getattr(config, name) not in options(),
        lambda config: unknown(name, getattr(config, name), options()),
        {name: example},
    )


def unknown(name: str, value: str, options: Iterable[str]) -> str:
    """The message about a value of the field ``name`` that is none of the options."""
    by_lower = {option.lower(): option for option in options}
    nearest = by_lower[difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=0)[0]]
    allowed = ", ".join(by_lower.values())
    return f"{name}={value!r} is unknown; allowed: {allowed}; nearest valid: {nearest!r}"


def _core(module: str, table: str) -> Callable[[], Iterable[str]]:
    """The names in a table of ``core``, read when the rule runs so that registered ones count."""
    return lambda: getattr(importlib.import_module(f"groupwise.core.{module}"), table)


CHOICE_RULES = (
    _one_of("loss_type", _core("objectives", "OBJECTIVES"), "grop"),
    _one_of("advantage_baseline", _core("advantages", "ADVANTAGES"), "leave_out"),
    _one_of("kl_estimator", _core("kl", "KL_ESTIMATORS"), "k4"),
    _one_of("importance_sampling_level", _core("ratios", "RATIO_LEVELS"), "tokens"),
    _one_of("vllm_importance_sampling_mode", _core("corrections", "CORRECTION_MODES"), "sequence_maks"),
    _one_of("scale_rewards", lambda: ("group", "batch", "none"), "groups"),
    _one_of("multi_objective_aggregation", _core("advantages", "AGGREGATIONS"), "sum"),
    _one_of("reward_on_error", lambda: ("raise", "none"), "ignore"),
    _one_of("logprob_head", lambda: ("auto", "dense", "chunked"), "chunk"),
    _one_of("sequence_layout", lambda: ("auto", "padded", "packed", "shared_prefix"), "padding"),
    _one_of("logprob_mismatch_check", lambda: ("off", "warn", "error"), "warm"),
    _one_of("vllm_mode", lambda: ("colocate", "server"), "colocated"),
    _one_of("vllm_model_impl", lambda: ("vllm", "transformers"), "hf"),
)


def _per_step(config: Any) -> int:
    """Completions of one micro-batch over all processes; 0 when reported elsewhere."""
    return max(config.per_device_train_batch_size, 0) * config.world_size


def _multiples(value: int, unit: int) -> str:
    """The multiples of ``unit`` on either side of ``value``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _divisors(value: int, near: int, low: int) -> str:
    """The divisors of ``value``, at least ``low``, on either side of ``near``."""
    divisors = [n for n in range(low, value + 1) if value % n == 0]
    around = {*[n for n in divisors if n < near][-1:], *[n for n in divisors if n > near][:1]}
    return " or ".join(str(n) for n in sorted(around))


def _unequal_steps(config: Any) -> bool:
    size, steps, per_step = config.generation_batch_size, config.steps_per_generation, _per_step(config)
    return None not in (size, steps) and min(size, steps, per_step) > 0 and size != steps * per_step


def _unequal_steps_message(config: Any) -> str:
    size, steps = config.generation_batch_size, config.steps_per_generation
    return (
        f"generation_batch_size={size} and steps_per_generation={steps} are both given and disagree; "
        f"allowed: one, the other None; nearest valid: generation_batch_size={steps * _per_step(config)}"
    )


def _split_step(config: Any) -> bool:
    size, per_step = config.generation_batch_size, _per_step(config)
    return size is not None and per_step > 0 and config.steps_per_generation is None and size % per_step != 0


def _split_step_message(config: Any) -> str:
    size, per_step = config.generation_batch_size, _per_step(config)
    sizes = _multiples(size, math.lcm(per_step, max(config.num_generations, 1)))
    return (
        f"generation_batch_size={size} is not divisible by {per_step}, which is per_device_train_batch_size="
        f"{config.per_device_train_batch_size} x {config.world_size} process(es); allowed: multiples of it "
        f"and of num_generations={config.num_generations}; nearest valid: {sizes}"
    )


def _split_groups(config: Any) -> bool:
    size, group = config.generation_batch_size, config.num_generations
    return size is not None and size > 0 and group > 1 and size % group != 0


def _split_groups_message(config: Any) -> str:
    size, group = config.generation_batch_size, config.num_generations
    sizes = _multiples(size, math.lcm(group, max(_per_step(config), 1)))
    groups = _divisors(size, near=group, low=2)
    return (
        f"generation_batch_size={size} (= per_device_train_batch_size x processes x steps_per_generation) is "
        f"not divisible by num_generations={group}; allowed: whole groups; nearest valid: "
        f"generation_batch_size {sizes}" + (f", or num_generations {groups}" if groups else "")
    )


def _split_eval_groups(config: Any) -> bool:
    size, group = max(config.per_device_eval_batch_size, 0) * config.world_size, config.num_generations_eval
    return config.eval_strategy != "no" and group is not None and group > 0 and size % group != 0


def _split_eval_groups_message(config: Any) -> str:
    each, processes, group = config.per_device_eval_batch_size, config.world_size, config.num_generations_eval
    valid_each = _multiples(each, group // math.gcd(group, processes))
    return (
        f"per_device_eval_batch_size={each} x {processes} process(es) is not divisible by "
        f"num_generations_eval={group}; allowed: whole groups; nearest valid: per_device_eval_batch_size "
        f"{valid_each}, or num_generations_eval {_divisors(each * processes, group, low=1)}"
    )


#: Sampler settings that an evaluation may have of its own, and their smallest and largest value.
_EVAL_SAMPLING = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
}


def _bad_eval_sampling(config: Any) -> dict[str, str]:
    found = {}
    for key, value in (config.eval_generation_kwargs or {}).items():
        if key not in _EVAL_SAMPLING:
            nearest = difflib.get_close_matches(str(key), _EVAL_SAMPLING, n=1, cutoff=0)[0]
            found[key] = (
                f"eval_generation_kwargs={{{key!r}: {value!r}}} is no sampler setting; allowed: "
                f"{', '.join(_EVAL_SAMPLING)}; nearest valid: {nearest!r}"
            )
            continue
        low, high = _EVAL_SAMPLING[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            allowed = f">= {low}" + (f" and <= {high}" if math.isfinite(high) else "")
            found[key] = (
                f"eval_generation_kwargs[{key!r}]={value!r} is out of range; allowed: a number {allowed}; "
                f"nearest valid: {low}"
            )
    return found


SAMPLING_RULES = (
    Rule(
        "eval_generation_kwargs",
        lambda c: bool(_bad_eval_sampling(c)),
        lambda c: join_lines(_bad_eval_sampling(c)),
        {"eval_generation_kwargs": {"temprature": 0.6}},
    ),
)


BATCH_RULES = (
    Rule(
        "generation_batch_size_and_steps_per_generation",
        _unequal_steps,
        _unequal_steps_message,
        {"generation_batch_size": 8, "steps_per_generation": 4},
    ),
    Rule(
        "generation_batch_size_in_whole_micro_batches",
        _split_step,
        _split_step_message,
        {"generation_batch_size": 12, "num_generations": 4},
    ),
    Rule(
        "generation_batch_size_in_whole_groups",
        _split_groups,
        _split_groups_message,
        {"per_device_train_batch_size": 12, "num_generations": 8},
    ),
    Rule(
        "eval_batch_in_whole_groups",
        _split_eval_groups,
        _split_eval_groups_message,
        {"eval_strategy": "steps", "per_device_eval_batch_size": 6},
    ),
)
