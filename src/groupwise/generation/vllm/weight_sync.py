"""What is brought into a colocated engine after an update: all weights, or an adapter alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from groupwise.errors import BackendError, ConfigError
from groupwise.generation.vllm.transport import LocalSender
from groupwise.generation.weight_iterator import buckets, gathering, weight_iterator, whole_tensor

# the ranks that vLLM has kernels for
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LocalReceiver:
    """``vllm.LLM`` behind the interface of the senders."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update(weight_version)


class FullWeightSync:
    """Every weight, adapters merged into those that they change."""

    sleep_level = 2  # weights are discarded: the trainer has them

    def __init__(self, engine: Any) -> None:
        self.sender, self.receiver = LocalSender(), LocalReceiver(engine)
        self.sender.connect(self.receiver)

    def bring(self, params: Iterator[tuple[str, torch.Tensor]], step: int) -> None:
        self.sender.push(buckets(params), self.receiver, step)

    def request_arguments(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.sender.close()


class LoRAWeightSync:
    """The LoRA adapter, a small part of the weights; the engine holds the base model from its start.

    Args:
        policy: returns the unwrapped ``PeftModel``.
    """

    sleep_level = 1  # the base weights wait in the memory of the host: nobody brings them again

    def __init__(self, engine: Any, policy: Callable[[], Any]) -> None:
        self.engine, self.policy = engine, policy
        self.directory = Path(tempfile.mkdtemp(prefix="groupwise-"))
        self.pushes = 0
        self.request: Any = None

    def bring(self, params: Iterator[tuple[str, torch.Tensor]], step: int) -> None:
        """Save the adapter and let the engine load it under a new id; the stream stays unread."""
        from vllm.lora.request import LoRARequest

        if self.request is not None:
            self.engine.llm_engine.remove_lora(self.request.lora_int_id)
        self.pushes += 1
        save_adapter(self.policy(), self.directory)
        self.request = LoRARequest("policy", self.pushes, str(self.directory))
        self.engine.llm_engine.add_lora(self.request)

    def request_arguments(self) -> dict[str, Any]:
        return {"lora_request": self.request}

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def save_adapter(model: Any, directory: Path) -> None:
    """Write the active adapter as vLLM reads it; sharded tensors are gathered, by all processes together.

    Raises:
        BackendError: the first version of FSDP holds it.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise BackendError(
            "vllm_engine_kwargs['enable_lora'] sends an adapter alone, which is not read out of the first "
            "version of FSDP; set fsdp_version to 2, or leave enable_lora out: the adapter is merged then"
        )
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    name = model.active_adapter
    own = {key: parameter for key, parameter in model.named_parameters() if "lora_" in key}
    with gathering(own.values()):
        whole = {key: whole_tensor(parameter.data) for key, parameter in own.items()}
        tensors = get_peft_model_state_dict(model, state_dict=whole, adapter_name=name)
        tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = model.peft_config[name].to_dict()
    settings["target_modules"] = sorted(settings["target_modules"])
    (directory / "adapter_config.json").write_text(json.dumps(settings, default=str))


def adapter_arguments(model: Any, directory: str) -> dict[str, Any]:
    """Engine arguments of a run that sends its adapter alone; the base weights are written to ``directory``.

    Raises:
        ConfigError: the policy trains something that is no plain LoRA adapter.
    """
    settings = model.peft_config[model.active_adapter] if hasattr(model, "active_adapter") else None
    if settings is None or settings.peft_type != "LORA":
        raise ConfigError(
            "vllm_engine_kwargs['enable_lora'] sends a LoRA adapter alone, and the policy has none; leave it "
            "out"
        )
    beyond = [
        name
        for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
        if getattr(settings, name, None)
    ] + (["bias"] if settings.bias != "none" else [])
    if beyond:
        raise ConfigError(
            f"the adapter has {', '.join(beyond)}, which vLLM does not take from an adapter; leave "
            "enable_lora out of vllm_engine_kwargs: the adapter is merged then"
        )
    from safetensors.torch import save_file

    with model.disable_adapter():
        base = {name: tensor.cpu().contiguous() for name, tensor in weight_iterator(model)}
    save_file(base, Path(directory) / "model.safetensors", metadata={"format": "pt"})
    rank = max([settings.r, *settings.rank_pattern.values()])
    return {
        "load_format": "safetensors",
        "weight_transfer_config": None,
        "max_loras": 1,
        "max_lora_rank": next((allowed for allowed in _RANKS if allowed >= rank), rank),
    }
