"""The constraints on combinations of settings that contradict each other."""

from __future__ import annotations

import importlib
from typing import Any

from groupwise.config.rules import Rule, join_lines, rule, unknown

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


def _normalizes_first(aggregation: str) -> bool:
    registered = importlib.import_module("groupwise.core.advantages").AGGREGATIONS
    return aggregation in registered and registered[aggregation].normalize_first


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


#: transformers lists the first only without MLflow, and the second never.
_NOT_LISTED = ("azure_ml", "flyte")


def _missing_dashboards(config: Any) -> dict[str, str]:
    """Names in ``report_to`` that Trainer does not know, or whose package is not there."""
    if not config.report_to:
        return {}
    integrations = importlib.import_module("transformers.integrations.integration_utils")
    known = integrations.INTEGRATION_TO_CALLBACK
    here = integrations.get_available_reporting_integrations()
    found = {}
    for name in config.report_to:
        if name not in known:
            found[name] = unknown("report_to", name, known)
        elif name not in here and name not in _NOT_LISTED:
            found[name] = (
                f"report_to={name!r} needs a package that is not installed; allowed: "
                f"{', '.join(here) or 'none'}; nearest valid: 'none', or install it"
            )
    return found


COMBINATION_RULES = (
    Rule(
        "old_names",
        lambda c: bool(_old_name_conflicts(c)),
        lambda c: join_lines(_old_name_conflicts(c)),
        {"vllm_importance_sampling_cap": 2.0, "vllm_importance_sampling_clip_max": 4.0},
    ),
    Rule(
        "report_to",
        lambda c: bool(_missing_dashboards(c)),
        lambda c: join_lines(_missing_dashboards(c)),
        {"report_to": "tensorbord"},
    ),
    Rule(
        "generation_kwargs",
        lambda c: bool(_sampling_conflicts(c)),
        lambda c: join_lines(_sampling_conflicts(c)),
        {"temperature": 0.7, "generation_kwargs": {"temperature": 0.9}},
    ),
    rule(
        "reward_weights",
        _bad_weights,
        "reward_weights={c.reward_weights} is not a list of numbers",
        "one number per reward function",
        "None (all 1)",
        reward_weights=[],
    ),
    rule(
        "eval_pass_at_k",
        _bad_pass_at_k,
        "eval_pass_at_k={c.eval_pass_at_k} has a k that cannot be estimated",
        "integers from 1 to num_generations_eval={c.num_generations_eval}",
        "[1, {c.num_generations_eval}]",
        eval_pass_at_k=[1, 16],
    ),
    rule(
        "delta_inside_clip_range",
        _delta_inside_clip,
        "delta={c.delta} is within the clip range, whose upper end is 1 + epsilon_high with "
        "epsilon_high={c.epsilon_high}",
        "None or > 1 + epsilon_high",
        "None",
        delta=1.1,
    ),
    rule(
        "kl_in_reward_without_beta",
        lambda c: c.kl_in_reward and c.beta == 0,
        "kl_in_reward=True is without effect at beta=0",
        "beta > 0",
        "kl_in_reward=False",
        kl_in_reward=True,
    ),
    rule(
        "bias_correction_without_beta",
        lambda c: c.use_bias_correction_kl and c.beta == 0,
        "use_bias_correction_kl=True is without effect at beta=0",
        "beta > 0",
        "use_bias_correction_kl=False",
        use_bias_correction_kl=True,
    ),
    rule(
        "kl_in_reward_normalised_away",
        lambda c: c.kl_in_reward and c.beta != 0 and _normalizes_first(c.multi_objective_aggregation),
        "kl_in_reward=True needs one reward to subtract the KL from, but this multi_objective_aggregation "
        "normalises each reward function first",
        'multi_objective_aggregation="sum_then_normalize", or kl_in_reward=False',
        "kl_in_reward=False",
        kl_in_reward=True,
        beta=0.04,
        multi_objective_aggregation="normalize_then_sum",
    ),
    rule(
        "bias_correction_with_kl_in_reward",
        lambda c: c.use_bias_correction_kl and c.kl_in_reward and c.beta != 0,
        "use_bias_correction_kl=True corrects the KL of the loss, which kl_in_reward=True removes",
        "one of them",
        "use_bias_correction_kl=False",
        use_bias_correction_kl=True,
        kl_in_reward=True,
        beta=0.04,
    ),
    rule(
        "sync_ref_model_without_beta",
        lambda c: c.sync_ref_model and c.beta == 0,
        "sync_ref_model=True has no reference model to move at beta=0",
        "beta > 0",
        "sync_ref_model=False",
        sync_ref_model=True,
    ),
    rule(
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
    rule(
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
    rule(
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
    rule(
        "hub_repo_without_log_completions",
        lambda c: c.log_completions_hub_repo is not None and not c.log_completions,
        "log_completions_hub_repo={c.log_completions_hub_repo!r} is set but log_completions=False "
        "writes nothing to upload",
        "both or neither",
        "log_completions=True",
        log_completions_hub_repo="me/completions",
    ),
    rule(
        "liger_with_logprob_head",
        lambda c: c.use_liger_kernel and c.logprob_head != "auto",
        "logprob_head={c.logprob_head!r} is contradicted by use_liger_kernel=True, whose fused "
        "loss has its own",
        "one of them",
        "logprob_head='auto'",
        use_liger_kernel=True,
        logprob_head="dense",
    ),
    rule(
        "two_generation_engines",
        lambda c: c.use_vllm and c.use_transformers_continuous_batching,
        "use_vllm=True and use_transformers_continuous_batching=True are both set",
        "one of them",
        "use_transformers_continuous_batching=False",
        use_vllm=True,
        use_transformers_continuous_batching=True,
    ),
    rule(
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
)
