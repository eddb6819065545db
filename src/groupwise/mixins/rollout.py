"""Rows to completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import TrainerState

from groupwise.agents import Agents, EnvironmentDrivenRollouts
from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.images import ImageInputs
from groupwise.generation.base import GenerationBackend
from groupwise.generation.overriding import Overriding
from groupwise.generation.rollout_func import call_rollout_function
from groupwise.generation.weight_iterator import weight_iterator
from groupwise.records import Completion, RolloutBatch, RolloutFunction, SamplingOptions
from groupwise.tokenization.images import (
    check_rollout,
    image_prompt,
    is_processor,
    read_prompt,
    refuse_images,
    row_images,
)
from groupwise.tokenization.prompts import as_completion, same_prompt, tokenize_prompt


class RolloutMixin:
    """Owns the generation backend, the loop over turns and the user's rollout function."""

    args: GRPOConfig
    state: TrainerState
    processing_class: Any
    backend: GenerationBackend
    rollout_func: RolloutFunction | None
    agents: Agents | EnvironmentDrivenRollouts | None

    def sync_sampler(self, policy: Any) -> None:
        """Give the backend the weights of ``policy``, if an optimizer step has changed them since."""
        self.backend.sync_weights(weight_iterator(policy), step=self.state.global_step)  # type: ignore[arg-type]

    def generate_rollouts(self, rows: list[dict[str, Any]]) -> RolloutBatch:
        """Sample one completion for each row; a prompt that stands in several rows gets several samples.

        Override it to generate in your own way.

        Args:
            rows: dataset rows with a ``prompt``; rows of one group are next to each other.
        """
        if self.agents is not None:
            return self.agents.generate_rollouts(rows, self.backend)
        prompts = [image_prompt(row) for row in rows]
        extra: dict[str, list[Any]] = {}
        images = None
        if self.rollout_func is None:
            prompt_ids, images = self._tokenize(rows, prompts)
            finished = self._teller(rows, prompts, prompt_ids)
            completions = self.backend.generate(prompt_ids, SamplingOptions(images=images, finished=finished))
        else:
            prompt_ids, completions, extra = call_rollout_function(
                self.rollout_func, prompts, self, self.backend.end_tokens
            )
            if is_processor(self.processing_class):
                own_ids, images = self._tokenize(rows, prompts)
                check_rollout(prompt_ids, own_ids, images)
        texts = self._texts(prompts, completions)
        return RolloutBatch(rows, prompts, prompt_ids, completions, texts, extra, images=images)

    def on_partial_rollout(self) -> Callable[[RolloutBatch], None] | None:
        """What is given the completions that are there while others are generated; the trainer says."""
        return None

    def _teller(
        self, rows: list[dict[str, Any]], prompts: list[Any], prompt_ids: list[list[int]]
    ) -> Callable[[Sequence[int], list[Completion]], None] | None:
        hearer = self.on_partial_rollout()
        if hearer is None:
            return None

        def tell(places: Sequence[int], completions: list[Completion]) -> None:
            own_prompts = [prompts[i] for i in places]
            texts = self._texts(own_prompts, completions)
            own = [rows[i] for i in places], own_prompts, [prompt_ids[i] for i in places]
            hearer(RolloutBatch(*own, completions, texts))

        return tell

    def _texts(self, prompts: list[Any], completions: list[Completion]) -> list[Any]:
        """Completions as reward functions see them."""
        texts = self.processing_class.batch_decode(
            [completion.token_ids for completion in completions], skip_special_tokens=True
        )
        return [as_completion(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    @contextmanager
    def evaluation_sampling(self) -> Iterator[None]:
        """Completions are sampled with the settings of evaluation."""
        backend = self.backend
        if self.args.eval_generation_kwargs:
            self.backend = Overriding(backend, self.args.eval_generation_kwargs)  # type: ignore[arg-type, assignment]
        try:
            yield
        finally:
            self.backend = backend

    def prefetch_rollouts(self, rows: list[dict[str, Any]], step: int) -> None:
        """Start generating the rollouts of optimizer step ``step`` on a server."""
        prompt_ids, images = self._tokenize(rows, [image_prompt(row) for row in rows])
        self.backend.prefetch(prompt_ids, SamplingOptions(images=images), step=step)  # type: ignore[attr-defined]

    def _tokenize(
        self, rows: list[dict[str, Any]], prompts: list[Any]
    ) -> tuple[list[list[int]], list[ImageInputs] | None]:
        """Tokens of every prompt, and with a processor its images; what equals its neighbour is read once."""
        pairs: list[tuple[list[int], Any]] = []
        for index, prompt in enumerate(prompts):
            repeated = index > 0 and same_prompt(prompt, prompts[index - 1])
            if repeated and same_prompt(row_images(rows[index]), row_images(rows[index - 1])):
                pairs.append(pairs[-1])
            else:
                pairs.append(self._read(rows[index], prompt))
        ids = [ids for ids, _ in pairs]
        return ids, [images for _, images in pairs] if is_processor(self.processing_class) else None

    def _read(self, row: dict[str, Any], prompt: Any) -> tuple[list[int], Any]:
        options: Any = self.args.chat_template_kwargs, self.args.max_prompt_length
        if is_processor(self.processing_class):
            return read_prompt(self.processing_class, prompt, row_images(row), *options)
        refuse_images(row, prompt, self.processing_class)
        return tokenize_prompt(self.processing_class, prompt, *options), None
