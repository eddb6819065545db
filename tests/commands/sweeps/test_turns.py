"""One thread computes at a time, with random numbers and accelerate's state of its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from groupwise.commands.sweeps.turns import ClosedError, TurnThread, preserved_accelerate
from groupwise.errors import BackendError


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_thread_pauses_and_gets_answers():
    thread, got = TurnThread("one", lambda: got.extend([thread.pause(1), thread.pause(2)])), []
    assert thread.advance() == 1 and thread.advance("a") == 2 and not thread.has_ended
    assert thread.advance("b") is None and thread.has_ended and got == ["a", "b"]


def test_a_thread_that_does_not_run_gets_no_turn():
    thread = TurnThread("one", lambda: None)
    with pytest.raises(BackendError, match="'one' samples only while a sweep"):
        thread.pause()
    thread.advance()
    with pytest.raises(BackendError, match="'one' samples only while a sweep"):
        thread.pause()


def test_a_thread_gets_no_turn_of_another_one():
    """As where a callback of a run evaluates another one, which would wait for ever."""

    def of_other() -> None:
        with pytest.raises(BackendError, match="'one' samples only while a sweep"):
            thread.pause()

    thread = TurnThread("one", lambda: thread.pause("mine"))
    assert thread.advance() == "mine"
    other = TurnThread("other", of_other)
    assert other.advance() is None and other.error is None
    thread.close()


def test_each_thread_draws_its_own_random_numbers():
    expected = []
    threads, found = [], []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        threads.append(TurnThread(str(seed), lambda: None))
        expected.append([draws() for _ in range(3)])

    def drawing(index: int):
        def body() -> None:
            for _ in range(3):
                found.append((index, draws()))
                threads[index].pause()

        return body

    for index, thread in enumerate(threads):
        thread.function = drawing(index)
    before = torch.get_rng_state()
    for _ in range(3):
        for thread in threads:
            thread.advance()
    assert [numbers for index, numbers in found if index == 0] == expected[0]
    assert [numbers for index, numbers in found if index == 1] == expected[1]
    assert torch.equal(torch.get_rng_state(), before)
    for thread in threads:
        thread.close()
        assert thread.has_ended


def test_each_thread_has_its_own_state_of_accelerate():
    accelerator, found = Accelerator(cpu=True), []

    def body() -> None:
        accelerator.gradient_state._set_sync_gradients(False)
        thread.pause()
        found.append(accelerator.sync_gradients)

    thread = TurnThread("one", body)
    thread.advance()
    assert accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(True)
    thread.advance()
    assert found == [False]


def test_a_configuration_can_be_built_beside_a_trainer(tmp_path):
    from groupwise import GRPOConfig

    AcceleratorState._reset_state(reset_partial_state=True)  # of another test
    accelerator = Accelerator(cpu=True)
    with preserved_accelerate():
        GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")  # resets the state
    assert accelerator.state.mixed_precision == "no"


def test_an_answer_may_be_an_error_and_a_closed_thread_ends():
    def body() -> None:
        with pytest.raises(ValueError, match="no"):
            thread.pause()
        thread.pause("still here")

    thread = TurnThread("one", body)
    thread.advance()
    assert thread.advance(ValueError("no")) == "still here"
    thread.close()
    assert isinstance(thread.error, ClosedError)
    thread.close()  # again: nothing happens


def test_gradients_are_recorded_in_a_thread():
    found: list[bool] = []
    TurnThread("one", lambda: found.append(torch.is_grad_enabled())).advance()
    assert found == [True]
