"""What the trainer needs before the first step, checked and built."""

from __future__ import annotations

from typing import Any

from groupwise.errors import ConfigError
from groupwise.setup.data import check_data, evaluation_rows
from groupwise.setup.lengths import check_prompt_lengths
from groupwise.setup.policy import model_name, prepare_policy, router_aux_loss_coef, speed_up
from groupwise.setup.rewards import LoadedRewards, RewardSetup, check_rewards, load_rewards
from groupwise.setup.step import check_backend, make_backend, make_parity_gate, make_scorer, window_cut
from groupwise.setup.vision import check_vision

__all__ = [
    "LoadedRewards",
    "RewardSetup",
    "check_backend",
    "check_data",
    "check_prompt_lengths",
    "check_rewards",
    "check_vision",
    "evaluation_rows",
    "load_rewards",
    "loss_is_scaled",
    "make_backend",
    "make_parity_gate",
    "make_scorer",
    "model_name",
    "prepare_policy",
    "refuse_unavailable",
    "router_aux_loss_coef",
    "speed_up",
    "window_cut",
]


def refuse_unavailable(**features: Any) -> None:
    """Raise for arguments whose feature does not exist yet."""
    given = [name for name, value in features.items() if value is not None]
    if given:
        raise ConfigError(
            f"not implemented yet: {', '.join(given)}; leave {'them' if given[1:] else 'it'} out"
        )


def loss_is_scaled(*_: Any, **__: Any) -> None:
    """Stands for ``compute_loss_func``, which is never called because ``compute_loss`` is overridden."""
    raise AssertionError("compute_loss is overridden")
