"""The constraints on combinations of settings that contradict each other."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from groupwise.config_rules import Rule, join_lines

OLD_NAMES = {
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "use_liger_loss": "use_liger_kernel",
    "wandb_log_unique_prompts": "log_unique_prompts",
}

# keys of `generation_kwargs` that say the same as a field; the trainer computes with the field
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


def is_surrogate(config: Any, name: str) -> bool:
    """Whether the loss uses the surrogate called ``name`` in ``core.surrogates``."""
    objectives = importlib.import_module("groupwise.core.objectives").OBJECTIVES
    surrogates = importlib.import_module("groupwise.core.surrogates")
    return config.loss_type in objectives and objectives[config.loss_type].surrogate is getattr(
        surrogates, name
    )


def _delta_inside_clip(config: Any) -> bool:
    if config.delta is None or config.epsilon_high is None or not is_surrogate(config, "clipped"):
        return False
    return 0 < config.delta <= 1 + config.epsilon_high


def _sampling_conflicts(config: Any) -> dict[str, str]:
    kwargs = config.generation_kwargs or {}
    found = {}
    for key, name in SAMPLING_FIELDS.items():
        # None and 0 both say "off" where a field takes None
        if key in kwargs and (kwargs[key] or 0) != (getattr(config, name) or 0):
            found[key] = (
                f"generation_kwargs[{key!r}]={kwargs[key]!r} contradicts {name}={getattr(config, name)!r}; "
                f"allowed: one value; nearest valid: {name}={kwargs[key]!r}"
            )
    return found


def _old_name_conflicts(config: Any) -> dict[str, str]:
    return {
        old: f"{old}={getattr(config, old)!r} is the old name of {new}={getattr(config, new)!r}; "
        f"allowed: {new} alone; nearest valid: {new}={getattr(config, new)!r}"
        for old, new in OLD_NAMES.items()
        if getattr(config, old) is not None
    }


def _bad_weights(config: Any) -> bool:
    weights = config.reward_weights
    return weights is not None and not (weights and all(_is_number(weight) for weight in weights))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bad_pass_at_k(config: Any) -> bool:
    ks, most = config.eval_pass_at_k, config.num_generations_eval
    return ks is not None and not (ks and all(type(k) is int and 1 <= k <= (most or k) for k in ks))


def _bounded_coef(config: Any) -> float | None:
    """The bound that entropy_coef is beyond, or None."""
    bounded = min(max(config.entropy_coef, config.entropy_coef_min), config.entropy_coef_max)
    return None if bounded == config.entropy_coef else bounded


def _rule(
    name: str, violated: Callable[[Any], bool], given: str, allowed: str, nearest: str, **example: Any
) -> Rule:
    """A rule whose message is made of format strings over the configuration ``c``."""
    message = f"{given}; allowed: {allowed}; nearest valid: {nearest}"
    return Rule(name, violated, lambda config: message.format(c=config), example)


def _bad_regex(config: Any) -> str | None:
    """What is wrong with the regular expression, or None."""
    try:
        re.compile(config.vllm_structured_outputs_regex or "")
    except re.error as error:
        return str(error)
    return None


def _shortest_model_length(config: Any) -> int:
    """What the longest prompt, or the shortest where they have no limit, needs beside a whole completion."""
    return (config.max_prompt_length or 1) + config.max_completion_length


COMBINATION_RULES = (
    Rule(
        "old_names",
        lambda c: bool(_old_name_conflicts(c)),
        lambda c: join_lines(_old_name_conflicts(c)),
        {"vllm_importance_sampling_cap": 2.0, "vllm_importance_sampling_clip_max": 4.0},
    ),
    Rule(
        "generation_kwargs",
        lambda c: bool(_sampling_conflicts(c)),
        lambda c: join_lines(_sampling_conflicts(c)),
        {"temperature": 0.7, "generation_kwargs": {"temperature": 0.9}},
    ),
    _rule(
        "reward_weights",
        _bad_weights,
        "reward_weights={c.reward_weights} is not a list of numbers",
        "one number per reward function",
        "None (all 1)",
        reward_weights=[],
    ),
    _rule(
        "eval_pass_at_k",
        _bad_pass_at_k,
        "eval_pass_at_k={c.eval_pass_at_k} has a k that cannot be estimated",
        "integers from 1 to num_generations_eval={c.num_generations_eval}",
        "[1, {c.num_generations_eval}]",
        eval_pass_at_k=[1, 16],
    ),
    _rule(
        "delta_inside_clip_range",
        _delta_inside_clip,
        "delta={c.delta} is within the clip range, whose upper end is 1 + epsilon_high with "
        "epsilon_high={c.epsilon_high}",
        "None or > 1 + epsilon_high",
        "None",
        delta=1.1,
    ),
    _rule(
        "kl_in_reward_without_beta",
        lambda c: c.kl_in_reward and c.beta == 0,
        "kl_in_reward=True is without effect at beta=0",
        "beta > 0",
        "kl_in_reward=False",
        kl_in_reward=True,
    ),
    _rule(
        "bias_correction_without_beta",
        lambda c: c.use_bias_correction_kl and c.beta == 0,
        "use_bias_correction_kl=True is without effect at beta=0",
        "beta > 0",
        "use_bias_correction_kl=False",
        use_bias_correction_kl=True,
    ),
    _rule(
        "kl_in_reward_normalised_away",
        lambda c: c.kl_in_reward and c.beta != 0 and c.multi_objective_aggregation == "normalize_then_sum",
        'kl_in_reward=True with multi_objective_aggregation="normalize_then_sum" divides the KL by its own '
        "standard deviation, so that beta has no effect",
        'multi_objective_aggregation="sum_then_normalize", or kl_in_reward=False',
        "kl_in_reward=False",
        kl_in_reward=True,
        beta=0.04,
        multi_objective_aggregation="normalize_then_sum",
    ),
    _rule(
        "bias_correction_with_kl_in_reward",
        lambda c: c.use_bias_correction_kl and c.kl_in_reward and c.beta != 0,
        "use_bias_correction_kl=True corrects the KL of the loss, which kl_in_reward=True removes",
        "one of them",
        "use_bias_correction_kl=False",
        use_bias_correction_kl=True,
        kl_in_reward=True,
        beta=0.04,
    ),
    _rule(
        "sync_ref_model_without_beta",
        lambda c: c.sync_ref_model and c.beta == 0,
        "sync_ref_model=True has no reference model to move at beta=0",
        "beta > 0",
        "sync_ref_model=False",
        sync_ref_model=True,
    ),
    _rule(
        "correction_bounds",
        lambda c: (
            None not in (c.vllm_importance_sampling_clip_min, c.vllm_importance_sampling_clip_max)
            and 0 < c.vllm_importance_sampling_clip_max < c.vllm_importance_sampling_clip_min
        ),
        "vllm_importance_sampling_clip_min={c.vllm_importance_sampling_clip_min} is above "
        "vllm_importance_sampling_clip_max={c.vllm_importance_sampling_clip_max}",
        "min <= max",
        "vllm_importance_sampling_clip_min={c.vllm_importance_sampling_clip_max}",
        vllm_importance_sampling_clip_min=4.0,
    ),
    _rule(
        "truncation_without_bounds",
        lambda c: (
            c.vllm_importance_sampling_correction
            and c.vllm_importance_sampling_mode.endswith("_truncate")
            and c.vllm_importance_sampling_clip_min is None
            and c.vllm_importance_sampling_clip_max is None
        ),
        "vllm_importance_sampling_mode={c.vllm_importance_sampling_mode!r} is without bounds to truncate to",
        "a clip_max or a clip_min",
        "vllm_importance_sampling_clip_max=3.0",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=None,
    ),
    _rule(
        "entropy_coef_bounds",
        lambda c: c.entropy_coef_min > c.entropy_coef_max,
        "entropy_coef_min={c.entropy_coef_min} is above entropy_coef_max={c.entropy_coef_max}",
        "min <= max",
        "entropy_coef_min={c.entropy_coef_max}",
        entropy_coef_min=2.0,
    ),
    Rule(
        "entropy_coef_outside_bounds",
        lambda c: (
            c.use_adaptive_entropy
            and c.entropy_coef_min <= c.entropy_coef_max
            and _bounded_coef(c) is not None
        ),
        lambda c: (
            f"entropy_coef={c.entropy_coef} is outside the bounds of use_adaptive_entropy; allowed: from "
            f"{c.entropy_coef_min} to {c.entropy_coef_max}; nearest valid: {_bounded_coef(c)}"
        ),
        {"use_adaptive_entropy": True, "entropy_coef": 1.5},
    ),
    _rule(
        "hub_repo_without_log_completions",
        lambda c: c.log_completions_hub_repo is not None and not c.log_completions,
        "log_completions_hub_repo={c.log_completions_hub_repo!r} is set but log_completions=False "
        "writes nothing to upload",
        "both or neither",
        "log_completions=True",
        log_completions_hub_repo="me/completions",
    ),
    _rule(
        "liger_with_logprob_head",
        lambda c: c.use_liger_kernel and c.logprob_head != "auto",
        "logprob_head={c.logprob_head!r} is contradicted by use_liger_kernel=True, whose fused "
        "loss has its own",
        "one of them",
        "logprob_head='auto'",
        use_liger_kernel=True,
        logprob_head="dense",
    ),
    _rule(
        "two_generation_engines",
        lambda c: c.use_vllm and c.use_transformers_continuous_batching,
        "use_vllm=True and use_transformers_continuous_batching=True are both set",
        "one of them",
        "use_transformers_continuous_batching=False",
        use_vllm=True,
        use_transformers_continuous_batching=True,
    ),
    _rule(
        "continuous_batching_config_unused",
        lambda c: (
            c.transformers_continuous_batching_config is not None
            and not c.use_transformers_continuous_batching
        ),
        "transformers_continuous_batching_config={c.transformers_continuous_batching_config} is "
        "set but use_transformers_continuous_batching=False",
        "both or neither",
        "use_transformers_continuous_batching=True",
        transformers_continuous_batching_config={"max_batch_tokens": 256},
    ),
    _rule(
        "regex_without_vllm",
        lambda c: c.vllm_structured_outputs_regex is not None and not c.use_vllm,
        "vllm_structured_outputs_regex={c.vllm_structured_outputs_regex!r} constrains nothing with "
        "use_vllm=False",
        "use_vllm=True",
        "vllm_structured_outputs_regex=None",
        vllm_structured_outputs_regex=r"\d+",
    ),
    Rule(
        "regex_syntax",
        lambda c: _bad_regex(c) is not None,
        lambda c: (
            f"vllm_structured_outputs_regex={c.vllm_structured_outputs_regex!r} is no regular expression: "
            f"{_bad_regex(c)}; allowed: regular expressions; nearest valid: "
            f"{re.escape(c.vllm_structured_outputs_regex)!r} (that text itself)"
        ),
        {"use_vllm": True, "vllm_structured_outputs_regex": "(yes|no"},
    ),
    Rule(
        "max_model_length_of_the_engine",
        lambda c: (
            c.use_vllm
            and c.vllm_mode == "colocate"
            and c.vllm_max_model_length is not None
            and c.vllm_max_model_length < _shortest_model_length(c)
        ),
        lambda c: (
            f"vllm_max_model_length={c.vllm_max_model_length} does not hold a prompt and "
            f"max_completion_length={c.max_completion_length}; allowed: {_shortest_model_length(c)} or more; "
            f"nearest valid: {_shortest_model_length(c)}"
        ),
        {"use_vllm": True, "vllm_max_model_length": 256, "max_completion_length": 256},
    ),
    _rule(
        "sharded_generation_with_vllm",
        lambda c: c.use_vllm and not c.ds3_gather_for_generation,
        "ds3_gather_for_generation=False is for generating with the training weights, not with use_vllm=True",
        "one of them",
        "ds3_gather_for_generation=True",
        use_vllm=True,
        ds3_gather_for_generation=False,
    ),
    _rule(
        "staleness_without_server",
        lambda c: c.rollout_staleness > 0 and not (c.use_vllm and c.vllm_mode == "server"),
        "rollout_staleness={c.rollout_staleness} needs a server that generates while training",
        "use_vllm=True with vllm_mode='server'",
        "rollout_staleness=0",
        rollout_staleness=1,
    ),
    _rule(
        "staleness_within_a_step",
        lambda c: (
            c.rollout_staleness > 0
            and c.gradient_accumulation_steps > 0
            and (c.steps_per_generation or 1) * c.num_iterations % c.gradient_accumulation_steps != 0
        ),
        "rollout_staleness={c.rollout_staleness} with steps_per_generation={c.steps_per_generation} x "
        "num_iterations={c.num_iterations} generates within an optimizer step of gradient_accumulation_steps="
        "{c.gradient_accumulation_steps} micro-batches",
        "multiples of gradient_accumulation_steps",
        "steps_per_generation={c.gradient_accumulation_steps}",
        use_vllm=True,
        vllm_mode="server",
        rollout_staleness=1,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
    ),
    _rule(
        "staleness_with_dynamic_sampling",
        lambda c: c.rollout_staleness > 0 and c.dynamic_sampling,
        "rollout_staleness={c.rollout_staleness} asks for batches ahead; dynamic_sampling=True decides only "
        "after the rewards which prompts they hold",
        "one of them",
        "dynamic_sampling=False",
        use_vllm=True,
        vllm_mode="server",
        rollout_staleness=1,
        dynamic_sampling=True,
    ),
    _rule(
        "staleness_without_correction",
        lambda c: c.rollout_staleness > 0 and not c.vllm_importance_sampling_correction,
        "rollout_staleness={c.rollout_staleness} samples from older weights, and "
        "vllm_importance_sampling_correction=False leaves that uncorrected",
        "vllm_importance_sampling_correction=True, or rollout_staleness=0",
        "vllm_importance_sampling_correction=True",
        use_vllm=True,
        vllm_mode="server",
        rollout_staleness=1,
        vllm_importance_sampling_correction=False,
    ),
    _rule(
        "staleness_with_dynamic_sampling",
        lambda c: c.rollout_staleness > 0 and c.dynamic_sampling,
        "rollout_staleness={c.rollout_staleness} asks for prompts that dynamic_sampling=True cannot know",
        "one of them",
        "rollout_staleness=0",
        use_vllm=True,
        vllm_mode="server",
        rollout_staleness=1,
        dynamic_sampling=True,
    ),
    _rule(
        "tensor_parallel_over_processes",
        lambda c: (
            c.use_vllm
            and c.vllm_mode == "colocate"
            and c.vllm_tensor_parallel_size > 0
            and c.world_size % c.vllm_tensor_parallel_size != 0
        ),
        "vllm_tensor_parallel_size={c.vllm_tensor_parallel_size} does not divide the "
        "{c.world_size} process(es)",
        "divisors of {c.world_size}",
        "1",
        use_vllm=True,
        vllm_tensor_parallel_size=1000003,
    ),
)
