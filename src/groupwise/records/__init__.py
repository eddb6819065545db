"""Records that travel through a step; the type says how far the data have come.

    RolloutRequest -generate_rollouts-> RolloutBatch -collate-> TokenBatch -> Experience -> MicroBatch
                                        RolloutBatch -compute_rewards-> RewardBatch -compute_advantages-> (N,)
                                        MicroBatch -compute_policy_loss-> LossOutput

Axis suffixes: B sequences of this rank, N of all ranks, L prompt tokens, T completion tokens, X is T or 1.
"""

from __future__ import annotations

from groupwise.records.images import ImageInputs
from groupwise.records.rollout import (
    Completion,
    GroupRewards,
    Mode,
    RewardBatch,
    RewardFunction,
    RolloutBatch,
    RolloutFunction,
    RolloutRequest,
    RoutedExperts,
    Row,
    SamplerSettings,
    SamplingOptions,
    copied,
)
from groupwise.records.sampling_mask import SamplingMask
from groupwise.records.tensors import (
    Experience,
    LogprobOutput,
    LossOutput,
    MicroBatch,
    OldAndRefLogps,
    PackedSequences,
    TokenBatch,
    align_advantages,
)

__all__ = [
    "Completion",
    "Experience",
    "GroupRewards",
    "ImageInputs",
    "LogprobOutput",
    "LossOutput",
    "MicroBatch",
    "Mode",
    "OldAndRefLogps",
    "PackedSequences",
    "RewardBatch",
    "RewardFunction",
    "RolloutBatch",
    "RolloutFunction",
    "RolloutRequest",
    "RoutedExperts",
    "Row",
    "SamplerSettings",
    "SamplingMask",
    "SamplingOptions",
    "TokenBatch",
    "align_advantages",
    "copied",
]
