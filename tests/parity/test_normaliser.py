"""Updates that TRL approximates: ours against the exact one in float64, and TRL's beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity_runs import (
    Policy,
    Setting,
    completion,
    largest_difference,
    mixed_reward,
    prompt_text,
    train_groupwise,
    train_trl,
)

trl_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
pytestmark = pytest.mark.parity

PROMPTS_PER_MICRO_BATCH, GROUP = 2, 4
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Sequence64:
    """One completion under the starting policy; log-probs and entropies, per token, are differentiable."""

    advantage: float
    logps: torch.Tensor
    entropies: torch.Tensor


def micro_batches(model: torch.nn.Module, policy: Policy, count: int, reward: Any) -> list[list[Sequence64]]:
    """The first ``count`` micro-batches of a run, from loops over prompts and completions."""
    batches: list[list[Sequence64]] = []
    for first in range(0, count * PROMPTS_PER_MICRO_BATCH, PROMPTS_PER_MICRO_BATCH):
        batches.append([])
        for index in range(first, first + PROMPTS_PER_MICRO_BATCH):
            prompt = prompt_text(index)
            prompt_ids = policy.tokenizer(prompt)["input_ids"]
            completions = [completion(prompt, sample) for sample in range(GROUP)]
            rewards = reward(prompts=[prompt] * GROUP, completion_ids=completions)
            for ids, value in zip(completions, rewards, strict=True):
                scale = statistics.stdev(rewards) + 1e-4
                advantage = (value - statistics.fmean(rewards)) / scale
                logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
                all_logps = logits.log_softmax(-1)
                logps = all_logps.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
                batches[-1].append(Sequence64(advantage, logps, -(all_logps.exp() * all_logps).sum(-1)))
    return batches


def tokens(batch: Sequence[Sequence64]) -> int:
    return sum(len(sequence.logps) for sequence in batch)


def policy_loss(batch: Sequence[Sequence64], threshold: float = 0.0) -> torch.Tensor:
    """Sum over tokens. At the first update ρ = 1: dapo, cispo and vespo all have the gradient −A ∇ℓ."""
    return sum(
        (-sequence.advantage * sequence.logps * (sequence.entropies.detach() >= threshold)).sum()
        for sequence in batch
    )


def stepped(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameters after one step of gradient descent."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {
        name: (tensor - LEARNING_RATE * gradient).detach()
        for (name, tensor), gradient in zip(model.named_parameters(), gradients, strict=True)
    }


@pytest.fixture(autouse=True)
def unshuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL deals out the rows of a generation anew; here its first window must hold the same rows as ours."""
    monkeypatch.setattr(trl_trainer, "shuffle_sequence_dict", lambda rows: rows)


def one_step(policy: Policy, directory: Path, reward: Any = mixed_reward, **options: Any) -> tuple[Any, Any]:
    setting = Setting(
        {"learning_rate": LEARNING_RATE, "max_steps": 1, "epsilon_high": 1.0, **options}, rewards=(reward,)
    )
    ours = train_groupwise(policy, setting, directory / "ours").parameters
    return ours, train_trl(policy, setting, directory / "theirs").parameters


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "steps_per_generation"), [(2, 1), (1, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_token_mean_over_a_window_that_is_not_a_generation(
    loss_type: str, accumulation: int, steps_per_generation: int, policy: Policy, tmp_path: Path
) -> None:
    """Every token of the accumulation window weighs 1 / (tokens of the window).

    TRL knows the tokens of the generation only, and takes the window to have its share of them: tokens of the
    generation × accumulation / steps per generation. With two generations in a window, a token of the one
    weighs more than a token of the other; with half a generation, all of them weigh too much or too little.
    """
    ours, theirs = one_step(
        policy,
        tmp_path,
        loss_type=loss_type,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
    )
    model = policy.load().double()
    batches = micro_batches(model, policy, max(accumulation, steps_per_generation), mixed_reward)
    window = batches[:accumulation]
    exact = stepped(model, sum(map(policy_loss, window)) / sum(map(tokens, window)))
    assert largest_difference(ours, exact) < 1e-6

    approximate = torch.zeros((), dtype=torch.float64)
    batches = micro_batches(model, policy, max(accumulation, steps_per_generation), mixed_reward)
    for index, batch in enumerate(batches[:accumulation]):
        first = index - index % steps_per_generation
        in_generation = sum(map(tokens, batches[first : first + steps_per_generation]))
        approximate = approximate + policy_loss(batch) / (in_generation * accumulation / steps_per_generation)
    assert largest_difference(theirs, stepped(model, approximate)) < 1e-6
    assert largest_difference(theirs, exact) > 1e-4


def no_preference(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def test_entropy_bonus_over_a_window(policy: Policy, tmp_path: Path) -> None:
    """Without advantages only the bonus is left: the mean entropy over all tokens of the window.

    TRL averages within each micro-batch, then over micro-batches, so that the split changes the update.
    """
    ours, theirs = one_step(
        policy, tmp_path, no_preference, loss_type="dapo", gradient_accumulation_steps=2, entropy_coef=0.5
    )
    model = policy.load().double()
    window = micro_batches(model, policy, 2, no_preference)
    sums = [sum(sequence.entropies.sum() for sequence in batch) for batch in window]
    exact = stepped(model, -0.5 * sum(sums) / sum(map(tokens, window)))
    assert largest_difference(ours, exact) < 1e-6
    assert largest_difference(theirs, exact) > 1e-4


def test_entropy_quantile_over_a_window(policy: Policy, tmp_path: Path) -> None:
    """The 40 % of the window's tokens with the highest entropy carry the surrogate; all count in the mean.

    TRL takes the quantile within each micro-batch, so that the split changes which tokens are kept.
    """
    ours, theirs = one_step(
        policy, tmp_path, loss_type="dapo", gradient_accumulation_steps=2, top_entropy_quantile=0.4
    )
    model = policy.load().double()
    window = micro_batches(model, policy, 2, mixed_reward)
    entropies = torch.cat([sequence.entropies.detach() for batch in window for sequence in batch])
    threshold = torch.quantile(entropies, 0.6).item()
    exact = stepped(model, sum(policy_loss(batch, threshold) for batch in window) / sum(map(tokens, window)))
    assert largest_difference(ours, exact) < 1e-6
    assert largest_difference(theirs, exact) > 1e-4
