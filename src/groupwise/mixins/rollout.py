"""Dataset rows to completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import TrainerState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_source import PromptSource
from groupwise.errors import check_counts
from groupwise.generation.backends import check_images
from groupwise.generation.base import GenerationBackend
from groupwise.random_state import RandomState, derived_seed
from groupwise.records import (
    Completion,
    RolloutBatch,
    RolloutFunction,
    RolloutRequest,
    Row,
    SamplerSettings,
    SamplingOptions,
)
from groupwise.records.images import ImageInputs
from groupwise.tokenization.images import (
    check_prompt_ids,
    encode_prompt,
    insert_images,
    is_processor,
    row_images,
)
from groupwise.tokenization.prompts import Prompt, format_completion, is_conversational, prompts_equal
from groupwise.tokenization.text import response_attribute, text_tokenizer

if TYPE_CHECKING:
    from groupwise.agents.multi_turn import MultiTurnRollouts

#: Receives the positions of finished rows in the request and their completions.
OnFinished = Callable[[Sequence[int], list[Completion]], None]


class RolloutMixin:
    """Generate completions with the backend, the agent loop or the user's ``rollout_func``."""

    args: GRPOConfig
    state: TrainerState
    metrics: dict[str, Any]
    prompts: PromptSource
    processing_class: Any
    backend: GenerationBackend
    rng: RandomState
    rollout_func: RolloutFunction | None
    model: Any
    agents: MultiTurnRollouts | None

    def generate_rollouts(self, request: RolloutRequest) -> RolloutBatch:
        """Sample one completion per row of ``request``; equal prompts get independent samples.

        Override to generate differently; build the result with :meth:`make_rollouts`.

        Args:
            request: rows of this rank, B; the G rows of a prompt are adjacent.

        Returns:
            B completions with their prompts, in the order of the request.
        """
        rows = request.rows
        if self.agents is not None:  # many calls of the backend, one per turn
            return replace(self.run_agents(request, self.backend.generate), **request.kept_fields())
        if self.rollout_func is not None:
            return self._call_rollout_func(self.rollout_func, request)
        prompt_ids, images = self.tokenize(rows)  # B lists of token ids, without padding
        sampling = SamplingOptions(
            images=images,
            generation_kwargs=request.generation_kwargs,
            # Rewards of finished prompts are computed while the sampler is busy with the others.
            on_finished=self._partial_rollouts(request, prompt_ids),
            seeds=request.seeds,
        )
        completions = self.backend.generate(prompt_ids, sampling)  # B; the G copies of a prompt differ
        return self.make_rollouts(request, prompt_ids, completions, images=images)

    def row_seeds(self, num_rows: int, step: int | None = None) -> list[int]:
        """Return a seed for each of this rank's rows of the prompts that were read last.

        It depends on the optimizer step of the generation (None: the present one), the prompts' place in the
        data, and the number of the row over all ranks.
        """
        step = self.state.global_step if step is None else step
        first = derived_seed(self.args.seed, step, self.prompts.last) + self.args.process_index * num_rows
        return list(range(first, first + num_rows))

    def run_agents(self, request: RolloutRequest, generate: Callable[..., list[Completion]]) -> RolloutBatch:
        """Sample rollouts with tools or environments, which draw from the random stream of the user's code.

        Args:
            generate: samples turns as ``GenerationBackend.generate`` does, from the stream of the run.
        """
        assert self.agents is not None
        # Tools may draw random numbers any number of times; sampling must not depend on how often.
        generate = self.rng.user_code(False)(generate)
        step = self.state.global_step if request.mode == "train" else None
        with self.rng.user_code():
            return self.agents.generate_rollouts(
                request.rows, self.backend, request.generation_kwargs, generate, step, request.seeds
            )

    def make_rollouts(
        self,
        request: RolloutRequest,
        prompt_ids: list[list[int]],
        completions: list[Completion],
        *,
        images: Sequence[ImageInputs] | None = None,
        extra: dict[str, list[Any]] | None = None,
    ) -> RolloutBatch:
        """Build the record of a rollout; completions are decoded for the reward functions.

        Args:
            prompt_ids: B entries in the order of the request.
            completions: B entries, those of the prompts.
            images: image inputs per row; None without a processor.
            extra: further columns for the reward functions, B entries each.

        Raises:
            ConfigError: a list has another number of entries.
        """
        prompts = [insert_images(row) for row in request.rows]
        check_counts("generation", len(prompts), prompts=len(prompt_ids), completions=len(completions))
        return RolloutBatch(
            rows=request.rows,
            prompts=prompts,
            prompt_ids=prompt_ids,
            completions=completions,
            texts=self._completion_texts(prompts, prompt_ids, completions),
            extra=extra or {},
            images=images,
            **request.kept_fields(),
        )

    def _completion_texts(
        self, prompts: list[Prompt], prompt_ids: list[list[int]], completions: list[Completion]
    ) -> list[Prompt]:
        """Decode completions; a tokenizer with a response template splits thoughts from content in chats."""
        token_ids = [completion.reward_ids for completion in completions]
        # Text for a text prompt, [{"role": "assistant", "content": text}] for a chat.
        decoded = self.processing_class.batch_decode(token_ids, skip_special_tokens=True)
        template_kwargs: Any = self.args.chat_template_kwargs
        texts = [format_completion(*each, template_kwargs) for each in zip(prompts, decoded, strict=True)]
        tokenizer = text_tokenizer(self.processing_class)
        if response_attribute(tokenizer) is not None:
            from groupwise.tokenization.tool_calls import TurnParser

            parse = TurnParser(tokenizer, "", with_tools=False)
            for row, prompt in enumerate(prompts):
                if is_conversational(prompt):
                    texts[row] = [parse(prompt_ids[row], token_ids[row], ()).message]
        return texts

    def prefetch_rollouts(self, sampler: SamplerSettings, *, first: int = 1) -> None:
        """Start generating the next ``rollout_staleness`` generations on a server, with agents all turns.

        The user's code before the first turns, such as ``reset``, runs now.

        Args:
            first: 1: the prompts of this generation are not yet taken; 0: they are (dynamic sampling).
        """
        args = self.args
        depth = args.rollout_staleness if self.rollout_func is None else 0
        if self.agents is not None and first:
            self.agents.end_batch()  # of the step before; with dynamic sampling, of this step: not yet over
        for ahead, rows in enumerate(self.prompts.upcoming(depth, args.prompts_per_batch, first), start=1):
            step = self.state.global_step + ahead * args.optimizer_steps_per_generation  # whole steps
            if step >= self.state.max_steps:
                return
            # The later request has the same settings, prompts and step: the server finds the results by them.
            seeds = self.row_seeds(len(rows), step)
            if self.agents is not None:
                with self.metrics["train"].phase("generate"), self.rng.user_code():
                    self.agents.begin(rows, self.backend, vars(sampler), step, seeds)
                continue
            prompt_ids, images = self.tokenize(rows)
            sampling = SamplingOptions(images=images, generation_kwargs=vars(sampler), seeds=seeds)
            self.backend.prefetch(prompt_ids, sampling, step=step)

    def tokenize(self, rows: list[Row]) -> tuple[list[list[int]], list[ImageInputs] | None]:
        """Tokenize the prompts of B rows and process their images; equal neighbours are processed once.

        Returns:
            token ids per row, and with a processor image inputs per row (else None).

        Raises:
            ConfigError: a prompt has images, but the backend samples from text alone.
        """
        # A longer prompt loses its first tokens; one with images is an error instead.
        template_kwargs, max_length = self.args.chat_template_kwargs, self.args.max_prompt_length
        pairs: list[tuple[list[int], Any]] = []
        for index, row in enumerate(rows):
            if index > 0 and _same_input(row, rows[index - 1]):  # the G copies of a prompt
                pairs.append(pairs[-1])
                continue
            prompt, images = insert_images(row), row_images(row)
            pairs.append(
                encode_prompt(self.processing_class, prompt, images, template_kwargs, max_length)  # type: ignore[arg-type]
            )
        ids = [ids for ids, _ in pairs]
        all_images = [images for _, images in pairs] if is_processor(self.processing_class) else None
        if self.rollout_func is None:  # its completions come from elsewhere
            check_images(self.backend, all_images)
        return ids, all_images

    def _call_rollout_func(self, function: RolloutFunction, request: RolloutRequest) -> RolloutBatch:
        from groupwise.generation.rollout_func import call_rollout_function

        prompts = [insert_images(row) for row in request.rows]
        vocab_size = getattr(self.model.config.get_text_config(decoder=True), "vocab_size", 2**31)
        prompt_ids, completions, extra, metrics = call_rollout_function(
            function, prompts, self, self.backend.end_tokens, vocab_size
        )
        images = None
        if is_processor(self.processing_class):  # the function returns token ids alone
            own_ids, images = self.tokenize(request.rows)
            check_prompt_ids(prompt_ids, own_ids, images)
        rollouts = self.make_rollouts(request, prompt_ids, completions, images=images, extra=extra)
        return replace(rollouts, metrics=metrics)

    def _partial_rollouts(self, request: RolloutRequest, prompt_ids: list[list[int]]) -> OnFinished | None:
        """Adapt ``on_partial_rollout`` to the backend's callback, which passes positions and completions."""
        on_partial_rollout = request.on_partial_rollout
        if on_partial_rollout is None:  # no reward function takes single completions
            return None

        def on_finished(row_ids: Sequence[int], completions: list[Completion]) -> None:
            # row_ids [4, 5, 6, 7] of a request of B = 8 rows: the second prompt with G = 4 is finished.
            part = replace(request, rows=[request.rows[i] for i in row_ids])
            rollouts = self.make_rollouts(part, [prompt_ids[i] for i in row_ids], completions)
            on_partial_rollout(replace(rollouts, row_ids=list(row_ids)))  # matched with the request later

        return on_finished


def _same_input(row: Row, other: Row) -> bool:
    return prompts_equal(insert_images(row), insert_images(other)) and prompts_equal(
        row_images(row), row_images(other)
    )
