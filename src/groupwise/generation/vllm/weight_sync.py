"""Weight sync into the colocated engine: all weights, or the LoRA adapter alone."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from groupwise.compat.vllm import add_lora, remove_lora
from groupwise.errors import ConfigError
from groupwise.generation.vllm.plugin import BACKEND
from groupwise.generation.vllm.transfer import WeightTransfer
from groupwise.generation.vllm.weight_check import WeightCheck
from groupwise.policy.introspection import CausalLM
from groupwise.policy.weight_iterator import LoRAWeights, PolicyWeights, base_weights
from groupwise.policy.weight_source import EngineWeights

if TYPE_CHECKING:
    from vllm import LLM

#: Values of ``max_lora_rank`` that vLLM accepts.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_adapter_ids = itertools.count(1)  # of all adapters of this process: several may be in one engine


class FullWeightSync:
    """Pushes all weights into the colocated engine, with adapters merged into them.

    Attributes:
        sleep_level: of ``LLM.sleep``; 1 moves the engine's weights to the host, 2 discards them.
        request: ``LoRARequest`` of the adapter; None: requests use the weights of the model.
    """

    sleep_level = 2  # the next push restores them
    request: Any = None

    def __init__(self, engine: LLM) -> None:
        self.weights = EngineWeights()
        self.transfer = WeightTransfer(BACKEND, engine, self.weights, in_process=True)

    def push(self, source: PolicyWeights, step: int, check: WeightCheck) -> str | None:
        """Load the weights of optimizer step ``step`` into the engine and compare them.

        Returns:
            the digest of all tensors; None if they were not compared.
        """
        self.weights.begin(lambda: check.record(source.full()))
        self.transfer.push(step)
        return check.compare()

    def close(self) -> None:
        """Release files and connections."""
        self.transfer.close()


class LoRAWeightSync:
    """Pushes only the LoRA adapter; the engine loads the base weights once, at start.

    Has the methods and attributes of :class:`FullWeightSync`.
    """

    sleep_level = 1  # the base weights are not pushed again
    request: Any = None

    def __init__(self, engine: LLM) -> None:
        self.engine = engine
        self.directory = Path(tempfile.mkdtemp(prefix="groupwise-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def push(self, source: PolicyWeights, step: int, check: WeightCheck) -> str | None:
        """Save the adapter and load it into the engine under a new id, because vLLM caches adapters by id."""
        from vllm.lora.request import LoRARequest

        if check.needs_base:
            check.compare_base(source.base())
        if self.request is not None:
            remove_lora(self.engine, self.request.lora_int_id)
        adapter, number = source.adapter(), next(_adapter_ids)
        save_adapter(adapter, self.directory)
        self.request = LoRARequest(f"adapter-{number}", number, str(self.directory))
        add_lora(self.engine, self.request)
        return check.compare_adapter(adapter)

    def close(self) -> None:
        self._remove()


def save_adapter(adapter: LoRAWeights, directory: Path) -> int:
    """Write an adapter in the format of PEFT, which vLLM reads; returns the number of bytes."""
    path = directory / "adapter_model.safetensors"
    save_file(dict(adapter.tensors), path)
    (directory / "adapter_config.json").write_text(json.dumps(adapter.config, default=str))
    return path.stat().st_size


def lora_rank(model: CausalLM) -> int:
    """Return the largest rank of a LoRA adapter that vLLM can load beside the base weights.

    Raises:
        ConfigError: the policy does not train a plain LoRA adapter.
    """
    lora = model.peft_config[model.active_adapter] if hasattr(model, "active_adapter") else None
    if lora is None or lora.peft_type != "LORA":
        raise ConfigError(
            "vllm_engine_kwargs['enable_lora'] sends only the LoRA adapter, but the policy has none; leave "
            "it out"
        )
    unsupported = [
        name
        for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
        if getattr(lora, name, None)
    ] + (["bias"] if lora.bias != "none" else [])
    if unsupported:
        raise ConfigError(
            f"the adapter has {', '.join(unsupported)}, which vLLM does not support in an adapter; "
            "set vllm_engine_kwargs['enable_lora'] to False to send merged weights"
        )
    return max([lora.r, *lora.rank_pattern.values()])


def adapter_arguments(model: CausalLM, directory: str, *, quantized: bool = False) -> dict[str, Any]:
    """Return the engine arguments of LoRA weight sync, after writing the base weights to ``directory``.

    Args:
        quantized: write 4-bit weights as they are, for an engine that loads them; otherwise as full matrices.

    Raises:
        ConfigError: see :func:`lora_rank`.
    """
    rank = lora_rank(model)
    weights = base_weights(model, dequantize=not quantized)
    base = {name: tensor.cpu().contiguous() for name, tensor in weights}
    save_file(base, Path(directory) / "model.safetensors", metadata={"format": "pt"})
    return {
        "enable_lora": True,
        "load_format": "bitsandbytes" if quantized else "safetensors",
        "weight_transfer_config": None,
        "max_lora_rank": next((allowed for allowed in _RANKS if allowed >= rank), rank),
    }
