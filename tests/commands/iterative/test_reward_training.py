"""Continued training of a reward model: examples, replay, losses."""

from __future__ import annotations

import math

import pytest
import torch
from support.iterative_runs import reward_model
from support.resume_runs import tokenizer

from groupwise.commands.iterative.iterative_config import REWARD_OBJECTIVES, IterativeConfig
from groupwise.commands.iterative.reward_training import (
    EXAMPLES,
    Example,
    example_loss,
    mean_loss,
    pairwise_examples,
    pointwise_examples,
    train_reward_model,
    with_replay,
)
from groupwise.rewards.runtime.models import RewardModel


def settings(epochs: int) -> IterativeConfig:
    return IterativeConfig(1, reward_learning_rate=1e-2, reward_batch_size=2, reward_epochs=epochs)


TEXTS = ["say a", "say eee", "say xyzzy", "say o"]


def scorer() -> RewardModel:
    return RewardModel(reward_model(), tokenizer(), 4, trust_remote_code=False)


def test_the_objectives_of_the_settings_are_those_with_examples():
    assert set(REWARD_OBJECTIVES) == set(EXAMPLES)


def test_pairs_are_those_with_different_labels_and_the_better_one_is_first():
    found = pairwise_examples(["a", "b", "c"], [1.0, 0.0, 1.0])
    assert found == [Example("a", "b"), Example("c", "b")]
    assert pairwise_examples(["a", "b"], [2.0, 2.0]) == []
    assert pointwise_examples(["a", "b"], [0.25, 1.0]) == [Example("a", label=0.25), Example("b", label=1.0)]


@pytest.mark.parametrize(
    ("fresh", "share", "replayed"),
    [(36, 0.1, 4), (9, 0.1, 1), (4, 0.1, 0), (10, 0.0, 0), (10, 0.5, 10), (30, 0.25, 10), (500, 0.1, 50)],
)
def test_the_replay_share_is_exact(fresh, share, replayed):
    """F fresh examples and R of the history: R / (F + R) is the share, R rounded; at most all 50 of them."""
    new, old = [Example(f"new {i}") for i in range(fresh)], [Example(f"old {i}") for i in range(50)]
    mixed = with_replay(new, old, share, seed=1)
    assert len(mixed) == len(set(mixed)) == fresh + replayed
    assert {example for example in mixed if example.text.startswith("new")} == set(new)
    assert mixed == with_replay(new, old, share, seed=1)
    assert fresh < 5 or mixed != with_replay(new, old, share, seed=2)


@pytest.mark.parametrize("objective", REWARD_OBJECTIVES)
def test_the_loss_is_that_of_scalar_loops(objective):
    judge = scorer()
    labels = [0.0, 1.0, 0.5, 0.0]
    scores = dict(zip(TEXTS, judge(prompts=[""] * 4, completions=TEXTS), strict=True))
    examples = EXAMPLES[objective](TEXTS, labels)
    terms = []
    for text, other, label in examples:
        if other is not None:
            terms.append(math.log(1 + math.exp(scores[other] - scores[text])))
        else:
            chance = 1 / (1 + math.exp(-scores[text]))
            terms.append(-label * math.log(chance) - (1 - label) * math.log(1 - chance))
    assert len(terms) == (5 if objective == "pairwise" else 4)
    expected = sum(terms) / len(terms)
    assert example_loss(judge, examples).item() == pytest.approx(expected, abs=1e-6)
    assert mean_loss(judge, examples, batch_size=3) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("objective", REWARD_OBJECTIVES)
def test_training_lowers_the_loss_on_its_examples_and_ranks_them(objective):
    judge = scorer()
    examples = EXAMPLES[objective](TEXTS, [0.0, 1.0, 1.0, 0.0])
    found = train_reward_model(judge, examples, settings(epochs=10))
    assert found["num_examples"] == len(examples)
    assert found["loss_after"] < 0.5 * found["loss_before"]
    bad, good, also_good, also_bad = judge(prompts=[""] * 4, completions=TEXTS)
    assert min(good, also_good) > max(bad, also_bad)
    assert not judge.model.training and all(p.grad is None for p in judge.model.parameters())


def test_frozen_weights_stay_and_no_examples_change_nothing():
    judge = scorer()
    judge.model.model.requires_grad_(False)
    before = {name: value.clone() for name, value in judge.model.state_dict().items()}
    found = train_reward_model(judge, [], settings(epochs=3))
    assert math.isnan(found["loss_before"]) and found["num_examples"] == 0
    examples = pairwise_examples(TEXTS, [0.0, 1.0, 1.0, 0.0])
    train_reward_model(judge, examples, settings(epochs=1))
    changed = [n for n, value in judge.model.state_dict().items() if not torch.equal(value, before[n])]
    assert changed == ["score.weight"]
