"""Checks of ``groupwise doctor`` that need the model: sampling, rewards, memory of the longest row."""

from __future__ import annotations

import dataclasses
import gc
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from groupwise.commands.cli.findings import Finding, fail, ok, warn
from groupwise.compat.transformers import enable_gradient_checkpointing
from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import total_rewards
from groupwise.cpu import save_matmul_outputs
from groupwise.cpu.malloc import malloc_trim
from groupwise.errors import RewardError
from groupwise.records import Completion, Experience, RolloutBatch, RolloutRequest
from groupwise.records.rollout import GroupRewards, step_sum
from groupwise.reporting.metrics import checked_metrics
from groupwise.rewards.runtime.calling import call_rewards
from groupwise.rewards.texts import RewardLog
from groupwise.trainer import GRPOTrainer

#: Optimizer state per trained parameter, in sizes of the parameter, by prefix of the optimizer name.
_STATES = {"adamw_bnb_8bit": 0.5, "adamw_8bit": 0.5, "paged_adamw_8bit": 0.5, "adam": 2.0, "paged_adam": 2.0}
_STATES |= {"sgd": 0.0, "adafactor": 0.0, "lion": 1.0, "rmsprop": 1.0}


def trial_config(config: GRPOConfig, tokens: int, directory: str) -> GRPOConfig:
    """Return the configuration for a trial on one process: nothing is saved, reported or sharded.

    Args:
        tokens: maximum number of tokens per completion.
    """
    given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.init}
    defaults = {item.name: item.default for item in dataclasses.fields(GRPOConfig)}
    engine = {name: defaults[name] for name in given if name.startswith(("use_vllm", "vllm_"))}
    group = config.num_generations
    changes: dict[str, Any] = {
        **engine,
        "output_dir": directory,
        "per_device_train_batch_size": group,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": None,
        "generation_batch_size": None,
        "max_completion_length": min(config.max_completion_length, tokens),
        "rollout_staleness": 0,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "report_to": "none",
        "push_to_hub": False,
        "log_completions": False,
        "deepspeed": None,
        "fsdp": None,
    }
    return GRPOConfig(**{**given, **changes})


def sample(trainer: GRPOTrainer, rows: Sequence[dict[str, Any]]) -> tuple[RolloutBatch, float]:
    """Sample a group of completions for each row; return them and the seconds."""
    repeated = [row for row in rows for _ in range(trainer.num_generations)]
    start = time.perf_counter()
    request = RolloutRequest(repeated, trainer.num_generations)
    return trainer.generate_rollouts(request), time.perf_counter() - start


def sample_findings(
    rollout: RolloutBatch, seconds: float, config: GRPOConfig, tokens: int
) -> Iterator[Finding]:
    """Report the lengths of completions that were sampled with the limit ``tokens``."""
    lengths = [len(completion.token_ids) for completion in rollout.completions]
    cut = sum(completion.truncated for completion in rollout.completions)
    text = (
        f"{len(lengths)} completions in {seconds:.1f} s, {sum(lengths) / len(lengths):.0f} tokens on "
        f"average, {cut} cut at {tokens}"
    )
    everything = cut == len(lengths) and tokens == config.max_completion_length
    yield warn("sampling", f"{text}: none has an end token") if everything else ok("sampling", text)
    if tokens < config.max_completion_length:
        yield ok("sampling", f"the limit of the run is {config.max_completion_length} (--max_new_tokens)")
    yield ok("sampling", f"the first one: {str(rollout.texts[0])[:200]!r}")


def reward_findings(
    trainer: GRPOTrainer, rollout: RolloutBatch, sampling_seconds: float
) -> Iterator[Finding]:
    """Run each reward function on the completions; report failures, None, constant and slow ones."""
    columns: list[list[float]] = []
    log = RewardLog(len(rollout), checked_metrics)
    for function, name in zip(trainer.reward_callables, trainer.reward_func_names, strict=True):
        start = time.perf_counter()
        try:
            called = call_rewards(
                [function],
                [name],
                rollout,
                timeout=trainer.args.reward_timeout,
                loop=trainer.event_loop,
                trainer_state=trainer.state,
                log_extra=log.log_extra,
                log_metric=log.log_metric,
            )
        except RewardError as error:
            yield fail("reward", str(error))
            continue
        seconds = time.perf_counter() - start
        values = [step_sum(v) if isinstance(v, list) else v for v in called.rewards_FB[0]]
        columns.append(values)
        yield from _value_findings(name, values, seconds)
        if seconds > max(sampling_seconds, 0.5):
            yield warn(
                "reward",
                f"{name}: slow, {seconds:.1f} s where sampling took {sampling_seconds:.1f} s; consider an "
                "async function and reward_timeout",
            )
    if len(columns) == len(trainer.reward_callables):
        size = trainer.num_generations
        rewards = GroupRewards(torch.tensor(columns).T, trainer.reward_weights, size)
        total_PG = total_rewards(rewards, trainer.args.multi_objective_aggregation).view(-1, size)
        groups = [total_G[~total_G.isnan()] for total_G in total_PG]  # NaN: a completion without a reward
        varied = sum(len(group) > 0 and bool(group.min() < group.max()) for group in groups)
        text = f"{varied} of {len(groups)} sampled groups have rewards that differ"
        yield ok("reward", text) if varied else warn("reward", f"{text}: there is no gradient")


def _value_findings(name: str, values: list[float], seconds: float) -> Iterator[Finding]:
    scored = [value for value in values if not math.isnan(value)]
    if not scored:
        yield warn("reward", f"{name}: None for all {len(values)} completions ({seconds:.2f} s)")
        return
    text = f"mean {sum(scored) / len(scored):.3g}, from {min(scored):.3g} to {max(scored):.3g}"
    if len(scored) < len(values):
        text += f", None for {len(values) - len(scored)} of {len(values)}"
    if min(scored) == max(scored):
        yield warn("reward", f"{name}: constant, {text} ({seconds:.2f} s); it gives no gradient")
    else:
        yield ok("reward", f"{name}: {text} ({seconds:.2f} s)")


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Context manager that measures the peak memory above the memory at entry: one number of bytes."""
    peak, process, has_ended = [0], psutil.Process(), threading.Event()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak[0] = torch.cuda.max_memory_allocated() - before
        return
    malloc_trim()  # free pages that malloc still holds would hide new allocations
    before = process.memory_info().rss

    def watch() -> None:
        while not has_ended.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        has_ended.set()
        watcher.join()


def train_row(trainer: GRPOTrainer, prompt_tokens: int, completion_tokens: int) -> int:
    """Run forward and backward of one row of this size; return the peak of additional memory in bytes."""
    args: GRPOConfig = trainer.args
    model: torch.nn.Module = trainer.accelerator.prepare_model(trainer.model)
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs)
        save_matmul_outputs(trainer.model)
    model.train()
    draw = torch.Generator().manual_seed(0)
    vocabulary = trainer.model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (prompt_tokens + completion_tokens,), generator=draw).tolist()
    rollout = RolloutBatch([{}], [""], [ids[:prompt_tokens]], [Completion(ids[prompt_tokens:])], [""])
    tokens = trainer.collate(rollout)
    logps = trainer.old_and_ref_logps(tokens, on_policy=True)
    window = [Experience.from_tokens(tokens, torch.ones(1), logps)]
    (batch,) = trainer.set_token_weights(window, trainer.compute_entropy_masks(window))
    # The first call also checks the layout; that must not count as memory of the row.
    trainer.compute_logprobs(model.eval(), batch)
    model.train()
    batch = trainer.logprob_computer.prepare(batch)
    with _peak_memory(trainer.accelerator.device) as peak:
        loss = trainer.compute_loss(model, batch)
        trainer.accelerator.backward(loss)
    return peak[0]


def memory_findings(
    trainer: GRPOTrainer, config: GRPOConfig, prompt_tokens: int, peak: int
) -> Iterator[Finding]:
    """Estimate the memory of training from the peak of the longest row, without sharding over devices."""
    weights = _size(trainer.model.parameters())
    trained = _size(p for p in trainer.model.parameters() if p.requires_grad)
    reference = 0 if trainer.ref_model is None else _size(trainer.ref_model.parameters())
    name = str(getattr(config.optim, "value", config.optim))
    states = next((size for start, size in _STATES.items() if name.startswith(start)), 2.0)
    fixed = weights + reference + trained + int(states * trained)
    row = max(peak - trained, 0)
    rows = config.per_device_train_batch_size
    length = f"{prompt_tokens} + {config.max_completion_length} tokens"
    yield ok(
        "memory",
        f"weights {_gb(weights)}, reference {_gb(reference)}, gradients {_gb(trained)}, optimizer ({name}) "
        f"{_gb(int(states * trained))}, activations of the longest row ({length}) {_gb(row)}",
    )
    if trainer.accelerator.device.type == "cuda":
        room, what = torch.cuda.mem_get_info(trainer.accelerator.device)[1], "the GPU"
    else:
        room, what = psutil.virtual_memory().available + weights + reference, "the machine"
    one, all_rows = fixed + row, fixed + rows * row
    text = (
        f"about {_gb(one)} with one longest row, at most {_gb(all_rows)} with {rows}; {what} has {_gb(room)}"
    )
    if one > room:
        yield fail("memory", f"{text}: shorten rows, train an adapter (lora) or shard the model")
    elif all_rows > room:
        yield warn("memory", f"{text}: micro-batches of long rows are split, with the same update")
    else:
        yield ok("memory", text)


def _size(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
