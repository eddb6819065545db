"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

from groupwise.compat.vllm import register_weight_transfer_engine

#: Name of the weight-transfer engine for senders that need no GPU.
BACKEND = "groupwise"


def register() -> None:
    """Register the weight-transfer engine of this package. May be called more than once."""
    register_weight_transfer_engine(BACKEND, "groupwise.generation.vllm.receiver", "CheckpointReceiver")
