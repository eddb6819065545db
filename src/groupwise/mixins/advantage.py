"""Rewards to advantages."""

from __future__ import annotations

import torch

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import ADVANTAGES, AdvantageSettings
from groupwise.records import RewardBatch


class AdvantageMixin:
    """Compute advantages; the estimators are the table ``groupwise.core.advantages.ADVANTAGES``."""

    settings: GRPOConfig

    def compute_advantages(self, rewards: RewardBatch) -> torch.Tensor:
        """Compute the advantage of every completion of the global batch.

        Override to use your own; groups are contiguous runs of ``rewards.rewards.num_generations`` rows.

        Args:
            rewards: rewards of all ranks.

        Returns:
            (N,), or (N, T) with one value per completion token, float32, for the N completions of all ranks.
        """
        settings = AdvantageSettings(
            scale=self.settings.scale_rewards, aggregation=self.settings.multi_objective_aggregation
        )
        return ADVANTAGES[self.settings.advantage_baseline](rewards.rewards, settings)
