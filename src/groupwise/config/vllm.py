"""The constraints on settings of vLLM, and on what goes together with it."""

from __future__ import annotations

import re
from typing import Any

from groupwise.config.rules import Rule, rule


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


VLLM_RULES = (
    rule(
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
    rule(
        "sharded_generation_with_vllm",
        lambda c: c.use_vllm and not c.ds3_gather_for_generation,
        "ds3_gather_for_generation=False is for generating with the training weights, not with use_vllm=True",
        "one of them",
        "ds3_gather_for_generation=True",
        use_vllm=True,
        ds3_gather_for_generation=False,
    ),
    rule(
        "staleness_without_server",
        lambda c: c.rollout_staleness > 0 and not (c.use_vllm and c.vllm_mode == "server"),
        "rollout_staleness={c.rollout_staleness} needs a server that generates while training",
        "use_vllm=True with vllm_mode='server'",
        "rollout_staleness=0",
        rollout_staleness=1,
    ),
    rule(
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
    rule(
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
    rule(
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
    rule(
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
