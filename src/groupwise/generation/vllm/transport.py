"""Ways for weights from the trainer into a vLLM engine, all through vLLM's own weight-transfer interface.

    sender.connect(receiver)                       once
    sender.push(buckets, receiver, version)        after every change of the weights

The receiver is the engine: ``LLM`` in this process, or a server behind its HTTP routes. A sender says which
engine-side counterpart it needs by ``backend``, the value of vLLM's ``--weight-transfer-config``.
"""

from __future__ import annotations

import base64
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from groupwise.errors import BackendError

#: Checkpoint names and tensors that travel together.
Bucket = list[tuple[str, torch.Tensor]]

#: The engine side of the two senders that need no GPU, as registered by ``plugin.register``.
BACKEND = "groupwise"

_SHARED_MEMORY = Path("/dev/shm")


class WeightReceiver(Protocol):
    """An engine that takes weights; the same four calls as vLLM's ``VLLMWeightSyncClient``, plain dicts.

    Every call returns when the engine has done it, and raises when it failed.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender:
    """Base of the senders: how a push goes. Subclasses say how a bucket travels."""

    backend = BACKEND

    def init_info(self) -> dict[str, Any]:
        """What the engine needs to know before the first push."""
        return {}

    def connect(self, receiver: WeightReceiver) -> None:
        """Prepare both sides for pushes."""
        receiver.init_weight_transfer_engine(self.init_info())

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> Any:
        """Bring one bucket into the engine.

        Returns:
            what must stay alive until the whole update is finished.
        """
        raise NotImplementedError

    def complete(self, receiver: WeightReceiver) -> None:
        """All buckets were sent. Our own receiver then looks for parameters that got nothing."""
        if self.backend == BACKEND:
            receiver.update_weights({})

    def push(self, buckets: Iterable[Bucket], receiver: WeightReceiver, version: int) -> None:
        """Replace the engine's weights; ``version`` is the optimizer step they are from.

        After an exception the engine has part of the new weights: another push must succeed before it
        generates.
        """
        try:
            receiver.start_weight_update()  # of several engines, some may have begun when it fails
            kept = [self.send(bucket, receiver) for bucket in buckets]
            self.complete(receiver)
        except BaseException:
            with suppress(Exception):  # it may have ended the update itself
                receiver.finish_weight_update()
            raise
        receiver.finish_weight_update(str(version))
        del kept

    def close(self) -> None:
        """Release what the sender holds."""


class LocalSender(WeightSender):
    """To an engine in this process: the tensors themselves, on whatever device, without a copy."""

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        receiver.update_weights({"weights": bucket})


class SharedMemorySender(WeightSender):
    """To an engine on the same machine: a file per bucket in shared memory, gone when it is loaded.

    Args:
        directory: where the files are written; default: /dev/shm, which every process of a machine sees.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        parent = Path(directory) if directory else _SHARED_MEMORY
        if not parent.is_dir():
            parent = Path(tempfile.gettempdir())
        self.directory = Path(tempfile.mkdtemp(prefix="groupwise-", dir=parent))

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        from safetensors.torch import save_file

        size = sum(tensor.nbytes for _, tensor in bucket)
        free = shutil.disk_usage(self.directory).free
        if size > free:  # writing beyond it would kill the process instead of raising
            raise BackendError(
                f"a bucket of {size / 2**20:.0f} MB of weights does not fit into {self.directory.parent}, "
                f"which has {free / 2**20:.0f} MB left; give it more (docker: --shm-size)"
            )
        path = self.directory / f"{uuid.uuid4().hex}.safetensors"
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in bucket}, path)
            receiver.update_weights({"path": str(path)})
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class NcclSender(WeightSender):
    """To engines on other GPUs: one NCCL broadcast per bucket, received by vLLM's own engine.

    Args:
        address, port: where trainer and workers meet; an address of this machine that the workers reach.
        workers: GPUs of all engines together.
    """

    backend = "nccl"

    def __init__(self, address: str, port: int, workers: int) -> None:
        self.address, self.port, self.world_size = address, port, workers + 1
        self.group: Any = None

    def init_info(self) -> dict[str, Any]:
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": 1,  # the trainer is rank 0
            "world_size": self.world_size,
            "packed": True,
        }

    def connect(self, receiver: WeightReceiver) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        # Both sides wait for each other in here.
        _together(lambda: super(NcclSender, self).connect(receiver), lambda: self._open(trainer_init))

    def _open(self, trainer_init: Callable[..., Any]) -> None:
        self.group = trainer_init(self.init_info())

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        def broadcast() -> None:
            packed_nccl_broadcast_producer(
                iter(bucket), self.group, src=0, post_iter_func=lambda item: item[1]
            )

        _together(lambda: receiver.update_weights(_described(bucket)), broadcast)

    def close(self) -> None:
        if self.group is not None:
            self.group.destroy()
            self.group = None


class CudaIpcSender(WeightSender):
    """To a server on the trainer's own GPU: handles of the tensors, received by vLLM's own engine.

    The server needs VLLM_ALLOW_INSECURE_SERIALIZATION=1, because handles travel pickled.
    """

    backend = "ipc"

    def send(self, bucket: Bucket, receiver: WeightReceiver) -> list[torch.Tensor]:
        from torch.multiprocessing.reductions import reduce_tensor

        tensors = [tensor.detach().contiguous() for _, tensor in bucket]
        gpu = str(torch.cuda.get_device_properties(tensors[0].device).uuid)
        handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in tensors]
        pickled = base64.b64encode(pickle.dumps(handles)).decode()
        receiver.update_weights({**_described(bucket), "ipc_handles_pickled": pickled})
        return tensors  # the engine reads from them until it has finished


def _described(bucket: Bucket) -> dict[str, Any]:
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def _together(remote: Callable[[], None], local: Callable[[], None]) -> None:
    """Run both at the same time; a failure of the remote side is seen before the local one waits for it."""
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        answer = pool.submit(remote)
        if answer.done():
            answer.result()
        local()
        answer.result()
    finally:
        pool.shutdown(wait=False)  # after a failure here, the other side would be waited for without end
