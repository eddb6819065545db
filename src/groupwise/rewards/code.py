"""A reward for programs that pass tests, run in a sandbox."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.runtime.sandbox import Limits, Outcome, run_program
from groupwise.rewards.texts import answer_text, check_number, check_whole

logger = logging.getLogger(__name__)

#: A statement that must not raise, or ``{"input": ..., "output": ...}`` of standard streams.
Test = str | dict[str, str]


def get_code_execution_reward(
    column: str = "tests",
    timeout: float = 5.0,
    memory_mb: int = 512,
    max_processes: int = 8,
    max_output_kb: int = 1024,
    max_workers: int | None = None,
    require_isolation: bool = True,
) -> Callable[..., list[float | None]]:
    """The share of tests that the Python program in a completion passes.

    The program is the last fenced code block, or the whole text where there is none. A test is a statement
    such as ``assert f(2) == 4``, run after the program, or a dictionary with the standard ``input`` and the
    expected ``output``, compared without spaces at line ends. Every test gets a process of its own, with this
    interpreter and its packages.

    On Linux (5.12 or newer) where user namespaces are permitted, a program

    - sees a read-only file system of the interpreter, ``/usr`` and four devices: none of the user's files, no
      ``/proc``; it can write to a ``/tmp`` of 8 times ``max_output_kb`` that ends with it;
    - has no network, not even the machine's own, and no process but its own;
    - has nothing of the environment of the training process, and no rights of root;
    - ends, with all its processes, after ``timeout``.

    It is no virtual machine. Not prevented are: attacks on the kernel (no system call is filtered) and on
    the processor; reading the interpreter's packages and everything in ``/usr``; ``max_processes`` times
    ``memory_mb`` of memory, since limits are per process, and the machine's processors up to the timeout;
    sockets of the virtual machine's host (``AF_VSOCK``). A statement test runs inside the program, which can
    read it and what reports its success, so a program can claim to pass; the expected output of an
    input-output test never enters the sandbox.

    Args:
        column: dataset column with a list of tests per row.
        timeout: seconds per test, of the clock, and of processor time per process.
        memory_mb: address space per process.
        max_processes: processes and threads of one program at a time.
        max_output_kb: standard output, and any one file.
        max_workers: programs at a time; None is the number of processors.
        require_isolation: refuse to work where namespaces are not permitted (as in most containers). With
            False, programs then run under time, memory, process and output limits only: **they can use the
            network and read and write whatever the user can**, the environment of the training process
            included (as root they run as ``nobody``).

    Returns:
        a reward function, None for rows without tests. It raises RewardError for something that is no test.

    Raises:
        ConfigError: an argument is out of range, or a program cannot be run in isolation here.
    """
    check_number("timeout", timeout, above=0.0)
    check_whole("memory_mb", memory_mb, 1)
    check_whole("max_processes", max_processes, 1)
    check_whole("max_output_kb", max_output_kb, 1)
    if max_workers is not None:
        check_whole("max_workers", max_workers, 1)
    limits = Limits(timeout, memory_mb << 20, max_processes, max_output_kb << 10)
    isolated = _isolation(limits, require_isolation)
    return _CodeExecution(column, limits, isolated, max_workers or os.cpu_count() or 1)


def _isolation(limits: Limits, required: bool) -> bool:
    """Whether programs run in namespaces, found out by running one.

    Raises:
        ConfigError: they must but cannot, or no program ends well under these limits.
    """
    try:
        isolated, outcome = True, run_program("print(1)", "", limits, isolated=True)
    except RewardError as error:
        if required:
            raise ConfigError(
                f"programs cannot be isolated here ({error}); allow user namespaces, or pass "
                "require_isolation=False, which lets programs use the network and the user's files"
            ) from error
        try:
            isolated, outcome = False, run_program("print(1)", "", limits, isolated=False)
        except RewardError as second:
            raise ConfigError(f"programs cannot be run here, isolated or not ({second})") from second
        logger.warning("programs run without isolation, with the network and the user's files (%s)", error)
    if outcome != Outcome("ok", "1\n"):
        raise ConfigError(
            f"a program of one line does not end well under {limits} (status {outcome.status!r}); allow "
            "more memory, output, processes or time"
        )
    return isolated


@dataclass(frozen=True)
class _CodeExecution:
    per_sample_reward: ClassVar[bool] = True
    __name__: ClassVar[str] = "code_execution_reward"

    column: str
    limits: Limits
    isolated: bool
    max_workers: int

    def __call__(
        self,
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if self.column not in columns:
            raise RewardError(f"the dataset has no column {self.column!r}, which holds the tests")
        tests = [list(row or []) for row in columns[self.column]]
        for row, test in ((row, test) for row, many in enumerate(tests) for test in many):
            _check_test(test, row)
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
            status, output = run_program(program, test["input"], self.limits, self.isolated)
            return status == "ok" and _lines(output) == _lines(test["output"])
        # Only a program that reaches the end of the test says this; one that exits early does not.
        token = secrets.token_hex(16)
        source = f"{program}\n{test}\nprint()\nprint({token!r}, flush=True)\n"
        status, output = run_program(source, "", self.limits, self.isolated)
        return status == "ok" and _lines(output)[-1:] == [token]


def program_text(text: str) -> str:
    """The last fenced code block (of Python or of no language), an unfinished one too; else the text."""
    fences = re.findall(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:^```|\Z)", text, re.DOTALL | re.MULTILINE)
    return fences[-1] if fences else text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _check_test(test: Any, row: int) -> None:
    streams = isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("input", "output"))
    if not streams and not isinstance(test, str):
        raise RewardError(
            f"test {test!r:.80} of row {row} is none; allowed: a statement, or a dictionary with the texts "
            "'input' and 'output'"
        )
