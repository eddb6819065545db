"""Loss and gradient of plain-number samples through the mixins of the trainer, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from groupwise import Completion, GRPOConfig, LogprobOutput, RewardBatch, RolloutBatch
from groupwise.core.entropy import EntropyControl
from groupwise.core.objectives import OBJECTIVES
from groupwise.core.weights import NORMALIZERS, WindowCounts
from groupwise.mixins.advantage import AdvantageMixin
from groupwise.mixins.logprob import LogprobMixin
from groupwise.mixins.loss import LossMixin, objective_settings
from groupwise.records import Experience, MicroBatch, OldAndRefLogps
from support.fakes.duals import stop
from support.fakes.mixin_hosts import host
from support.oracles.paper_samples import Samples

Gradient = dict[tuple[str, int, int], float]


class OneRank:
    """An accelerator of a single process."""

    device, num_processes, process_index = torch.device("cpu"), 1, 0

    def reduce(self, local: torch.Tensor, reduction: str) -> torch.Tensor:
        return local

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def pad_across_processes(self, local: torch.Tensor, pad_index: float) -> torch.Tensor:
        return local


def loss_and_gradient(
    config: GRPOConfig,
    samples: Samples,
    columns: Sequence[Sequence[float]],
    entropy: EntropyControl | None = None,
) -> tuple[float, Gradient]:
    """Compute the loss of one optimizer step from rewards, and its gradient by log-probs and entropies.

    Args:
        columns: rewards of every function, N each.
        entropy: coefficient of the entropy bonus; None: the initial one.
    """
    parts = [
        host(mixin, OneRank(), settings=vars(config), metrics_column="")
        for mixin in (LogprobMixin, AdvantageMixin, LossMixin)
    ]
    logprob, advantage, loss = parts
    logprob.processing_class = SimpleNamespace(pad_token_id=0)
    loss.entropy_control = entropy or EntropyControl(config.entropy_coef)
    loss.objective_settings = objective_settings(config)
    logps_NT, entropies_NT = (
        _padded(rows, 0.0).requires_grad_() for rows in (samples.logps, samples.entropies)
    )
    window = experience(config, samples, columns, logprob, advantage)
    outputs = [
        LogprobOutput(*(table[rows, : part.loss_mask_BT.shape[1]] for table in (logps_NT, entropies_NT)))
        for rows, part in zip(samples.micro_batches, window, strict=True)
    ]
    scored = iter(outputs)
    logprob.model, logprob.compute_logprobs = None, lambda *_, **__: next(scored)
    micro_batches = in_float64(loss.set_token_weights(window, logprob.compute_entropy_masks(window)), loss)
    losses = [
        loss.compute_policy_loss(batch, output).loss
        for batch, output in zip(micro_batches, outputs, strict=True)
    ]
    value = torch.stack(losses).sum()
    gradients = torch.autograd.grad(value, (logps_NT, entropies_NT), allow_unused=True)
    return value.item(), {
        (name, i, t): 0.0 if table is None else table[i, t].item()
        for name, table in zip(("logp", "entropy"), gradients, strict=True)
        for i, row in enumerate(samples.logps)
        for t in range(len(row))
    }


def experience(
    config: GRPOConfig, samples: Samples, columns: Any, logprob: Any, advantage: Any
) -> list[Experience]:
    """Collate the completions, compute advantages and split the rows over the accumulation steps."""
    corrected = config.use_vllm
    completions = [
        Completion(
            [3] * len(row),
            logps=samples.sampler[i] if corrected else None,
            loss_mask=samples.masks[i],
            truncated=samples.truncated[i],
        )
        for i, row in enumerate(samples.logps)
    ]
    count = len(samples)
    nothing: list[Any] = [{}] * count
    rollouts = RolloutBatch(nothing, nothing, [[5]] * count, completions, nothing, samples.size)
    old = samples.logps if samples.old is None else samples.old
    known = samples.old is not None or config.kl_in_reward
    tokens = logprob.collate(rollouts)
    tokens = replace(
        tokens,
        old_logps_BT=_padded(old, math.nan) if known else tokens.old_logps_BT.double(),
        sampler_logps_BT=_padded(samples.sampler, math.nan) if corrected else None,
    )
    logps = OldAndRefLogps(tokens.old_logps_BT, _padded(samples.ref, math.nan) if config.beta else None)
    rewards_NF = torch.tensor(columns, dtype=torch.float64).T
    weights_F = torch.tensor(config.reward_weights or [1.0] * len(columns), dtype=torch.float64)
    rewards = RewardBatch(rewards_NF, weights_F, samples.size, local=slice(0, count))
    rewards = logprob.apply_kl_penalty(rewards, tokens, logps if config.kl_in_reward else None)
    advantages = advantage.compute_advantages(rewards)
    assert advantages.dtype == torch.float64
    made = Experience.from_tokens(tokens, advantages, logps)
    return [made.select(rows) for rows in samples.micro_batches]


def in_float64(window: list[MicroBatch], loss: Any) -> list[MicroBatch]:
    """Replace the float32 weights of the trainer by the same in float64."""
    groups = [int(g) for batch in window for g in batch.group_ids_B]
    lengths = [int(n) for batch in window for n in batch.loss_mask_BT.sum(-1)]
    tokens = {g: sum(n for h, n in zip(groups, lengths, strict=True) if h == g) for g in groups}
    limit = loss.args.max_completion_length
    counts = WindowCounts(len(groups), sum(lengths), len(window), 1, limit, tokens)
    normalizer = NORMALIZERS[OBJECTIVES[loss.args.loss_type].normalizer]
    target = loss.args.entropy_target if loss.args.use_adaptive_entropy else None
    share = loss.entropy_control.applied(target) / max(sum(int(b.entropy_mask_BT.sum()) for b in window), 1)
    exact = []
    for batch in window:
        weights_BT = normalizer(batch.loss_mask_BT.double(), batch.group_ids_B, counts)
        torch.testing.assert_close(batch.token_weights_BT.double(), weights_BT, rtol=1e-6, atol=0.0)
        bonus_BT = batch.entropy_weights_BT
        if bonus_BT is not None:
            bonus_BT = batch.entropy_mask_BT.double() * share
            torch.testing.assert_close(batch.entropy_weights_BT.double(), bonus_BT, rtol=1e-6, atol=0.0)
        exact.append(replace(batch, token_weights_BT=weights_BT, entropy_weights_BT=bonus_BT))
    return exact


def _padded(rows: Sequence[Sequence[Any]], fill: float) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor(
        [[*map(stop, row), *[fill] * (width - len(row))] for row in rows], dtype=torch.float64
    )


def reward_columns(
    functions: Sequence[Callable[..., list[float]]], lengths: Sequence[int], solved: Sequence[bool]
) -> list[list[float]]:
    """Call reward functions on completions of the given lengths, of which some are correct."""
    given: dict[str, Any] = {
        "completion_ids": [[k % 7 for k in range(length)] for length in lengths],
        "completions": [f"\\boxed{{{1 if right else 2}}}" for right in solved],
        "solution": ["1"] * len(solved),
    }
    return [function(**given) for function in functions]
