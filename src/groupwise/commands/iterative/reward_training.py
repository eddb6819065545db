"""Continued training of a reward model on labelled completions, pairwise or pointwise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from groupwise.commands.iterative.iterative_config import IterativeConfig
from groupwise.rewards.runtime.models import RewardModel


class Example(NamedTuple):
    """Training example of a reward model.

    text: prompt and completion.
    other: a completion of the same prompt with a lower label, after that prompt; None: pointwise.
    label: label of ``text``, from 0 to 1 (pointwise).
    """

    text: str
    other: str | None = None
    label: float = 1.0


def pairwise_examples(texts: Sequence[str], labels: Sequence[float]) -> list[Example]:
    """Return every pair of a group's completions with different labels, the better one first."""
    rows = range(len(texts))
    return [Example(texts[i], texts[j]) for i in rows for j in rows if labels[i] > labels[j]]


def pointwise_examples(texts: Sequence[str], labels: Sequence[float]) -> list[Example]:
    """Return one example per completion."""
    return [Example(text, label=label) for text, label in zip(texts, labels, strict=True)]


#: Functions that turn the completions of a group into examples, by the name of the objective.
EXAMPLES: dict[str, Callable[[Sequence[str], Sequence[float]], list[Example]]] = {
    "pairwise": pairwise_examples,
    "pointwise": pointwise_examples,
}


def with_replay(
    fresh: Sequence[Example], history: Sequence[Example], share: float, seed: int
) -> list[Example]:
    """Mix fresh examples with a sample of the history, in random order.

    Args:
        share: part of the result that is history, rounded to whole examples; fewer if the history is small.

    Returns:
        All fresh examples, and F · share / (1 − share) of the history for F fresh ones.
    """
    draw = random.Random(seed)
    wanted = round(len(fresh) * share / (1 - share))
    mixed = [*fresh, *draw.sample(list(history), min(wanted, len(history)))]
    draw.shuffle(mixed)
    return mixed


def example_loss(scorer: RewardModel, examples: Sequence[Example]) -> torch.Tensor:
    """Compute the mean loss of examples of one kind, a scalar.

    Pairwise: −log σ(r(better) − r(worse)), Bradley-Terry. Pointwise: cross-entropy of σ(r) with the label.
    """
    scores = scorer.scores([example.text for example in examples])
    if examples[0].other is not None:
        others = scorer.scores([str(example.other) for example in examples])
        return -F.logsigmoid(scores - others).mean()
    labels = torch.tensor([example.label for example in examples], device=scores.device)
    return F.binary_cross_entropy_with_logits(scores, labels)


def mean_loss(scorer: RewardModel, examples: Sequence[Example], batch_size: int) -> float:
    """Return the mean loss over examples, in evaluation mode and without gradient; NaN without examples."""
    if not examples:
        return math.nan
    scorer.model.eval()
    with torch.no_grad():
        parts = [examples[i : i + batch_size] for i in range(0, len(examples), batch_size)]
        return sum(example_loss(scorer, part).item() * len(part) for part in parts) / len(examples)


def train_reward_model(
    scorer: RewardModel, examples: Sequence[Example], settings: IterativeConfig
) -> dict[str, Any]:
    """Train the reward model on examples in their order with AdamW; a new optimizer in each call.

    Returns:
        ``loss_before`` and ``loss_after``, means over the examples, and ``num_examples``.
    """
    batch_size = settings.reward_batch_size
    before = mean_loss(scorer, examples, batch_size)
    parameters = [parameter for parameter in scorer.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.reward_learning_rate, weight_decay=0.0)
    scorer.model.train()
    for _ in range(settings.reward_epochs):
        for start in range(0, len(examples), batch_size):
            example_loss(scorer, examples[start : start + batch_size]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    scorer.model.eval()
    after = mean_loss(scorer, examples, batch_size)
    return {"loss_before": before, "loss_after": after, "num_examples": len(examples)}
