"""Run scripts in processes forked from one that has imported torch, transformers and groupwise.

These imports take longer than most scripts of the tests. A server process does them once for each process of
pytest, starts no thread, and forks for every script; what a launcher adds (torchrun, accelerate) is tested
where a run is started with it. Environment variables that a library reads while it is imported are those of
the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

#: accelerate imports deepspeed, if it is installed, with the first model that it unwraps, transformers wandb
#: with the first trainer.
IMPORTS = (
    *("support.runs", "transformers.models.auto.modeling_auto", "deepspeed", "wandb", "peft"),
    *("groupwise.reporting.terminal", "support.workers.distributed_worker"),
)
#: For scripts with an engine in the process.
WITH_VLLM = (
    *(*IMPORTS, "vllm", "vllm.entrypoints.openai.api_server"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
)
#: The Hub's client needs httpx itself before its version 2.
_HTTPX = () if metadata.version("huggingface-hub").startswith("1.") else ("httpx",)
#: Modules of each extra of pyproject.toml; the installation without extras lacks them, and Pillow.
EXTRAS = {
    "peft": ("peft",),
    "server": _HTTPX,
    "vllm": ("vllm",),
    "kernels": ("kernels",),
    "deepspeed": ("deepspeed",),
    "liger": ("liger_kernel",),
    "rewards": ("math_verify", "latex2sympy2_extended"),
    "verifiers": ("verifiers",),
    "openenv": ("openenv",),
    "capture": ("openenv",),
    "trackio": ("trackio",),
    "dashboards": ("tensorboard", "tensorboardX", "wandb", "matplotlib"),
    "quickstart": ("gguf",),
}
#: Time for the other ranks to end on their own after one failed, seconds.
GRACE = 15.0


def without_extras(*installed: str) -> tuple[str, ...]:
    """Return ``imports`` of a process in which no extra but ``installed`` can be imported."""
    missing = [name for extra, names in EXTRAS.items() if extra not in installed for name in names]
    return (*(f"-{name}" for name in (*missing, "PIL", "trl", "bitsandbytes")), *IMPORTS)


class _Server:
    """Client of the forking process: requests and answers are lines of JSON."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # not interrupted with the tests: it ends its scripts when they end
        )

    def start(self, request: dict[str, Any]) -> int:
        """Fork a process for the request and return its id, which is that of its process group too."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the forking process ended; its error is on stderr"
        return int(answer)


@cache
def _server(imports: tuple[str, ...]) -> _Server:
    return _Server(imports)


class Script:
    """A started script.

    Args:
        command: a script and its arguments, or ``-m``, a module and its arguments.
        environment: variables beside those of the tests.
        directory: working directory; that of the tests without one.
        imports: modules that the forking process imports; ``-NAME`` is one that cannot be imported.
        without: a module that the script alone cannot import; the forking process has not imported it.
    """

    def __init__(
        self,
        *command: object,
        environment: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
        imports: tuple[str, ...] = IMPORTS,
        without: str = "",
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="script-")  # removed with this object
        folder = Path(self.folder.name)
        self.files, self.status = [folder / "stdout", folder / "stderr"], folder / "status"
        request = {
            "command": [str(part) for part in command],
            "environment": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
            "directory": str(directory or os.getcwd()),
            "files": [str(file) for file in self.files],
            "status": str(self.status),
            "without": without,
        }
        self.pid = _server(imports).start(request)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the script runs."""
        return int(self.status.read_text()) if self.status.exists() else None

    def kill(self) -> None:
        """Kill the script, if it runs, and the processes that it started, and wait for its end."""
        while self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.02)

    def text(self, file: int) -> str:
        return self.files[file].read_text() if self.files[file].exists() else ""


def run(*command: object, timeout: float = 280, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; the options are those of :class:`Script`."""
    return _finish([Script(*command, **options)], timeout)


def free_port() -> int:
    """Return a port that nothing listens on now.

    The system gives no socket without a port of its own one of these: none takes it before its server starts.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            # Not of the generator that runs seed: two workers of pytest would draw the same.
            probe.bind(("127.0.0.1", port := random.SystemRandom().randrange(10_000, 16_000)))
            return port


def start_ranks(
    *command: object, world_size: int = 2, master_port: int | None = None, **options: Any
) -> list[Script]:
    """Start a script as ``world_size`` ranks on this machine, with the variables that torchrun sets.

    Args:
        master_port: of the ranks' store, if there is one; None: rank 0 starts it on a free port.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port or free_port())}
    size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    common = {**(options.pop("environment", None) or {}), **address, **size}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return [Script(*command, environment={**common, **rank}, **options) for rank in ranks]


def run_ranks(
    *command: object, world_size: int = 2, timeout: float = 280, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``world_size`` ranks.

    When a rank fails, the others have ``GRACE`` seconds to end. The exit code is 0 if all ranks succeed.
    """
    return _finish(start_ranks(*command, world_size=world_size, **options), timeout)


def _finish(scripts: list[Script], timeout: float) -> subprocess.CompletedProcess[str]:
    """Wait for all scripts; return the first exit code that is not 0, and the output of one after another."""
    end, failed = time.monotonic() + timeout, False
    try:
        while None in (codes := [script.poll() for script in scripts]) and time.monotonic() < end:
            if any(codes) and not failed:
                failed, end = True, min(end, time.monotonic() + GRACE)
            time.sleep(0.02)
    finally:
        for script in scripts:
            script.kill()
    stdout, stderr = ("".join(script.text(file) for script in scripts) for file in (0, 1))
    if None in codes and not failed:
        raise TimeoutError(f"no end within {timeout} s:\n{stdout}{stderr}")
    code = next((code for code in codes if code), 0)
    return subprocess.CompletedProcess([script.pid for script in scripts], code, stdout, stderr)


def _serve(imports: list[str]) -> dict[str, Any]:
    """Fork a process for every request; return its request in each of them and never in the server."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print
    for name in imports:
        if name.startswith("-"):
            sys.modules[name[1:]] = None  # type: ignore[assignment]  # find_spec returns None, import raises
            continue
        with contextlib.suppress(ModuleNotFoundError):  # an optional package
            importlib.import_module(name)
    if accelerate := sys.modules.get("accelerate.utils.imports"):
        # It reads DeepSpeed's metadata, 3 ms, whenever a model is unwrapped: a tenth of a short run.
        accelerate._is_package_available = cache(accelerate._is_package_available)
    gc.collect()
    gc.freeze()  # a full collection in a script need not visit the imports
    running: dict[int, Path] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.02 if running else None)[0]:
            line = sys.stdin.readline()
            if not line:  # the tests ended
                for pid in running:
                    os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                answers.close()
                return request
            os.setpgid(pid, pid)  # before the client knows the id: it kills the group
            running[pid] = Path(request["status"])
            print(pid, file=answers, flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                written = running[pid].with_suffix(".written")
                written.write_text(str(os.waitstatus_to_exitcode(status)))
                written.rename(running.pop(pid))


@contextlib.contextmanager
def _ends_at_once() -> Iterator[None]:
    """End the process as the interpreter does, without deleting every module: that takes half a second."""
    code: object = 0
    try:
        yield
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _become(request: dict[str, Any]) -> None:
    """Run the request's script as ``python COMMAND...`` does."""
    for number, path in enumerate([os.devnull, *request["files"]]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    with _ends_at_once():
        _run(request)


def _run(request: dict[str, Any]) -> None:
    command = request["command"]
    if without := request["without"]:
        sys.modules[without] = None  # type: ignore[assignment]
    if "vllm" in sys.modules:  # an engine would compile functions of its sampler, for seconds each
        importlib.import_module("torch._dynamo.config").disable = True  # type: ignore[attr-defined]
    paths = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    own = os.getcwd() if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    sys.path[:] = [own, *filter(None, paths), *sys.path[1:]]
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _become(_serve(sys.argv[1:]))
