"""Rewards to advantages."""

from __future__ import annotations

import torch

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import ADVANTAGES, AdvantageSettings
from groupwise.errors import ConfigError
from groupwise.records import RewardBatch


class AdvantageMixin:
    """Compute advantages; the estimators are the table ``groupwise.core.advantages.ADVANTAGES``."""

    args: GRPOConfig

    def compute_advantages(self, rewards: RewardBatch) -> torch.Tensor:
        """Compute the advantage of every completion of the global batch.

        Override to use your own; groups are contiguous runs of ``rewards.num_generations`` rows.

        Args:
            rewards: rewards of all ranks.

        Returns:
            (N,), or (N, T) with one value per completion token, float32, for the N completions of all ranks.
        """
        settings = AdvantageSettings(
            scale=self.args.scale_rewards, aggregation=self.args.multi_objective_aggregation
        )
        # (N, F) -> (N,): rewards minus the baseline of their group, divided by a standard deviation; zero
        # where all rewards of a group are equal. With step rewards (N, T), one value per token.
        return ADVANTAGES[self.args.advantage_baseline](rewards, settings)


def checked_advantages(advantages: torch.Tensor, rewards: RewardBatch) -> torch.Tensor:
    """Return the result of ``compute_advantages``, which may be overridden or registered; (N, 1) as (N,).

    Raises:
        ConfigError: it has not one row per completion of all ranks, or fewer columns than the longest one.
    """
    num_rows, num_tokens = len(rewards.rewards_NF), rewards.num_tokens
    shape = tuple(advantages.shape)
    if shape == (num_rows, 1):  # as token-wise advantages, they would be those of the first tokens
        return advantages.squeeze(1)
    if shape == (num_rows,) or (len(shape) == 2 and shape[0] == num_rows and shape[1] >= num_tokens):
        return advantages
    raise ConfigError(
        f"compute_advantages returned a tensor of shape {shape}; allowed: ({num_rows},), one advantage for "
        f"each completion of all processes, or ({num_rows}, {num_tokens}), one for each of its tokens"
    )
