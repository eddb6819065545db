"""Trainer side of vLLM's weight transfer: one source of weights for vLLM's engines and for one without a GPU.

    transfer = WeightTransfer(backend, receiver, weights)     connects
    weights.begin(read); transfer.push(step)                  after every change of the weights

The receiver is a ``vllm.LLM`` in this process, or servers behind their HTTP routes. ``backend`` is the value
of their ``--weight-transfer-config``.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file

from groupwise.compat.vllm import trainer_engine
from groupwise.errors import BackendError
from groupwise.generation.vllm.plugin import ADAPTER_FILES, BACKEND
from groupwise.generation.vllm.weight_source import EngineWeights, NamedTensor, current_stream
from groupwise.policy.weight_iterator import BUCKET_BYTES, LoRAWeights, buckets
from groupwise.threads import settle, start_thread

if TYPE_CHECKING:
    from vllm import LLM

    from groupwise.generation.vllm.client import VLLMServers

#: Engines of vLLM, which read :meth:`EngineWeights.metadata`; "nccl" broadcasts.
WITH_METADATA = ("nccl", "ipc")

_SHARED_MEMORY = Path("/dev/shm")
_LOCK = b"lock of groupwise"  # content of the file


class WeightTransfer:
    """Connection of one rank to engines that receive weights, and ``VLLMWeightSyncClient`` of vLLM's engines.

    As the client it keeps the first failure and sends nothing after it: a failure raised inside vLLM's engine
    would leave the other ranks in its collectives.

    Args:
        backend: name of the weight-transfer engine.
        receiver: the engines, used by rank 0.
        weights: the source. For a backend in ``WITH_METADATA`` its first pass has begun.
        rank: rank 0 sends; the others take part in the collectives of source and engine.
        timeout: seconds that a broadcast may take after the engines have answered. Their answers have a limit
            of their own.
        given: further fields of the trainer's init info, such as the rendezvous.

    Attributes:
        answer: set by the request during which the engines receive, or by the first failure.

    Raises:
        BackendError, LostAnswerError: the engines did not connect.
    """

    def __init__(
        self,
        backend: str,
        receiver: LLM | VLLMServers,
        weights: EngineWeights,
        *,
        rank: int = 0,
        timeout: float = 240.0,
        **given: Any,
    ) -> None:
        self.backend, self.receiver, self.weights = backend, receiver, weights
        self.rank, self.timeout = rank, timeout
        self.failure: Exception | None = None
        self.answer: Future[None] = Future()
        if backend in WITH_METADATA:
            sizes = [one.nbytes for _, one in weights.metadata()]
            # CUDA IPC refuses a tensor that is larger than its buffer.
            given |= {"packed": True, "packed_buffer_size_bytes": max(*sizes, min(BUCKET_BYTES, sum(sizes)))}
        if backend == "nccl":
            # Up to 0.32 a server receives two buffers on two streams and loads a layer that is in both of
            # them on the second one, without an order between the two.
            given["packed_num_buffers"] = 1

        def connect() -> Any:
            if backend == BACKEND:  # without vLLM in the trainer's environment
                self.init_weight_transfer_engine({})
                return BucketSender(self, weights, **given)
            return trainer_engine(backend, self, weights, rank=rank, **given)

        # A vLLM TrainerWeightTransferEngine or BucketSender; None: this rank only reads the source. The ranks
        # of "ipc" share barriers.
        self.engine: Any = None if rank > 0 and backend != "ipc" else self._run(connect)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._request(self.receiver.init_weight_transfer_engine, {"init_info": init_info})
        settle(self.answer)

    def start_weight_update(self) -> None:
        self._request(self.receiver.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if (handles := update_info.get("ipc_handles")) is not None:  # tuples, which JSON does not have
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}
        self._request(self.receiver.update_weights, {"update_info": update_info})
        settle(self.answer)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: :meth:`push` finishes, with the version of the weights."""

    def _request(self, send: Callable[..., None], *body: dict[str, Any]) -> None:
        try:
            if self.failure is None:
                send(*body)
        except Exception as error:
            self.failure = error
        if self.failure is not None:
            settle(self.answer, error=self.failure)

    def push(self, step: int) -> None:
        """Replace the engines' weights by those of the pass that ``weights.begin`` began.

        After an exception the engines have only part of the new weights: a push of another connection must
        succeed before they generate.

        Args:
            step: optimizer step of the weights, which becomes their version.
        """
        self.failure = None
        try:
            if self.engine is None:
                self.weights.end(read_rest=True)
            else:
                self._run(self.engine.send_weights)
        except BaseException as error:
            self.failure = BackendError("the update failed")  # requests of a thread are not sent
            self.weights.end(read_rest=isinstance(error, Exception))
            if self.rank == 0:
                with suppress(Exception):  # the engine may have ended the update itself
                    self.receiver.finish_weight_update()
            raise
        if self.rank == 0:
            self.receiver.finish_weight_update(str(step))

    def close(self) -> None:
        """Release files, connections and memory."""
        if self.engine is not None:
            if (group := getattr(self.engine, "model_update_group", None)) is not None:
                group.destroy()  # ends a broadcast that waits; vLLM's engines do it since 0.32
            self.engine.shutdown()

    def _run(self, function: Callable[[], Any]) -> Any:
        """Run a function of the trainer's engine and raise the failure of its requests.

        NCCL waits for its peers without a limit, and nothing can stop it. What broadcasts therefore runs in a
        thread, which is left behind after a failure; this connection is not used again.

        Raises:
            BackendError, LostAnswerError: the broadcast or a request failed; the message has both states.
        """
        self.answer = answer = Future[None]()
        if self.backend != "nccl":
            result = function()
            if self.failure is not None:
                raise self.failure
            return result
        stream = current_stream()

        def on_stream() -> Any:
            with torch.cuda.stream(stream):  # a thread begins on another one
                return function()

        sending = start_thread(on_stream)
        wait((answer, sending), return_when=FIRST_COMPLETED)
        error = answer.exception() if answer.done() else None
        try:
            # A broadcast that has failed leaves the engines waiting in NCCL: their answer is not awaited.
            result = sending.result(self.timeout if answer.done() and error is None else 0)
            if error is None:
                return result
            state = "had finished"
        except FutureTimeoutError:
            state = "was still waiting for the engines"
        except Exception as failure:
            state = f"failed ({failure})"
        engines = "the engines received the weights" if answer.done() else "the engines have not answered"
        kind = BackendError if error is None else type(error)
        raise kind(f"{error or engines}; the NCCL broadcast of the trainer {state}") from error


class BucketSender:
    """Trainer side of the weight-transfer engine without a GPU; ``receiver.py`` has the other side.

    Sends one file per bucket through shared memory, which is removed once it is loaded.

    Args:
        in_process: the engine is in this process, and gets the tensors.
    """

    def __init__(
        self, client: WeightTransfer, source: Iterable[NamedTensor], *, in_process: bool = False
    ) -> None:
        self.client, self.source = client, source
        self.directory: Path | None = None
        if not in_process:
            self.directory, self._remove = shared_directory(self)

    def send_weights(self) -> None:
        """Send all weights of the source."""
        self.client.start_weight_update()
        for bucket in buckets(self.source, BUCKET_BYTES):
            if self.directory is None:
                self.client.update_weights({"weights": bucket})
            else:
                self._send_file(bucket, self.directory)
            del bucket  # it is not kept while the next one is made
        self.client.update_weights({})  # the receiver then checks that every parameter got weights

    def _send_file(self, bucket: list[NamedTensor], directory: Path) -> None:
        size = sum(tensor.nbytes for _, tensor in bucket)
        free = shutil.disk_usage(directory).free
        if size > free:  # writing to a full /dev/shm kills the process (SIGBUS)
            raise BackendError(
                f"a bucket of {size / 2**20:.0f} MB of weights does not fit into {directory.parent}, "
                f"which has {free / 2**20:.0f} MB left; enlarge it (docker: --shm-size)"
            )
        path = directory / f"{uuid.uuid4().hex}.safetensors"
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in bucket}, path)
            self.client.update_weights({"path": str(path)})
        finally:
            path.unlink(missing_ok=True)

    def shutdown(self) -> None:
        """Remove the directory."""
        if self.directory is not None:
            self._remove()


class AdapterLoader(Protocol):
    """Engines that load the LoRA adapter in a directory under a name, and unload it."""

    def load_adapter(self, name: str, path: Path) -> object: ...
    def unload_adapter(self, name: str) -> None: ...


class AdapterTransfer:
    """LoRA adapters of a run, which its engines load from files; an engine has the weights below them.

    Args:
        num_previous: adapters before the latest that requests under way may still use.

    Attributes:
        remove: removes the files.
    """

    def __init__(self, engines: AdapterLoader, num_previous: int = 0) -> None:
        self.engines, self.num_previous = engines, num_previous
        self.directory, self.remove = shared_directory(self)
        self.names: list[str] = []

    def push(self, adapter: LoRAWeights, name: str) -> None:
        """Unload the adapters that no request uses, and load one under a new name."""
        self.unload(self.names[: -self.num_previous or None])
        path = self.directory / name
        path.mkdir()
        weights, settings = (path / name for name in ADAPTER_FILES)
        save_file(dict(adapter.tensors), weights)
        settings.write_text(json.dumps(adapter.config, default=str))
        self.names.append(name)
        try:
            self.engines.load_adapter(name, path)
        except BaseException:
            self.unload([name])  # some of the servers may have it
            raise

    def unload(self, names: list[str]) -> None:
        """Unload adapters and remove their files."""
        for name in names:
            self.engines.unload_adapter(name)
            shutil.rmtree(self.directory / name, ignore_errors=True)
        self.names = [name for name in self.names if name not in names]


def shared_directory(owner: object) -> tuple[Path, Callable[[], object]]:
    """Make a directory in memory that processes of a machine share, else among temporary files.

    Its lock ends with the process. Such directories of this user that no process has locked are removed.

    Returns:
        the directory, and a function that removes it. That is called at the latest when ``owner`` or the
        process ends, because shared memory would stay occupied. It does nothing in a forked process.
    """
    import fcntl

    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    process = os.getpid()
    for directory in parent.glob("groupwise-*"):
        with suppress(OSError), open(directory / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process runs
            is_own = os.fstat(lock.fileno()).st_uid == os.geteuid()
            if is_own and lock.read(200) == _LOCK:
                shutil.rmtree(directory, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="groupwise-", dir=parent))
    stack = ExitStack()
    own = stack.enter_context(open(directory / "lock", "wb"))  # noqa: SIM115  open as long as the directory
    fcntl.flock(own, fcntl.LOCK_EX)
    own.write(_LOCK)  # only then it may be removed
    own.flush()
    stack.callback(shutil.rmtree, directory, ignore_errors=True)

    def remove() -> None:
        if os.getpid() == process:
            stack.close()

    return directory, weakref.finalize(owner, remove)
