"""Rewards to advantages."""

from __future__ import annotations

import torch

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import ADVANTAGES, AdvantageSettings
from groupwise.records import RewardBatch


class AdvantageMixin:
    """Owns nothing; the estimators are a table in ``groupwise.core.advantages``."""

    args: GRPOConfig

    def compute_advantages(self, scored: RewardBatch) -> torch.Tensor:
        """Advantages of every completion of the global batch.

        Override it to use your own; groups are contiguous runs of ``scored.rewards.num_generations`` rows.

        Returns:
            (N,), or (N, T) with a value per completion token, for the N completions of all ranks.
        """
        settings = AdvantageSettings(
            scale=self.args.scale_rewards, aggregation=self.args.multi_objective_aggregation
        )
        return ADVANTAGES[self.args.advantage_baseline](scored.rewards, settings)
