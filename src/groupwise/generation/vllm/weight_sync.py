"""Weight sync for the colocated vLLM engine: full weights, or only the LoRA adapter."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.compat.vllm import add_lora, remove_lora
from groupwise.errors import ConfigError
from groupwise.generation.vllm.transport import LocalSender
from groupwise.policy.introspection import CausalLM
from groupwise.policy.weight_iterator import LoRAWeights, WeightSource, base_weights, buckets

if TYPE_CHECKING:
    from vllm import LLM

#: Values of ``max_lora_rank`` that vLLM accepts.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LocalReceiver:
    """``WeightReceiver`` of a ``vllm.LLM`` in this process."""

    def __init__(self, engine: LLM) -> None:
        self.engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update(weight_version)


class WeightSync(ABC):
    """Transfer of weights into the colocated engine.

    Attributes:
        sleep_level: of ``LLM.sleep``; 1 moves the engine's weights to the host, 2 discards them.
    """

    sleep_level: int

    @abstractmethod
    def push(self, source: WeightSource, step: int) -> None:
        """Load the weights of optimizer step ``step`` into the engine."""

    def generate_kwargs(self) -> dict[str, Any]:
        """Return further arguments of ``LLM.generate``."""
        return {}

    def close(self) -> None:
        """Release files and connections."""


class FullWeightSync(WeightSync):
    """Pushes all weights, with adapters merged into them."""

    sleep_level = 2  # the next push restores them

    def __init__(self, engine: LLM) -> None:
        self.sender, self.receiver = LocalSender(), LocalReceiver(engine)
        self.sender.connect(self.receiver)

    def push(self, source: WeightSource, step: int) -> None:
        self.sender.push(buckets(source.full()), self.receiver, step)

    def close(self) -> None:
        self.sender.close()


class LoRAWeightSync(WeightSync):
    """Pushes only the LoRA adapter; the engine loads the base weights once, at start."""

    sleep_level = 1  # the base weights are not pushed again

    def __init__(self, engine: LLM) -> None:
        self.engine = engine
        self.directory = Path(tempfile.mkdtemp(prefix="groupwise-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self.num_pushes = 0
        self.request: Any = None  # vllm.lora.request.LoRARequest

    def push(self, source: WeightSource, step: int) -> None:
        """Save the adapter and load it into the engine under a new id, because vLLM caches adapters by id."""
        from vllm.lora.request import LoRARequest

        if self.request is not None:
            remove_lora(self.engine, self.request.lora_int_id)
        self.num_pushes += 1
        save_adapter(source.adapter(), self.directory)
        self.request = LoRARequest("policy", self.num_pushes, str(self.directory))
        add_lora(self.engine, self.request)

    def generate_kwargs(self) -> dict[str, Any]:
        return {"lora_request": self.request}

    def close(self) -> None:
        self._remove()


def save_adapter(adapter: LoRAWeights, directory: Path) -> None:
    """Write an adapter in the format of PEFT, which vLLM reads."""
    from safetensors.torch import save_file

    save_file(dict(adapter.tensors), directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(adapter.config, default=str))


def adapter_arguments(model: CausalLM, directory: str, *, quantized: bool = False) -> dict[str, Any]:
    """Return the engine arguments of LoRA weight sync, after writing the base weights to ``directory``.

    Args:
        quantized: write 4-bit weights as they are, for an engine that loads them; otherwise as full matrices.

    Raises:
        ConfigError: the policy does not train a plain LoRA adapter.
    """
    settings = model.peft_config[model.active_adapter] if hasattr(model, "active_adapter") else None
    if settings is None or settings.peft_type != "LORA":
        raise ConfigError(
            "vllm_engine_kwargs['enable_lora'] sends only the LoRA adapter, but the policy has none; leave "
            "it out"
        )
    unsupported = [
        name
        for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
        if getattr(settings, name, None)
    ] + (["bias"] if settings.bias != "none" else [])
    if unsupported:
        raise ConfigError(
            f"the adapter has {', '.join(unsupported)}, which vLLM does not support in an adapter; "
            "set vllm_engine_kwargs['enable_lora'] to False to send merged weights"
        )
    from safetensors.torch import save_file

    weights = base_weights(model, dequantize=not quantized)
    base = {name: tensor.cpu().contiguous() for name, tensor in weights}
    save_file(base, Path(directory) / "model.safetensors", metadata={"format": "pt"})
    rank = max([settings.r, *settings.rank_pattern.values()])
    return {
        "enable_lora": True,
        "load_format": "bitsandbytes" if quantized else "safetensors",
        "weight_transfer_config": None,
        "max_loras": 1,
        "max_lora_rank": next((allowed for allowed in _RANKS if allowed >= rank), rank),
    }
