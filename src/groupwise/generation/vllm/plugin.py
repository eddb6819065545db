"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

from groupwise.compat.vllm import register_weight_transfer_engine

#: Name of the weight-transfer engine that needs no GPU.
BACKEND = "groupwise"


def register() -> None:
    """Register both sides of the weight-transfer engine of this package. May be called more than once."""
    room = "groupwise.generation.vllm"
    register_weight_transfer_engine(
        BACKEND, (f"{room}.receiver", "CheckpointReceiver"), (f"{room}.transfer", "BucketSender")
    )
