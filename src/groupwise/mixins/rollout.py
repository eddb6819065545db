"""Rows to completions."""

from __future__ import annotations

from typing import Any

from groupwise.agents import Agents
from groupwise.backends.rollout_function import call_rollout_function
from groupwise.config import GRPOConfig
from groupwise.prompts import as_completion, tokenize_prompt
from groupwise.protocols import GenerationBackend, RolloutFunction
from groupwise.stages import RolloutBatch, Sampling


class RolloutMixin:
    """Owns the generation backend, the loop over turns and the user's rollout function."""

    args: GRPOConfig
    processing_class: Any
    backend: GenerationBackend
    rollout_func: RolloutFunction | None
    agents: Agents | None

    def roll_out(self, rows: list[dict[str, Any]]) -> RolloutBatch:
        """Sample one completion for each row; a prompt that stands in several rows gets several samples.

        Override it to generate in your own way.

        Args:
            rows: dataset rows with a ``prompt``; rows of one group are next to each other.
        """
        if self.agents is not None:
            return self.agents.roll_out(rows, self.backend)
        prompts = [row["prompt"] for row in rows]
        extra: dict[str, list[Any]] = {}
        if self.rollout_func is None:
            prompt_ids = self._tokenize(prompts)
            completions = self.backend.generate(prompt_ids, Sampling())
        else:
            prompt_ids, completions, extra = call_rollout_function(
                self.rollout_func, prompts, self, self.backend.end_tokens
            )
        texts = self.processing_class.batch_decode(
            [completion.token_ids for completion in completions], skip_special_tokens=True
        )
        return RolloutBatch(
            rows=rows,
            prompts=prompts,
            prompt_ids=prompt_ids,
            completions=completions,
            texts=[as_completion(prompt, text) for prompt, text in zip(prompts, texts, strict=True)],
            extra=extra,
        )

    def _tokenize(self, prompts: list[Any]) -> list[list[int]]:
        """Tokens of every prompt; a prompt equal to the one before it is not tokenised again."""
        prompt_ids: list[list[int]] = []
        for index, prompt in enumerate(prompts):
            if index and prompt == prompts[index - 1]:
                prompt_ids.append(prompt_ids[-1])
            else:
                prompt_ids.append(
                    tokenize_prompt(
                        self.processing_class,
                        prompt,
                        self.args.chat_template_kwargs,  # type: ignore[arg-type]
                        self.args.max_prompt_length,
                    )
                )
        return prompt_ids
