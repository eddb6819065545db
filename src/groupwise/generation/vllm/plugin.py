"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

from groupwise.compat.vllm import register_weight_transfer_engine
from groupwise.compat.vllm_weights import add_worker_method
from groupwise.generation.vllm.weight_check import ADAPTERS, WEIGHTS, adapter_reports, weight_report

#: Name of the weight-transfer engine that needs no GPU.
BACKEND = "groupwise"


def register() -> None:
    """Register both sides of the weight-transfer engine of this package, and methods of vLLM's workers.

    May be called more than once.
    """
    room = "groupwise.generation.vllm"
    register_weight_transfer_engine(
        BACKEND, (f"{room}.receiver", "CheckpointReceiver"), (f"{room}.transfer", "BucketSender")
    )
    add_worker_method(WEIGHTS, weight_report)
    add_worker_method(ADAPTERS, adapter_reports)
