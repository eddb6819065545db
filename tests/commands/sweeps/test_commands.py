"""Commands reach a running sweep as files, and its answer comes back."""

from __future__ import annotations

import errno
import json
import threading
import time
from types import SimpleNamespace

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
    def end_with_a_command_waiting() -> None:
        while not list(tmp_path.glob("_commands/*.json")):
            time.sleep(0.01)
        lock.__exit__(None, None, None)

    lock = sweep_lock(tmp_path)
    lock.__enter__()
    threading.Thread(target=end_with_a_command_waiting, daemon=True).start()
    with pytest.raises(ConfigError, match="ended before"):
        send_command(tmp_path, {"action": "stop", "name": "low"}, 0.01)


def test_one_sweep_per_directory(tmp_path):
    with sweep_lock(tmp_path), pytest.raises(ConfigError, match="a sweep is running"), sweep_lock(tmp_path):
        pass


def test_a_command_that_is_no_file_does_not_end_the_sweep(tmp_path, caplog):
    calls: list[dict[str, str]] = []
    with sweep_lock(tmp_path):
        (tmp_path / "_commands").mkdir()
        (tmp_path / "_commands" / "z.json").write_bytes(b"\xff{")
        (tmp_path / "_commands" / "list.json").write_text("[]")
        for _ in range(2):
            answer_commands(tmp_path, calls.append)
    assert not calls
    for name, error in ("list", "is [], not dict"), ("z", "cut or overwritten"):
        answer = json.loads((tmp_path / "_commands" / f"{name}.answer").read_text())
        assert not answer["accepted"] and error in answer["text"]
    (tmp_path / "_commands" / "mine").mkdir()
    with sweep_lock(tmp_path):  # deletes the files of commands
        assert [path.name for path in (tmp_path / "_commands").iterdir()] == ["mine"]


def test_a_command_whose_answer_cannot_be_written_is_executed_once(tmp_path, monkeypatch, caplog):
    calls: list[dict[str, str]] = []
    with sweep_lock(tmp_path):
        (tmp_path / "_commands").mkdir()
        (tmp_path / "_commands" / "x.json").write_text('{"action": "stop"}')
        monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
        for _ in range(2):
            answer_commands(tmp_path, calls.append)
    assert calls == [{"action": "stop"}] and "was not written: OSError: [Errno 28]" in caplog.text


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("answered", [False, True])
def test_a_sender_does_not_wait_for_a_sweep_that_was_started_again(tmp_path, monkeypatch, answered):
    first, second = sweep_lock(tmp_path), sweep_lock(tmp_path)

    def restart(seconds: float) -> None:
        if answered:
            answer_commands(tmp_path, lambda command: "yes")
        first.__exit__(None, None, None)
        second.__enter__()  # deletes the command, and an answer that is not read yet

    # In that module alone: threads of other tests sleep too.
    clock = SimpleNamespace(sleep=restart, time_ns=time.time_ns)
    monkeypatch.setattr("groupwise.commands.sweeps.commands.time", clock)
    first.__enter__()
    with pytest.raises(ConfigError, match="ended before it answered"):
        send_command(tmp_path, {"action": "stop", "name": "low"})
    second.__exit__(None, None, None)
