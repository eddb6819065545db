"""Sandbox for untrusted Python programs; :class:`LinuxSandbox` documents its guarantees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol, cast

from groupwise.errors import RewardError


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one program.

    timeout: seconds of wall-clock time, and of CPU time per process.
    memory: bytes of address space per process.
    processes: concurrent processes and threads.
    output: bytes of standard output, and of each file.
    """

    timeout: float
    memory: int
    processes: int
    output: int


class SandboxResult(NamedTuple):
    """Exit status and standard output of a program."""

    status: Literal["ok", "failed", "timeout"]
    output: str


class Sandbox(Protocol):
    """Runs the programs of ``get_code_execution_reward``, which calls it from several threads."""

    def run(self, program: str, stdin: str, limits: SandboxLimits) -> SandboxResult:
        """Run a Python program and wait until it and all processes it started have ended.

        Raises:
            RewardError: the sandbox could not be set up; the program was not run.
        """
        ...


class LinuxSandbox:
    """Sandbox of Linux namespaces and resource limits.

    On Linux (5.12 or newer) with user namespaces, a program

    - has a read-only file system with the interpreter (``bin``, ``lib`` and ``pyvenv.cfg`` of its prefixes),
      ``/usr`` and four devices, without user files and ``/proc``, and a temporary, writable ``/tmp`` of 8
      times ``SandboxLimits.output``;
    - has pipes as its standard input and output, and cannot use the kernel's keyrings, System V IPC,
      ``memfd_create``, ``io_uring`` or ``userfaultfd``;
    - has no network, not even loopback to the machine, and no sockets but those of IP and AF_UNIX, and sees
      only its own processes;
    - has no environment variables of the training process and no root privileges;
    - is killed with all its processes after the timeout.

    The sandbox is not a virtual machine. It does not prevent attacks on the kernel (through all other system
    calls) or the CPU; reading the interpreter's packages and ``/usr``; using as many times the memory limit
    as there may be processes, and all CPUs until the timeout.
    """

    def run(self, program: str, stdin: str, limits: SandboxLimits) -> SandboxResult:
        """Run a Python program; see :class:`Sandbox`."""
        if sys.platform != "linux":
            raise RewardError("the sandbox could not be set up: it needs Linux")
        # Imported here: its module needs Linux.
        from groupwise.sandbox import launcher

        with tempfile.TemporaryDirectory(prefix="groupwise_sandbox_", ignore_cleanup_errors=True) as name:
            directory = Path(name)
            (directory / "program.py").write_text(program, encoding="utf-8", errors="replace")
            (directory / "root").mkdir()
            job = {
                **vars(limits),
                "directory": str(directory),
                "executable": sys.executable,
                # What a program needs of the installation and of its virtual environment: their directories
                # may be those of a project, with other files.
                "paths": [
                    sys.executable,
                    *(
                        os.path.join(prefix, part)
                        for prefix in dict.fromkeys((sys.base_prefix, sys.prefix))
                        for part in ("bin", "lib", "lib64", "pyvenv.cfg")
                    ),
                ],
            }
            # -S skips site-packages: start-up dominates the cost of a short program.
            command = [sys.executable, "-I", "-S", launcher.__file__, json.dumps(job)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # a file could be given space on its disk
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                start_new_session=True,
            )
            output, errors = _communicate(process, stdin.encode("utf-8", errors="replace"), limits)
            if errors:
                raise RewardError(f"the sandbox could not be set up: {errors.strip().splitlines()[-1]}")
            statuses: dict[int, Literal["ok", "failed", "timeout"]] = {
                0: "failed" if len(output) > limits.output else "ok",
                launcher.FAILED: "failed",
            }
            text = output[: limits.output].decode("utf-8", errors="replace")
            return SandboxResult(statuses.get(process.returncode, "timeout"), text)


def _communicate(process: subprocess.Popen[bytes], stdin: bytes, limits: SandboxLimits) -> tuple[bytes, str]:
    """Wait for the launcher, or stop it if it exceeds its own time limit.

    Returns:
        its output, more than the limit if there was more, and its stderr.
    """
    pipe, process.stdout = cast(IO[bytes], process.stdout), None  # communicate() would read all of it
    output, errors = bytearray(), b""

    def read() -> None:
        with pipe:
            while len(output) <= limits.output and (chunk := os.read(pipe.fileno(), 1 << 16)):
                output.extend(chunk)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        errors = process.communicate(stdin, timeout=limits.timeout + 10)[1]
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()  # the kernel kills the program and its processes with it
            process.wait()
            for unread in filter(None, (process.stdin, process.stderr)):
                unread.close()
    reader.join(5)  # a program outlives a launcher that was killed just when it started it
    return bytes(output), errors.decode(errors="replace")
