"""Reward for programs that pass tests in a sandbox."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from groupwise.config.settings import check_value
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.texts import Text, answer_text
from groupwise.sandbox.linux import LinuxSandbox, Sandbox, SandboxLimits, SandboxResult

#: A statement that must not raise, or ``{"input": ..., "output": ...}`` for stdin and stdout.
Test = str | dict[str, str]


def get_code_execution_reward(
    column: str = "tests",
    timeout: float = 5.0,
    memory_mb: int = 512,
    max_processes: int = 8,
    max_output_kb: int = 1024,
    max_workers: int | None = None,
    sandbox: Sandbox | None = None,
) -> Callable[..., list[float | None]]:
    """Create a reward that is the fraction of tests passed by the Python program in a completion.

    The program is the last fenced code block, or the whole text if it has none. A test is a statement such
    as ``assert f(2) == 4``, executed after the program, or a dictionary with the stdin ``input`` and the
    expected stdout ``output``, compared without trailing spaces. Every test runs in a new process of this
    interpreter.

    Programs are isolated as :class:`groupwise.sandbox.linux.LinuxSandbox` describes. A statement
    test runs inside the program, which can read the test and forge its success; the expected output of an
    input-output test never enters the sandbox.

    Args:
        column: dataset column with a list of tests per row.
        timeout: seconds of wall-clock time per test, and of CPU time per process.
        memory_mb: address space per process.
        max_processes: concurrent processes and threads of one program.
        max_output_kb: size of stdout, and of each file.
        max_workers: concurrent programs; None: number of CPUs.
        sandbox: runs the programs in another way, for example on another machine; see
            :class:`groupwise.sandbox.Sandbox`. None: on this machine, as described above, which needs
            namespaces: most containers do not permit them.

    Returns:
        a reward function: one float in [0, 1] per completion, None for rows without tests. It raises
        RewardError for an invalid test.

    Raises:
        ConfigError: an argument is out of range, or the sandbox cannot be set up.
    """
    check_value("timeout", timeout, float, gt=0)
    check_value("memory_mb", memory_mb, int, ge=1)
    check_value("max_processes", max_processes, int, ge=1)
    check_value("max_output_kb", max_output_kb, int, ge=1)
    if max_workers is not None:
        check_value("max_workers", max_workers, int, ge=1)
    limits = SandboxLimits(timeout, memory_mb << 20, max_processes, max_output_kb << 10)
    runner = LinuxSandbox() if sandbox is None else sandbox
    try:
        result = runner.run("print(1)", "", limits)
    except RewardError as error:
        raise ConfigError(
            f"programs cannot be run ({error}); allow user namespaces on this machine, or pass a sandbox "
            "that runs them elsewhere"
        ) from error
    if result != SandboxResult("ok", "1\n"):
        raise ConfigError(
            f"a program of one line fails under {limits} (status {result.status!r}); allow more memory, "
            "output, processes or time"
        )
    return _CodeExecution(column, limits, runner, max_workers or os.cpu_count() or 1)


@dataclass(frozen=True)
class _CodeExecution:
    per_sample_reward: ClassVar[bool] = True
    __name__: ClassVar[str] = "code_execution_reward"

    column: str
    limits: SandboxLimits
    sandbox: Sandbox
    max_workers: int

    def __call__(
        self,
        completions: Sequence[Text],
        log_extra: Callable[[str, list], None] | None = None,
        **columns: Sequence[Sequence[Test] | None],
    ) -> list[float | None]:
        if self.column not in columns:
            raise RewardError(f"the dataset has no column {self.column!r} with the tests")
        tests = [list(row or []) for row in columns[self.column]]
        for row, test in ((row, test) for row, many in enumerate(tests) for test in many):
            streams = [test.get(key) for key in ("input", "output")] if isinstance(test, dict) else [test]
            if not all(isinstance(stream, str) for stream in streams):
                raise RewardError(
                    f"test {test!r:.80} of row {row} is invalid; allowed: a statement, or a dictionary with "
                    "the strings 'input' and 'output'"
                )
        programs = [program_text(answer_text(completion)) for completion in completions]
        runs = [(p, test) for p, many in zip(programs, tests, strict=True) for test in many]
        with ThreadPoolExecutor(self.max_workers) as pool:
            passed = iter(list(pool.map(lambda run: self._passes(*run), runs)))
        counts = [(sum(next(passed) for _ in many), len(many)) for many in tests]
        if log_extra is not None:
            log_extra("tests_passed", [f"{good}/{total}" for good, total in counts])
        return [good / total if total else None for good, total in counts]

    def _passes(self, program: str, test: Test) -> bool:
        if isinstance(test, dict):
            status, output = self.sandbox.run(program, test["input"], self.limits)
            return status == "ok" and _lines(output) == _lines(test["output"])
        # Printed only if the program reaches the end of the test; it may exit before.
        token = secrets.token_hex(16)
        source = f"{program}\n{test}\nprint()\nprint({token!r}, flush=True)\n"
        status, output = self.sandbox.run(source, "", self.limits)
        return status == "ok" and _lines(output)[-1:] == [token]


def program_text(text: str) -> str:
    """Return the last fenced code block (Python or unlabelled, possibly unclosed), else the text."""
    fences = re.findall(
        r"^```[ \t]*(?:(?:python3?|py)[ \t]*)?\n(.*?)(?:^```|\Z)", text, re.DOTALL | re.MULTILINE
    )
    return fences[-1] if fences else text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
