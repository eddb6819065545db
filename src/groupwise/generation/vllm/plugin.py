"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

from groupwise.generation.vllm.transport import BACKEND


def register() -> None:
    """Register the weight-transfer engine of this package. May be called more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "groupwise.generation.vllm.receiver", "CheckpointReceiver"
        )
