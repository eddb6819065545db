"""A real ``vllm serve`` on this machine that can be killed and started again."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from pathlib import Path

from groupwise.generation.vllm.serve import serve_command
from support.engine_runs import policy
from support.runs import tokenizer
from support.workers import forked_server
from support.workers.launch import WITH_VLLM, Script, free_port

HERE = Path(__file__).parent
# A small cache and few places; the tests of several servers at a time would not fit otherwise.
SMALL = ["--kv-cache-memory-bytes", str(2**24), "--max-num-seqs", "32"]
SMALL += ["--worker-extension-cls", "support.fakes.worker_faults.Extension"]


class ServerProcess:
    """Serves the tiny policy, with weights that are not the trainer's.

    Args:
        directory: where the model and the log are written.
    """

    def __init__(self, directory: Path, extra: tuple[str, ...] = ()) -> None:
        model = directory / "model"
        if not model.exists():
            policy(seed=7).save_pretrained(model)
            tokenizer().save_pretrained(model)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command, environment = serve_command(str(model), port=self.port, device="cpu", extra=[*SMALL, *extra])
        self.command = command[2:] if command[1] == "-m" else ["vllm.entrypoints.cli.main", *command[1:]]
        own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
        self.out_of_memory = directory / "out-of-memory"  # when it exists, the next forward pass fails
        own["OUT_OF_MEMORY_FILE"] = str(self.out_of_memory)
        own["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self.environment = {**environment, **own}
        self.process: Script | None = None

    def start(self) -> ServerProcess:
        """Start without waiting. Server and engine are forked: each import of vLLM takes 13 s of CPU time."""
        end = time.monotonic() + 30
        while (
            not self._port_is_free() and time.monotonic() < end
        ):  # a killed engine has the socket until it ends
            time.sleep(0.02)
        command = [forked_server.__file__, *self.command]
        self.process = Script(*command, environment=self.environment, imports=WITH_VLLM)
        return self

    def _port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
            return True

    def output(self) -> str:
        """Return what the running server, or the last one, has written."""
        return "" if self.process is None else self.process.text(0) + self.process.text(1)

    def wait(self, seconds: float = 400.0) -> ServerProcess:
        """Return when it is healthy."""
        end = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    output = self.output()
                    cause = output[max(output.find("Traceback"), 0) :]  # of the engine
                    raise AssertionError(f"vLLM did not start:\n{cause[:8000]}\n{output[-2000:]}") from None
                time.sleep(0.3)

    def revive(self) -> ServerProcess:
        """Start it again if it ended; what it said goes to the test's output."""
        if self.process is not None and self.process.poll() is not None:
            print(f"vLLM ended with {self.process.poll()}:\n{self.output()[-8000:]}")
            self.start()
        return self.wait()

    def kill(self) -> None:
        """End it at once, with its workers, as a machine that fails does."""
        if self.process is not None:
            self.process.kill()
