"""Weight sync from the trainer to vLLM engines, through vLLM's weight-transfer interface.

    sender.connect(receiver)                       once
    sender.push(buckets, receiver, version)        after every change of the weights

The receiver is a ``vllm.LLM`` in this process, or servers behind their HTTP routes.
``WeightSender.backend`` is the value of vLLM's ``--weight-transfer-config`` that a sender needs. A colocated
engine may instead get the LoRA adapter alone (:class:`LoRAWeightSync`).
"""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import tempfile
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file

from groupwise.compat.torch import cuda_ipc_handle
from groupwise.compat.vllm import add_lora, join_nccl_group, packed_broadcast, remove_lora
from groupwise.errors import BackendError, ConfigError
from groupwise.generation.vllm.plugin import BACKEND
from groupwise.policy.introspection import CausalLM
from groupwise.policy.weight_iterator import LoRAWeights, WeightSource, base_weights, buckets
from groupwise.threads import start_thread

if TYPE_CHECKING:
    from vllm import LLM

    from groupwise.generation.vllm.client import VLLMServers

#: (checkpoint name, tensor) pairs that are sent together.
Bucket = list[tuple[str, torch.Tensor]]

_SHARED_MEMORY = Path("/dev/shm")

#: Values of ``max_lora_rank`` that vLLM accepts.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class WeightReceiver(Protocol):
    """Engine that receives weights: the four calls of vLLM's ``VLLMWeightSyncClient``, with plain dicts.

    A call returns once the engine has finished it.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender:
    """Base class of senders; subclasses implement :meth:`send`.

    Attributes:
        backend: name of vLLM's weight-transfer engine on the receiving side.
    """

    backend = BACKEND

    def init_info(self) -> dict[str, Any]:
        """Return the engine's connection settings."""
        return {}

    def connect(self, receiver: WeightReceiver) -> None:
        """Connect both sides; required before the first push."""
        receiver.init_weight_transfer_engine(self.init_info())

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        """Send one bucket; its tensors are not read after the return."""
        raise NotImplementedError

    def push(self, buckets: Iterable[Bucket], receiver: WeightReceiver, version: int) -> None:
        """Replace the engine's weights.

        After an exception the engine has only part of the new weights: another push must succeed before it
        generates.

        Args:
            version: optimizer step of the weights.
        """
        try:
            receiver.start_weight_update()  # inside try: part of the engines may have started
            for bucket in buckets:
                self.send(bucket, receiver)
                del bucket  # it is not kept while the next one is made
            if self.backend == BACKEND:
                receiver.update_weights({})  # our receiver then checks that every parameter got weights
        except BaseException:
            with suppress(Exception):  # the engine may have ended the update itself
                receiver.finish_weight_update()
            raise
        receiver.finish_weight_update(str(version))

    def close(self) -> None:
        """Release files, connections and memory."""


class LocalSender(WeightSender):
    """Sender for an engine in this process: passes the tensors without a copy, on any device."""

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        receiver.update_weights({"weights": bucket})


class SharedMemorySender(WeightSender):
    """Sender for an engine on the same machine: one file per bucket in shared memory, removed once loaded.

    A sender locks its directory. Directories that nothing locks are removed first: a process that was killed
    cannot remove its own.

    Args:
        directory: where the files are written; default: /dev/shm, which all processes of a machine share.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        parent = Path(directory) if directory else shared_memory()
        _remove_abandoned(parent)
        self.directory, lock = _locked_directory(parent)
        # At the latest when the process ends: shared memory would stay occupied.
        self._remove = weakref.finalize(self, _remove, self.directory, lock)

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        size = sum(tensor.nbytes for _, tensor in bucket)
        free = shutil.disk_usage(self.directory).free
        if size > free:  # writing to a full /dev/shm kills the process (SIGBUS)
            raise BackendError(
                f"a bucket of {size / 2**20:.0f} MB of weights does not fit into {self.directory.parent}, "
                f"which has {free / 2**20:.0f} MB left; enlarge it (docker: --shm-size)"
            )
        path = self.directory / f"{uuid.uuid4().hex}.safetensors"
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in bucket}, path)
            receiver.update_weights({"path": str(path)})
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._remove()


def shared_memory() -> Path:
    """Return the directory in memory that processes of a machine share, else that of temporary files."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _locked_directory(parent: Path) -> tuple[Path, IO[str]]:
    """Make a directory with a locked file; the lock ends with the process or with the returned file."""
    import fcntl

    hidden = Path(tempfile.mkdtemp(prefix=".groupwise-", dir=parent))  # not found before it is locked
    lock = open(hidden / "lock", "w")  # noqa: SIM115  open as long as the sender
    fcntl.flock(lock, fcntl.LOCK_EX)
    return hidden.rename(parent / hidden.name.removeprefix(".")), lock


def _remove(directory: Path, lock: IO[str]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of senders whose process has ended; those of other users are skipped."""
    import fcntl

    for directory in parent.glob("groupwise-*"):
        with suppress(OSError), open(directory / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process runs
            shutil.rmtree(directory, ignore_errors=True)


class NcclSender(WeightSender):
    """Sender for engines on other GPUs: one NCCL broadcast per bucket, received by vLLM's NCCL engine.

    Args:
        address, port: rendezvous; an address of this machine that the workers can reach.
        num_workers: GPUs of all engines together.
        timeout: seconds that a broadcast may take after the engines have answered. Their answers have a limit
            of their own.
    """

    backend = "nccl"

    def __init__(self, address: str, port: int, num_workers: int, timeout: float) -> None:
        self.address, self.port, self.world_size = address, port, num_workers + 1
        self.timeout = timeout
        self.group: Any = None  # vLLM's PyNcclCommunicator

    def init_info(self) -> dict[str, Any]:
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": 1,  # the trainer is rank 0
            "world_size": self.world_size,
            "packed": True,
        }

    def connect(self, receiver: WeightReceiver) -> None:
        # Both sides block until the other has connected.
        self._run_both(lambda: super(NcclSender, self).connect(receiver), self._open)

    def _open(self) -> None:
        self.group = join_nccl_group(self.init_info())

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        bucket = _aligned(bucket)
        self._run_both(
            lambda: receiver.update_weights(_metadata(bucket)), packed_broadcast(bucket, self.group)
        )

    def _run_both(self, request: Callable[[], None], broadcast: Callable[[], None]) -> None:
        """Run a request to the engines, and the side of this process in a thread.

        NCCL waits for its peers without a limit, and nothing can stop it. After a failure the thread is left
        behind, and this sender is closed.

        Raises:
            BackendError, LostAnswerError: one of them failed; the message also has the state of the other.
        """
        answer, sending = start_thread(request), start_thread(broadcast)
        wait((answer, sending), return_when=FIRST_COMPLETED)
        if not answer.done() and sending.exception() is None:
            wait((answer,))  # a request has a limit of its own
        error = answer.exception() if answer.done() else None
        try:
            # A broadcast that has failed leaves the engines waiting in NCCL: their answer is not awaited.
            sending.result(self.timeout if answer.done() and error is None else 0)
            state = "had finished"
        except FutureTimeoutError:
            state = "was still waiting for the engines"
        except Exception as failure:
            state = f"failed ({failure})"
        if error is not None:
            raise type(error)(f"{error}; the NCCL broadcast of the trainer {state}") from error
        if not answer.done():
            raise BackendError(f"the NCCL broadcast of the trainer {state}; the engines have not answered")
        if state != "had finished":
            raise BackendError(f"the engines received the weights, but the NCCL broadcast {state}")

    def close(self) -> None:
        if self.group is not None:
            self.group.destroy()
            self.group = None


class CudaIpcSender(WeightSender):
    """Sender for a server on the trainer's GPU: CUDA IPC handles, received by vLLM's IPC engine.

    The server needs VLLM_ALLOW_INSECURE_SERIALIZATION=1, because handles are pickled.
    """

    backend = "ipc"

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None  # uint8, of the size of a bucket
        self.handles = ""

    def init_info(self) -> dict[str, Any]:
        return {"packed": True}

    def push(self, buckets: Iterable[Bucket], receiver: WeightReceiver, version: int) -> None:
        """Replace the engine's weights through one buffer, which is freed at the end.

        The engine copies a bucket out of the buffer before it answers. At the end of the update it releases
        the buffer, so every push exports another one.
        """
        try:
            super().push(buckets, receiver, version)
        finally:
            self.buffer = None

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        bucket = _aligned(bucket)
        items = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
        size = sum(map(len, items))
        if self.buffer is None or len(self.buffer) < size:
            self.buffer = torch.empty(size, dtype=torch.uint8, device=items[0].device)
            gpu = str(torch.cuda.get_device_properties(self.buffer.device).uuid)
            self.handles = base64.b64encode(pickle.dumps({gpu: cuda_ipc_handle(self.buffer)})).decode()
        torch.cat(items, out=self.buffer[:size])
        torch.cuda.current_stream().synchronize()  # another process reads it
        receiver.update_weights(
            {
                **_metadata(bucket),
                "tensor_sizes": list(map(len, items)),
                "ipc_handles_pickled": self.handles,
            }
        )


def _aligned(bucket: Bucket) -> Bucket:
    """Sort by item size, largest first: the engine views the tensors of one byte buffer in place.

    Each then begins at a multiple of its item size.
    """
    return sorted(bucket, key=lambda pair: pair[1].element_size(), reverse=True)


def _metadata(bucket: Bucket) -> dict[str, Any]:
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


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


def save_adapter(adapter: LoRAWeights, directory: Path) -> int:
    """Write an adapter in the format of PEFT, which vLLM reads; returns the number of bytes."""
    path = directory / "adapter_model.safetensors"
    save_file(dict(adapter.tensors), path)
    (directory / "adapter_config.json").write_text(json.dumps(adapter.config, default=str))
    return path.stat().st_size


class ServerAdapters:
    """LoRA adapters of a run on its servers, which read them from files.

    Requests that are under way finish with the adapter that they were sent for, so the latest ones stay.

    Args:
        servers: started with ``--enable-lora`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
        parent: directory that all of them can read.
        num_kept: adapters that requests may still use, the new one included.
    """

    def __init__(self, servers: VLLMServers, parent: Path, num_kept: int) -> None:
        self.servers, self.num_kept = servers, num_kept
        parent.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="groupwise-adapters-", dir=parent))
        self._remove = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self.names: list[str] = []

    def push(self, adapter: LoRAWeights, name: str) -> int:
        """Load the adapter on every server and unload those that no request uses; returns its bytes."""
        path = self.directory / name
        path.mkdir()
        size = save_adapter(adapter, path)
        try:
            self.servers.load_adapter(name, str(path))
        except BaseException:
            self._unload([name])  # some of the servers may have it
            raise
        self.names.append(name)
        self._unload(self.names[: -self.num_kept])
        return size

    def _unload(self, names: list[str]) -> None:
        for name in names:
            self.servers.unload_adapter(name)
            shutil.rmtree(self.directory / name, ignore_errors=True)
        self.names = [name for name in self.names if name not in names]

    def close(self) -> None:
        """Unload this run's adapters from servers that respond, and remove the files."""
        self._unload(self.names)
        self._remove()


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
        "max_loras": 1,
        "max_lora_rank": next((allowed for allowed in _RANKS if allowed >= rank), rank),
    }
