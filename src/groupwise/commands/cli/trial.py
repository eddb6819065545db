"""One optimizer step of a run, for ``groupwise doctor``: its configuration, and the findings in its log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from groupwise.commands.cli.findings import Finding, ok, warn
from groupwise.config.grpo_config import GRPOConfig
from groupwise.policy.recomputation import free_memory
from groupwise.reporting.documented import documentation_of, plain_text
from groupwise.trainer import GRPOTrainer


def trial_config(config: GRPOConfig, directory: str) -> GRPOConfig:
    """Return the configuration of one step on one process: nothing is reported, pushed or sharded.

    The step has the completions of one process of the run, or of as many as make whole groups.
    """
    given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.init}
    defaults = {item.name: item.default for item in dataclasses.fields(GRPOConfig)}
    engine = {name: defaults[name] for name in given if name.startswith(("use_vllm", "vllm_"))}
    steps, group = config.steps_per_generation or 1, config.num_generations
    shares = group // math.gcd(config.per_device_train_batch_size * steps, group)
    changes: dict[str, Any] = {
        **engine,
        "output_dir": directory,
        "gradient_accumulation_steps": config.gradient_accumulation_steps * shares,
        "steps_per_generation": steps * shares,
        "generation_batch_size": None,
        "rollout_staleness": 0,
        "shuffle_dataset": False,
        "max_steps": 1,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "report_to": "none",
        "push_to_hub": False,
        "log_completions": False,
        "deepspeed": None,
        "fsdp": None,
    }
    one_gpu = type("GRPOConfig", (GRPOConfig,), {"n_gpu": 1})  # the process of the step may see several
    step: GRPOConfig = one_gpu(**{**given, **changes})
    return step


def step_findings(trainer: GRPOTrainer) -> Iterator[Finding]:
    """Report times, memory and rewards of the trainer's first step, and metrics above their healthy range."""
    log, limit = trainer.state.log_history[0], trainer.args.max_completion_length
    phases = {name: log.get(f"time/{name}", 0.0) for name in ("generate", "reward", "logprobs", "train")}
    times = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    longest = f"completions of up to {log['completions/max_length']:.0f} of {limit} tokens"
    yield ok("step", f"{log['step_time']:.1f} s: {times}; {longest}")
    free = free_memory(trainer.accelerator.device)
    yield ok("memory", f"{free / 1e9:.3g} GB were free at the peak of the step, with {longest}")
    for name in trainer.reward_func_names:
        mean, std = (log.get(f"rewards/{name}/{part}", math.nan) for part in ("mean", "std"))
        seconds = log.get(f"time/reward/{name}", 0.0)
        text = f"{name}: mean {mean:.3g}, standard deviation {std:.3g} ({seconds:.2f} s)"
        if math.isnan(mean):
            yield warn("reward", f"{name}: None for every completion")
        else:
            yield ok("reward", text) if std else warn("reward", f"{text}: constant, it gives no gradient")
        if seconds > max(phases["generate"], 0.5):
            yield warn("reward", f"{name}: slower than sampling; use an async function, and reward_timeout")
    for name, value in log.items():
        metric = documentation_of(name)
        if metric and metric.range and (high := metric.range[1]) is not None and value > high:
            advice = plain_text(metric.otherwise)
            yield warn("metrics", f"{name} is {value:.3g}, healthy: {metric.healthy}; otherwise: {advice}")
