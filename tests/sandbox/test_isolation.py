"""Rewards in processes of their own: crashes, leaks and endless loops stay there."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.runs import trainer
from support.workers.launch import run

from groupwise import ConfigError, RewardError
from groupwise.sandbox import isolated


def judge(reward, texts, **given):
    """Rewards of a function that is called as the trainer does."""
    return reward(prompts=[f"p{i}" for i in range(len(texts))], completions=texts, **given)


def by_text(completions, log_extra, log_metric, trainer_state=None, **_):
    """Does what the completion says."""
    (text,) = completions
    log_extra("said", [text.upper()])
    log_metric("length", len(text))
    if text == "crash":
        ctypes.string_at(0)  # a segmentation fault
    if text == "exit":
        os._exit(3)
    if text == "leave":
        sys.exit(0)
    if text == "hang":
        time.sleep(60)
    if text == "two":
        log_extra("said", ["a", "b"])
    if text == "raise":
        raise KeyError("no such answer")
    if text == "none":
        return [None]
    return [float(len(text))]


@pytest.mark.slow
def test_completions_are_judged_one_by_one_in_order():
    texts = ["a", "none", "bbb", "cc", "dddd"]
    for processes in (1, 2, 3):
        logged, metrics = {}, []
        log = {"log_extra": logged.__setitem__, "log_metric": lambda *entry, to=metrics: to.append(entry)}
        rewards = judge(isolated(by_text, processes=processes), texts, **log)
        assert rewards == [1.0, None, 3.0, 2.0, 4.0]
        assert logged["said"] == ["A", "NONE", "BBB", "CC", "DDDD"]
        assert sorted(value for name, value in metrics if name == "length") == [1, 2, 3, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("crash", r"ended its process \(SIGSEGV\)"),
        ("exit", r"ended its process \(exit code 3\)"),
        ("hang", "took longer than 1.0 seconds and was killed"),
        ("leave", "raised SystemExit: 0"),
        ("raise", "raised KeyError: 'no such answer'"),
        ("two", r"raised ValueError: log_extra\('said', ...\) has 2 values for one completion"),
    ],
)
def test_a_failure_is_that_of_one_completion(text, said):
    texts = ["a", text, "bb", text, "ccc"]
    metrics = {}
    # Only what hangs is to reach the limit: a crash takes a while on a busy machine.
    timeout = 1.0 if text == "hang" else 60.0
    tolerant = isolated(by_text, timeout=timeout, on_error="none", processes=2)
    assert judge(tolerant, texts, log_metric=metrics.__setitem__) == [1.0, None, 2.0, None, 3.0]
    assert metrics["rewards/by_text/failed_rows"] == 2.0
    assert judge(tolerant, ["dddd"]) == [4.0]  # and it goes on
    with pytest.raises(RewardError, match=f"'by_text' {said}, for row 1; prompt: 'p1'; completion: '{text}'"):
        judge(isolated(by_text, timeout=timeout), texts)


def die_while_sending(completions, log_extra, **_):
    """Reward and a large column; a message of that size through a pipe ends the process half-way."""
    (text,) = completions

    def send(self, buffer, write=os.write):
        if len(buffer) > 10_000:
            write(self._handle, buffer[: len(buffer) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(self._handle, buffer)

    if text == "large":
        multiprocessing.connection.Connection._send = send
        log_extra("text", ["x" * 1_000_000])
    if text == "dies":
        log_extra("text", [DiesWhenSent()])
    return [float(len(text))]


class DiesWhenSent:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
        return (str, ())


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("processes", [1, 3])
def test_a_worker_that_dies_while_it_sends_takes_no_other_result_with_it(processes):
    texts = ["a", "large", "bb", "dies", "ccc", "large", "dddd"]
    reward = isolated(die_while_sending, timeout=30.0, processes=processes, on_error="none")
    columns = {}
    found = judge(reward, texts, log_extra=columns.__setitem__)
    assert found == [1.0, 5.0, 2.0, None, 3.0, 5.0, 4.0]
    assert [value and len(value) for value in columns["text"]] == [None, 10**6, None, None, None, 10**6, None]
    assert judge(reward, ["ccc", "a"]) == [3.0, 1.0]


def dies_after_its_reward(completions, **_):
    """A thread of the row "late" ends the process when the row has its reward and others are scored."""
    (text,) = completions
    if text == "late":
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(0.3)
    return [float(len(text))]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_that_dies_after_its_row_takes_no_reward_of_another(processes):
    reward = isolated(dies_after_its_reward, processes=processes, on_error="none")
    rewards = judge(reward, ["a", "late", "bb", "ccc", "late"])
    assert [rewards[i] for i in (0, 2, 3)] == [1.0, 2.0, 3.0]
    assert rewards[1] in (4.0, None) and rewards[4] in (4.0, None)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_call_that_was_given_up_leaves_its_rewards_to_no_other():
    def slow(completions, **_):
        time.sleep(1.0 if completions == ["slow"] else 0.0)
        return [float(len(completions[0]))]

    reward = isolated(slow)
    presses = []

    def press(*_):
        presses.append(1)
        if len(presses) == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            try:
                judge(reward, ["slow"])
            finally:  # a second press while the first one is handled
                while len(presses) < 2:
                    time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert judge(reward, ["a", "bbb"]) == [1.0, 3.0]
    assert judge(reward, ["bb"]) == [2.0]


@pytest.mark.slow
def test_the_slowest_completion_is_in_the_table():
    def slow(completions, **_):
        time.sleep(0.4 if completions == ["slow"] else 0.0)
        return [1.0]

    logged, metrics = {}, {}
    judge(isolated(slow), ["a", "slow", "b"], log_extra=logged.__setitem__, log_metric=metrics.__setitem__)
    seconds = logged["slow_seconds"]
    assert len(seconds) == 3 and seconds[1] >= 0.4  # how long the others take is the machine's affair
    assert metrics["rewards/slow/slowest_seconds"] == pytest.approx(max(seconds), abs=1e-3)


@pytest.mark.slow
def test_state_and_memory_of_a_call_do_not_persist():
    kept = []

    def leaking(completions, **_):
        kept.append(bytearray(1000))
        return [float(len(kept))]

    reward = isolated(leaking)
    assert judge(reward, ["a", "b"]) == [1.0, 1.0]
    assert judge(reward, ["c"]) == [1.0]
    assert kept == []


def test_an_async_function_and_a_closure():
    bonus = 2.0

    async def later(completions, **_):
        return torch.tensor([len(completions[0]) + bonus])

    assert judge(isolated(later), ["abc"]) == [5.0]


@pytest.mark.representative("a run survives crashes")
@pytest.mark.slow
def test_a_run_survives_crashes(tmp_path):
    def fragile(completion_ids, **_):
        if sum(completion_ids[0]) % 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        return [float(completion_ids[0][0])]

    crashing = trainer(tmp_path, isolated(fragile, on_error="none"), max_steps=2)
    crashing.train()
    logged = [line for line in crashing.state.log_history if "loss" in line]
    assert any(line["rewards/fragile/failed_rows"] > 0 for line in logged)
    assert all("rewards/fragile/slowest_seconds" in line for line in logged)


def test_workers_load_neither_torch_nor_transformers():
    code = "import sys, groupwise.sandbox; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_processes_end_with_the_script(tmp_path):
    code = (
        "import os, time\n"
        "from groupwise.sandbox import isolated\n"
        "def pid(**_): return [float(os.getppid())]\n"
        "print(int(isolated(pid)(prompts=['p'], completions=['c'])[0]))\n"
    )
    (tmp_path / "script.py").write_text(code)
    done = run(tmp_path / "script.py", timeout=120)
    assert done.returncode == 0, done.stderr
    for _ in range(100):
        try:
            os.kill(int(done.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the process that starts workers is still there")


@pytest.mark.timeout(60)
def test_a_call_ends_with_a_trainer_that_is_killed(tmp_path):
    def endless(completions, **_):
        (tmp_path / "started").write_text(str(os.getpid()))
        os.rename(tmp_path / "started", tmp_path / "worker")
        time.sleep(600)

    trainer = os.fork()
    if trainer == 0:
        try:
            judge(isolated(endless), ["a"])
        finally:
            os._exit(1)
    wait_until((tmp_path / "worker").exists)
    worker = int((tmp_path / "worker").read_text())
    command = Path(f"/proc/{worker}/cmdline")
    assert command.read_bytes()
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    try:
        wait_until(lambda: not command.exists() or not command.read_bytes())  # empty for a zombie
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def wait_until(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not come to pass within twenty seconds")


@pytest.mark.parametrize(
    ("reward", "given", "said"),
    [
        (torch.nn.Linear(1, 1), {}, "takes a reward function, not a Linear"),
        (by_text, {"processes": 0}, "processes from 1"),
        (by_text, {"timeout": 0}, "timeout None or above 0"),
        (by_text, {"on_error": "ignore"}, "on_error 'raise' or 'none'"),
    ],
)
def test_settings_are_checked(reward, given, said):
    with pytest.raises(ConfigError, match=said):
        isolated(reward, **given)
