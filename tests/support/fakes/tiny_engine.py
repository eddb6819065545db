"""An engine that loads weights as vLLM does: fused matrices, and matrices that only a kernel has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from groupwise.generation.vllm.plugin import ADAPTERS
from groupwise.generation.vllm.weight_places import DigestReport, find_places
from groupwise.policy.digests import row_digests

FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def target(name: str) -> tuple[str, int]:
    """Return the parameter that a checkpoint's tensor is loaded to, and its index among its parts."""
    for part, (whole, index) in FUSED.items():
        if f".{part}." in name:
            return name.replace(f".{part}.", f".{whole}."), index
    return name, 0


class TinyEngine:
    """Weights of a checkpoint in an engine, with the calls of ``vllm.LLM`` and of its workers.

    Args:
        weights: (name, tensor) pairs of a checkpoint, whose shapes it takes; its own values are random.
        tied_head: compute logits with a repacked copy of the embedding.

    Attributes:
        fault: called with the name and the tensor of everything that is received; returns what is loaded, or
            None.
        damage: called at the end of an update.
        ignores: leave updates out.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype = torch.float32,
        tied_head: bool = True,
    ) -> None:
        self.rank = 0
        self.model_config = SimpleNamespace(dtype=dtype, max_model_len=128, max_logprobs=20)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in weights}
        rows: dict[str, dict[int, int]] = {}
        for name, shape in self.shapes.items():
            whole, index = target(name)
            rows.setdefault(whole, {})[index] = shape[0]
        self.first_row = {
            name: sum(rows[whole][i] for i in range(index))
            for name, (whole, index) in ((name, target(name)) for name in self.shapes)
        }
        self.parameters: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            whole = target(name)[0]
            self.parameters[whole] = torch.rand(sum(rows[whole].values()), *shape[1:], dtype=dtype)
        self.repacked = [name for name in self.parameters if "proj" in name]
        self.tied = "model.embed_tokens.weight" if tied_head else ""
        self.kernels: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}  # transposed, digests of rows
        self.adapters: list[dict[str, torch.Tensor]] = []  # the latest first
        self.fault: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda name, tensor: tensor
        self.damage: Callable[[TinyEngine], None] = lambda engine: None
        self.ignores = False
        self.version: str | None = None
        self._loaded: dict[str, torch.Tensor] = {}
        self._places: Any = None
        self.finish_weight_update()

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        for name, tensor in weights:
            part = parameters[target(name)[0]].data.narrow(0, self.first_row[name], tensor.shape[0])
            part.copy_(tensor)

    # The calls of an update.

    def init_weight_transfer_engine(self, request: Any) -> None:
        pass

    def start_weight_update(self) -> None:
        for name in self.repacked:  # as they were before they were repacked, without values
            self.parameters[name] = self.kernels[name][0].T.clone()

    def update_weights(self, request: dict[str, Any]) -> None:
        info = request["update_info"]
        weights = list(load_file(info["path"]).items()) if info.get("path") else info.get("weights") or []
        if self.ignores:
            return
        for name, tensor in weights:
            loaded = self.fault(name, tensor)
            if loaded is not None:
                self.load([(name, loaded)], self.parameters)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.version = weight_version
        for name in (*self.repacked, self.tied):
            if name:
                matrix = self.parameters[name]
                self.kernels[name] = (matrix.T.contiguous(), row_digests(matrix))
        for name in self.repacked:
            self.parameters[name] = self.parameters[name].new_empty(0)
        self.damage(self)

    # Workers.

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        if method == ADAPTERS:
            reports = [self._adapter_report(adapter, kwargs["shapes"]) for adapter in self.adapters]
        else:
            reports = [self._weight_report(**kwargs)]
        self.groupwise_reports = reports
        return [reports]

    def _weight_report(self, shapes: dict[str, list[int]]) -> dict[str, Any]:
        if self._places is None or self._places[0] != shapes:
            on_meta = {name: tensor.to("meta") for name, tensor in self._whole().items()}
            found = find_places(lambda weights: self.load(weights, on_meta), shapes, on_meta, torch.float32)
            self._places = (shapes, found)
        places, report = self._places[1], DigestReport(shapes)
        report.empty += places.empty
        for name, own in places.by_parameter.items():
            if self.parameters[name].numel():
                report.add(own, self.parameters[name])
            if name in self.kernels:
                packed, rows_N = self.kernels[name]
                read = lambda packed=packed: packed.T  # noqa: E731
                report.add_repacked(own, places.shapes[name][1], packed.dtype, read, rows_N)
        return report.result()

    def _whole(self) -> dict[str, torch.Tensor]:
        return {
            name: self.kernels[name][0].T.contiguous() if name in self.repacked else tensor
            for name, tensor in self.parameters.items()
        }

    def _adapter_report(
        self, adapter: dict[str, torch.Tensor], shapes: dict[str, list[int]]
    ) -> dict[str, Any]:
        report = DigestReport(shapes)
        for name in shapes.keys() & adapter.keys():
            padded = torch.zeros(
                adapter[name].shape[0] + 4, adapter[name].shape[1] + 4, dtype=adapter[name].dtype
            )
            padded[: adapter[name].shape[0], : adapter[name].shape[1]] = adapter[name]
            report.add_tensor(name, padded)
        return report.result()

    def add_adapter(self, tensors: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Load an adapter as vLLM does: B is scaled."""
        if not self.ignores:
            faulty = {name: self.fault(name, tensor) for name, tensor in tensors.items()}
            kept = {name: tensor for name, tensor in faulty.items() if tensor is not None}
            self.adapters.insert(0, scaled_adapter(kept, scaling))
            del self.adapters[2:]
        self.damage(self)

    # The calls of ``vllm.LLM`` for a colocated engine.

    @property
    def llm_engine(self) -> TinyEngine:
        return self

    def add_lora(self, request: Any) -> None:
        directory = Path(request.lora_path)
        config = json.loads((directory / "adapter_config.json").read_text())
        self.add_adapter(
            load_file(directory / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
        )

    def remove_lora(self, number: int) -> None:
        pass  # an old adapter may stay

    def reset_prefix_cache(self) -> None:
        pass


def scaled_adapter(tensors: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """Return an adapter as vLLM keeps it: B is multiplied by the scaling."""
    return {name: tensor * scaling if "lora_B" in name else tensor for name, tensor in tensors.items()}
