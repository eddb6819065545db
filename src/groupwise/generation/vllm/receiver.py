"""Weight-transfer engine for the senders that need no GPU. Runs inside vLLM's workers."""

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

from groupwise.compat.vllm import layerwise_reload
from groupwise.compat.vllm_weights import loaded_parameters, repack_experts

# vLLM warns about every layer without weights; parameters that receive none are an error below.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

#: Warning per weight and update of an engine in bfloat16 that loads float32 weights; filtered out.
ROUNDED = "Attempted to load weight %s with dtype"
logging.getLogger("vllm.model_executor.models.utils").addFilter(
    lambda record: not str(record.msg).startswith(ROUNDED)
)


@dataclass
class Weights(WeightTransferUpdateInfo):
    """One bucket of weights.

    Attributes:
        weights: (checkpoint name, tensor) pairs.
        path: a safetensors file instead. Without weights and path: all buckets were sent.
    """

    weights: list[tuple[str, Any]] | None = None
    path: str | None = None


class CheckpointReceiver(WeightTransferEngine[WeightTransferInitInfo, Weights]):
    """Loads buckets of weights under checkpoint names.

    Uses vLLM's layerwise reload: kernels repack the weights of loaded layers, after which ``load_weights``
    alone fails.
    """

    init_info_cls = WeightTransferInitInfo  # empty: no connection to set up
    update_info_cls = Weights

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Record the parameter names, before an update replaces the layers' parameters."""
        self.names = loaded_parameters(self.model)

    def start_weight_update(self) -> None:
        self.missing = set(self.names)
        start, _ = layerwise_reload()
        start(self.model)
        repack_experts(self.model)

    def receive_weights(self, update_info: Weights) -> None:
        weights = update_info.weights
        if update_info.path is not None:
            # Memory-mapped: stays readable after the sender has removed the file.
            weights = list(load_file(update_info.path, device=str(self.device)).items())
        if weights is not None:
            # Some models do not return the names they loaded; up to 0.31 those of experts lack a module.
            loaded = self.model.load_weights(weights) or self.missing
            self.missing -= {
                one for one in self.missing if {one, one.replace(".routed_experts.", ".")} & loaded
            }
        elif self.missing and self.model_config.quantization is None:
            some = ", ".join(sorted(self.missing)[:4])
            raise ValueError(
                f"the trainer sent no weights for {len(self.missing)} parameters of the engine ({some}, "
                "...): policy and engine have different architectures"
            )

    def finish_weight_update(self) -> None:
        _, finish = layerwise_reload()
        finish(self.model, self.model_config)
        for path, layer in self.model.named_modules():
            # On a CPU, a head tied to the embedding computes with a repacked copy of the weights. The reload
            # repacks only layers with own weights, so the copy would keep the weights of the first load.
            if hasattr(layer, "cpu_linear") and f"{path}.weight" not in self.names:
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """No resources to release."""
