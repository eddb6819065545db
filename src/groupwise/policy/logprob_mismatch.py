"""Comparison of the sampler's log-probs with the trainer's, and with the model's plain forward of one row.

Axes: B sequences of this rank, T completion tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import LogitsProcessor

from groupwise.compat.accelerate import forward_autocast
from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import BackendError
from groupwise.policy.introspection import CausalLM, base_model, config_numbers, evaluation_mode, plain_logps
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import TokenBatch
from groupwise.records.images import ImageInputs, join_images

logger = logging.getLogger(__name__)

#: Largest mean |difference| of log-probs due to rounding, by dtype of the trainer's matrix products. As a
#: measure: autocast and bfloat16 weights of the same 135M-parameter model differ by 0.05.
TOLERANCES = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

#: Completions that are compared on every rank.
_NUM_ROWS = 4


#: The same between a cache and none of one model, in one dtype.
PLAIN_TOLERANCES = TOLERANCES | {torch.float64: 5e-4, torch.float32: 5e-4}

#: Tokens of a row that the plain forward is compared in: their logits are in memory, (N, V).
_NUM_TOKENS = 256


class WrongLogpsError(Exception):
    """Tokens are sampled with other log-probs than those of the model's plain forward of their row."""


class PlainForwardCheck:
    """Comparison of the log-probs that tokens were sampled with to the model's plain forward of their row.

    Nothing is padded or cached there. It is due for the first rows, for the first ones beside padding, and
    for the first ones that begin and end between other numbers of the model's config: one of them may be a
    window, or where positions are scaled.
    """

    #: Most rows that are compared in one generation.
    most_rows = 4

    def __init__(self, model: nn.Module) -> None:
        self.numbers = sorted({number for _, number in config_numbers(base_model(model).config.to_dict())})
        self.forget()

    def forget(self) -> None:
        """Compare again, after a change of what samples."""
        self.seen: set[tuple[int, int]] = set()  # numbers below prompt and row of compared rows
        self.padded = False  # rows beside padding were compared

    def _numbers_below(self, length: int) -> int:
        return bisect_left(self.numbers, length)  # a window of 48 acts on a row of 49 tokens

    def may_be_due(self, prompts: Iterable[int], limit: int, padded: bool) -> bool:
        """Return True if completions of at most ``limit`` tokens may show what no compared row has shown.

        Args:
            prompts: lengths of the prompts.
            padded: some of them are padded.
        """
        kinds = {
            (self._numbers_below(length), last)
            for length in set(prompts)
            for last in range(self._numbers_below(length), self._numbers_below(length + limit) + 1)
        }
        return not self.seen.issuperset(kinds) or (padded and not self.padded)

    def due_rows(self, sizes: Sequence[tuple[int, int]], padded: bool) -> list[int]:
        """Return the rows to compare: that with the most padding, and one of each kind that is due.

        Args:
            sizes: tokens of the prompt and of the completion, B.
        """
        rows = [max(range(len(sizes)), key=lambda row: (-sizes[row][0], sizes[row][1]))]
        rows = rows if padded and not self.padded else []
        seen = {*self.seen, *(self._kind(sizes[row]) for row in rows)}
        for row in sorted(range(len(sizes)), key=lambda row: -sum(sizes[row])):
            if (kind := self._kind(sizes[row])) not in seen:
                seen.add(kind)
                rows.append(row)
        return rows[: self.most_rows]

    def check_rows(
        self,
        model: CausalLM,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        images: Sequence[ImageInputs] | None,
        logps_of: Callable[[int, int], torch.Tensor],
        *,
        padded: bool,
        lockstep: bool,
        forward_context: AbstractContextManager[None],
    ) -> None:
        """Compare the rows that are due.

        Args:
            rows: tokens of prompt and completion, B.
            images: image inputs per row; None: prompts of text.
            logps_of: returns the recorded log-probs of the first tokens of a completion, by row and number.
            padded: some prompts were padded.
            lockstep: ranks run forwards together: they compare two rows of the first generation.
            forward_context: entered for the forwards.

        Raises:
            WrongLogpsError: log-probs differ by more than rounding.
        """
        sizes = [(len(prompt), len(completion)) for prompt, completion in rows]
        due = self.due_rows(sizes, padded)
        if lockstep:
            due = [] if self.seen else [*due, 0, 0][:2]
        if not due:
            return
        dtype = forward_autocast(model) or model.dtype
        tolerance = PLAIN_TOLERANCES.get(dtype, PLAIN_TOLERANCES[torch.bfloat16])
        with forward_context:
            for row in due:
                prompt, tokens = rows[row]
                logps_T = logps_of(row, len(tokens)).to(model.device)
                arrays = join_images([images[row]] if images else (), [0], sum(sizes[row]), model.device)
                gap = self.compare(model, prompt, tokens, logps_T, arrays)
                if not gap <= tolerance:  # also for NaN
                    raise WrongLogpsError(
                        f"{len(logps_T)} tokens after a prompt of {len(prompt)} are sampled with log-probs "
                        f"that differ by {gap:.2g} nats from those of a plain forward of the row (rounding "
                        f"accounts for at most {tolerance:.2g})"
                    )
        self.passed([sizes[row] for row in due], padded)

    def passed(self, sizes: Iterable[tuple[int, int]], padded: bool) -> None:
        """Note that rows of these sizes agree."""
        self.seen.update(map(self._kind, sizes))
        self.padded |= padded

    def _kind(self, size: tuple[int, int]) -> tuple[int, int]:
        return self._numbers_below(size[0]), self._numbers_below(sum(size))

    @staticmethod
    def compare(
        model: nn.Module,
        prompt: Sequence[int],
        completion: Sequence[int],
        logps_T: torch.Tensor,
        images: Mapping[str, Any],
    ) -> float:
        """Return the mean |difference| in nats of the recorded log-probs (T,) of a completion's first tokens.

        Args:
            model: in evaluation mode, called without gradients.
            images: arguments of the model for the images of the prompt.
        """
        ids = torch.tensor([[*prompt, *completion]], device=logps_T.device)  # (1, S)
        steps = torch.linspace(0, len(logps_T) - 1, min(len(logps_T), _NUM_TOKENS), device=ids.device).long()
        plain_N = plain_logps(model, ids, len(prompt) - 1 + steps, images)
        return float((plain_N - logps_T[steps]).abs().sum() / max(len(steps), 1))


@dataclass
class LogprobMismatchCheck:
    """Comparison of a few completions' log-probs under the trainer with those from the sampler.

    Checks the first generation, the second (after the first update, which detects missing weight syncs), and
    then every ``every`` generations.

    computer: its head and precision are those of the compared log-probs.
    accelerator: of the trainer; all ranks compare rows, and their sum decides.
    action: "off", "warn" or "error".
    every: generations between two checks; the first two generations are always checked.
    """

    computer: LogprobComputer
    accelerator: Accelerator
    action: str = "warn"
    every: int = 20
    generations: int = 0

    def check(
        self, model: nn.Module, batch: TokenBatch, fresh: Sequence[bool], *, truncation: float = 0.0
    ) -> Metrics:
        """Compare one generation if it is due. All ranks call this for every generation.

        Args:
            fresh: B flags, True for rows sampled from the current weights; others are not compared.
            truncation: the most by which the sampler's log-prob of a token exceeds the trainer's because the
                sampler truncates its distribution without reporting the sampling mask; such differences do
                not count.

        Returns:
            ``sampling/logprob_mismatch``, the mean |difference| per token in nats; empty if nothing was
            compared.

        Raises:
            BackendError: the difference exceeds the tolerance, with ``action="error"``.
        """
        self.generations += 1
        due = self.generations <= 2 or self.generations % self.every == 0
        if self.action == "off" or not due:
            return {}
        batch = _some_rows(batch, fresh)
        sampler_BT = batch.sampler_logps_BT
        if sampler_BT is None:  # this rank has none, but other ranks may
            sampler_BT = torch.full_like(batch.old_logps_BT, torch.nan)
        # Rows with old log-probs come from an earlier policy.
        compared_BT = batch.loss_mask_BT * ~sampler_BT.isnan() * batch.old_logps_BT.isnan()
        tokens = self._total(compared_BT)
        if not tokens:
            return {}
        with evaluation_mode(model), torch.no_grad():
            trainer_BT = compute_padded_logprobs(
                model, batch, self.computer.head, with_entropy=False
            ).logps_BT
        excess_BT = sampler_BT.nan_to_num() - trainer_BT
        unexplained_BT = excess_BT - excess_BT.clamp(0.0, truncation)
        gap = self._total(unexplained_BT.abs() * compared_BT) / tokens
        tolerance = TOLERANCES[self.computer.mixed_precision or next(model.parameters()).dtype]
        if not gap <= tolerance:  # also for NaN
            self._report(gap, tolerance)
        return {"sampling/logprob_mismatch": Mean(gap)}

    def _report(self, gap: float, tolerance: float) -> None:
        message = (
            f"the sampler's log-probs differ from the trainer's by {gap:.2g} nats per token on average "
            f"(rounding accounts for at most {tolerance:.2g}). If it grows by the step, weights are not "
            "synced; otherwise give both sides one temperature (vLLM: --logprobs-mode "
            "processed_logprobs), top_p, top_k and min_p, chat template and dtype"
        )
        if self.action == "error":
            raise BackendError(f"{message} (logprob_mismatch_check='warn' continues training)")
        logger.warning("%s", message)

    def _total(self, values_BT: torch.Tensor) -> float:
        return self.accelerator.reduce(values_BT.sum(dtype=torch.float32), "sum").item()


def _some_rows(batch: TokenBatch, fresh: Sequence[bool]) -> TokenBatch:
    """Select ``_NUM_ROWS`` evenly spaced fresh rows, which then belong to different prompts."""
    found = [row for row, is_fresh in enumerate(fresh) if is_fresh]
    if not found:  # this rank joins the collectives with a row that is not compared
        return replace(batch.select([0]), sampler_logps_BT=None)
    places = {round(i * (len(found) - 1) / (_NUM_ROWS - 1)) for i in range(min(_NUM_ROWS, len(found)))}
    return batch.select([found[place] for place in sorted(places)])


class LogpRecorder(LogitsProcessor):
    """Record of the log-probs of sampled tokens under the model, before a setting changes its logits.

    In the loop of transformers it is the first logits processor, and never learns the last token.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # completions and log-probs, (R,) each
        self._last_RV: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._last_RV is not None:
            rows_R = torch.arange(len(scores), device=scores.device)
            self.record(self._last_RV, input_ids[:, -1], rows_R)
        self._last_RV = scores.clone()
        return scores

    def record(self, logits_RV: torch.Tensor, tokens_R: torch.Tensor, rows_R: torch.Tensor) -> None:
        """Record one step: logits, sampled tokens, and the completion of each."""
        tokens_R1 = tokens_R[:, None].clamp(0, logits_RV.shape[1] - 1)  # padding of finished rows may be any
        self._steps.append((rows_R, logits_RV.gather(1, tokens_R1)[:, 0] - logits_RV.logsumexp(-1)))

    def of_completion(self, row: int, num_tokens: int) -> torch.Tensor:
        """Return the recorded log-probs of the first tokens of a completion."""
        # One row of each step is the completion's. A sum, since the host would wait to index by a mask.
        logps = [logps_R.where(rows_R == row, 0.0).sum() for rows_R, logps_R in self._steps[:num_tokens]]
        return torch.stack(logps) if logps else torch.zeros(0)
