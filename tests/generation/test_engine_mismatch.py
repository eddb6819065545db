"""An engine that is not the policy: what is logged and trained on follows the equations, in every mode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine_runs import policy, trainer, trainer_logps

from groupwise.generation.base import PolicyWeights

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOW, HIGH = 0.9, 1.1
MISSING = 3  # so many log-probs of the first completion are not reported


class PerturbedWeights:
    """Weights of another model, close to the policy."""

    def __init__(self, source: PolicyWeights) -> None:
        self.source = source

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in self.source.full():
            noise = torch.randn(tensor.shape, generator=generator)
            yield name, tensor + 0.02 * noise if name == "lm_head.weight" else tensor


def correction(gaps: list[list[float]], mode: str) -> list[list[float]]:
    """The factor of every token."""
    level, bound = mode.split("_")
    factors = []
    for row in gaps:
        own = [math.exp(sum(row))] * len(row) if level == "sequence" else [math.exp(gap) for gap in row]
        if bound == "truncate":
            factors.append([min(max(factor, LOW), HIGH) for factor in own])
        else:
            factors.append([factor if LOW <= factor <= HIGH else 0.0 for factor in own])
    return factors


def advantages(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """By mode, one step with the perturbed engine: what it generated, the policy's log-probs, and the log."""
    found = {}
    run = trainer(
        tmp_path_factory.mktemp("mismatch"),
        model=policy(),
        loss_type="grpo",
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=8,
        skip_zero_advantage=False,
        vllm_importance_sampling_clip_min=LOW,
        vllm_importance_sampling_clip_max=HIGH,
        logprob_mismatch_check="off",
    )
    start = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    generate, sync = run.backend.generate, run.backend.sync_weights
    run.backend.sync_weights = lambda source, *, step: sync(PerturbedWeights(source), step=step)

    def watched(prompts: Any, sampling: Any) -> Any:
        completions = generate(prompts, sampling)
        first = completions[0]
        completions[0] = replace(first, logps=[math.nan] * MISSING + first.logps[MISSING:])
        model = run.model.eval()
        seen.extend(
            (completion, trainer_logps(model, prompt, completion.token_ids, run.temperature).tolist())
            for prompt, completion in zip(prompts, completions, strict=True)
        )
        return completions

    run.backend.generate = watched
    for mode in MODES:
        seen: list[Any] = []
        run.model.load_state_dict(start)
        run.backend.invalidate_weights()
        run.args.vllm_importance_sampling_mode = mode  # read at the next step
        run.train()
        found[mode] = seen, run.state.log_history[0]
    run.backend.close()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_metrics_are_those_of_the_equations(steps, mode):
    seen, line = steps[mode]
    gaps = [
        [
            0.0 if math.isnan(other) else own - other
            for own, other in zip(logps, completion.logps, strict=True)
        ]
        for completion, logps in seen
    ]
    reported = [not math.isnan(logp) for completion, _ in seen for logp in completion.logps]
    assert reported.count(False) == MISSING
    sizes = [abs(gap) for row in gaps for gap in row]
    assert max(sizes) > 0.1  # the planted difference shows
    near = {"abs": 2e-5, "rel": 2e-5}
    assert line["sampling/sampling_logp_difference/mean"] == pytest.approx(sum(sizes) / sum(reported), **near)
    assert line["sampling/sampling_logp_difference/max"] == pytest.approx(max(sizes), **near)
    factors = correction(gaps, mode)
    num_valid = [row[0] for row in factors] if "sequence" in mode else [c for row in factors for c in row]
    assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(
        sum(num_valid) / len(num_valid), **near
    )
    assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(min(num_valid), **near)
    assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(max(num_valid), **near)
    unbounded = correction_without_bounds(gaps, mode)
    assert {factor == free for factor, free in zip(num_valid, unbounded, strict=True)} == {True, False}
    rewards = [float(sum(token % 2 == 0 for token in completion.token_ids)) for completion, _ in seen]
    loss = -sum(
        advantage * sum(row) / len(row) / len(seen)
        for advantage, row in zip(advantages(rewards), factors, strict=True)
    )
    assert line["loss"] == pytest.approx(loss, abs=2e-5)
    assert math.isfinite(line["grad_norm"]) and line["grad_norm"] > 0


def correction_without_bounds(gaps: list[list[float]], mode: str) -> list[float]:
    if "sequence" in mode:
        return [math.exp(sum(row)) for row in gaps]
    return [math.exp(gap) for row in gaps for gap in row]
