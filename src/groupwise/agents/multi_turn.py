"""Multi-turn rollouts: one scheduler for all agent loops, which samples the turns that they request.

In the thread of the trainer, rollouts that are ready for a turn share a generate call; a slow one joins a
later call::

    generate  | a1 b1 c1 |          | a2 c2 |       | b2 |
    row a                 tool ...            end
    row b                 slow tool ...............       end
    row c                 tool .....          end
                          |<------>|  until c is ready: at most MIN_WAIT or the duration of the last call

With ``rollout_staleness``, a batch begins before its step. Each of its rollouts then continues by itself, in
a thread beside the update and in the trainer's thread once its step has come::

    trainer   | update n | sync | step n + 1: waits for b ..... | update n + 1 |
    row a     | a1 tool a2 end |
    row b     | b1 slow tool ......... b2 | b3 end |              b2: sampled by the weights after the sync
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from groupwise.agents.loop import AgentLoop, Calls, ChatResponse, Rollout, TurnRequest
from groupwise.agents.trajectory import Trajectory
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import json_dict
from groupwise.core.metrics import Mean
from groupwise.errors import AgentError, ConfigError, warn_once
from groupwise.generation.backends import check_images
from groupwise.generation.base import GenerationBackend
from groupwise.random_state import derived_seed, get_state, set_state
from groupwise.records import Completion, RolloutBatch, SamplingOptions
from groupwise.records.images import ImageInputs
from groupwise.threads import Invocation, function_name, is_concurrent, start_thread
from groupwise.tokenization.images import encode_prompt, is_processor, row_images
from groupwise.tokenization.prompts import (
    Message,
    continues_final_message,
    format_completion,
    is_conversational,
    prompts_equal,
    with_text_content,
)
from groupwise.tokenization.rendering import PrefixMismatchError, Renderer
from groupwise.tokenization.text import ProcessingClass, message_text, text_tokenizer, with_rendered_results

logger = logging.getLogger(__name__)

#: ``GenerationBackend.generate``, or a function with its signature.
Generate = Callable[[Sequence[Sequence[int]], SamplingOptions], list[Completion]]

#: Minimum time in seconds that rollouts which are ready wait for slower ones, so that one generate call
#: serves both.
MIN_WAIT = 1.0


@dataclass(eq=False)
class BatchAhead:
    """A batch that was begun before the optimizer step that takes it.

    Attributes:
        state: state of the random generators before its first call.
        rollouts: []: to be begun again.
        thread: result of the thread that continues the rollouts; None: there is none.
        leave: ends the thread; its rollouts then wait where they are.
    """

    state: Any
    rollouts: list[Rollout] = field(default_factory=list)
    thread: Future[None] | None = None
    leave: Future[None] = field(default_factory=Future)

    def stop(self) -> BaseException | None:
        """End the thread; returns its error."""
        thread, self.thread = self.thread, None
        if thread is None:
            return None
        self.leave.set_result(None)
        return thread.exception()


class MultiTurnRollouts:
    """Run the rollouts of an agent loop: sample the turns that they request, many in one generate call.

    Sync functions are called in the thread of the caller, in the order of the rows.

    Args:
        loop: runs one rollout per row.
        processing_class: the tokenizer, or the processor of a vision-language model.
        config: limits of a rollout, variables of the chat template, and what a failed rollout leads to.
        end_tokens: token ids that end a turn.
        any_rank: returns True if its argument is True on any rank, for backends that all ranks must call
            equally often; ``bool`` if ranks are independent.
        context_length: tokens of prompt and completion that the model supports; None: unlimited.

    Attributes:
        renderer: renders tool schemas and later messages; None if a rollout has one turn.
        max_retries: repetitions of a failed rollout, after which its completion is dropped; None: the error
            of a rollout is raised.
        environments: environments of the latest batch, one per completion; None without environments.
        ahead: batches that were begun and not yet taken, by the optimizer step that takes them.
    """

    def __init__(
        self,
        loop: AgentLoop,
        processing_class: ProcessingClass,
        config: GRPOConfig,
        end_tokens: frozenset[int],
        any_rank: Callable[[bool], bool] = bool,
        context_length: int | None = None,
    ) -> None:
        self.loop, self.any_rank, self.context_length = loop, any_rank, context_length
        self.tokenizer = text_tokenizer(processing_class)
        self.processing_class = processing_class if loop.reads_images else self.tokenizer
        self.renderer = make_renderer(loop, processing_class, config, end_tokens)
        self.template_kwargs = json_dict(config.chat_template_kwargs)
        self.max_prompt_length = config.max_prompt_length
        self.max_completion_length = config.max_completion_length
        self.max_retries = config.rollout_retries if config.rollout_on_error == "retry" else None
        self.environments: list[Any] | None = None
        self.ahead: dict[int, BatchAhead] = {}
        self._places: Sequence[Any] = ()  # of the batch that was taken last
        self._warned: set[str] = set()

    def generate_rollouts(
        self,
        rows: list[dict[str, Any]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any] | None = None,
        generate: Generate | None = None,
        step: int | None = None,
        seeds: Sequence[int] | None = None,
    ) -> RolloutBatch:
        """Run one rollout for each row; failed ones are repeated ``max_retries`` times and then dropped.

        Args:
            rows: dataset rows; rows of one group are adjacent.
            generation_kwargs: sampler settings in place of the run's, as in ``SamplingOptions``.
            generate: samples the turns; None: ``backend.generate``.
            step: optimizer step, whose batch :meth:`begin` may have begun; None: of an evaluation.
            seeds: of the rows, B, as ``begin`` got them.

        Returns:
            Completions of all turns, with ``loss_mask`` 0 on tokens that were not sampled; the columns of the
            rollouts.

        Raises:
            ConfigError: a row cannot be used.
            AgentError: a rollout failed, and ``max_retries`` is None.
        """
        self.end_batch()
        generation_kwargs, send = generation_kwargs or {}, None
        if step in self.ahead:
            send = partial(self._send, backend, generation_kwargs, step)
            batch = self._begin_batch(rows, backend, step, seeds, send)
            if error := batch.stop():
                raise error
            rollouts = batch.rollouts
            del self.ahead[step]
        else:
            rollouts = self._make_rollouts(enumerate(rows), self.loop.begin_batch(rows), backend)
        self._places = [rollout.place for rollout in rollouts]
        sample = partial(self._sample, backend, generate or backend.generate, generation_kwargs)
        self._run(rollouts, sample, send)
        num_repeated = 0
        for _ in range(self.max_retries or 0):
            failed = [rollout.index for rollout in rollouts if rollout.error is not None]
            if not self.any_rank(bool(failed)):
                break
            num_repeated += len(failed)
            repeated = self._make_rollouts([(i, rows[i]) for i in failed], self._places, backend)
            self._run(repeated, sample)
            for rollout in repeated:
                rollouts[rollout.index] = rollout
        return self._make_batch(rollouts, backend, num_repeated)

    def begin(
        self,
        rows: list[dict[str, Any]],
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any],
        step: int,
        seeds: Sequence[int],
    ) -> None:
        """Begin a later batch, and continue its rollouts in a thread until ``generate_rollouts`` takes it.

        The calls before the first turns are made now. Of later ones the thread starts those of async and
        ``thread_safe`` functions alone; a rollout that calls another one waits for its step.

        Args:
            step: optimizer step that will take the batch.
            seeds: of the rows, B; turns are sampled with seeds that follow from them.
        """
        send = partial(self._send, backend, generation_kwargs, step)
        batch = self._begin_batch(rows, backend, step, seeds, send)
        if batch.thread is None:
            advance = partial(self._continue, batch.rollouts, send, batch.leave)
            batch.thread = start_thread(advance, "groupwise-turns")

    def _begin_batch(
        self,
        rows: list[dict[str, Any]],
        backend: GenerationBackend,
        step: int,
        seeds: Sequence[int] | None,
        send: Callable[[Sequence[Rollout]], None],
    ) -> BatchAhead:
        """Run each rollout of a batch up to the request of its first turn and send it, unless that was done.

        A restored batch, or one whose rows have changed, begins again in the random state of its beginning.
        """
        present = get_state()
        batch = self.ahead.get(step) or BatchAhead(present)
        if batch.rollouts and prompts_equal([rollout.row for rollout in batch.rollouts], rows):
            return batch
        self._close(batch)
        set_state(batch.state)
        rollouts = self._make_rollouts(enumerate(rows), self.loop.begin_batch(rows), backend)
        for rollout in rollouts:
            rollout.seed = None if seeds is None else seeds[0]
        begun = self.ahead[step] = BatchAhead(batch.state, rollouts)
        ready = self._advance(rollouts, [(rollout, None) for rollout in rollouts], MIN_WAIT)
        # Slow ones too: reset draws from the random stream of the run, not beside the update.
        while any(rollout.futures for rollout in rollouts):
            ready += self._advance(rollouts, (), MIN_WAIT)
        if batch.state is not present:
            set_state(present)
        send(sorted(ready, key=lambda rollout: rollout.index))
        return begun

    def end_batch(self) -> None:
        """Let later batches use the environments of the last batch, whose rewards are computed."""
        self.loop.end_batch(self._places)

    def snapshot(self) -> dict[int, Any]:
        """Return the random states in which the batches ahead have begun, by optimizer step."""
        return {step: batch.state for step, batch in self.ahead.items()}

    def restore(self, snapshot: dict[int, Any]) -> None:
        """Discard the batches ahead; those of a snapshot begin again when they are next asked for."""
        for batch in self.ahead.values():
            self._close(batch)
        self.ahead = {step: BatchAhead(state) for step, state in snapshot.items()}

    def merge(self, snapshots: Sequence[dict[int, Any]], config: GRPOConfig) -> dict[int, Any]:
        """Return no random states: on another number of ranks batches ahead begin anew."""
        return {}

    def _close(self, batch: BatchAhead) -> None:
        if error := batch.stop():  # its rows are not used, so that the run goes on
            logger.warning("a batch that was begun ahead is discarded, and had failed: %s", error)
        self._end(batch.rollouts)
        self.loop.end_batch([rollout.place for rollout in batch.rollouts])

    def _end(self, rollouts: Sequence[Rollout]) -> None:
        """End rollouts where they are; an environment with a call in progress is not used again."""
        for rollout in rollouts:
            rollout.steps.close()
            for future in rollout.futures:
                self.loop.executor.give_up(future, RuntimeError("the rollout was discarded"))

    def _make_rollouts(
        self, rows: Iterable[tuple[int, dict[str, Any]]], places: Sequence[Any], backend: GenerationBackend
    ) -> list[Rollout]:
        limits = [each for each in (self.context_length, backend.context_length) if each is not None]
        rollouts = [Rollout(index, row, places[index], min(limits, default=None)) for index, row in rows]
        for rollout in rollouts:
            rollout.steps = self.loop.run_rollout(rollout)
        return rollouts

    def _run(
        self,
        rollouts: list[Rollout],
        sample: Callable[[Sequence[Rollout]], list[ChatResponse]],
        send: Callable[[Sequence[Rollout]], None] | None = None,
    ) -> None:
        """Alternate between generate calls and the steps of the rollouts until all have ended, on all ranks.

        Args:
            send: of a batch that was begun ahead, whose rollouts first continue each by itself; the generate
                calls then sample what they could not.

        Raises:
            AgentError: a rollout failed, and ``max_retries`` is None.
        """
        try:
            if send is not None:
                self._continue(rollouts, send)
            begun = [rollout for rollout in rollouts if rollout.request is not None]  # ahead
            others = [(each, None) for each in rollouts if each not in begun and not each.calls]
            ready = begun + self._advance(rollouts, others, MIN_WAIT)  # others begin now, or have ended
            while self.any_rank(bool(ready)):
                started = time.monotonic()
                values = zip(ready, sample(ready), strict=True)
                # A rollout that misses a batch costs one more generate call: waiting that long costs no more.
                ready = self._advance(rollouts, values, max(MIN_WAIT, time.monotonic() - started))
        finally:
            self._end(rollouts)

    def _continue(
        self,
        rollouts: list[Rollout],
        send: Callable[[Sequence[Rollout]], None],
        leave: Future[None] | None = None,
    ) -> None:
        """Continue rollouts, each by itself, until all have ended or wait for what :meth:`_run` does.

        Calls of sync functions are left to it: their order must not depend on how long others take. So is a
        turn that could not be sampled, which its generate call repeats with the same seed.

        Args:
            send: requests turns; sets ``futures``, which stay empty if the backend has none.
            leave: ends the thread beside the update, while turns and calls go on. None: this is the thread
                of the trainer, in which calls have the ``idle_limit`` of their executor.
        """
        while True:
            continued = []
            for rollout, value in _finished(rollouts):
                if rollout.request is not None:
                    (turn,) = cast("list[Future[Completion]]", value)
                    if turn.exception() is not None:
                        continue
                    value = self._append_turn(rollout, turn.result())
                rollout.calls = self._resume(rollout, value)
                continued.append(rollout)
            self._start([each for each in rollouts if each.calls and _may_overlap(each)])
            requesting = [each for each in continued if each.request is not None]
            if requesting:
                send(requesting)
            held = [each for each in rollouts if each.futures]
            if not held or (leave is not None and leave.done()):
                return
            unfinished = [future for each in held for future in each.futures if not future.done()]
            if not unfinished:
                continue  # they ended meanwhile: the thread must not wait for its end alone
            if leave is not None:
                wait([*unfinished, leave], return_when=FIRST_COMPLETED)
            elif any(each.request is not None for each in held):  # the server has limits of its own
                wait(unfinished, return_when=FIRST_COMPLETED)
            else:
                self.loop.executor.wait_for_next(unfinished)

    def _start(self, rollouts: Sequence[Rollout]) -> None:
        """Start the calls of rollouts, together: async calls of all begin before the sync ones, made here."""
        calls = [call for each in rollouts for call in each.calls]
        for rollout in rollouts:  # now: an interrupt of a sync call leaves async ones in progress
            rollout.futures, rollout.calls = [*rollout.calls], ()
        self.loop.executor.start([call for call in calls if isinstance(call, Invocation)])

    def _send(
        self,
        backend: GenerationBackend,
        generation_kwargs: Mapping[str, Any],
        step: int,
        rollouts: Sequence[Rollout],
    ) -> None:
        """Request turns of a batch ahead; the future of each is its rollout's."""
        contexts, sampling = self._turns(rollouts, backend, generation_kwargs)
        futures = backend.prefetch(contexts, sampling, step=step) or ()
        for rollout, future in zip(rollouts, futures, strict=False):
            rollout.futures = [future]

    def _advance(
        self, rollouts: Sequence[Rollout], values: Iterable[tuple[Rollout, object]], patience: float
    ) -> list[Rollout]:
        """Continue rollouts until they request a turn.

        Args:
            rollouts: those of a batch; calls of some may be in progress.
            values: rollouts to continue, and the values that they wait for.
            patience: seconds after which the rollouts that are ready no longer wait for others.

        Returns:
            Rollouts that request a turn; empty only if no call is in progress.
        """
        end = time.monotonic() + patience
        ready: list[Rollout] = []
        while True:
            for rollout, value in values:
                rollout.calls = self._resume(rollout, value)
                if rollout.request is not None:
                    ready.append(rollout)
            self._start([rollout for rollout in rollouts if rollout.calls])
            futures = [future for rollout in rollouts for future in rollout.futures]
            wait(futures, timeout=max(end - time.monotonic(), 0.0))
            values = _finished(rollouts)
            if not values:
                if ready or not futures:
                    return ready
                self.loop.executor.wait_for_next(futures)

    def _resume(self, rollout: Rollout, value: object) -> Calls:
        """Continue a rollout with the value that it waits for; return the calls that it waits for next.

        Its request of a turn is set as ``request``, once the messages are appended to its tokens.
        """
        rollout.request = None
        while True:
            try:
                if isinstance(value, Exception):
                    step = rollout.steps.throw(value)
                else:
                    step = rollout.steps.send(value)
            except StopIteration:
                return ()
            except AgentError as error:
                self._fail(rollout, error)
                return ()
            if not isinstance(step, TurnRequest):
                return step
            try:
                if self._append_messages(rollout, step):
                    rollout.request = step
                    return ()
                value = None
            except Exception as problem:
                if rollout.trajectory is None:  # the prompt cannot be used
                    raise
                value = problem

    def _fail(self, rollout: Rollout, error: AgentError) -> None:
        """Set the error of a rollout, with a warning once per kind; without retries, raise it."""
        if self.max_retries is None:
            raise error
        rollout.error = error
        kind = type(error.__cause__ or error).__name__
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "a rollout failed (%s); failed rollouts are repeated in a fresh environment, at most "
                "rollout_retries=%d times, and then dropped from their group; see the metrics rollouts/*",
                error,
                self.max_retries,
            )

    def _append_messages(self, rollout: Rollout, request: TurnRequest) -> bool:
        """Append the new messages of a request to the tokens; return False if none remains for the turn.

        The rollout forks if the request rewrites its history, or the chat template renders it differently.
        Messages without room are omitted.
        """
        trajectory, messages = rollout.trajectory, request.messages
        if trajectory is None:
            self._begin(rollout, request)
            return True
        assert self.renderer is not None and is_conversational(messages)
        known = cast(list[Message], rollout.messages)
        new = messages[len(known) :] if all(map(_same_message, known, messages)) else []
        new = with_rendered_results(new)
        if not self.renderer.may_fit(new, trajectory.remaining_tokens):
            trajectory.truncated = True
            return False
        try:
            if not new or not trajectory.token_ids:
                raise PrefixMismatchError("the history has changed")  # forks below
            start = len(trajectory.context_ids)
            tokens, images = self.renderer.render_next_messages(new, trajectory.token_ids[-1])
            fits = trajectory.append_observed(tokens)
            if fits and images is not None and rollout.images is not None:
                rollout.images = rollout.images.followed_by(images, start)
        except PrefixMismatchError:
            if rollout.images is not None:  # a fork could separate an image from its tokens
                trajectory.truncated = True
                return False
            history = cast(list[Message], with_text_content(with_rendered_results(messages)))
            fits = trajectory.continue_from(self.renderer.render_prompt(history, request.schemas))
        if fits:
            rollout.messages = messages
        return fits

    def _begin(self, rollout: Rollout, request: TurnRequest) -> None:
        """Tokenize the prompt.

        Raises:
            ConfigError: the prompt fills the context of the model or of the backend.
        """
        kwargs = self.template_kwargs
        if self.renderer is not None:
            kwargs = self.renderer.prompt_kwargs(request.schemas)
        prompt_ids, rollout.images = encode_prompt(
            self.processing_class,
            request.messages,
            row_images(rollout.row) if self.loop.reads_images else (),
            kwargs,
            self.max_prompt_length,
        )
        trajectory = Trajectory(prompt_ids, self.max_completion_length, rollout.context_length)
        if trajectory.remaining_tokens < 1:
            raise ConfigError(
                f"row {rollout.index}: the prompt with its tools has {len(prompt_ids)} tokens, which leaves "
                f"none for a completion in a context of {trajectory.context_length}; shorten it, or set "
                "max_prompt_length"
            )
        rollout.trajectory = trajectory
        rollout.prompt = rollout.messages = request.messages

    def _sample(
        self,
        backend: GenerationBackend,
        generate: Generate,
        generation_kwargs: Mapping[str, Any],
        rollouts: Sequence[Rollout],
    ) -> list[ChatResponse]:
        """Sample the requested turns in one call of the backend.

        Without rollouts, a token is sampled and discarded: other ranks are generating, and their call is
        collective.
        """
        if not rollouts:
            generate([sorted(backend.end_tokens)[:1]], SamplingOptions([1]))
            return []
        completions = generate(*self._turns(rollouts, backend, generation_kwargs))
        return [self._append_turn(*each) for each in zip(rollouts, completions, strict=True)]

    def _turns(
        self, rollouts: Sequence[Rollout], backend: GenerationBackend, generation_kwargs: Mapping[str, Any]
    ) -> tuple[list[list[int]], SamplingOptions]:
        """Return the contexts of the requested turns, and the settings with their limits."""
        trajectories = [cast(Trajectory, rollout.trajectory) for rollout in rollouts]
        images = self._images(rollouts)
        check_images(backend, images)
        limits = [trajectory.remaining_tokens for trajectory in trajectories]
        contexts = [trajectory.context_ids for trajectory in trajectories]
        seeds = None
        if all(rollout.seed is not None for rollout in rollouts):
            # Consecutive for the first turns of a group, and the same in whatever order later ones are sent.
            # They depend on the context: a turn from a checkpoint is never that of another context.
            inputs = images or [ImageInputs()] * len(rollouts)
            turns = zip(rollouts, trajectories, contexts, inputs, strict=True)
            seeds = [
                derived_seed(rollout.seed, len(trajectory.turns), f"{context}{own.digest}") + rollout.index
                for rollout, trajectory, context, own in turns
            ]
        return contexts, SamplingOptions(limits, images, generation_kwargs, seeds=seeds)

    def _append_turn(self, rollout: Rollout, completion: Completion) -> ChatResponse:
        """Append a sampled turn to the tokens; parse it and append its message to the conversation."""
        prompt, trajectory = rollout.messages, cast(Trajectory, rollout.trajectory)
        context_ids = trajectory.context_ids
        token_ids = trajectory.append_sampled(completion)
        if self.renderer is None or not is_conversational(prompt):
            text = cast(str, self.tokenizer.decode(token_ids, skip_special_tokens=True))
            texts = format_completion(prompt, text, self.template_kwargs)
            rollout.messages = prompt + texts  # type: ignore[operator]  # both texts, or both messages
            return ChatResponse({"role": "assistant", "content": text}, trajectory.truncated)
        schemas = cast(TurnRequest, rollout.request).schemas
        turn = self.renderer.parser(context_ids, token_ids, schemas)
        message = turn.message
        is_first = len(prompt) == len(rollout.prompt) and not self.renderer.parser.reads_context
        if is_first and continues_final_message(prompt, self.template_kwargs):
            text = cast(str, self.tokenizer.decode(token_ids, skip_special_tokens=True))
            space = text[: len(text) - len(text.lstrip())]  # the parser strips it
            message = {**message, "content": f"{message_text(prompt[-1])}{space}{message['content']}"}
        rollout.messages = [*prompt, message]
        return ChatResponse(message, trajectory.truncated, turn.tool_calls)

    def _images(self, rollouts: Sequence[Rollout]) -> list[ImageInputs] | None:
        if not is_processor(self.processing_class):
            return None
        return [rollout.images or ImageInputs() for rollout in rollouts]

    def _make_batch(
        self, rollouts: list[Rollout], backend: GenerationBackend, num_repeated: int
    ) -> RolloutBatch:
        """Return the record of the rollouts; failed ones are one token without loss."""
        end = sorted(backend.end_tokens)[:1] or [0]
        kept = [rollout for rollout in rollouts if rollout.error is None]
        for rollout in rollouts:
            if rollout.error is not None:
                rollout.trajectory, rollout.images = None, None
                rollout.messages = rollout.prompt + format_completion(rollout.prompt, "")  # type: ignore[operator]
                rollout.columns = dict.fromkeys(rollout.columns)
        trajectories = [rollout.trajectory for rollout in rollouts]
        metrics = self.loop.metrics(kept)
        if self.renderer is not None:
            num_forks = float(sum(len(each.contexts) for each in trajectories if each is not None))
            metrics["tools/fork_frequency"] = Mean(num_forks, float(len(kept)))
        if self.max_retries is not None:
            metrics["rollouts/retry_frequency"] = Mean(float(num_repeated), float(len(rollouts)))
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.columns)
        extra = {name: [rollout.columns.get(name) for rollout in rollouts] for name in names}
        self.environments = extra.get("environments")
        return RolloutBatch(
            rows=[rollout.row for rollout in rollouts],
            prompts=[rollout.prompt for rollout in rollouts],
            prompt_ids=[end if each is None else each.prompt_ids for each in trajectories],
            completions=[
                Completion(end, loss_mask=[0], dropped=True) if each is None else each.completion()
                for each in trajectories
            ],
            texts=[rollout.messages[len(rollout.prompt) :] for rollout in rollouts],
            extra=extra,
            metrics=metrics,
            images=self._images(rollouts),
        )


def _finished(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, object]]:
    """Return the rollouts whose calls or turn are done, and their futures, for which they no longer wait."""
    done = [each for each in rollouts if each.futures and all(future.done() for future in each.futures)]
    finished: list[tuple[Rollout, object]] = [(each, each.futures) for each in done]
    for each in done:
        each.futures = []
    return finished


def _may_overlap(rollout: Rollout) -> bool:
    """Return True if the next calls of a rollout may be made beside the update; a warning names another."""
    functions = [call.function for call in rollout.calls if isinstance(call, Invocation)]
    sync = [function for function in functions if not is_concurrent(function)]
    for function in sync:
        warn_once(
            logger,
            "rollout_staleness: a rollout that calls %s waits for its step, because it is a sync function of "
            "the trainer's thread; make it async, or decorate it with groupwise.agents.thread_safe",
            function_name(function),
        )
    return not sync


def _same_message(one: Message, other: Message) -> bool:
    """Compare role, content and tool calls of two messages; other keys are ignored."""

    def key(message: Message) -> tuple[object, ...]:
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        content = message.get("content") or ""
        return message["role"], content, [(call["name"], call["arguments"]) for call in calls]

    return one is other or key(one) == key(other)  # contents may be arrays, which have no truth value


def make_renderer(
    loop: AgentLoop,
    processing_class: ProcessingClass,
    config: GRPOConfig,
    end_tokens: frozenset[int] = frozenset(),
) -> Renderer | None:
    """Return the renderer of tool schemas and later messages, or None if a rollout has one turn.

    Raises:
        ConfigError: the chat template cannot be used, with the reason.
    """
    if not loop.has_later_turns:
        return None
    return Renderer(
        processing_class,
        end_tokens,
        json_dict(config.chat_template_kwargs),
        with_tools=loop.uses_tools,
        with_images=loop.reads_images,
    )
