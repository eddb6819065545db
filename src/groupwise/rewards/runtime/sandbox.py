"""Programs of unknown intent in a process with limits; what it protects from is said in ``code.py``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from groupwise.errors import RewardError


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    timeout: seconds, of the clock and of processor time per process.
    memory: bytes of address space per process.
    processes: processes and threads at one time.
    output: bytes of standard output, and of any one file.
    """

    timeout: float
    memory: int
    processes: int
    output: int


class Outcome(NamedTuple):
    """How a program ended, and what it wrote to standard output."""

    status: Literal["ok", "failed", "timeout"]
    output: str


def run_program(source: str, stdin: str, limits: Limits, isolated: bool) -> Outcome:
    """Run a Python program and wait for it and for everything it started.

    Args:
        isolated: in namespaces of its own; otherwise under limits only.

    Raises:
        RewardError: the sandbox could not be set up; the program was not run.
    """
    if sys.platform != "linux":
        raise RewardError("the sandbox could not be set up: it needs Linux")
    # Not above: it imports what other systems do not have.
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
            # The program runs as nobody, who must reach its working directory.
            directory.chmod(0o711)
            os.chown(directory / "work", sandbox_launcher.NOBODY, sandbox_launcher.NOBODY)
        given.write(stdin.encode("utf-8", errors="replace"))
        given.seek(0)
        job = {
            **vars(limits),
            "isolated": isolated,
            "directory": str(directory),
            "executable": sys.executable,
            "prefixes": sorted({sys.base_prefix, sys.prefix}),
        }
        # Not through the interpreter's site packages: the start is most of the cost of a short program.
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
        complaint = _wait(process, limits.timeout)
        if complaint:
            raise RewardError(f"the sandbox could not be set up: {complaint.strip().splitlines()[-1]}")
        statuses: dict[int, Literal["ok", "failed", "timeout"]] = {
            0: "ok",
            sandbox_launcher.FAILED: "failed",
        }
        written.seek(0)
        output = written.read(limits.output).decode("utf-8", errors="replace")
        return Outcome(statuses.get(process.returncode, "timeout"), output)


def _wait(process: subprocess.Popen[bytes], timeout: float) -> str:
    """Until the launcher ends, or is ended when it outlives its own time limit; what it wrote to stderr."""
    try:
        return process.communicate(timeout=timeout + 10)[1].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return ""
    finally:
        if process.poll() is None:
            # Only a launcher that is asked to end can be sure to end what left its process group.
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stderr.close()
