"""Multi-turn rollouts: sample a turn, run its tool calls, append the results, until a turn calls no tool."""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from groupwise.agents.environments import Environment, EnvironmentPool, Slot, add_observation, empty_prompt
from groupwise.agents.executor import ToolExecutor
from groupwise.agents.retries import RolloutRetries, dropped_completion
from groupwise.agents.tools import Tool, ToolResult, ToolSet, failed_result, start_tool_calls, tool_result
from groupwise.agents.trajectory import Trajectory
from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import AgentError, ConfigError
from groupwise.generation.base import GenerationBackend, check_images
from groupwise.records import RolloutBatch, SamplingOptions
from groupwise.records.images import ImageInputs
from groupwise.tokenization.images import check_no_images, insert_images, process_prompt
from groupwise.tokenization.prompts import (
    Message,
    Prompt,
    content_text,
    continues_final_message,
    format_completion,
    is_conversational,
    tokenize_prompt,
    with_rendered_results,
    with_text_content,
)
from groupwise.tokenization.rendering import PrefixMismatchError, Renderer
from groupwise.tokenization.tool_calls import ToolCall, TurnParser

logger = logging.getLogger(__name__)

#: Minimum time in seconds that finished tool calls wait for slower ones, so that one generate call serves
#: both.
MIN_WAIT = 1.0

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 300


@dataclass(frozen=True)
class MultiTurnSettings:
    """Limits of a rollout, and the chat template's variables.

    Attributes:
        max_completion_length: tokens of a completion, tool results included.
        max_tool_calling_iterations: turns whose tool calls are executed; None: unlimited.
        max_prompt_length: longer prompts are truncated on the left; None: unlimited.
        template_kwargs: further variables of the chat template.
        context_length: tokens of prompt and completion that the model supports; None: unlimited.
        tool_timeout: seconds per call of a tool, ``reset`` or ``get_reward``; None: no limit.
        max_retries: repetitions of a failed rollout, after which its completion is dropped; None: the error
            of a rollout is raised.
    """

    max_completion_length: int
    max_tool_calling_iterations: int | None = None
    max_prompt_length: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    context_length: int | None = None
    tool_timeout: float | None = None
    max_retries: int | None = None


@dataclass
class _Rollout:
    """State of one rollout.

    Attributes:
        messages: messages after the prompt.
        tool_calls: tool calls of the latest turn.
        results: their results, once started.
        images: image inputs of the model for the tokens so far; None without a processor.
        prompt_images: image inputs of the prompt alone.
        first_failure: first call that failed, and its error.
        error: the environment or a tool has failed the rollout.
    """

    prompt: Prompt
    tools: ToolSet
    trajectory: Trajectory
    images: ImageInputs | None = None
    prompt_images: ImageInputs | None = None
    messages: list[Message] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    results: list[Future[Any]] = field(default_factory=list)
    iterations: int = 0
    num_calls: int = 0
    num_failures: int = 0
    first_failure: tuple[ToolCall, str] | None = None
    error: AgentError | None = None


class MultiTurnRollouts:
    """Sample rollouts with tools and environments.

    Args:
        tools: tools of every rollout.
        pool: environments; None without.
        renderer: renders tool schemas and tool results; None if no rollout has tools.
        any_rank: returns True if its argument is True on any rank, for backends that all ranks must call
            equally often; ``bool`` if ranks are independent.
        processor: processor of a vision-language model; None for text.

    Attributes:
        environments: environments of the latest batch, one per completion; None without environments.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        pool: EnvironmentPool | None,
        tokenizer: PreTrainedTokenizerBase,
        settings: MultiTurnSettings,
        renderer: Renderer | None = None,
        any_rank: Callable[[bool], bool] = bool,
        processor: ProcessorMixin | None = None,
    ) -> None:
        self.tools, self.pool = list(tools), pool
        self.tokenizer, self.processor = tokenizer, processor
        self.settings, self.renderer, self.any_rank = settings, renderer, any_rank
        self.parser = None if renderer is None else TurnParser(tokenizer, renderer.chat_template)
        self.executor = ToolExecutor(settings.tool_timeout) if pool is None else pool.executor
        self.retries = RolloutRetries(settings.max_retries, lambda here: self.any_rank(here))
        self._reported: set[tuple[str, str]] = set()
        self.environments: list[Environment | None] | None = None

    def generate_rollouts(
        self,
        rows: list[dict[str, Any]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> RolloutBatch:
        """Sample one rollout for each row.

        Args:
            rows: dataset rows with a ``prompt``; rows of one group are adjacent.
            generation_kwargs: sampler settings in place of the run's, as in ``SamplingOptions``.

        Returns:
            Completions of all turns, with ``loss_mask`` 0 on tool results; the environments as column
            ``environments``.

        Raises:
            ConfigError: a row cannot be used.
            AgentError: an environment failed, and ``max_retries`` is None.
        """
        slots = self.pool.acquire(rows) if self.pool is not None else []
        rollouts: dict[int, _Rollout] = {}

        def attempt(indices: list[int]) -> list[int]:
            rollouts.update(self._attempt(indices, rows, slots, backend, generation_kwargs or {}))
            failed = [index for index in indices if rollouts[index].error is not None]
            for index in failed if slots else []:
                slots[index].discard()
            return failed

        metrics = self.retries.run(attempt, len(rows))
        ordered = [rollouts[index] for index in range(len(rows))]
        return self._make_batch(rows, ordered, slots, backend, metrics)

    def _attempt(
        self,
        indices: list[int],
        rows: list[dict[str, Any]],
        slots: Sequence[Slot],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any],
    ) -> dict[int, _Rollout]:
        """Sample the rollouts of some rows, in environments that are reset; failed ones have an ``error``.

        Raises:
            AgentError: a rollout failed, and ``max_retries`` is None.
        """
        used = [slots[index] for index in indices] if slots else []
        outcomes = self.pool.reset(used) if self.pool is not None else [None] * len(indices)
        rollouts: dict[int, _Rollout] = {}
        for place, (index, outcome) in enumerate(zip(indices, outcomes, strict=True)):
            prompt = insert_images({"prompt": empty_prompt(), **rows[index]})
            tools = ToolSet([*self.tools, *(used[place].tools if used else [])])
            error = None
            if isinstance(outcome, AgentError):
                self.retries.check(outcome)
                error = outcome
            else:
                prompt = add_observation(prompt, outcome)
            prompt_ids, images = self._encode_prompt(index, prompt, tools)
            trajectory = start_trajectory(prompt_ids, self.settings, backend, f"row {index}")
            rollouts[index] = _Rollout(prompt, tools, trajectory, images, images, error=error)
        running = [rollout for rollout in rollouts.values() if rollout.error is None]
        self._run(running, backend, generation_kwargs)
        self._report_failures(running)
        if self.pool is not None and self.retries.max_retries is not None:
            # Before the reward functions are called, so that a failure here repeats the rollout, too.
            ended = [place for place, index in enumerate(indices) if rollouts[index].error is None]
            errors = self.pool.compute_rewards([used[place] for place in ended])
            for place, error in zip(ended, errors, strict=True):
                if error is not None:
                    self.retries.check(error)
                    rollouts[indices[place]].error = error
        return rollouts

    def _run(
        self, rollouts: list[_Rollout], backend: GenerationBackend, generation_kwargs: Mapping[str, Any]
    ) -> None:
        """Alternate between generation and tool calls until all rollouts have ended, on all ranks."""
        ready, waiting = rollouts, list[_Rollout]()
        while self.any_rank(bool(ready)):
            started = time.monotonic()
            self._generate(ready, backend, generation_kwargs)
            # A rollout that misses a batch costs one more generate call: waiting that long does not cost
            # more.
            patience = max(MIN_WAIT, time.monotonic() - started)
            waiting += self._start_tool_calls(ready)
            ready, waiting = self._wait_for_results(waiting, patience)

    def _generate(
        self, ready: list[_Rollout], backend: GenerationBackend, generation_kwargs: Mapping[str, Any]
    ) -> None:
        """Sample the next turn of all ``ready`` rollouts in one call of the backend."""
        trajectories = [rollout.trajectory for rollout in ready]
        turns = sample_turns(trajectories, backend, generation_kwargs, _images(ready))
        for rollout, (context_ids, token_ids) in zip(ready, turns, strict=True):
            self._parse_turn(rollout, context_ids, token_ids)

    def _parse_turn(self, rollout: _Rollout, context_ids: list[int], token_ids: list[int]) -> None:
        """Append the policy's message, and store its tool calls."""
        rollout.tool_calls = []
        prompt = rollout.prompt
        if self.parser is None or not is_conversational(prompt):
            return
        turn = self.parser(context_ids, token_ids, rollout.tools.schemas)
        message = turn.message
        continued = continues_final_message(prompt, self.settings.template_kwargs)
        if not rollout.messages and continued and not self.parser.reads_context:
            text = cast(str, self.tokenizer.decode(token_ids, skip_special_tokens=True))
            space = text[: len(text) - len(text.lstrip())]  # the parser strips it
            message = {
                **message,
                "content": f"{content_text(prompt[-1]['content'])}{space}{message['content']}",
            }
        rollout.messages.append(message)
        if not rollout.trajectory.truncated and rollout.tools:
            rollout.tool_calls = turn.tool_calls

    def _start_tool_calls(self, rollouts: list[_Rollout]) -> list[_Rollout]:
        """Start the tool calls of the latest turns; return the rollouts that have any."""
        limit = self.settings.max_tool_calling_iterations
        calling = [
            rollout
            for rollout in rollouts
            if rollout.tool_calls and (limit is None or rollout.iterations < limit)
        ]
        turns = [(rollout.tool_calls, rollout.tools) for rollout in calling]
        for rollout, results in zip(calling, start_tool_calls(turns, self.executor), strict=True):
            rollout.iterations += 1
            rollout.results = results
        return calling

    def _wait_for_results(
        self, waiting: list[_Rollout], patience: float
    ) -> tuple[list[_Rollout], list[_Rollout]]:
        """Wait until all results are there, or after ``patience`` seconds until those of one rollout are.

        Returns:
            Rollouts to continue, and rollouts whose tools are still running. The first list is empty only if
            the second is.
        """
        ready: list[_Rollout] = []
        wait(_futures(waiting), timeout=patience)
        while waiting and not ready:
            is_done = [all(future.done() for future in rollout.results) for rollout in waiting]
            finished = [rollout for rollout, done in zip(waiting, is_done, strict=True) if done]
            waiting = [rollout for rollout, done in zip(waiting, is_done, strict=True) if not done]
            ready = [rollout for rollout in finished if self._append_results(rollout)]
            if not finished:
                self.executor.wait_for_next(_futures(waiting))
        return ready, waiting

    def _append_results(self, rollout: _Rollout) -> bool:
        """Append tool results to messages and tokens; return False if the rollout has ended.

        Raises:
            AgentError: a tool failed the rollout, and ``max_retries`` is None.
        """
        futures, rollout.results = rollout.results, []
        try:
            results = [
                tool_result(call, rollout.tools, future, images=self.processor is not None)
                for call, future in zip(rollout.tool_calls, futures, strict=True)
            ]
        except AgentError as error:
            self.retries.check(error)
            rollout.error = error
            return False
        try:
            fits = self._append_messages(rollout, _tool_messages(rollout, results))
        except Exception as problem:  # an image that the processor rejects, content that the template rejects
            results = [result if result.failure else failed_result(problem) for result in results]
            fits = self._append_messages(rollout, _tool_messages(rollout, results))
        rollout.num_calls += len(results)
        rollout.num_failures += sum(bool(result.failure) for result in results)
        for call, result in zip(rollout.tool_calls, results, strict=True):
            if result.failure and rollout.first_failure is None:
                rollout.first_failure = call, result.failure
        return fits

    def _append_messages(self, rollout: _Rollout, messages: list[Message]) -> bool:
        """Append tool messages; return False if no token remains for the next turn: they are omitted."""
        assert self.renderer is not None
        trajectory, rendered = rollout.trajectory, with_rendered_results(messages)
        if not self.renderer.may_fit(rendered, trajectory.remaining_tokens):
            trajectory.truncated = True
            return False
        try:
            start = len(trajectory.context_ids)
            tokens, images = self.renderer.render_next_messages(rendered, trajectory.token_ids[-1])
            fits = trajectory.append_observed(tokens)
            if fits and images is not None and rollout.images is not None:
                rollout.images = rollout.images.followed_by(images, start)
        except PrefixMismatchError:
            if rollout.images is not None:  # a fork could separate an image from its tokens
                trajectory.truncated = True
                return False
            prompt = cast(list[Message], rollout.prompt)
            history = with_rendered_results([*prompt, *rollout.messages, *messages])
            text = cast(list[Message], with_text_content(history))
            fits = trajectory.continue_from(self.renderer.render_prompt(text, rollout.tools.schemas))
        if fits:
            rollout.messages += messages
        return fits

    def _make_batch(
        self,
        rows: list[dict[str, Any]],
        rollouts: list[_Rollout],
        slots: Sequence[Slot],
        backend: GenerationBackend,
        metrics: Metrics,
    ) -> RolloutBatch:
        extra: dict[str, list[Any]] = {}
        if self.pool is not None:
            self.environments = [slot.instance for slot in slots]
            extra = {"environments": self.environments}
        succeeded = [rollout for rollout in rollouts if rollout.error is None]
        rollouts = [
            rollout if rollout.error is None else replace(rollout, messages=[], images=rollout.prompt_images)
            for rollout in rollouts
        ]
        return RolloutBatch(
            rows=rows,
            prompts=[rollout.prompt for rollout in rollouts],
            prompt_ids=[rollout.trajectory.prompt_ids for rollout in rollouts],
            completions=[
                rollout.trajectory.completion() if rollout.error is None else dropped_completion(backend)
                for rollout in rollouts
            ],
            texts=[
                self._completion_text(rollout)
                if rollout.error is None
                else format_completion(rollout.prompt, "")
                for rollout in rollouts
            ],
            extra=extra,
            metrics={**metrics, **(_metrics(succeeded) if self.parser is not None else {})},
            images=_images(rollouts),
        )

    def _report_failures(self, rollouts: list[_Rollout]) -> None:
        """Warn if every tool call of a generation failed, once per tool and kind of error."""
        num_calls = sum(rollout.num_calls for rollout in rollouts)
        failures = [rollout.first_failure for rollout in rollouts if rollout.first_failure is not None]
        if not failures or sum(rollout.num_failures for rollout in rollouts) < num_calls:
            return
        call, error = failures[0]
        is_known = any(call.name in rollout.tools for rollout in rollouts)
        key = call.name if is_known else "", error.partition(":")[0]
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(
                "all %d tool calls of a generation failed; the first one: %s(%s): %s",
                num_calls,
                call.name,
                ", ".join(f"{name}={_SHORT.repr(value)}" for name, value in call.arguments.items()),
                _SHORT.repr(error),
            )

    def _encode_prompt(
        self, index: int, prompt: Prompt, tools: ToolSet
    ) -> tuple[list[int], ImageInputs | None]:
        settings, renderer = self.settings, self.renderer if tools else None
        kwargs = settings.template_kwargs if renderer is None else renderer.prompt_kwargs(tools.schemas)
        if self.processor is not None:
            return process_prompt(self.processor, prompt, (), kwargs, settings.max_prompt_length)
        check_no_images({}, prompt, self.tokenizer)
        text_prompt = with_text_content(prompt)
        if renderer is not None and not is_conversational(text_prompt):
            raise ConfigError(
                f"row {index} has a text prompt ({prompt!r:.80}), but tools need chat prompts: a list of "
                "messages such as [{'role': 'user', 'content': ...}]"
            )
        return tokenize_prompt(self.tokenizer, text_prompt, kwargs, settings.max_prompt_length), None

    def _completion_text(self, rollout: _Rollout) -> Prompt:
        """Return the completion in the format that reward functions expect."""
        if rollout.messages:
            return rollout.messages
        decoded = self.tokenizer.decode(rollout.trajectory.token_ids, skip_special_tokens=True)
        return format_completion(rollout.prompt, cast(str, decoded), self.settings.template_kwargs)


def start_trajectory(
    prompt_ids: list[int], settings: MultiTurnSettings, backend: GenerationBackend, what: str
) -> Trajectory:
    """Return the trajectory of a rollout before its first turn.

    Args:
        what: name of the rollout, for the message.

    Raises:
        ConfigError: the prompt fills the context of the model or of the backend.
    """
    limits = [length for length in (settings.context_length, backend.context_length) if length is not None]
    trajectory = Trajectory(prompt_ids, settings.max_completion_length, min(limits, default=None))
    if trajectory.remaining_tokens < 1:
        raise ConfigError(
            f"{what}: the prompt with its tools has {len(prompt_ids)} tokens, which leaves none for a "
            f"completion in a context of {trajectory.context_length}; shorten it, or set max_prompt_length"
        )
    return trajectory


def sample_turns(
    trajectories: Sequence[Trajectory],
    backend: GenerationBackend,
    generation_kwargs: Mapping[str, Any],
    images: Sequence[ImageInputs] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Sample the next turn of every trajectory in one call of the backend, and append it.

    Without trajectories, a token is sampled and discarded: other ranks are generating, and their call is
    collective.

    Returns:
        token ids before the turn, and those of the turn.
    """
    if not trajectories:
        backend.generate([sorted(backend.end_tokens)[:1]], SamplingOptions([1]))
        return []
    check_images(backend, images)
    contexts = [trajectory.context_ids for trajectory in trajectories]
    limits = [trajectory.remaining_tokens for trajectory in trajectories]
    completions = backend.generate(contexts, SamplingOptions(limits, images, generation_kwargs))
    for trajectory, completion in zip(trajectories, completions, strict=True):
        trajectory.append_sampled(completion)
    return [(context, c.token_ids) for context, c in zip(contexts, completions, strict=True)]


def _futures(rollouts: list[_Rollout]) -> list[Future[Any]]:
    return [future for rollout in rollouts for future in rollout.results]


def _tool_messages(rollout: _Rollout, results: list[ToolResult]) -> list[Message]:
    return [
        {"role": "tool", "name": call.name, "content": result.content}
        for call, result in zip(rollout.tool_calls, results, strict=True)
    ]


def _images(rollouts: list[_Rollout]) -> list[ImageInputs] | None:
    images = [rollout.images for rollout in rollouts if rollout.images is not None]
    return images if len(images) == len(rollouts) else None


def _metrics(rollouts: list[_Rollout]) -> Metrics:
    calls = float(sum(rollout.num_calls for rollout in rollouts))
    failures = float(sum(rollout.num_failures for rollout in rollouts))
    metrics: Metrics = {
        "tools/call_frequency": Mean(calls, float(len(rollouts))),
        "tools/failure_frequency": Mean(failures, calls),
    }
    num_forks = sum(rollout.trajectory.num_forks for rollout in rollouts)
    if num_forks:
        metrics["tools/fork_frequency"] = Mean(float(num_forks), float(len(rollouts)))
    return metrics
