"""Settings of the outer loop of iterative GRPO."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError, nearest_name

#: Objectives of the reward model: the functions are in ``groupwise.recipes.reward_training``.
REWARD_OBJECTIVES = ("pairwise", "pointwise")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class IterativeConfig:
    """Outer loop of iterative GRPO. The optimizer steps of an iteration are ``max_steps / iterations``.

    Attributes:
        iterations: outer iterations; the reference becomes the policy at the end of each.
        reward_prompts: prompts sampled after each iteration to train the reward model, ``num_generations``
            completions each; the processes share them.
        reward_objective: "pairwise" (Bradley-Terry, on completions of a prompt with different labels), or
            "pointwise" (cross-entropy with labels from 0 to 1).
        reward_learning_rate: of AdamW, constant.
        reward_batch_size: examples per optimizer step of the reward model.
        reward_epochs: passes over the examples of an iteration.
        replay_share: part of the examples that comes from earlier iterations.

    Raises:
        ConfigError: a value is out of range; all of them in one message.
    """

    iterations: int
    reward_prompts: int = 64
    reward_objective: str = "pairwise"
    reward_learning_rate: float = 1e-5
    reward_batch_size: int = 8
    reward_epochs: int = 1
    replay_share: float = 0.1

    def __post_init__(self) -> None:
        counts = ("iterations", "reward_prompts", "reward_batch_size", "reward_epochs")
        given = {name: getattr(self, name) for name in counts}
        found = [
            f"{name}={value!r} is not allowed; give an integer of 1 or more"
            for name, value in given.items()
            if not _is_number(value) or not isinstance(value, int) or value < 1
        ]
        if self.reward_objective not in REWARD_OBJECTIVES:
            nearest = nearest_name(str(self.reward_objective), list(REWARD_OBJECTIVES))
            found.append(
                f"reward_objective={self.reward_objective!r} is unknown; allowed: "
                f"{', '.join(REWARD_OBJECTIVES)}; nearest: {nearest!r}"
            )
        if not (_is_number(self.reward_learning_rate) and 0 < self.reward_learning_rate < math.inf):
            found.append(
                f"reward_learning_rate={self.reward_learning_rate!r} is not allowed; give a finite number > 0"
            )
        if not (_is_number(self.replay_share) and 0 <= self.replay_share < 1):
            found.append(f"replay_share={self.replay_share!r} is not allowed; it is at least 0 and below 1")
        if found:
            raise ConfigError("IterativeConfig: " + "; ".join(found))

    def with_reference_refresh(self, args: GRPOConfig) -> GRPOConfig:
        """Return a copy of ``args`` in which the reference becomes the policy after every iteration.

        Raises:
            ConfigError: ``args`` have no whole number of steps per iteration, cannot be resumed exactly, or
                move the reference otherwise.
        """
        steps, remainder = divmod(args.max_steps, self.iterations)
        if remainder or steps < 1:
            nearest = max(round(args.max_steps / self.iterations), 1) * self.iterations
            raise ConfigError(
                f"max_steps={args.max_steps} is no positive multiple of iterations={self.iterations}; "
                f"nearest valid: max_steps={nearest}"
            )
        for name in ("save_only_model", "load_best_model_at_end"):
            if getattr(args, name):
                raise ConfigError(f"{name}=True does not work with iterations, which resume from checkpoints")
        for name in ("save_strategy", "eval_strategy", "logging_strategy"):
            if getattr(args, name) == "epoch":
                raise ConfigError(f'{name}="epoch" does not work: iterations end within epochs; use "steps"')
        if args.beta == 0:
            return args
        refresh: dict[str, Any] = {"ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": steps}
        if args.sync_ref_model and any(getattr(args, name) != value for name, value in refresh.items()):
            raise ConfigError(
                f"sync_ref_model=True moves the reference otherwise than iterations={self.iterations}; drop "
                f"sync_ref_model, or set ref_model_mixup_alpha=1.0 and ref_model_sync_steps={steps}"
            )
        return replace(args, sync_ref_model=True, **refresh)
