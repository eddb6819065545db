"""Run a vLLM server on this machine for the duration of a benchmark."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def serving(
    model: Path, cores: set[int], *, precision: str, cache_mib: int = 512, start_seconds: float = 300
) -> Iterator[str]:
    """Start the server on the given cores, one thread each, and yield its address.

    Args:
        precision: "bf16" or "float32", of weights and computation.
        cache_mib: memory for keys and values.

    Raises:
        SystemExit: it does not come up; with the end of what it wrote.
    """
    from groupwise.generation.vllm.serve import serve_command

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    extra = ["--kv-cache-memory-bytes", str(cache_mib * 2**20), "--max-model-len", "2048"]
    dtype = {"bf16": "bfloat16"}.get(precision, precision)
    command, environment = serve_command(str(model), port=port, device="cpu", dtype=dtype, extra=extra)
    if command[0] == "vllm":  # of this environment, not of the search path
        command[0] = str(Path(sys.executable).with_name("vllm"))
    own = {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own["VLLM_LOGGING_LEVEL"] = "WARNING"
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, **own},
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            _wait(process, url, start_seconds, log)
            yield url
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen, url: str, limit: float, log: IO[bytes]) -> None:
    end = time.monotonic() + limit
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                text = log.read()[-3000:].decode(errors="replace")
                raise SystemExit(f"vllm serve did not start within {limit:g} s:\n{text}") from None
            time.sleep(0.3)
