"""The engine's side of the senders that need no GPU. Runs inside vLLM's workers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

# It warns about every layer that has no weights at all; parameters that got none are an error below.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

#: What it says about every weight at every update where an engine in bfloat16 serves weights kept in float32.
ROUNDED = "Attempted to load weight %s with dtype"
logging.getLogger("vllm.model_executor.models.utils").addFilter(
    lambda record: not str(record.msg).startswith(ROUNDED)
)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on."""


@dataclass
class Weights(WeightTransferUpdateInfo):
    """One bucket: its pairs, or the safetensors file that holds them. Neither: all buckets were sent."""

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
        """Note what there is to load, before an update takes the layers apart."""
        self.names = {name for name, _ in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        self.missing = set(self.names)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Weights) -> None:
        weights = update_info.weights
        if update_info.path is not None:
            # Mapped into memory: stays readable when the sender has removed the file.
            weights = list(load_file(update_info.path, device=str(self.device)).items())
        if weights is None:
            self._expect_nothing_more()
            return
        # Some models do not say what they took.
        self.missing -= self.model.load_weights(weights) or self.missing

    def _expect_nothing_more(self) -> None:
        if self.missing and self.model_config.quantization is None:
            some = ", ".join(sorted(self.missing)[:4])
            raise ValueError(
                f"the trainer sent no weights for {len(self.missing)} parameters of the engine ({some}, "
                "...): the two do not hold the same model"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for path, layer in self.model.named_modules():
            # On a CPU, a head that is tied to the embedding computes with a repacked copy of its weights. It
            # loads none of its own, so without this the copy would stay that of the first load.
            if hasattr(layer, "cpu_linear") and f"{path}.weight" not in self.names:
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing to release."""
