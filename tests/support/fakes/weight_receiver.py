"""vLLM's receiving side of a weight transfer without a GPU: its engines in another process, fake transports.

    python weight_receiver.py ADDRESS

Receives [engine, route, body] as JSON over a socket at ADDRESS. The route "save" writes the weights that the
engine's model was given, in their order.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PATIENCE = 120  # seconds
GPU = "GPU-of-both-processes"
#: Position of the entries of a CUDA IPC handle, the arguments of torch's ``rebuild_cuda_tensor``.
SIZE, DTYPE, DEVICE, HANDLE, NUM_ENTRIES = 1, 5, 6, 7, 15


class Stream:
    """CUDA stream of a device that computes in order."""

    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass


class StoreCommunicator:
    """``PyNcclCommunicator`` that exchanges tensors through the store of its process group."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self.device, self.destroyed = group, torch.device("cpu", device), False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        sent = self.group.broadcast_obj(tensor if self.group.rank == src else None, src)
        assert (tensor.dtype, tensor.shape) == (sent.dtype, sent.shape)  # NCCL would hang or write beyond it
        tensor.copy_(sent)

    def destroy(self) -> None:
        self.destroyed = True


def fake_gpu(replace: Callable[[str, Any], None]) -> None:
    """Replace the symbols that both sides of vLLM's weight transfer need a GPU for.

    Args:
        replace: sets a dotted name, as ``monkeypatch.setattr`` does.
    """
    replace("torch.cuda.Stream", Stream)
    replace("torch.cuda.stream", lambda stream: nullcontext())
    replace("torch.cuda.current_stream", Stream)
    replace("torch.cuda.ipc_collect", lambda: None)
    replace("torch.empty", lambda *size, empty=torch.empty, **given: empty(*size, **_on_cpu(given)))
    replace("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=GPU))
    replace("torch.accelerator.current_device_index", lambda: 0)
    replace("torch.accelerator.device_index", lambda index: nullcontext())
    replace("vllm.distributed.device_communicators.pynccl.PyNcclCommunicator", StoreCommunicator)


def _on_cpu(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "device": "cpu"} if given.get("device") == "cuda" else given


def _mapped(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def export(tensor: torch.Tensor, path: Path) -> tuple[Any, ...]:
    """Move a buffer of bytes to a file at ``path`` that both processes map; returns its IPC handle."""
    assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
    path.write_bytes(tensor.numpy().tobytes())
    tensor.set_(_mapped(path))
    entries: list[Any] = [None] * NUM_ENTRIES
    entries[SIZE], entries[DTYPE] = tuple(tensor.shape), tensor.dtype
    entries[DEVICE], entries[HANDLE] = "device of the sender", str(path)
    return tuple(entries)


def rebuild(*entries: Any) -> torch.Tensor:
    """Return the buffer behind an IPC handle of :func:`export`: the sender's next bytes appear in it."""
    assert len(entries) == NUM_ENTRIES and entries[DEVICE] == 0  # the index of the receiver's device
    return _mapped(Path(entries[HANDLE])).view(entries[DTYPE]).view(entries[SIZE])


class Model(torch.nn.Module):
    """Model that keeps every weight that it is given, and has 5 where it was given none."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[tuple[str, torch.Tensor]] = []
        self.values: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weights.append((name, tensor.clone()))  # buffers are used again
            self.values.setdefault(name, torch.full_like(tensor, 5)).copy_(tensor)


def make_engine(backend: str, model: Model) -> Any:
    """Build the engine of ``--weight-transfer-config`` as a worker of vLLM does, for a device without GPU."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
    return WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, torch.device("cpu", 0), model
    )


class Worker:
    """Worker of vLLM: calls the weight-transfer engine as the routes do."""

    def __init__(self, backend: str) -> None:
        self.model = Model()
        self.engine = make_engine(backend, self.model)
        self.version: str | None = None

    def init_weight_transfer_engine(self, body: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(body["init_info"]))

    def start_weight_update(self, body: dict[str, Any]) -> None:
        self.engine.start_weight_update()

    def update_weights(self, body: dict[str, Any]) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(body["update_info"]))

    def finish_weight_update(self, body: dict[str, Any]) -> None:
        self.engine.finish_weight_update()
        self.version = body["weight_version"]

    def save(self, body: dict[str, Any]) -> None:
        weights, values = self.model.weights, self.model.values
        torch.save({"weights": weights, "values": values, "version": self.version}, body["path"])


def main(address: str) -> None:
    from unittest import mock

    import vllm.distributed.device_communicators.pynccl
    import vllm.distributed.weight_transfer.ipc_engine  # noqa: F401

    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    fake_gpu(lambda name, value: mock.patch(name, value).start())
    mock.patch("torch.multiprocessing.reductions.rebuild_cuda_tensor", rebuild).start()
    workers: dict[str, Worker] = {}
    with Client(address) as connection:
        while (message := connection.recv_bytes()) != b"close":
            backend, name, body = json.loads(message)
            try:
                if backend not in workers:
                    workers[backend] = Worker(backend)
                getattr(workers[backend], name)(body)
                connection.send_bytes(b"")
            except Exception as error:
                connection.send_bytes(repr(error).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
