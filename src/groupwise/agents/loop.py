"""The loop over turns: the policy writes, tools answer, until nobody has anything to add."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from groupwise.agents.environments import EMPTY_PROMPT, Environments, as_plain, as_text, with_observation
from groupwise.agents.parsing import Call, TurnParser
from groupwise.agents.tools import CONCURRENT, Outcome, Runner, Tool, Toolbox
from groupwise.agents.transcript import Transcript
from groupwise.core.images import ImageInputs
from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import AgentError, ConfigError
from groupwise.generation.base import GenerationBackend
from groupwise.records import RolloutBatch, SamplingOptions
from groupwise.tokenization.images import image_prompt, prompt_images, read_prompt, refuse_images
from groupwise.tokenization.prompts import as_completion, is_chat, tokenize_prompt
from groupwise.tokenization.rendering import DriftError, Renderer

#: Seconds that answered rollouts wait for the others at least: what is quicker stays in one batch.
PATIENCE = 1.0

#: Seconds after the limit of every call at which the event loop of the tools must be blocked.
BLOCKED_MARGIN = 10.0


@dataclass(frozen=True)
class AgentSettings:
    """What bounds a rollout.

    max_completion_length: tokens, those of tools included.
    max_iterations: turns that may be answered by tools; None is no limit but the length.
    context_length: tokens of prompt and completion that the model takes; None where nothing bounds them.
    """

    max_completion_length: int
    max_iterations: int | None = None
    max_prompt_length: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    context_length: int | None = None


@dataclass
class _Rollout:
    """One row's rollout as it goes on.

    messages: what followed the prompt.
    calls: of the newest turn.
    answer: their outcomes, when they have been started.
    images: what the model takes beside the tokens so far; None without a processor.
    """

    prompt: Any
    tools: Toolbox
    transcript: Transcript
    images: ImageInputs | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    answer: Future[list[Outcome]] | None = None
    iterations: int = 0
    num_calls: int = 0
    num_failures: int = 0

    def seconds(self) -> float:
        """The longest that the calls of this turn may take, one after the other."""
        return sum(self.tools[call.name].time_limit for call in self.calls if call.name in self.tools)


class Agents:
    """Rollouts with tools and environments.

    Args:
        tools: those that every rollout has.
        environments: None without.
        renderer: None where there are no tools at all.
        processor: turns the images of prompts into tokens; None for text.
        any_rank: whether a statement holds on any process, where all of them must call the backend as often.

    Attributes:
        current: the environments of the newest batch, one per completion; None without environments.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        environments: Environments | None,
        tokenizer: Any,
        settings: AgentSettings,
        renderer: Renderer | None = None,
        any_rank: Callable[[bool], bool] = bool,
        processor: Any = None,
    ) -> None:
        self.processor = processor
        self.tools, self.environments = list(tools), environments
        self.tokenizer, self.settings = tokenizer, settings
        self.renderer = renderer
        self.parser = None if renderer is None else TurnParser(tokenizer, renderer.chat_template)
        self.any_rank = any_rank
        self.runner = Runner()
        self.current: list[Any] | None = None

    def generate_rollouts(
        self,
        rows: list[dict[str, Any]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> RolloutBatch:
        """One rollout for each row.

        Raises:
            ConfigError: a row that cannot be used.
            AgentError: an environment failed, or the running of tools.
        """
        prompts: list[Any] = [image_prompt({"prompt": EMPTY_PROMPT, **row}) for row in rows]
        toolboxes = [Toolbox(self.tools)] * len(rows)
        extra: dict[str, list[Any]] = {}
        if self.environments is not None:
            lent = self.environments.lend(rows)
            self.current = [instance for instance, _ in lent]
            toolboxes = [Toolbox([*self.tools, *own]) for _, own in lent]
            shown = self.environments.reset(self.current, rows, self.runner)
            prompts = [with_observation(prompt, each) for prompt, each in zip(prompts, shown, strict=True)]
            extra = {"environments": self.current}
        rollouts = []
        for index, (prompt, tools) in enumerate(zip(prompts, toolboxes, strict=True)):
            ids, images = self._read_prompt(index, prompt, tools)
            transcript = open_transcript(ids, self.settings, backend, f"row {index}")
            rollouts.append(_Rollout(prompt, tools, transcript, images))
        self._run(rollouts, backend, generation_kwargs or {})
        return RolloutBatch(
            rows=rows,
            prompts=prompts,
            prompt_ids=[rollout.transcript.prompt_ids for rollout in rollouts],
            completions=[rollout.transcript.completion() for rollout in rollouts],
            texts=[self._text(rollout) for rollout in rollouts],
            extra=extra,
            metrics=_metrics(rollouts) if self.parser is not None else {},
            images=_images(rollouts),
        )

    def _run(
        self, rollouts: list[_Rollout], backend: GenerationBackend, generation_kwargs: Mapping[str, Any]
    ) -> None:
        """Until every rollout has ended. One call of the backend continues all that have been answered."""
        ready, waiting = rollouts, list[_Rollout]()
        while self.any_rank(bool(ready)):
            started = time.monotonic()
            self._generate(ready, backend, generation_kwargs)
            # Who misses a batch costs one more call of the backend: waiting as long as that is worth it.
            patience = max(PATIENCE, time.monotonic() - started)
            waiting += [rollout for rollout in ready if self._acts(rollout)]
            ready, waiting = self._answered(waiting, patience)

    def _generate(
        self, ready: list[_Rollout], backend: GenerationBackend, generation_kwargs: Mapping[str, Any]
    ) -> None:
        if not ready:
            join_collective_generate(backend)
            return
        contexts = [rollout.transcript.context for rollout in ready]
        room = [rollout.transcript.room for rollout in ready]
        sampling = SamplingOptions(room, _images(ready), generation_kwargs)
        for rollout, completion in zip(ready, backend.generate(contexts, sampling), strict=True):
            before = rollout.transcript.context
            rollout.transcript.sampled(completion)
            self._take_turn(rollout, before, completion.token_ids)

    def _take_turn(self, rollout: _Rollout, context: list[int], tokens: list[int]) -> None:
        """Add the message that the policy wrote, and note what it calls."""
        rollout.calls = []
        if self.parser is None or not is_chat(rollout.prompt):
            return
        turn = self.parser(context, tokens, rollout.tools.schemas)
        message = turn.message
        if not rollout.messages and rollout.prompt[-1]["role"] == "assistant":  # the prompt began it
            message = {**message, "content": as_text(rollout.prompt[-1]["content"]) + message["content"]}
        rollout.messages.append(message)
        if not rollout.transcript.truncated and rollout.tools:
            rollout.calls = turn.calls

    def _acts(self, rollout: _Rollout) -> bool:
        """Start the tools that the newest turn calls, if any may be called."""
        most = self.settings.max_iterations
        if not rollout.calls or (most is not None and rollout.iterations >= most):
            return False
        rollout.iterations += 1
        rollout.answer = self.runner.start(rollout.calls, rollout.tools)
        return True

    def _answered(self, waiting: list[_Rollout], patience: float) -> tuple[list[_Rollout], list[_Rollout]]:
        """Rollouts to continue, and those whose tools still run: none to continue means that none runs."""
        ready: list[_Rollout] = []
        limit = BLOCKED_MARGIN + max((r.seconds() for r in waiting), default=0.0) * (
            1 + sum(len(r.calls) for r in waiting) // CONCURRENT
        )
        if waiting:
            wait([rollout.answer for rollout in waiting if rollout.answer is not None], timeout=patience)
        while waiting and not ready:
            pending = [rollout.answer for rollout in waiting if rollout.answer is not None]
            done, _ = wait(pending, timeout=limit, return_when=FIRST_COMPLETED)
            if not done:
                names = sorted({call.name for rollout in waiting for call in rollout.calls})
                raise AgentError(
                    f"no answer of the tools {', '.join(names)} within {limit:g} seconds, although each call "
                    "has a limit: an async tool blocks the event loop (time.sleep, requests); make it await, "
                    "or make it a plain function"
                )
            answered = [rollout for rollout in waiting if rollout.answer in done]
            waiting = [rollout for rollout in waiting if rollout.answer not in done]
            ready = [rollout for rollout in answered if self._observe(rollout)]
        return ready, waiting

    def _observe(self, rollout: _Rollout) -> bool:
        """Add what the tools said; False where that leaves no room for an answer."""
        assert rollout.answer is not None and self.renderer is not None
        outcomes, rollout.answer = rollout.answer.result(), None
        rollout.num_calls += len(outcomes)
        rollout.num_failures += sum(outcome.failed for outcome in outcomes)
        messages = [
            {"role": "tool", "name": call.name, "content": _shown(outcome.content)}
            for call, outcome in zip(rollout.calls, outcomes, strict=True)
        ]
        transcript = rollout.transcript
        try:
            end_token = transcript.token_ids[-1]
            start = len(transcript.context)
            tokens, images = self.renderer.read_observation(messages, end_token)
            fits = transcript.observed(tokens)
            if fits and images is not None and rollout.images is not None:
                rollout.images = rollout.images.followed_by(images, start)
        except DriftError:
            if rollout.images is not None:  # another history might part an image from its tokens
                transcript.truncated = True
                return False
            whole = as_plain([*rollout.prompt, *rollout.messages, *messages])
            fits = transcript.follow(self.renderer.whole(whole, rollout.tools.schemas))
        if fits:
            rollout.messages += messages
        return fits

    def _read_prompt(self, index: int, prompt: Any, tools: Toolbox) -> tuple[list[int], ImageInputs | None]:
        settings = self.settings
        if self.processor is not None:
            told = settings.template_kwargs
            if tools and self.renderer is not None:
                told = self.renderer.settings(tools.schemas)
            return read_prompt(self.processor, prompt, (), told, settings.max_prompt_length)
        refuse_images({}, prompt, self.tokenizer)
        return self._prompt_ids(index, as_plain(prompt), tools), None

    def _prompt_ids(self, index: int, prompt: Any, tools: Toolbox) -> list[int]:
        settings = self.settings
        if not tools or self.renderer is None:
            return tokenize_prompt(
                self.tokenizer, prompt, settings.template_kwargs, settings.max_prompt_length
            )
        if not is_chat(prompt):
            raise ConfigError(
                f"row {index} has a text prompt ({prompt!r:.80}), but tools need chat prompts: a list of "
                "messages such as [{'role': 'user', 'content': ...}]"
            )
        return self.renderer.prompt(prompt, tools.schemas, settings.max_prompt_length)

    def _text(self, rollout: _Rollout) -> Any:
        """The completion as reward functions see it."""
        if rollout.messages:
            return rollout.messages
        decoded = self.tokenizer.decode(rollout.transcript.token_ids, skip_special_tokens=True)
        return as_completion(rollout.prompt, decoded)


def _images(rollouts: list[_Rollout]) -> list[ImageInputs] | None:
    images = [rollout.images for rollout in rollouts if rollout.images is not None]
    return images if len(images) == len(rollouts) else None


def open_transcript(
    prompt_ids: list[int], settings: AgentSettings, backend: GenerationBackend, what: str
) -> Transcript:
    """A rollout before its first turn.

    Raises:
        ConfigError: the prompt fills the context of the model or of the backend.
    """
    known = [length for length in (settings.context_length, backend.context_length) if length is not None]
    transcript = Transcript(prompt_ids, settings.max_completion_length, min(known, default=None))
    if transcript.room < 1:
        raise ConfigError(
            f"{what}: the prompt with its tools has {len(prompt_ids)} tokens, which leaves no room within a "
            f"context of {transcript.context_length}; shorten it, or set max_prompt_length"
        )
    return transcript


def join_collective_generate(backend: GenerationBackend) -> None:
    """Call the backend for nothing, because other processes call it and wait for this one."""
    backend.generate([sorted(backend.end_tokens)[:1]], SamplingOptions([1]))


def _shown(content: Any) -> Any:
    """What a tool returned, as one text unless there are images in it."""
    return content if prompt_images([{"content": content}]) else as_text(content)


def _metrics(rollouts: list[_Rollout]) -> Metrics:
    calls = float(sum(rollout.num_calls for rollout in rollouts))
    failures = float(sum(rollout.num_failures for rollout in rollouts))
    metrics: Metrics = {
        "tools/call_frequency": Mean(calls, float(len(rollouts))),
        "tools/failure_frequency": Mean(failures, calls),
    }
    forks = sum(rollout.transcript.forks for rollout in rollouts)
    if forks:
        metrics["tools/fork_frequency"] = Mean(float(forks), float(len(rollouts)))
    return metrics
