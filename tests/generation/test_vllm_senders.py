"""NCCL and CUDA IPC senders against vLLM's receiving engines in another process, with fake transports."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fakes import weight_receiver
from support.workers.launch import WITH_VLLM, Script

pytest.importorskip("vllm")
from groupwise.errors import BackendError
from groupwise.generation.vllm import weight_sync

pytestmark = pytest.mark.vllm


class Receiver:
    """``WeightReceiver`` of another process: every call is a body of JSON, as over vLLM's routes."""

    def __init__(self, connection: Connection, backend: str) -> None:
        self.connection, self.backend = connection, backend
        self.calls: list[str] = []

    def post(self, name: str, body: dict[str, Any]) -> None:
        self.calls.append(name)
        self.connection.send_bytes(json.dumps([self.backend, name, body]).encode())
        if error := self.connection.recv_bytes():
            raise BackendError(error.decode())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("finish_weight_update", {"weight_version": weight_version})


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """Connection to a process with vLLM's engines."""
    address = str(tmp_path_factory.mktemp("receiver") / "socket")
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with Listener(address) as listener:
        process = Script(weight_receiver.__file__, address, environment=environment, imports=WITH_VLLM)
        try:
            with listener.accept() as connection:
                yield connection
                connection.send_bytes(b"close")
        finally:
            process.kill()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
    importlib.import_module("vllm.distributed.device_communicators.pynccl")
    weight_receiver.fake_gpu(monkeypatch.setattr)


def _nccl() -> weight_sync.NcclSender:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return weight_sync.NcclSender("127.0.0.1", port, num_workers=1)


SENDERS: dict[str, Callable[[], weight_sync.WeightSender]] = {"nccl": _nccl, "ipc": weight_sync.CudaIpcSender}


def _buckets(step: int) -> list[weight_sync.Bucket]:
    """Tensors of several types, views among them, in an order that is not that of their names."""
    generator = torch.Generator().manual_seed(step)
    table = torch.randn(6, 5, generator=generator)
    return [
        [("model.z", table), ("model.a", table.bfloat16()), ("model.transposed", table.t())],
        [("lm_head.weight", table.half()[1:4]), ("count", torch.arange(step, step + 7))],
        [("model.row", table[2]), ("quantized", (100 * table).to(torch.int8)), ("one", table[:1, :1])],
    ]


def _in_order(backend: str, bucket: weight_sync.Bucket) -> weight_sync.Bucket:
    """The order of the bucket, with NCCL large items first: vLLM refuses a view of unaligned bytes."""
    return sorted(bucket, key=lambda pair: -pair[1].element_size() if backend == "nccl" else 0)


@pytest.mark.parametrize("backend", SENDERS)
def test_every_tensor_arrives_bitwise_in_its_order(
    backend: str, tmp_path: Path, worker: Connection, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = itertools.count()

    def handle(tensor: torch.Tensor) -> tuple[Any, ...]:
        return weight_receiver.export(tensor, tmp_path / f"memory {next(exported)}")

    monkeypatch.setattr(weight_sync, "cuda_ipc_handle", handle)
    sender, engine = SENDERS[backend](), Receiver(worker, backend)
    assert sender.backend == backend
    sender.connect(engine)
    for step in (3, 4):
        sender.push(_buckets(step), engine, version=step)
    update = ["start_weight_update", *["update_weights"] * 3, "finish_weight_update"]
    assert engine.calls == ["init_weight_transfer_engine", *update, *update]
    engine.post("save", {"path": str(tmp_path / "weights.pt")})
    group = getattr(sender, "group", None)
    sender.close()
    received = torch.load(tmp_path / "weights.pt")
    sent = [pair for step in (3, 4) for bucket in _buckets(step) for pair in _in_order(backend, bucket)]
    assert [name for name, _ in received["weights"]] == [name for name, _ in sent]
    for (name, ours), (_, theirs) in zip(sent, received["weights"], strict=True):
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape), name
        assert torch.equal(theirs, ours), name
    assert received["version"] == "4"
    assert next(exported) == (16 if backend == "ipc" else 0)
    assert backend == "ipc" or (group.group.world_size == 2 and group.destroyed)


def test_a_handle_has_the_entries_that_torch_rebuilds_a_tensor_from() -> None:
    """vLLM overwrites the entry of the device with its own."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert len(names) == weight_receiver.NUM_ENTRIES
    assert names[weight_receiver.SIZE] == "tensor_size" and names[weight_receiver.DTYPE] == "dtype"
    assert names[weight_receiver.DEVICE] == "storage_device"
    assert names[weight_receiver.HANDLE] == "storage_handle"
