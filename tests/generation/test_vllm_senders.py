"""NCCL and CUDA IPC senders against vLLM's receiving engines in another process, with fake transports."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fakes import weight_receiver
from support.workers.launch import WITH_VLLM, Script

pytest.importorskip("vllm")
from groupwise.errors import BackendError
from groupwise.generation.vllm import weight_sync
from groupwise.generation.vllm.http import LostAnswerError

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
    return weight_sync.NcclSender("127.0.0.1", port, num_workers=1, timeout=60)


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


def _in_order(bucket: weight_sync.Bucket) -> weight_sync.Bucket:
    """The order of the bucket, large items first: vLLM refuses a view of unaligned bytes."""
    return sorted(bucket, key=lambda pair: -pair[1].element_size())


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
    sent = [pair for step in (3, 4) for bucket in _buckets(step) for pair in _in_order(bucket)]
    assert [name for name, _ in received["weights"]] == [name for name, _ in sent]
    for (name, ours), (_, theirs) in zip(sent, received["weights"], strict=True):
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape), name
        assert torch.equal(theirs, ours), name
    assert received["version"] == "4"
    # Tensors of the buckets: 330 bytes, then 86; the last one has 141. One buffer per push holds them all.
    assert next(exported) == (2 if backend == "ipc" else 0)
    assert backend == "ipc" or (group.group.world_size == 2 and group.destroyed)


def test_a_handle_has_the_entries_that_torch_rebuilds_a_tensor_from() -> None:
    """vLLM overwrites the entry of the device with its own."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert len(names) == weight_receiver.NUM_ENTRIES
    assert names[weight_receiver.SIZE] == "tensor_size" and names[weight_receiver.DTYPE] == "dtype"
    assert names[weight_receiver.DEVICE] == "storage_device"
    assert names[weight_receiver.HANDLE] == "storage_handle"


class Engines:
    """``WeightReceiver`` that records update infos."""

    def __init__(self, update: Callable[[], object] = lambda: None) -> None:
        self.update, self.infos = update, []

    def start_weight_update(self) -> None:
        """No weights yet."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.infos.append(update_info)
        self.update()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing to finish."""


def _joined(timeout: float = 60.0, broadcast: Callable[[], object] = lambda: None) -> weight_sync.NcclSender:
    sender = weight_sync.NcclSender("127.0.0.1", 1, num_workers=1, timeout=timeout)
    sender.group = SimpleNamespace(broadcast=lambda tensor, src: broadcast(), destroy=lambda: None)
    return sender


def test_nccl_reads_a_bucket_after_the_stream_that_wrote_it(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side streams wait for an event that is recorded behind the writes: [operation, stream, event]."""
    log: list[tuple[str, int, object]] = []
    numbers, active = itertools.count(), threading.local()

    class Recorded(weight_receiver.Stream):
        def __init__(self, device: Any = None) -> None:
            self.number = next(numbers)

        def record_event(self) -> object:
            event = object()
            log.append(("record", self.number, event))
            return event

        def wait_event(self, event: object) -> None:
            log.append(("wait", self.number, event))

    @contextmanager
    def use(stream: Recorded) -> Iterator[None]:
        before, active.stream = current(), stream
        yield
        active.stream = before

    main, other = Recorded(), Recorded()  # the stream of the step, and the default one of other threads
    active.stream = main

    def current() -> Recorded:
        return getattr(active, "stream", other)

    concatenate = torch.cat

    def cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        log.append(("read", current().number, None))
        return concatenate(tensors, dim)

    monkeypatch.setattr("torch.cuda.Stream", Recorded)
    monkeypatch.setattr("torch.cuda.stream", use)
    monkeypatch.setattr("torch.cuda.current_stream", current)
    monkeypatch.setattr(torch, "cat", cat)
    producer = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    producer._get_streams.cache_clear()  # streams of other tests
    sender, buckets = _joined(), _buckets(0)

    def written() -> Iterator[weight_sync.Bucket]:
        for bucket in buckets:
            log.append(("write", current().number, None))
            yield bucket

    try:
        sender.push(written(), Engines(), version=0)
    finally:
        producer._get_streams.cache_clear()
    operations = [operation for operation, _, _ in log]
    assert operations.count("read") == operations.count("write") == 3
    for read in (i for i, operation in enumerate(operations) if operation == "read"):
        write = max(i for i in range(read) if operations[i] == "write")
        waits = [i for i in range(write, read) if log[i][:2] == ("wait", log[read][1])]
        records = [i for i in range(write, read) if log[i][:2] == ("record", main.number)]
        assert log[read][1] != main.number
        assert any(log[wait][2] is log[record][2] for wait in waits for record in records if record < wait)


def test_a_request_that_fails_ends_the_sync_while_nccl_waits(gpu: None) -> None:
    release = threading.Event()

    def fail() -> None:
        raise LostAnswerError("no response")

    try:
        with pytest.raises(LostAnswerError, match=r"no response.*was still waiting for the engines"):
            _joined(broadcast=release.wait).push(_buckets(0), Engines(fail), version=0)
    finally:
        release.set()


def test_a_broadcast_that_fails_ends_the_sync_while_the_engines_wait(gpu: None) -> None:
    release = threading.Event()

    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    try:
        with pytest.raises(BackendError, match=r"failed \(NCCL error.*engines have not answered"):
            _joined(broadcast=fail).push(_buckets(0), Engines(release.wait), version=0)
    finally:
        release.set()


def test_both_failures_are_named(gpu: None) -> None:
    broken = threading.Event()

    def break_off() -> None:
        broken.set()
        raise RuntimeError("connection reset by peer")

    def fail() -> None:
        broken.wait()
        raise BackendError("the server ran out of memory")

    with pytest.raises(BackendError, match=r"connection reset by peer") as caught:
        _joined(broadcast=break_off).push(_buckets(0), Engines(fail), version=0)
    assert "out of memory" in str(caught.value) or "have not answered" in str(caught.value)


def test_a_broadcast_has_a_limit_after_the_engines_have_answered(gpu: None) -> None:
    release = threading.Event()
    try:
        with pytest.raises(BackendError, match=r"received the weights.*still waiting"):
            _joined(timeout=0.05, broadcast=release.wait).push(_buckets(0), Engines(), version=0)
    finally:
        release.set()


def test_ipc_holds_one_bucket_at_a_time(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak of the sender: one bucket of the iterator and one buffer, not a second copy of the model."""
    monkeypatch.setattr(weight_sync, "cuda_ipc_handle", lambda buffer: (len(buffer),))
    alive: list[weakref.ref[torch.Tensor]] = []
    peaks = []
    sender = weight_sync.CudaIpcSender()

    def made() -> Iterator[weight_sync.Bucket]:
        for step in range(8):
            bucket = [("weight", torch.full((25, 10), float(step)))]
            alive.append(weakref.ref(bucket[0][1]))
            yield bucket
            del bucket
            buffer = 0 if sender.buffer is None else sender.buffer.nbytes
            peaks.append(sum(one.nbytes for ref in alive if (one := ref()) is not None) + buffer)

    engines = Engines()
    sender.push(made(), engines, version=0)
    assert len(engines.infos) == 8 and max(peaks) <= 2 * 1000  # bytes; the model has 8000
    assert sender.buffer is None
