"""vLLM's trainer engines over the policy's weights, against its receiving engines, with fake transports.

Files: ``generation/vllm/transfer.py``.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import sys
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
from support.workers.launch import WITH_VLLM, Script, free_port

pytest.importorskip("vllm")

from groupwise.errors import BackendError
from groupwise.generation.vllm import transfer
from groupwise.generation.vllm.client import LostAnswerError
from groupwise.generation.vllm.transfer import WeightTransfer
from groupwise.generation.vllm.weight_source import EngineWeights

pytestmark = pytest.mark.vllm

NamedTensors = list[tuple[str, torch.Tensor]]


class Receiver:
    """Engines in another process: every call is a body of JSON, as over vLLM's routes."""

    def __init__(self, connection: Connection, backend: str) -> None:
        self.connection, self.backend = connection, backend
        self.calls: list[str] = []

    def post(self, name: str, body: dict[str, Any]) -> None:
        self.calls.append(name)
        self.connection.send_bytes(json.dumps([self.backend, name, body]).encode())
        if error := self.connection.recv_bytes():
            raise BackendError(error.decode())

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.post("init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        self.post("start_weight_update", {})

    def update_weights(self, request: dict[str, Any]) -> None:
        self.post("update_weights", request)

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
    importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    importlib.import_module("vllm.distributed.device_communicators.pynccl")
    weight_receiver.fake_gpu(monkeypatch.setattr)


@pytest.fixture
def exported(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Buffers that were made for another process, which maps them."""
    buffers: list[torch.Tensor] = []

    def share(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        buffers.append(tensor)
        return None, weight_receiver.export(tensor, tmp_path / f"memory {len(buffers)}")

    monkeypatch.setattr("vllm.distributed.weight_transfer.packed_tensor.reduce_tensor", share)
    return buffers


def rendezvous(backend: str) -> dict[str, Any]:
    if backend == "ipc":
        return {}
    return {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}


def weights_of(step: int) -> NamedTensors:
    """Tensors of several types, views among them, in an order that is not that of their names."""
    generator = torch.Generator().manual_seed(step)
    table = torch.randn(6, 5, generator=generator)
    return [
        *[("model.z", table), ("model.a", table.bfloat16()), ("model.transposed", table.t())],
        *[("lm_head.weight", table.half()[1:4]), ("count", torch.arange(step, step + 7))],
        *[("model.row", table[2]), ("quantized", (100 * table).to(torch.int8)), ("one", table[:1, :1])],
    ]


def in_order(weights: NamedTensors) -> NamedTensors:
    """Multiples of 8 bytes first, then large items first: vLLM refuses a view of unaligned bytes."""
    first = [pair for pair in weights if pair[1].nbytes % 8 == 0]
    rest = [pair for pair in weights if pair[1].nbytes % 8]
    return first + sorted(rest, key=lambda pair: -pair[1].element_size())


def push(sender: WeightTransfer, weights: NamedTensors, step: int) -> None:
    sender.weights.begin(lambda: iter(weights))
    sender.push(step)


def connect(backend: str, receiver: Any, weights: NamedTensors, **given: Any) -> WeightTransfer:
    source = EngineWeights()
    source.begin(lambda: iter(weights))
    return WeightTransfer(backend, receiver, source, **{**rendezvous(backend), **given})


def received(receiver: Receiver, path: Path) -> dict[str, Any]:
    receiver.post("save", {"path": str(path)})
    return torch.load(path)


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_every_tensor_arrives_bitwise_in_its_order(
    backend: str,
    tmp_path: Path,
    worker: Connection,
    exported: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 200)  # the weights have 589 bytes
    engine = Receiver(worker, backend)
    sender = connect(backend, engine, weights_of(3))
    for step in (3, 4):
        push(sender, weights_of(step), step)
    # NCCL: one update, and buckets that both sides cut alike. IPC: an update per bucket.
    updates = ["update_weights"] * (1 if backend == "nccl" else 3)
    update = ["start_weight_update", *updates, "finish_weight_update"]
    assert engine.calls == ["init_weight_transfer_engine", *update, *update]
    group = getattr(sender.engine, "model_update_group", None)
    sender.close()
    got = received(engine, tmp_path / "weights.pt")
    sent = [pair for step in (3, 4) for pair in in_order(weights_of(step))]
    assert [name for name, _ in got["weights"]] == [name for name, _ in sent]
    for (name, ours), (_, theirs) in zip(sent, got["weights"], strict=True):
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape), name
        assert torch.equal(theirs, ours), name
    assert got["version"] == "4"
    assert [buffer.nbytes for buffer in exported] == ([200] * 2 if backend == "ipc" else [])
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
    """Engines that record update infos and versions."""

    def __init__(self, update: Callable[[], object] = lambda: None) -> None:
        self.update = update
        self.infos: list[dict[str, Any]] = []
        self.versions: list[str | None] = []

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """No weights yet."""

    def update_weights(self, request: dict[str, Any]) -> None:
        self.infos.append(request["update_info"])
        self.update()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.versions.append(weight_version)


@pytest.fixture
def join(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WeightTransfer]:
    """Connect over NCCL to engines; ``broadcast`` replaces NCCL's."""

    def joined(
        engines: Engines,
        broadcast: Callable[[], object] = lambda: None,
        timeout: float = 60.0,
        weights: NamedTensors | None = None,
    ) -> WeightTransfer:
        group = SimpleNamespace(broadcast=lambda tensor, src: broadcast(), destroy=lambda: None)
        endpoint = "vllm.distributed.weight_transfer.nccl_engine.open_trainer_endpoint"
        monkeypatch.setattr(endpoint, lambda init_info: group)
        return connect("nccl", engines, weights or weights_of(0), timeout=timeout)

    return joined


def test_nccl_reads_weights_after_the_stream_that_wrote_them(
    join: Callable[..., WeightTransfer], monkeypatch: pytest.MonkeyPatch
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
    def use(stream: Recorded | None) -> Iterator[None]:
        before = current()
        active.stream = stream or before
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

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.Stream", Recorded)
    monkeypatch.setattr("torch.cuda.stream", use)
    monkeypatch.setattr("torch.cuda.current_stream", current)
    monkeypatch.setattr(torch, "cat", cat)
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 200)
    producer = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    producer._get_streams.cache_clear()  # streams of other tests
    try:
        sender = join(Engines())

        def written() -> Iterator[tuple[str, torch.Tensor]]:
            for pair in weights_of(0):
                log.append(("write", current().number, None))
                yield pair

        sender.weights.begin(written)
        sender.push(0)
    finally:
        producer._get_streams.cache_clear()
    reads = [i for i, (operation, _, _) in enumerate(log) if operation == "read"]
    writes = [i for i, (operation, _, _) in enumerate(log) if operation == "write"]
    assert len(reads) >= 2 and len(writes) == len(weights_of(0))
    assert {log[write][1] for write in writes} == {main.number}
    for write in writes:
        read = next(i for i in reads if i > write)
        side = log[read][1]
        assert side != main.number
        records = {log[i][2] for i in range(write, read) if log[i][:2] == ("record", main.number)}
        waits = {log[i][2] for i in range(write, read) if log[i][:2] == ("wait", side)}
        assert records & waits


def test_a_request_that_fails_ends_the_sync_while_nccl_waits(join: Callable[..., WeightTransfer]) -> None:
    release = threading.Event()

    def fail() -> None:
        raise LostAnswerError("no response")

    engines = Engines(fail)
    try:
        with pytest.raises(LostAnswerError, match=r"no response.*was still waiting for the engines"):
            push(join(engines, release.wait), weights_of(0), 0)
    finally:
        release.set()
    assert engines.versions == [None]  # not the version of complete weights


def test_an_update_that_cannot_start_ends_the_sync(join: Callable[..., WeightTransfer]) -> None:
    release, engines = threading.Event(), Engines()

    def fail() -> None:
        raise LostAnswerError("no such route")

    engines.start_weight_update = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(LostAnswerError, match="no such route"):
            push(join(engines, release.wait), weights_of(0), 0)
    finally:
        release.set()
    assert engines.infos == []


def test_a_broadcast_that_fails_ends_the_sync_while_the_engines_wait(
    join: Callable[..., WeightTransfer],
) -> None:
    release = threading.Event()

    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    try:
        with pytest.raises(BackendError, match=r"engines have not answered.*failed \(NCCL error"):
            push(join(Engines(release.wait), fail), weights_of(0), 0)
    finally:
        release.set()


def test_both_failures_are_named(join: Callable[..., WeightTransfer]) -> None:
    broken, sender = threading.Event(), list[threading.Thread]()

    def break_off() -> None:
        sender.append(threading.current_thread())
        broken.set()
        raise RuntimeError("connection reset by peer")

    def fail() -> None:
        broken.wait()
        sender[0].join()  # its failure is known, whichever of the two is read first
        raise BackendError("the server ran out of memory")

    with pytest.raises(BackendError, match=r"connection reset by peer") as caught:
        push(join(Engines(fail), break_off), weights_of(0), 0)
    assert "out of memory" in str(caught.value) or "have not answered" in str(caught.value)


def test_a_broadcast_has_a_limit_after_the_engines_have_answered(
    join: Callable[..., WeightTransfer],
) -> None:
    release = threading.Event()
    try:
        with pytest.raises(BackendError, match=r"received the weights.*still waiting"):
            push(join(Engines(), release.wait, timeout=0.05), weights_of(0), 0)
    finally:
        release.set()


def test_a_thread_that_is_left_behind_reads_and_sends_nothing_more(
    join: Callable[..., WeightTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller reads the rest, for ranks that wait in the collectives of the source."""
    begun, release, read = threading.Event(), threading.Event(), []
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 8)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(0):
            read.append((name, threading.current_thread()))
            yield name, tensor

    def broadcast() -> None:
        begun.set()
        release.wait()

    sender = join(Engines(begun.wait), broadcast, timeout=0.05)  # its thread has read before the limit begins
    sender.weights.begin(gathered)
    with pytest.raises(BackendError, match="still waiting"):
        sender.push(0)
    release.set()
    assert [name for name, _ in read] == [name for name, _ in weights_of(0)]
    assert read[0][1] is not threading.current_thread() and read[-1][1] is threading.current_thread()


def test_ipc_holds_one_buffer_and_the_tensor_that_is_copied(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak of the sender: not a second copy of the model."""
    buffers: list[weakref.ref[torch.Tensor]] = []

    def share(buffer: torch.Tensor) -> tuple[None, tuple[int]]:
        buffers.append(weakref.ref(buffer))
        return None, (len(buffer),)

    monkeypatch.setattr("vllm.distributed.weight_transfer.packed_tensor.reduce_tensor", share)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 1000)
    alive: list[weakref.ref[torch.Tensor]] = []
    peaks = []

    def nbytes() -> int:
        return sum(one.nbytes for ref in (*alive, *buffers) if (one := ref()) is not None)

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for step in range(8):
            tensor = torch.full((25, 10), float(step))
            alive.append(weakref.ref(tensor))
            yield f"weight {step}", tensor
            del tensor
            peaks.append(nbytes())

    engines = Engines()
    source = EngineWeights()
    source.begin(made)
    sender = WeightTransfer("ipc", engines, source)
    peaks.clear()
    source.begin(made)
    sender.push(0)
    assert len(engines.infos) == 8 and len(buffers) == 1
    assert max(peaks) <= 3 * 1000  # bytes: the buffer, and two tensors when the next one is asked for
    assert nbytes() == 0


def test_engines_of_vllm_that_fail_are_asked_for_nothing_more(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's loop goes on, because other ranks are in it; the failure is raised at its end."""
    monkeypatch.setattr(
        "vllm.distributed.weight_transfer.packed_tensor.reduce_tensor", lambda buffer: (None, (1,))
    )
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 8)
    collected = []  # after each bucket, beside a barrier of the ranks
    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: collected.append(len(engines.infos)))

    def fail() -> None:
        raise LostAnswerError("no response")

    engines = Engines()
    sender = connect("ipc", engines, weights_of(0))
    push(sender, weights_of(0), 0)
    num_buckets, num_barriers = len(engines.infos), len(collected)
    assert num_buckets > 2
    engines.update = fail
    with pytest.raises(LostAnswerError, match="no response"):
        push(sender, weights_of(0), 1)
    assert len(engines.infos) == num_buckets + 1 and len(collected) == 2 * num_barriers
    assert engines.versions == ["0", None]


@pytest.mark.parametrize("backend", ["nccl", "groupwise"])
def test_other_ranks_read_all_weights_and_send_nothing(backend: str) -> None:
    source, read = EngineWeights(), []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights_of(0):
            read.append(pair[0])
            yield pair

    source.begin(gathered)
    sender = WeightTransfer(backend, None, source, rank=1)
    read.clear()
    sender.push(0)
    sender.close()
    assert len(read) == len(weights_of(0))


def test_a_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BackendError, match=r"'nccl' needs vLLM.*groupwise\[vllm\]"):
        connect("nccl", Engines(), weights_of(0))


def test_a_backend_without_a_trainers_side_is_named() -> None:
    with pytest.raises(BackendError, match="trainer's side of the weight transfer 'modelexpress'"):
        connect("modelexpress", Engines(), weights_of(0))
