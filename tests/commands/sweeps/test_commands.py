"""Commands reach a running sweep as files, and its answer comes back."""

from __future__ import annotations

import threading
import time

import pytest

from groupwise.commands.sweeps.commands import answer_commands, send_command, sweep_lock
from groupwise.errors import ConfigError


def test_a_command_is_answered_or_refused(tmp_path):
    def execute(command: dict[str, str]) -> str:
        if command["name"] == "odd":
            raise KeyError("odd")
        if command["name"] != "low":
            raise ConfigError("no run 'lo'; nearest: 'low'")
        return f"{command['action']} {command['name']}"

    def serve() -> None:
        while not done.is_set():
            answer_commands(tmp_path, execute)
            time.sleep(0.01)

    done = threading.Event()
    with sweep_lock(tmp_path):
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            assert send_command(tmp_path, {"action": "stop", "name": "low"}, 0.01) == "stop low"
            with pytest.raises(ConfigError, match="nearest: 'low'"):
                send_command(tmp_path, {"action": "stop", "name": "lo"}, 0.01)
            with pytest.raises(ConfigError, match="KeyError: 'odd'"):  # the sweep goes on
                send_command(tmp_path, {"action": "stop", "name": "odd"}, 0.01)
            assert send_command(tmp_path, {"action": "stop", "name": "low"}, 0.01) == "stop low"
        finally:
            done.set()
            thread.join()
    assert not list((tmp_path / "_commands").iterdir())


def test_a_command_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no sweep is running"):
        send_command(tmp_path, {"action": "stop", "name": "low"})
    with sweep_lock(tmp_path):
        pass
    with pytest.raises(ConfigError, match="no sweep is running"):
        send_command(tmp_path, {"action": "stop", "name": "low"})


def test_a_sweep_that_ends_leaves_no_command_waiting(tmp_path):
    ended = threading.Timer(0.2, lambda: lock.__exit__(None, None, None))
    lock = sweep_lock(tmp_path)
    lock.__enter__()
    ended.start()
    with pytest.raises(ConfigError, match="ended before"):
        send_command(tmp_path, {"action": "stop", "name": "low"}, 0.01)


def test_one_sweep_per_directory(tmp_path):
    with sweep_lock(tmp_path), pytest.raises(ConfigError, match="a sweep is running"), sweep_lock(tmp_path):
        pass
