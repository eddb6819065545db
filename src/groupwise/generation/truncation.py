"""Record of the tokens that truncated sampling keeps in the decoding loops of transformers.

Axes: R rows (completions being decoded), V vocabulary, E tokens kept at all rows in one step.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from groupwise.compat.transformers import has_stock_sampling_loop, sampling_loop
from groupwise.config.sampling import TRUNCATING
from groupwise.policy.introspection import CausalLM, without_adapter
from groupwise.records.sampling_mask import SamplingMask


def make_recorder(model: CausalLM, config: GenerationConfig) -> SamplingMaskRecorder | None:
    """Return a recorder if ``config`` truncates the sampling distribution of ``model.generate``.

    Settings of the model do not count: the backend samples under ``without_model_settings``.

    Returns:
        None without truncation, with greedy decoding, and if the model has its own decoding loop.
    """
    given = {name: getattr(config, name, None) for name in TRUNCATING}
    truncates = any(value not in (None, TRUNCATING[name]) for name, value in given.items())
    samples = config.do_sample is not False and config.num_beams in (None, 1)
    return SamplingMaskRecorder() if truncates and samples and can_record(model) else None


def can_record(model: CausalLM) -> bool:
    """Return True if ``model`` samples with the decoding loop of transformers."""
    return has_stock_sampling_loop(without_adapter(model))


class SamplingMaskRecorder(LogitsProcessor):
    """Record of the tokens with a finite score, by row and step. As the last logits processor, it sees the
    distribution that is sampled from.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows and ids of tokens kept, (E,) each

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.record(scores, torch.arange(len(scores), device=scores.device))
        return scores

    def record(self, scores_RV: torch.Tensor, rows_R: torch.Tensor) -> None:
        """Record one step.

        Args:
            scores_RV: scores that are sampled from, -inf for removed tokens.
            rows_R: completion of each score.
        """
        kept_RV = scores_RV > -torch.inf
        kept_RV &= ~kept_RV.all(-1, keepdim=True)  # no ids stand for the whole vocabulary
        index_E, id_E = kept_RV.nonzero(as_tuple=True)
        self._steps.append((rows_R[index_E].cpu(), id_E.int().cpu()))

    def completions(self, num_rows: int) -> list[SamplingMask]:
        """Return the sampling mask of every completion, one position per recorded step."""
        if not self._steps:
            return [SamplingMask.whole_vocabulary(0)] * num_rows
        counts_TR = torch.stack([torch.bincount(row_E, minlength=num_rows) for row_E, _ in self._steps])
        row_E, id_E = (torch.cat(parts) for parts in zip(*self._steps, strict=True))
        ids = id_E[row_E.sort(stable=True).indices].split(counts_TR.sum(0).tolist())
        return [
            SamplingMask(ids_of_row.clone(), counts_T.int())
            for ids_of_row, counts_T in zip(ids, counts_TR.T, strict=True)
        ]


def sample_and_record(
    model: CausalLM,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    recorder: SamplingMaskRecorder,
    synced_gpus: bool,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Run the decoding loop of transformers with ``recorder`` as the last logits processor.

    The other arguments are those of the decoding loop.

    Args:
        synced_gpus: sharded parameters: continue until all ranks have finished. ``generate`` does not pass it
            to a ``custom_generate``.
    """
    processors = LogitsProcessorList([*logits_processor, recorder])
    kwargs = {"synced_gpus": synced_gpus, **model_kwargs}
    return sampling_loop(model, input_ids, processors, stopping_criteria, generation_config, kwargs)
