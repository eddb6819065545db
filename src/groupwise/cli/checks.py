"""Checks of ``groupwise doctor`` that need no model weights: batches, prompts, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from groupwise.cli.report import Finding, fail, ok, warn
from groupwise.config.grpo_config import GRPOConfig
from groupwise.tokenization.prompts import Message, Prompt, is_conversational


def batch_findings(config: GRPOConfig, prompts: int | None) -> Iterator[Finding]:
    """Report sizes of batches and numbers of steps, for a valid configuration.

    Args:
        prompts: number of rows of the training set; None if unknown.
    """
    size, group = config.generation_batch_size or 0, config.num_generations  # both resolved when built
    per_batch = size // group
    yield ok(
        "batches",
        f"{size} completions at a time = {config.per_device_train_batch_size} per device x "
        f"{config.world_size} process(es) x {config.steps_per_generation} micro-batch(es) = {per_batch} "
        f"prompt(s) x {group} completions",
    )
    uses = (config.steps_per_generation or 1) * config.num_iterations
    if config.gradient_accumulation_steps % uses == 0:
        yield ok("batches", "every completion is used in one optimizer step: exactly on-policy")
    else:
        steps = -(-uses // config.gradient_accumulation_steps)
        yield ok(
            "batches",
            f"a generation batch is used in {steps} optimizer steps: ratios to old log-probs are clipped",
        )
    if prompts is not None:
        yield from _step_findings(config, prompts, per_batch, uses)


def _step_findings(config: GRPOConfig, prompts: int, per_batch: int, uses: int) -> Iterator[Finding]:
    if prompts < per_batch:
        yield fail(
            "steps",
            f"{prompts} prompt(s), but a generation batch needs {per_batch}; nearest valid: "
            f"generation_batch_size={prompts * config.num_generations}, or {per_batch} prompts",
        )
        return
    per_epoch = prompts // per_batch * uses / config.gradient_accumulation_steps
    total = config.max_steps if config.max_steps > 0 else int(per_epoch * config.num_train_epochs)
    yield ok(
        "steps",
        f"{prompts} prompts, {per_epoch:.6g} optimizer steps per epoch, {total} in all "
        f"({total / per_epoch:.3g} epochs)",
    )
    if prompts % per_batch:
        yield ok(
            "steps", f"{prompts % per_batch} prompt(s) of every epoch do not fill a batch and are dropped"
        )


def row_findings(rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Report empty or missing prompts, and a mix of text and chat prompts."""
    kinds = {"chat" if is_conversational(row["prompt"]) else "text" for row in rows if row["prompt"]}
    empty = [index for index, row in enumerate(rows) if not row["prompt"]]
    if empty:
        yield fail("prompts", f"{len(empty)} empty prompt(s), the first in row {empty[0]}")
    if len(kinds) > 1:
        yield warn("prompts", "some prompts are strings, others are chat messages")


def length_findings(
    lengths: Sequence[int], config: GRPOConfig, context: int | None, population: str
) -> Iterator[Finding]:
    """Report the prompt lengths in tokens, before truncation, and compare them with the limits.

    Args:
        context: maximum number of positions of the model; None if unknown.
        population: description of the prompts, for the report.
    """
    ordered = sorted(lengths)

    def at(share: float) -> int:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    yield ok(
        "prompts",
        f"tokens of {population}: min {ordered[0]}, median {at(0.5)}, 95% {at(0.95)}, max {ordered[-1]}",
    )
    limit = config.max_prompt_length
    if limit is not None:
        cut = sum(length > limit for length in lengths)
        if cut:
            yield warn(
                "prompts",
                f"max_prompt_length={limit} truncates {cut} of {len(lengths)} from the left; no truncation "
                f"from {ordered[-1]} on",
            )
    if not ordered[0]:
        yield fail("prompts", f"{sum(not length for length in lengths)} prompt(s) have no tokens")
    longest = min(ordered[-1], limit or ordered[-1])
    if context is not None and longest + config.max_completion_length > context:
        room = context - longest
        way_out = f"max_completion_length={room}" if room > 0 else f"max_prompt_length={context // 2}"
        yield fail(
            "prompts",
            f"the longest prompt ({longest}) and max_completion_length={config.max_completion_length} "
            f"exceed the model's {context} positions; nearest valid: {way_out}",
        )
    elif context is not None:
        yield ok(
            "prompts",
            f"longest prompt and completion: {longest + config.max_completion_length} of {context} positions",
        )


def tokenizer_findings(
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    end_tokens: Sequence[int],
    prompt: Prompt,
    template_kwargs: dict[str, Any] | None,
) -> Iterator[Finding]:
    """Check end tokens, padding and chat template of a tokenizer on one prompt of the data.

    Args:
        vocabulary: vocabulary size of the model.
        end_tokens: ids that end a completion.
    """
    if end_tokens:
        names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens)
        yield ok("tokenizer", f"completions end with {names}")
    else:
        yield fail("tokenizer", "model and tokenizer have no end token: no completion can end")
    if tokenizer.pad_token is None:
        yield ok("tokenizer", f"no padding token; {tokenizer.eos_token!r} is used")
    elif tokenizer.pad_token_id in end_tokens:
        yield ok("tokenizer", f"padding is an end token ({tokenizer.pad_token!r}); masks distinguish them")
    if len(tokenizer) > vocabulary:
        yield fail(
            "tokenizer",
            f"it has {len(tokenizer)} tokens, the model {vocabulary}; resize the model's embeddings",
        )
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
    template_kwargs: dict[str, Any] | None,
) -> Iterator[Finding]:
    if not tokenizer.chat_template:
        yield fail("template", "prompts are chat messages, but the tokenizer has no chat template")
        return

    def render(messages: list[Message], **options: bool) -> str:
        kwargs = {**(template_kwargs or {}), **options}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))

    try:
        with_generation_prompt, bare = render(prompt, add_generation_prompt=True), render(prompt)
        answered = render([*prompt, {"role": "assistant", "content": "Paris"}])
    except Exception as error:
        yield fail("template", f"it cannot render the first prompt: {type(error).__name__}: {error}")
        return
    if prompt[-1]["role"] != "assistant" and with_generation_prompt == bare:
        yield warn(
            "template", "add_generation_prompt has no effect: the prompt does not start an assistant turn"
        )
    if not answered.startswith(with_generation_prompt):
        yield warn("template", "a chat with an answer does not start with the rendered prompt")
    after = answered.rpartition("Paris")[2]
    closing = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    if closing and not set(closing) & set(end_tokens):
        yield warn(
            "template",
            f"answers end with {after!r}, without an end token: completions may run to the length limit",
        )
    else:
        yield ok("template", f"a prompt ends with {with_generation_prompt[-40:]!r}, an answer with {after!r}")
