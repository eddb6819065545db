"""``groupwise vllm-serve`` prints a command for this machine only, without keys, and becomes it.

Files: ``commands/cli/serve.py``, ``generation/vllm/serve.py``.
"""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from groupwise.commands.cli import main, serve


@pytest.fixture(autouse=True)
def usual_vllm(monkeypatch):
    """The build for CPUs is started in another way."""
    monkeypatch.setattr("groupwise.generation.vllm.serve.serve_program", lambda: ["vllm", "serve"])


def shown_command(capsys, *flags: str) -> tuple[list[str], str]:
    """Output of a dry run: the words of the command, and the warnings."""
    assert main(["vllm-serve", "--dry_run", *flags]) == 0
    shown = capsys.readouterr()
    return shlex.split(shown.out), shown.err


def test_the_server_listens_on_this_machine_only(capsys):
    command, warnings = shown_command(capsys, "--model", "some/model")
    assert command[command.index("--host") + 1] == "127.0.0.1" and warnings == ""
    command, warnings = shown_command(capsys, "--model", "some/model", "--host", "0.0.0.0", "--port=8001")
    assert command[command.index("--host") + 1] == "0.0.0.0" and "0.0.0.0:8001" in warnings


def test_model_and_port_come_from_the_run(capsys, run_file, tiny):
    path = run_file(vllm_server_port=8123)
    command, _ = shown_command(capsys, "--config", path, "--tensor-parallel-size", "2", "--max-num-seqs", "9")
    assert command[command.index("serve") + 1] == str(tiny)
    assert command[command.index("--port") + 1] == "8123"
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert command[-2:] == ["--max-num-seqs", "9"]
    command, _ = shown_command(capsys, "--config", path, "--model", "other/model", "--port", "1")
    assert command[command.index("serve") + 1] == "other/model"
    assert command[command.index("--port") + 1] == "1"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--api-key", "planted"], ["--api-key", "<API_KEY>"]),
        (["--api-key=planted"], ["--api-key=<API_KEY>"]),
        (["--api_key", "planted"], ["--api_key", "<API_KEY>"]),
        (["--api-key", "planted", "planted2"], ["--api-key", "<API_KEY>", "<API_KEY>"]),
        (["--api-key=planted", "planted2"], ["--api-key=<API_KEY>", "<API_KEY>"]),
        (["--hf-token", "planted"], ["--hf-token", "<HF_TOKEN>"]),
    ],
    ids=" ".join,
)
def test_keys_are_not_shown(capsys, given, shown):
    command, _ = shown_command(capsys, "--model", "some/model", *given, "--max-num-seqs", "9")
    assert command[-len(shown) - 2 :] == [*shown, "--max-num-seqs", "9"]


def test_the_process_becomes_the_server(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    monkeypatch.setattr(serve.shutil, "which", lambda name, path: f"/somewhere/{name}")
    main(["vllm-serve", "--model", "some/model", "--api-key", "planted"])
    ((path, command, environment),) = became
    assert path == "/somewhere/vllm" and command[:3] == ["vllm", "serve", "some/model"]
    assert command[-2:] == ["--api-key", "planted"]
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"] == os.environ["PATH"]
    assert "planted" not in capsys.readouterr().out


def test_a_build_without_its_command_is_started_by_the_running_python(monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    python = [sys.executable, "-m", "some.server", "--model"]
    monkeypatch.setattr("groupwise.generation.vllm.serve.serve_program", lambda: python)
    main(["vllm-serve", "--model", "some/model"])
    ((path, command, _),) = became
    assert path == sys.executable and command[:5] == [*python, "some/model"]


def test_missing_arguments_are_reported(monkeypatch, capsys):
    assert main(["vllm-serve"]) == 2 and "model is missing" in capsys.readouterr().err
    monkeypatch.setattr(serve.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["vllm-serve", "--model", "m"]) == 2
    assert "vllm is not installed" in capsys.readouterr().err
