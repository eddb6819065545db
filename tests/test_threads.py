"""Threads: time limits, exceptions that would end a thread or process, and the end of an event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import wait
from functools import partial

import pytest
import torch

from groupwise.threads import CallExecutor, EventLoop, Invocation, await_call, interrupted, start_thread

LONG = 30.0


@pytest.fixture
def loop():
    made = EventLoop("test")
    yield made
    made.close()


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("x"), KeyboardInterrupt()])
def test_exceptions_that_end_a_process_are_runtime_errors(loop, error):
    def fails():
        raise error

    async def fails_async():
        raise error

    for future in (
        start_thread(fails),
        loop.submit(await_call(fails, LONG)),
        loop.submit(await_call(fails_async, LONG)),
    ):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            future.result(LONG)
    assert loop.submit(await_call(lambda: 5, None)).result(LONG) == 5


def test_a_call_ends_at_its_limit(loop):
    leave, cancelled = threading.Event(), threading.Event()

    async def endless():
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    for function in (endless, lambda: leave.wait(LONG)):
        with pytest.raises(TimeoutError, match=r"no result within 0\.05 seconds"):
            loop.submit(await_call(function, 0.05)).result(LONG)
    assert cancelled.wait(LONG)
    leave.set()


def test_a_loop_survives_a_task_that_exits(loop, caplog):
    async def exits():
        raise SystemExit

    async def starts_one():
        task = asyncio.get_running_loop().create_task(exits())
        await asyncio.sleep(0)
        return task

    loop.submit(starts_one()).result(LONG)
    assert loop.submit(asyncio.sleep(0, "alive")).result(LONG) == "alive"
    assert "a task in the event loop 'test' raised" in caplog.text


def test_close_cancels_what_runs_then_finishes_and_ends_the_thread():
    closed, finished = EventLoop("closed"), threading.Event()

    async def finish():
        finished.set()

    future = closed.submit(asyncio.sleep(LONG))
    closed.close(finish)
    for made in (lambda: future.result(LONG), lambda: closed.submit(asyncio.sleep(0))):
        with pytest.raises(RuntimeError, match="the event loop 'closed' was closed"):
            made()
    assert finished.wait(LONG)
    end = time.monotonic() + LONG
    while any(thread.name == "closed" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_function_in_the_main_thread_is_interrupted():
    with pytest.raises(TimeoutError, match=r"no result within 0\.1 seconds"):
        interrupted(lambda: time.sleep(LONG), 0.1)
    assert interrupted(lambda: 5, LONG) == 5


def test_a_limit_that_passes_before_the_function_is_called_is_the_same_error(monkeypatch):
    """As where other processes hold the processor for longer than the limit."""
    start, previous = threading.Timer.start, signal.getsignal(signal.SIGVTALRM)

    def start_and_wait(timer):
        start(timer)
        time.sleep(LONG)

    monkeypatch.setattr(threading.Timer, "start", start_and_wait)
    with pytest.raises(TimeoutError, match=r"no result within 0\.05 seconds"):
        interrupted(lambda: 5, 0.05)
    assert signal.getsignal(signal.SIGVTALRM) == previous


def test_a_thread_that_cannot_use_the_callers_device_fails(monkeypatch):
    """After an illegal access every call of CUDA raises; who waits for the thread must not wait forever."""

    def broken(device):
        raise RuntimeError(f"CUDA error on {device}")

    for name, function in (("is_initialized", lambda: True), ("current_device", lambda: 1)):
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.cuda, "set_device", broken)
    with pytest.raises(RuntimeError, match="CUDA error on 1"):
        start_thread(lambda: 5).result(LONG)


def test_a_function_that_cancels_itself_fails(loop):
    async def cancels():
        asyncio.current_task().cancel()
        await asyncio.sleep(LONG)

    (call,) = CallExecutor(loop=loop).run_all([Invocation(cancels)])
    with pytest.raises(RuntimeError, match="CancelledError"):
        call.result(LONG)


def test_a_call_that_is_given_up_while_it_waits_is_not_made(loop, monkeypatch):
    monkeypatch.setattr("groupwise.threads.MAX_CONCURRENT_CALLS", 1)
    begun, leave, made = threading.Event(), threading.Event(), []

    async def first():
        begun.set()
        while not leave.is_set():
            await asyncio.sleep(0.01)

    async def call(number):
        made.append(number)

    executor, environment = CallExecutor(loop=loop), object()
    invocations = [
        Invocation(first, environment),
        *(Invocation(partial(call, 1), owner) for owner in (environment, None)),  # of a rollout; any other
        Invocation(partial(call, 2)),
    ]
    executor.start(invocations)
    assert begun.wait(LONG)
    for given_up in invocations[1:3]:
        executor.give_up(given_up, RuntimeError("the rollout was discarded"))
    leave.set()
    wait([invocations[0], invocations[3]], LONG)
    loop.submit(asyncio.sleep(0.1)).result(LONG)
    assert made == [2]


def test_a_thread_has_the_callers_gradient_mode():
    with torch.no_grad():
        futures = [start_thread(torch.is_grad_enabled, "named")]
    futures.append(start_thread(torch.is_grad_enabled))
    wait(futures, LONG)
    assert [future.result() for future in futures] == [False, True]
