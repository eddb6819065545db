"""Settings of iterative GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.settings import Setting, field_violations, raise_for, with_settings
from groupwise.errors import ConfigError

#: Objectives of the reward model: the functions are in ``groupwise.commands.iterative.reward_training``.
REWARD_OBJECTIVES = ("pairwise", "pointwise")


@dataclass(frozen=True)
@with_settings({})
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

    SETTINGS: ClassVar[Mapping[str, Setting]]

    iterations: Annotated[int, Setting(ge=1)]
    reward_prompts: Annotated[int, Setting(ge=1)] = 64
    reward_objective: Annotated[str, Setting(choices=REWARD_OBJECTIVES)] = "pairwise"
    reward_learning_rate: Annotated[float, Setting(gt=0)] = 1e-5
    reward_batch_size: Annotated[int, Setting(ge=1)] = 8
    reward_epochs: Annotated[int, Setting(ge=1)] = 1
    replay_share: Annotated[float, Setting(ge=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        raise_for(field_violations(self), "IterativeConfig")

    def with_reference_refresh(self, args: GRPOConfig) -> GRPOConfig:
        """Return a copy of ``args`` in which the reference becomes the policy after every iteration.

        Raises:
            ConfigError: ``args`` have no whole number of steps per iteration, or they move the reference
                otherwise.
        """
        steps, remainder = divmod(args.max_steps, self.iterations)
        if remainder or steps < 1:
            nearest = max(round(args.max_steps / self.iterations), 1) * self.iterations
            raise ConfigError(
                f"max_steps={args.max_steps} is no positive multiple of iterations={self.iterations}; "
                f"nearest valid: max_steps={nearest}"
            )
        if args.beta == 0:
            return args
        refresh: dict[str, Any] = {"ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": steps}
        if args.sync_ref_model and any(getattr(args, name) != value for name, value in refresh.items()):
            raise ConfigError(
                f"sync_ref_model=True moves the reference otherwise than iterations={self.iterations}; drop "
                f"sync_ref_model, or set ref_model_mixup_alpha=1.0 and ref_model_sync_steps={steps}"
            )
        return replace(args, sync_ref_model=True, **refresh)
