"""Rows of the generations to come, so that a server can sample them while the current one trains.

With ``rollout_staleness`` = k, a generation is asked for k generations before it is trained on. Its tokens
then come from weights that are up to k generations old; each says from which, and the correction for the
sampler (``core.corrections``) reweights for the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from groupwise.core.metrics import Max, Mean, Metrics
from groupwise.data.batches import epoch_permutation
from groupwise.data.prompt_source import LazyRow, rows_of_rank
from groupwise.records import Completion

logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]


class Pipeline:
    """Looks as many generations ahead as the configuration allows; not at all without staleness.

    What a generation is made of follows from its number alone, in any epoch: a resumed run sees the same.

    Args:
        config: a ``GRPOConfig``; each of its generations trains for whole optimizer steps.
        dataset: the training rows; not used without staleness.
        one_turn: a completion is one request, known before it begins: no agents, no ``rollout_func``.
    """

    def __init__(self, config: Any, dataset: Any = None, *, one_turn: bool = True) -> None:
        self.config, self.dataset = config, dataset
        self.depth = config.rollout_staleness if one_turn else 0
        if config.rollout_staleness and not one_turn:
            logger.warning(
                "rollout_staleness=%d is without effect: with tools, environments or a rollout_func, what is "
                "generated is not known ahead",
                config.rollout_staleness,
            )
        uses = config.steps_per_generation * config.num_iterations
        self.steps = uses // config.gradient_accumulation_steps
        self._order: tuple[int, list[int]] = (-1, [])

    def upcoming(self, step: int, last: int) -> Iterator[tuple[int, Rows]]:
        """The following generations: the optimizer step that begins with each, and this rank's rows of it.

        Args:
            step: optimizer steps done; a generation begins with the next one.
            last: optimizer steps of the whole run.
        """
        for number in range(1, self.depth + 1):
            later = step + number * self.steps
            if later >= last:
                return
            yield later, self.rows(later // self.steps)

    def rows(self, number: int) -> Rows:
        """This rank's rows of a generation, as ``data.GroupSampler`` orders them; the first one is 0."""
        config = self.config
        num_prompts = config.generation_batch_size // config.num_generations
        epoch, place = divmod(number, len(self.dataset) // num_prompts)
        if self._order[0] != epoch:
            seed = config.seed if config.data_seed is None else config.data_seed
            self._order = epoch, epoch_permutation(len(self.dataset), config.shuffle_dataset, seed, epoch)
        indices = self._order[1][place * num_prompts : (place + 1) * num_prompts]
        prompts = [LazyRow(self.dataset, index) for index in indices]
        return rows_of_rank(prompts, config.num_generations, config.process_index, config.world_size)


def staleness(completions: Sequence[Completion], step: int) -> Metrics:
    """How many optimizer steps behind the weights were that sampled each token."""
    behind = [step - version for c in completions for version in c.versions or ()]
    if not behind:
        return {}
    return {
        "staleness": Mean(float(sum(behind)), float(len(behind))),
        "staleness/max": Max(float(max(behind))),
    }
