"""The engine's side of the senders that need no GPU. Runs inside vLLM's workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on."""


@dataclass
class Weights(WeightTransferUpdateInfo):
    """One bucket: its pairs, or the safetensors file that holds them."""

    weights: list[tuple[str, Any]] | None = None
    path: str | None = None


class CheckpointReceiver(WeightTransferEngine[NoInitInfo, Weights]):
    """Loads buckets of weights under checkpoint names.

    Always through the reload functions: loaded layers are repacked for their kernels and take no checkpoint
    weights any more.
    """

    init_info_cls = NoInitInfo
    update_info_cls = Weights

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Weights) -> None:
        weights = update_info.weights
        if weights is None:
            # Mapped into memory: stays readable when the sender has removed the file.
            weights = list(load_file(update_info.path, device=str(self.device)).items())
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""
