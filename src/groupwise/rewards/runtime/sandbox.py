"""Sandbox for untrusted Python programs; ``code.py`` documents its guarantees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

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


@dataclass(frozen=True)
class LinuxSandbox:
    """Sandbox of Linux namespaces and resource limits.

    isolated: run in new namespaces; False applies the resource limits only.
    """

    isolated: bool = True

    def run(self, program: str, stdin: str, limits: SandboxLimits) -> SandboxResult:
        """Run a Python program; see :class:`Sandbox`."""
        return _run(program, stdin, limits, self.isolated)


def _run(source: str, stdin: str, limits: SandboxLimits, isolated: bool) -> SandboxResult:
    if sys.platform != "linux":
        raise RewardError("the sandbox could not be set up: it needs Linux")
    # Imported here: its module needs Linux.
    from groupwise.rewards.runtime import sandbox_launcher

    with (
        tempfile.TemporaryDirectory(prefix="groupwise_sandbox_", ignore_cleanup_errors=True) as name,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as written,
    ):
        directory = Path(name)
        (directory / "program.py").write_text(source, encoding="utf-8", errors="replace")
        (directory / "root").mkdir()
        (directory / "work").mkdir()
        if os.geteuid() == 0 and not isolated:
            # The program runs as an unprivileged user, which needs access to its working directory.
            directory.chmod(0o711)
            os.chown(directory / "work", sandbox_launcher.UNPRIVILEGED_ID, sandbox_launcher.UNPRIVILEGED_ID)
        given.write(stdin.encode("utf-8", errors="replace"))
        given.seek(0)
        job = {
            **vars(limits),
            "isolated": isolated,
            "directory": str(directory),
            "executable": sys.executable,
            # with the targets: a virtual environment may be a symbolic link
            "prefixes": sorted(
                {
                    path
                    for prefix in (sys.base_prefix, sys.prefix)
                    for path in (prefix, os.path.realpath(prefix))
                }
            ),
        }
        # -S skips site-packages: start-up dominates the cost of a short program.
        command = [sys.executable, "-I", "-S", sandbox_launcher.__file__, json.dumps(job)]
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=written,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        errors = _wait(process, limits.timeout)
        if errors:
            raise RewardError(f"the sandbox could not be set up: {errors.strip().splitlines()[-1]}")
        statuses: dict[int, Literal["ok", "failed", "timeout"]] = {
            0: "ok",
            sandbox_launcher.FAILED: "failed",
        }
        written.seek(0)
        output = written.read(limits.output).decode("utf-8", errors="replace")
        return SandboxResult(statuses.get(process.returncode, "timeout"), output)


def _wait(process: subprocess.Popen[bytes], timeout: float) -> str:
    """Wait for the launcher, or stop it if it exceeds its own time limit. Returns its stderr."""
    try:
        return process.communicate(timeout=timeout + 10)[1].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return ""
    finally:
        if process.poll() is None:
            # SIGTERM first: only the launcher can kill processes that left its process group.
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stderr is not None:
                process.stderr.close()
