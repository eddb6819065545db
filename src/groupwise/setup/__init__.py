"""What the trainer needs before the first step, checked and built."""

from __future__ import annotations

from typing import Any

from groupwise.setup.agents import AgentSetup, check_agents, check_chat_template, make_agents, own_data
from groupwise.setup.arguments import check_arguments
from groupwise.setup.backend import check_backend, make_backend
from groupwise.setup.data import PreparedData, check_data, evaluation_rows, num_positions, prepare_data
from groupwise.setup.policy import prepare_policy, router_aux_loss_coef, speed_up
from groupwise.setup.rewards import LoadedRewards, RewardSetup, check_rewards, load_rewards
from groupwise.setup.step import make_parity_gate, make_scorer, window_cut
from groupwise.setup.vision import check_vision

__all__ = [
    "AgentSetup",
    "LoadedRewards",
    "PreparedData",
    "RewardSetup",
    "check_agents",
    "check_arguments",
    "check_backend",
    "check_chat_template",
    "check_data",
    "check_rewards",
    "check_vision",
    "evaluation_rows",
    "load_rewards",
    "loss_is_scaled",
    "make_agents",
    "make_backend",
    "make_parity_gate",
    "make_scorer",
    "num_positions",
    "own_data",
    "prepare_data",
    "prepare_policy",
    "router_aux_loss_coef",
    "speed_up",
    "window_cut",
]


def loss_is_scaled(*_: Any, **__: Any) -> None:
    """Stands for ``compute_loss_func``, which is never called because ``compute_loss`` is overridden."""
    raise AssertionError("compute_loss is overridden")
