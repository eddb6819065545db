"""Whether the sampler's log-probs are those of the policy that trains, and why not where they are not.

Axes: B rows, P prompt tokens, C completion tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from groupwise.core.metrics import Mean, Metrics
from groupwise.errors import BackendError
from groupwise.policy.layouts import HeadSettings, compute_padded_logprobs
from groupwise.records import TokenBatch

logger = logging.getLogger(__name__)

#: Largest mean difference of log-probs that rounding explains, by the dtype of the trainer's products.
#: Autocast and bfloat16 weights of one model of 135M parameters are 0.05 apart, without any sampler.
TOLERANCES = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

#: An assumption that leaves less than this part of the difference explains it.
_LEFT = 0.2

#: Temperatures a sampler may have used by mistake.
_TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5)

#: A truncated distribution is a renormalised one: no sampled token may look less likely than it is.
_LESS_LIKELY = 0.01

#: Where the prompts differ, the first tokens of a completion are off by more than this many times the others.
_FIRST, _FIRST_RATIO = 4, 3.0

_TRUNCATED = (
    "the sampler truncates its distribution ({}): every token it took is more likely there; set top_p=1, "
    "top_k=0 and min_p=None on both sides, also in the server's generation config"
)
_DTYPE = (
    "the dtype: bfloat16 in place of the trainer's precision makes a difference of this size; let both "
    "compute in the same dtype"
)
_PROMPTS = (
    "the prompts: the first tokens of the completions are off much more than the others; compare the chat "
    "template and the special tokens of both sides"
)
_STALE = (
    "stale weights, or another model: nothing about sampling explains it; see whether the weights are sent "
    "to the sampler after each update"
)


@dataclass(frozen=True)
class LogprobMismatchSettings:
    """When the comparison is made, and what follows from a difference.

    action: "off", "warn" or "error".
    every: generations between two comparisons; the first two are always compared.
    rows: completions that are compared, on every rank.
    prepended: the token that a sampler may add in front of a prompt, if there is one.
    truncating: the settings by which the sampler truncates its distribution, as they should be called.
    """

    action: str = "warn"
    every: int = 20
    rows: int = 4
    prepended: int | None = None
    truncating: str = ""


class LogprobMismatchCheck:
    """Compares a few completions of a generation under the trainer with what the sampler reported.

    The first generation is compared, the second (the first after an update: weights that do not follow show
    there), and then every so often.

    Args:
        settings: see there.
        head: how the trainer's hidden states become log-probs.
        reduce: sums a tensor over all ranks.
        mixed_precision: dtype of the trainer's products where it is not that of the weights.
    """

    def __init__(
        self,
        settings: LogprobMismatchSettings,
        head: HeadSettings,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        mixed_precision: torch.dtype | None = None,
    ) -> None:
        self.settings, self.head, self.reduce = settings, head, reduce
        self.mixed_precision = mixed_precision
        self.generations = 0

    def check(self, model: Any, batch: TokenBatch, fresh: Sequence[bool]) -> Metrics:
        """``sampling/logprob_mismatch``, the mean |difference| in nats, when this generation is compared.

        Every rank calls it for every generation: what it finds is decided together.

        Args:
            batch: rows sampled from the present weights; those with old log-probs are left out.

        Raises:
            BackendError: the difference is beyond rounding, and the settings ask for an error.
        """
        self.generations += 1
        due = self.generations <= 2 or self.generations % self.settings.every == 0
        if self.settings.action == "off" or not due:
            return {}
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                comparison = _Comparison(self, model, _some_rows(batch, fresh, self.settings.rows))
                if not comparison.tokens:
                    return {}
                gap, band = comparison.gap(), TOLERANCES[self.mixed_precision or comparison.dtype]
                if not gap <= band:
                    self._complain(gap, band, comparison.cause(band))
        finally:
            model.train(was_training)
        return {"sampling/logprob_mismatch": Mean(gap)}

    def _complain(self, gap: float, band: float, cause: str) -> None:
        message = (
            f"the sampler's log-probs differ from the trainer's by {gap:.2g} nats per token on average "
            f"(rounding explains up to {band:.2g}); probable cause: {cause}"
        )
        if self.settings.action == "error":
            raise BackendError(f"{message} (logprob_mismatch_check='warn' trains on all the same)")
        logger.warning("%s", message)


def _some_rows(batch: TokenBatch, fresh: Sequence[bool], rows: int) -> TokenBatch:
    """Fresh rows from all over the batch, so that they belong to different prompts; one that does not count
    if there are none."""
    found = [row for row, is_fresh in enumerate(fresh) if is_fresh]
    if not found:
        return replace(batch.select([0]), sampler_logps_BT=None)
    places = {round(i * (len(found) - 1) / max(rows - 1, 1)) for i in range(min(rows, len(found)))}
    return batch.select([found[place] for place in sorted(places)])


class _Comparison:
    """The chosen rows under the trainer as it is, and under assumptions about what the sampler did."""

    def __init__(self, gate: LogprobMismatchCheck, model: Any, batch: TokenBatch) -> None:
        self.gate, self.model, self.batch = gate, model, batch
        weights = next(model.parameters())
        self.dtype, self.device = weights.dtype, weights.device
        sampler_BT = batch.sampler_logps_BT
        if sampler_BT is None:  # this rank's sampler reported nothing; other ranks' may have
            sampler_BT = torch.full(batch.completion_ids_BT.shape, torch.nan, device=self.device)
        self.reported_BT = batch.loss_mask_BT * ~sampler_BT.isnan()
        # Rows with old log-probs were sampled by an earlier policy.
        self.reported_BT = self.reported_BT * batch.old_logps_BT.isnan()
        self.sampler_BT = sampler_BT.nan_to_num()
        self.tokens = self._total(self.reported_BT)
        self.trainer_BT = self.score() if self.tokens else self.sampler_BT

    def score(self, batch: TokenBatch | None = None, temperature: float | None = None) -> torch.Tensor:
        """Log-probs (B, C) of the chosen rows, under an assumption if one is given."""
        head = self.gate.head if temperature is None else replace(self.gate.head, temperature=temperature)
        return compute_padded_logprobs(self.model, batch or self.batch, head, with_entropy=False).logps_BT

    def gap(self, logps_BT: torch.Tensor | None = None, to_BT: torch.Tensor | None = None) -> float:
        """Mean |difference| to the sampler, over the tokens of all ranks."""
        logps_BT = self.trainer_BT if logps_BT is None else logps_BT
        to_BT = self.sampler_BT if to_BT is None else to_BT
        return self._total((logps_BT - to_BT).abs() * self.reported_BT) / self.tokens

    def cause(self, band: float) -> str:
        """What explains the difference best."""
        limit = max(band, _LEFT * self.gap())
        gaps = {name: self.gap(logps_BT) for name, logps_BT in self._assumptions()}
        best = min(gaps, key=gaps.__getitem__)
        if gaps[best] <= limit:
            return best
        signs = (
            (
                lambda: self._is_renormalised(band),
                _TRUNCATED.format(self.gate.settings.truncating or "the configuration asks for none"),
            ),
            (self._is_rounding, _DTYPE),
            (self._is_at_the_start, _PROMPTS),
        )
        return next((cause for holds, cause in signs if holds()), _STALE)

    def _assumptions(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = self.gate.head.temperature
        for temperature in _TEMPERATURES:
            if temperature != own:
                name = (
                    f"the temperature: the sampler's log-probs are those at {temperature}, the trainer's at "
                    f"{own}; vLLM reports those at the sampling temperature with "
                    "--logprobs-mode processed_logprobs"
                )
                yield name, self.score(temperature=temperature)
        without = "the prompt: the sampler saw it without its first token; check who adds special tokens"
        yield without, self.score(_without_first_token(self.batch))
        if self.gate.settings.prepended is not None:
            doubled = "the prompt: the sampler saw one more beginning-of-text token; check who adds it"
            yield doubled, self.score(_with_token_in_front(self.batch, self.gate.settings.prepended))

    def _is_renormalised(self, band: float) -> bool:
        less_BT = (self.sampler_BT < self.trainer_BT - band) * self.reported_BT
        return self._total(less_BT) <= _LESS_LIKELY * self.tokens

    def _is_rounding(self) -> bool:
        """Whether products in bfloat16 would move the trainer's own log-probs as much."""
        if self.gate.mixed_precision is not None:
            return False  # the band is that of reduced precision already
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            rounded_BT = self.score()
        return self.gap() <= 3.0 * self.gap(rounded_BT, to_BT=self.trainer_BT)

    def _is_at_the_start(self) -> bool:
        first_T = torch.arange(self.reported_BT.shape[1], device=self.device) < _FIRST
        off_BT = (self.trainer_BT - self.sampler_BT).abs() * self.reported_BT
        at_first, later = self._total(self.reported_BT * first_T), self._total(self.reported_BT * ~first_T)
        if not at_first or not later:
            return False
        return (
            self._total(off_BT * first_T) / at_first > _FIRST_RATIO * self._total(off_BT * ~first_T) / later
        )

    def _total(self, values_BT: torch.Tensor) -> float:
        return self.gate.reduce(values_BT.sum(dtype=torch.float32)).item()


def _without_first_token(batch: TokenBatch) -> TokenBatch:
    """Every prompt without its first token."""
    mask_BL = batch.prompt_mask_BL
    return replace(batch, prompt_mask_BL=mask_BL * (mask_BL.cumsum(-1) > 1))


def _with_token_in_front(batch: TokenBatch, token: int) -> TokenBatch:
    """Every prompt with one more token in front."""
    ids_BL, mask_BL = F.pad(batch.prompt_ids_BL, (1, 0)), F.pad(batch.prompt_mask_BL, (1, 0))
    front_BL = F.pad(mask_BL[:, 1:], (0, 1), value=1) * (1 - mask_BL)
    return replace(batch, prompt_ids_BL=ids_BL.where(front_BL == 0, token), prompt_mask_BL=mask_BL + front_BL)
