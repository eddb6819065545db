"""One sampler for the completions of many runs: their requests are decoded as one batch.

A row has the adapter, the logits processors, the limits and the random numbers of its run, so that it gets
the tokens of a run on its own. Axes: P prompts, R rows of the batch, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedModel

from groupwise.commands.sweeps.adapters import RowAdapters, shared_copy
from groupwise.commands.sweeps.turns import TurnThread
from groupwise.config.grpo_config import GRPOConfig
from groupwise.cpu import cpu_generation, install_cpu_training
from groupwise.errors import ConfigError
from groupwise.generation.base import RUN_SETTINGS
from groupwise.generation.decoding import RowSampler, decode_groups, group_prompts
from groupwise.generation.settings import (
    decoding_path,
    keep_autocast_weights,
    make_recorder,
    without_model_settings,
)
from groupwise.generation.transformers_backend import TransformersBackend, make_backend
from groupwise.policy.introspection import CausalLM, evaluation_mode, is_text_only
from groupwise.records import Completion, SamplingOptions
from groupwise.tokenization.text import ProcessingClass

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

#: Settings and adapters of the runs that share a base model.
Runs: TypeAlias = "Sequence[tuple[GRPOConfig, PeftConfig]]"


@dataclass(frozen=True)
class SampleRequest:
    """Completions that a run waits for.

    backend: of the run.
    prompts: token ids of B rows; the rows of a group are adjacent.
    sampling: settings of the request.
    """

    backend: SharedBackend
    prompts: Sequence[Sequence[int]]
    sampling: SamplingOptions


class SharedBackend(TransformersBackend):
    """Backend of a run whose completions come from the shared sampler; the run pauses until it has them."""

    supports_images = False
    eager_reason = "the runs of a sweep are decoded in one batch"
    thread: TurnThread

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS
    ) -> list[Completion]:
        self.check(sampling)
        return self.thread.pause(SampleRequest(self, prompts, sampling))

    def check(self, sampling: SamplingOptions = RUN_SETTINGS) -> None:
        """Raise ConfigError for a setting that the shared sampler does not have."""
        model, config = self.model(), self.config_of(sampling)
        needs_other = self.stock_decoding or self.records_experts or not is_text_only(model)
        if needs_other or decoding_path(model, config).reason:
            raise ConfigError(
                f"run {self.thread.name!r}: the model, its cache, a sampling setting or router_replay='R3' "
                "needs another decoding loop than the shared sampler has; train the run on its own"
            )


class _Part:
    """Rows of a run in the joint batch.

    Args:
        length: padded length of the prompts of all runs.
    """

    def __init__(self, model: CausalLM, request: SampleRequest, length: int) -> None:
        self.request, self.backend = request, request.backend
        first, self.copies = group_prompts(request.prompts)
        self.prompts = [request.prompts[row] for row in first]  # P distinct prompts of the run
        self.config = self.backend.config_of(request.sampling)
        self.recorder = make_recorder(model, self.config)  # None: nothing is truncated
        self.rows_R: torch.Tensor  # positions of its rows in the batch
        self.error: Exception | None = None
        self.inputs = self.backend.model_inputs(self.prompts, (), length, model.device)
        # The loop of a run on its own gets its processors and criteria from generate; this one too.
        model.generate(**self.inputs, generation_config=self.config, custom_generate=self._keep_sampler)

    def _keep_sampler(
        self,
        model: CausalLM,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **_: Any,
    ) -> torch.Tensor:
        self.sampler = RowSampler(
            logits_processor,
            stopping_criteria,
            generation_config,
            self.recorder,
            self.backend.generator_of(self.request.sampling, input_ids.device),
        )
        return input_ids

    def attempt(self, step: Callable[..., Any], *batch: torch.Tensor) -> torch.Tensor | None:
        """Call a step of the run's sampler for its rows, if it has any; an error ends them alone."""
        try:
            return step(*(each[self.rows_R] for each in batch)) if len(self.rows_R) else None
        except Exception as error:  # of a processor of this run; logits that are NaN, on a GPU one step later
            self.error, self.rows_R = error, self.rows_R[:0]
            return None

    def completions(self, sequences: list[list[int]]) -> list[Completion] | Exception:
        """Return the completions of the run from the tokens after the prompts, padded on the right."""
        if self.error is not None:
            return self.error
        limits = self.request.sampling.max_tokens
        return self.backend.completions(sequences, limits, self.config, self.recorder)


class _JointSampler(RowSampler):
    """Sampler of the joint batch: each run samples its own rows, in the order of a run on its own.

    A run draws a random number for every row that its own batch would still have: rows leave by its count of
    finished rows, and the joint batch is cut once enough rows of all runs have left.
    """

    def __init__(self, parts: Sequence[_Part], adapters: RowAdapters, pad: int) -> None:
        self.parts, self.adapters, self.pad = parts, adapters, pad
        self.num_rows = 0

    def begin(self, rows_R: torch.Tensor) -> None:
        start, self.num_rows = 0, len(rows_R)
        for part in self.parts:
            copies = torch.tensor(part.copies, device=rows_R.device)
            prompts_R = torch.arange(len(copies), device=rows_R.device).repeat_interleave(copies)
            part.rows_R = torch.arange(start, start + len(prompts_R), device=rows_R.device)
            part.sampler.begin(prompts_R)
            start += len(prompts_R)
        self.adapters.assign(self.adapters.runs_R[rows_R])  # until now of the P prompts

    def sample(self, tokens_RS: torch.Tensor, logits_RV: torch.Tensor) -> torch.Tensor:
        next_R = tokens_RS.new_full((len(tokens_RS),), self.pad)
        for part in self.parts:
            sampled_R = part.attempt(part.sampler.sample, tokens_RS, logits_RV)
            if sampled_R is not None:
                next_R[part.rows_R] = sampled_R
        return next_R

    def rows_to_keep(self, tokens_RS: torch.Tensor) -> torch.Tensor | None:
        for part in self.parts:
            kept_R = part.attempt(part.sampler.rows_to_keep, tokens_RS)
            if kept_R is not None:
                part.rows_R = part.rows_R[kept_R]
        remaining_R = torch.cat([part.rows_R for part in self.parts])
        if len(remaining_R) > (1 - self.finished_share) * self.num_rows:
            return None
        start, self.num_rows = 0, len(remaining_R)
        for part in self.parts:
            part.rows_R = torch.arange(start, start + len(part.rows_R), device=remaining_R.device)
            start += len(part.rows_R)
        self.adapters.assign(self.adapters.runs_R[remaining_R])
        return remaining_R


class PolicySampler:
    """Sampler of the runs that share a base model: our decoding loop, with the adapter of each row's run.

    Args:
        base: model without adapters.
        runs: those that the sweep begins with.
    """

    def __init__(self, base: PreTrainedModel, runs: Runs, processing_class: ProcessingClass) -> None:
        self.processing_class, self.adapters = processing_class, RowAdapters(shared_copy(base))
        self.model: Any = self.adapters.model

    def make_backend(self, config: GRPOConfig, adapter: PeftConfig) -> Any:
        """Return the backend of a run, which gets its ``thread`` before it samples."""
        return make_backend(lambda: self.adapters.model, config, self.processing_class, kind=SharedBackend)

    def check(self, backend: Any, policy: PeftModel) -> None:
        """Raise an error if a run cannot be sampled together with others, such as that of its processors."""
        backend.check()
        with without_model_settings(self.model):
            _Part(self.model, SampleRequest(backend, [[0]], RUN_SETTINGS), 1)
        self.adapters.load({backend.thread.name: policy})  # checks its layers
        self.adapters.unload()

    def prepare(self, accelerator: Any) -> None:
        """Give the model the forward pass of the policies, under autocast too."""
        self.model = accelerator.prepare_model(self.adapters.model, evaluation_mode=True)
        install_cpu_training([self.model])

    @torch.no_grad()
    def sample(
        self, requests: Sequence[SampleRequest], policies: Mapping[str, PeftModel]
    ) -> list[list[Completion] | Exception]:
        """Decode the requests of K runs as one batch.

        Args:
            requests: those with which the runs paused.
            policies: policies of the same runs, by name.

        Returns:
            completions of each request in the order of its prompts, or the error of a run that diverged.
        """
        model, adapters = self.model, self.adapters
        adapters.load(policies)
        with ExitStack() as stack:
            for context in (evaluation_mode, without_model_settings, cpu_generation):
                stack.enter_context(context(model))
            stack.enter_context(keep_autocast_weights(model.device))
            length = max(request.backend.padded_length(request.prompts) for request in requests)
            parts = [_Part(model, request, length) for request in requests]
            config = GenerationConfig(
                max_new_tokens=max(part.config.max_new_tokens for part in parts),
                do_sample=True,
                pad_token_id=parts[0].config.pad_token_id,
                eos_token_id=parts[0].config.eos_token_id,
                use_cache=True,
            )
            counts = torch.tensor([len(part.prompts) for part in parts])
            runs_P = torch.arange(len(parts)).repeat_interleave(counts)
            adapters.assign(runs_P.to(model.device))  # then of the R rows
            sampler = _JointSampler(parts, adapters, config.pad_token_id)
            copies = [count for part in parts for count in part.copies]
            sequences = model.generate(
                input_ids=torch.cat([part.inputs["input_ids"] for part in parts]),
                attention_mask=torch.cat([part.inputs["attention_mask"] for part in parts]),
                generation_config=config,
                custom_generate=partial(decode_groups, copies=copies, make_sampler=lambda *_: sampler),
            )
        adapters.unload()
        tokens = iter(sequences[:, length:].tolist())
        return [part.completions([next(tokens) for _ in part.request.prompts]) for part in parts]
