"""The trainer for subclasses and scripts written for TRL's ``GRPOTrainer``.

>>> from groupwise.trl_hooks import GRPOConfig, GRPOTrainer

Overrides of TRL's hooks, ``super()`` calls and methods replaced on the instance work as with TRL 1.16, whose
defaults the configuration has.
"""

from groupwise.trl_hooks.config import GRPOConfig
from groupwise.trl_hooks.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
