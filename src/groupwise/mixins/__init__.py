"""Glue between the trainer and the functions: each mixin is one verb a subclass may override.

A mixin has no ``__init__``, overrides nothing of ``transformers.Trainer`` and reads nothing another mixin
owns: the trainer sets every attribute annotated here and passes records from one to the next.
"""

from groupwise.mixins.advantage import AdvantageMixin
from groupwise.mixins.logprob import LogprobMixin
from groupwise.mixins.loss import LossMixin
from groupwise.mixins.reward import RewardMixin
from groupwise.mixins.rollout import RolloutMixin

__all__ = ["AdvantageMixin", "LogprobMixin", "LossMixin", "RewardMixin", "RolloutMixin"]
