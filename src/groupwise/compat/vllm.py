"""Undocumented symbols of vLLM, seen in 0.32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def device_type() -> str:
    """Return the device type that the installed vLLM was built for."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def engine_argument_names() -> set[str]:
    """Return the names of the arguments of ``vllm.LLM``."""
    from vllm.engine.arg_utils import EngineArgs

    return set(EngineArgs.__dataclass_fields__)


def has_bitsandbytes() -> bool:
    """Return True if vLLM has layers of bitsandbytes, which are a package of their own since 0.28."""
    return importlib.util.find_spec("vllm_bnb_plugin") is not None


def register_weight_transfer_engine(name: str, module: str, cls: str) -> None:
    """Register a weight-transfer engine, unless ``name`` is registered."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, cls)


def join_nccl_group(init_info: dict[str, Any]) -> Any:
    """Join the NCCL group of the engine's workers as rank 0 and return it."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init(init_info)


def packed_broadcast(weights: Iterable[tuple[str, torch.Tensor]], group: Any) -> Callable[[], None]:
    """Return a function that broadcasts weights from rank 0 of ``group``; it may run in another thread.

    vLLM copies weights into its buffers on CUDA streams of its own, which wait only for each other. Here they
    wait for the caller's stream first; otherwise they could copy values of before the last update.
    """
    import torch
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    written = torch.cuda.current_stream().record_event()

    def after_write(item: tuple[str, torch.Tensor]) -> torch.Tensor:
        torch.cuda.current_stream().wait_event(written)  # the stream of the buffer
        return item[1]

    return lambda: packed_nccl_broadcast_producer(iter(weights), group, src=0, post_iter_func=after_write)


def layerwise_reload() -> tuple[Callable[[nn.Module], None], Callable[[nn.Module, Any], None]]:
    """Return the functions that start and finish a reload of loaded layers."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    return initialize_layerwise_reload, finalize_layerwise_reload


@contextmanager
def preserve_buffers() -> Iterator[None]:
    """Keep the loader of dummy weights from overwriting buffers of the models that it loads.

    Buffers that no checkpoint has are computed from the config, such as the pixel normalization of Qwen-VL
    (``input_norm``). vLLM's loader overwrites the persistent ones with random numbers, and no weight update
    would restore them.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def load_parameters(self: Any, model: nn.Module, model_config: Any) -> None:
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        load(self, model, model_config)
        for buffer, value in buffers:
            buffer.copy_(value)

    DummyModelLoader.load_weights = load_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        DummyModelLoader.load_weights = load  # type: ignore[method-assign]


def add_lora(engine: Any, request: Any) -> None:
    """Load a LoRA adapter into a ``vllm.LLM``."""
    engine.llm_engine.add_lora(request)


def remove_lora(engine: Any, adapter_id: int) -> None:
    """Unload a LoRA adapter from a ``vllm.LLM``."""
    engine.llm_engine.remove_lora(adapter_id)


def reset_encoder_cache(engine: Any) -> None:
    """Discard the outputs of the vision tower that a ``vllm.LLM`` keeps by image."""
    engine.llm_engine.reset_encoder_cache()


@contextmanager
def abort_on_error(engine: Any) -> Iterator[None]:
    """Abort the requests of a ``vllm.LLM`` when its generation fails, as by Ctrl-C.

    Requests that stay in the engine make its next generation fail.
    """
    try:
        yield
    except BaseException:
        inner = engine.llm_engine
        inner.abort_request(list(inner.output_processor.request_states), internal=True)
        raise


def shut_down(engine: Any) -> None:
    """Stop a ``vllm.LLM`` and free its memory."""
    engine.llm_engine.engine_core.shutdown()
