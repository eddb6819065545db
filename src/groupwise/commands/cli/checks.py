"""Reports of ``groupwise doctor`` that need no model weights: batches, lengths of prompts, tokenizer.

What the trainer would refuse is refused by its own checks, which the doctor runs before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer

from groupwise.commands.cli.findings import Finding, fail, ok, warn
from groupwise.config.grpo_config import GRPOConfig
from groupwise.tokenization.prompts import Message, Prompt, is_conversational


def batch_findings(config: GRPOConfig, prompts: int) -> Iterator[Finding]:
    """Report sizes of batches and numbers of steps of a training set that fills a batch.

    Args:
        prompts: number of rows of the training set.
    """
    per_batch = config.prompts_per_batch
    yield ok(
        "batches",
        f"{config.generation_batch_size} completions at a time = {config.per_device_train_batch_size} per "
        f"device x {config.world_size} process(es) x {config.steps_per_generation} micro-batch(es) = "
        f"{per_batch} prompt(s) x {config.num_generations} completions",
    )
    use = (
        "every completion is used in one optimizer step: exactly on-policy"
        if config.trains_on_policy
        else f"a generation batch is used in {config.optimizer_steps_per_generation} optimizer steps: ratios "
        "to old log-probs are clipped"
    )
    yield ok("batches", use)
    uses = config.micro_batches_per_generation / config.gradient_accumulation_steps
    per_epoch = prompts // per_batch * uses
    total = config.max_steps if config.max_steps > 0 else int(per_epoch * config.num_train_epochs)
    yield ok(
        "steps",
        f"{prompts} prompts, {per_epoch:.6g} optimizer steps per epoch, {total} in all "
        f"({total / per_epoch:.3g} epochs)",
    )
    if prompts % per_batch:
        left = f"{prompts % per_batch} prompt(s) of every epoch do not fill a batch and are dropped"
        yield ok("steps", left)


def memory_finding(policy: nn.Module, config: GRPOConfig, launch: Mapping[str, Any]) -> Finding:
    """Report the bytes of weights, gradients and optimizer on each device at a step, sharded as in the run.

    DeepSpeed keeps weights and gradients in the run's precision, and in float32 a copy of the trained weights
    and, at a step, of the gradients (ZeRO-3: of 1e9 at a time). FSDP keeps trained weights in float32. DDP
    copies gradients to exchange them.

    Args:
        policy: the model with its adapter, on the meta device or another.
        launch: configuration of accelerate; without one, `deepspeed` and `fsdp` of the settings count.
    """
    ranks, zero = config.world_size, cast(Any, launch.get("deepspeed_config") or config.deepspeed)
    file = zero if isinstance(zero, str) else (zero or {}).get("deepspeed_config_file")
    zero = json.loads(Path(file).read_text()) if file else zero or {}
    fsdp = not zero and bool(launch.get("fsdp_config") or config.fsdp)
    stage = int(zero.get("zero_stage", zero.get("zero_optimization", {}).get("stage", 3 * fsdp)))
    half = config.bf16 or config.fp16 or launch.get("mixed_precision", "no") != "no"
    parameters = [*policy.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    probe = nn.Parameter(torch.zeros(64, 64, dtype=None if zero or (fsdp and half) else trained[0].dtype))
    probe.grad = torch.zeros_like(probe)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
    (optimizer := kind([probe], **options)).step()
    states = sum(state.nbytes for state in optimizer.state[probe].values() if getattr(state, "ndim", 0))
    count, width, low = sum(one.numel() for one in trained), probe.itemsize, 2 if zero and half else 4
    stored = [(one.numel(), width if one.requires_grad else one.itemsize) for one in parameters]
    gradients = count * low / (ranks if stage > 1 else 1) + 4 * min(
        count / ranks, 1e9 if stage == 3 else count
    )
    if not zero:
        gradients = count * width * (1 / ranks if fsdp else min(ranks, 2))
    parts = {
        "weights": sum(number * min(low, size) for number, size in stored) / (ranks if stage == 3 else 1),
        "gradients": gradients,
        kind.__name__: count * (states / probe.numel() + 4 * bool(zero)) / (ranks if stage else 1),
    }
    shown = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts.items())
    how = f"ZeRO-{stage}" if zero else "FSDP" if fsdp else "DDP" if ranks > 1 else "one process"
    text = f"{sum(parts.values()) / 1e9:.3g} GB on each of {ranks} device(s), {how}: {shown}; "
    given = f"bf16={config.bf16}, fp16={config.fp16} on this {config.device.type}"
    return ok("memory", f"{text}{given}; without activations, buckets, a reference model and an engine")


def length_findings(
    lengths: Sequence[int], config: GRPOConfig, context: int | None, population: str
) -> Iterator[Finding]:
    """Report the prompt lengths in tokens, before truncation, and compare them with the limits.

    Args:
        context: maximum number of positions of the model; None if unknown.
        population: description of the prompts, for the report.
    """
    ordered = sorted(lengths)
    median, most = (ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.95))
    yield ok(
        "prompts",
        f"tokens of {population}: min {ordered[0]}, median {median}, 95% {most}, max {ordered[-1]}",
    )
    limit = config.max_prompt_length or ordered[-1]
    cut = sum(length > limit for length in lengths)
    if cut:
        yield warn(
            "prompts",
            f"max_prompt_length={limit} truncates {cut} of {len(lengths)} from the left; set it to "
            f"{ordered[-1]} to keep all whole",
        )
    if context is not None:
        total = min(ordered[-1], limit) + config.max_completion_length
        yield ok("prompts", f"longest prompt and completion: {total} of {context} positions")


def tokenizer_findings(
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Sequence[int],
    prompt: Prompt,
    template_kwargs: dict[str, Any],
) -> Iterator[Finding]:
    """Check end tokens, padding and chat template of a tokenizer on one prompt of the data.

    Args:
        end_tokens: ids that end a completion.
    """
    if end_tokens:
        names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens)
        yield ok("tokenizer", f"completions end with {names}")
    else:
        yield fail("tokenizer", "model and tokenizer have no end token: no completion can end; set eos_token")
    if tokenizer.pad_token_id in end_tokens:
        yield ok("tokenizer", f"padding is an end token ({tokenizer.pad_token!r}); masks distinguish them")
    if is_conversational(prompt):
        yield from _template_findings(tokenizer, end_tokens, prompt, template_kwargs)
    else:
        ids = tokenizer(prompt)["input_ids"]
        if ids and ids[-1] in end_tokens:
            yield fail("tokenizer", "it ends prompts with an end token; switch add_eos_token off")


def _template_findings(
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Sequence[int],
    prompt: list[Message],
    template_kwargs: dict[str, Any],
) -> Iterator[Finding]:
    def render(messages: list[Message], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **{**template_kwargs, **options}))

    with_generation_prompt, bare = render(prompt, add_generation_prompt=True), render(prompt)
    answered = render([*prompt, {"role": "assistant", "content": "Paris"}])
    if prompt[-1]["role"] != "assistant" and with_generation_prompt == bare:
        yield warn(
            "template",
            "add_generation_prompt has no effect: the prompt does not start an assistant turn; end the chat "
            "template with the assistant's header if add_generation_prompt",
        )
    if not answered.startswith(with_generation_prompt):
        yield warn(
            "template",
            "a chat with an answer does not start with the rendered prompt; use a "
            "template that prints earlier turns unchanged, or chat_template_kwargs that make it",
        )
    after = answered.rpartition("Paris")[2]
    closing = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    if closing and not set(closing) & set(end_tokens):
        yield warn(
            "template",
            f"answers end with {after!r}, without an end token: completions may run to the length limit; "
            "make the last token of an answer an eos_token_id of the model's generation config",
        )
    else:
        yield ok("template", f"a prompt ends with {with_generation_prompt[-40:]!r}, an answer with {after!r}")
