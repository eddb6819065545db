"""Record of the tokens that truncated sampling keeps, in either decoding loop.

Axes: R rows (completions being decoded), V vocabulary, E tokens kept at all rows in one step.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from groupwise.compat.transformers import sampling_loop
from groupwise.policy.introspection import CausalLM
from groupwise.policy.logprob_mismatch import LogpRecorder
from groupwise.records.sampling_mask import SamplingMask

#: Bytes of (R, V) masks that wait on the device to become token ids together, for the host waits each time:
#: none on a CPU, 256 MB on others.
_PENDING_BYTES = {"cpu": 0}


class SamplingMaskRecorder(LogitsProcessor):
    """Record of the tokens with a finite score, by row and step. As the last logits processor, it sees the
    distribution that is sampled from.

    The record stays on the device: its ids are found for many steps at once, and copied once at the end.

    Axes: X rows of all steps, one after the other.
    """

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []  # completion of each row, (R,) per step
        self._pending: list[torch.Tensor] = []  # (R, V), True for kept tokens, of the last steps
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids (E,) and their number per row

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
        self._rows.append(rows_R)
        self._pending.append(kept_RV)
        limit = _PENDING_BYTES.get(kept_RV.device.type, 1 << 28)
        if sum(mask_RV.numel() for mask_RV in self._pending) > limit:
            self._find_ids()

    def _find_ids(self) -> None:
        if self._pending:
            kept_XV = torch.cat(self._pending)
            ids_E = kept_XV.nonzero(as_tuple=True)[1]  # waits for the device
            self._found.append((ids_E.int(), kept_XV.count_nonzero(-1).int()))
            self._pending = []

    def completions(self, num_rows: int) -> list[SamplingMask]:
        """Return the sampling mask of every completion, one position per recorded step."""
        self._find_ids()
        sizes = torch.tensor([len(rows_R) for rows_R in self._rows])  # (T,), rows in the batch at each step
        ids, counts = zip(*self._found, strict=True)
        parts = [torch.cat([rows_R.int() for rows_R in self._rows]), torch.cat(counts), torch.cat(ids)]
        row_X, counts_X, ids_E = torch.cat(parts).cpu().split([*map(len, parts)])  # one copy
        step_X = torch.arange(len(sizes)).repeat_interleave(sizes)
        counts_RT = torch.zeros(num_rows, len(sizes), dtype=torch.int32)
        counts_RT[row_X.long(), step_X] = counts_X
        order_E = row_X.repeat_interleave(counts_X).sort(stable=True).indices  # by completion, then step
        ids_of_rows = ids_E[order_E].split(counts_RT.sum(1).tolist())
        return [SamplingMask(i.clone(), c.clone()) for i, c in zip(ids_of_rows, counts_RT, strict=True)]


def sample_and_record(
    model: CausalLM,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    recorder: SamplingMaskRecorder | None,
    logps: LogpRecorder | None,
    synced_gpus: bool,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Run the decoding loop of transformers with ``logps`` as the first logits processor, ``recorder`` last.

    The other arguments are those of the decoding loop.

    Args:
        synced_gpus: sharded parameters: continue until all ranks have finished. ``generate`` does not pass it
            to a ``custom_generate``.
    """
    parts = [logps, *logits_processor, recorder]
    processors = LogitsProcessorList([part for part in parts if part is not None])
    kwargs = {"synced_gpus": synced_gpus, **model_kwargs}
    return sampling_loop(model, input_ids, processors, stopping_criteria, generation_config, kwargs)
