"""Iterative GRPO and the training of reward models."""
