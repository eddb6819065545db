"""The entry point that vLLM calls in each of its processes (``vllm.general_plugins``)."""

from __future__ import annotations

from groupwise.generation.vllm.transport import BACKEND


def register() -> None:
    """Make our side of the weight transfer known under its name; called any number of times."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "groupwise.generation.vllm.receiver", "CheckpointReceiver"
        )
