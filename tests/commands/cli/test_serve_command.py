"""``groupwise vllm-serve`` prints a command for this machine only, without keys, and becomes it.

Files: ``commands/cli/serve.py``, ``generation/vllm/serve.py``.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shlex
import sys
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from groupwise.commands.cli import main, serve
from groupwise.errors import ConfigError
from groupwise.generation.vllm import serve as serve_module


@pytest.fixture(autouse=True)
def usual_vllm(monkeypatch):
    """The build for CPUs is started in another way."""
    monkeypatch.setattr("groupwise.generation.vllm.serve.serve_program", lambda: ["vllm", "serve"])


def shown_command(capsys, *flags: str) -> tuple[list[str], str]:
    """Output of a dry run: the words of the command, and the warnings."""
    assert main(["vllm-serve", "--dry_run", *flags]) == 0
    shown = capsys.readouterr()
    return shlex.split(shown.out), shown.err


def test_the_server_listens_on_this_machine_only_unless_it_has_a_key(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    command, warnings = shown_command(capsys, "--model", "some/model")
    assert command[command.index("--host") + 1] == "127.0.0.1" and "password" not in warnings
    command, warnings = shown_command(capsys, "--model", "some/model", "--host", "0.0.0.0", "--port=8001")
    assert command[command.index("--host") + 1] == "0.0.0.0" and "0.0.0.0:8001" in warnings
    for flags, key in ((["--api-key", "k"], ""), (["--api-key=k"], ""), ([], "k")):
        monkeypatch.setenv("VLLM_API_KEY", key)
        assert (
            shown_command(capsys, "--model", "some/model", "--host", "0.0.0.0", "--device=cpu", *flags)[1]
            == ""
        )


def answer_of(path, key=None, *, given=(), method="GET", kind="http"):
    """Return the status with which the middleware answers, 200 if it passes the request on."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    server = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=list(given))))
    scope = {"type": kind, "path": path, "method": method, "app": server}
    scope["headers"] = [(b"authorization", f"Bearer {key}".encode())] if key else []
    asyncio.run(serve_module.RequireKey(app)(scope, None, send))
    return sent[0]["status"]


def test_all_routes_but_those_for_monitoring_need_the_key_of_the_server(capsys, monkeypatch):
    command, _ = shown_command(capsys, "--model", "some/model")
    module, _, name = command[command.index("--middleware") + 1].rpartition(".")
    assert getattr(importlib.import_module(module), name) is serve_module.RequireKey
    control = ("/collective_rpc", "/pause", "/update_weights", "/v1/load_lora_adapter", "/server_info", "/x")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert {answer_of(path) for path in control} == {200}  # no key was set
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    assert {answer_of(path, key) for path in control for key in (None, "", "s3cre", "s3cret2")} == {401}
    assert {answer_of(path, "s3cret") for path in control} == {200}
    assert {answer_of(path) for path in ("/health", "/metrics", "/ping")} == {200}
    assert answer_of("/pause", method="OPTIONS") == answer_of("/pause", kind="lifespan") == 200
    # Keys of the command line replace that of the environment.
    assert [answer_of("/pause", key, given=["one", "two"]) for key in ("one", "two", "s3cret")] == [
        *(200, 200),
        401,
    ]


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
        (["--api-key", "planted"], ["--api-key", "<removed>"]),
        (["--api-key=planted"], ["--api-key=<removed>"]),
        (["--api_key", "planted"], ["--api_key", "<removed>"]),
        (["--api-key", "planted", "planted2"], ["--api-key", "<removed>", "<removed>"]),
        (["--api-key=planted", "planted2"], ["--api-key=<removed>", "<removed>"]),
        (["--hf-token", "planted"], ["--hf-token", "<removed>"]),
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


@pytest.mark.parametrize(
    ("heads", "of_keys", "sizes"), [(12, 4, [1, 2, 4, 12]), (8, 1, [1, 2, 4, 8]), (6, None, [1, 2, 3, 6])]
)
def test_heads_divide_over_the_gpus_of_a_copy(heads, of_keys, sizes):
    config = LlamaConfig(hidden_size=heads, num_attention_heads=heads, num_key_value_heads=of_keys)
    for size in range(1, 13):
        if size in sizes:
            serve_module.check_tensor_parallel(config, size, "size")
        else:
            with pytest.raises(
                ConfigError, match=f"size={size} does not .*allowed: {', '.join(map(str, sizes))}"
            ):
                serve_module.check_tensor_parallel(config, size, "size")


def test_experts_divide_over_the_gpus_of_a_copy():
    config = Qwen3MoeConfig(num_attention_heads=32, num_key_value_heads=4, moe_intermediate_size=36)
    serve_module.check_tensor_parallel(config, 4, "size")
    with pytest.raises(ConfigError, match=r"experts of width 36; allowed: 1, 2, 4\."):
        serve_module.check_tensor_parallel(config, 8, "size")
    serve_module.check_tensor_parallel(config, 8, "size", splits_experts=False)
    dense = LlamaConfig(num_attention_heads=32, intermediate_size=36)  # no experts
    serve_module.check_tensor_parallel(dense, 8, "size")


def test_a_size_that_does_not_divide_the_heads_starts_nothing(tmp_path, capsys):
    LlamaConfig(hidden_size=6, num_attention_heads=6, num_key_value_heads=2).save_pretrained(tmp_path)
    flags = ["--model", str(tmp_path), "--dry_run", "--tensor_parallel_size"]
    assert main(["vllm-serve", *flags, "4"]) == 2
    assert "--tensor_parallel_size=4 does not divide the 6 attention heads" in capsys.readouterr().err
    assert main(["vllm-serve", *flags, "3"]) == 2  # 2 heads of keys on 3 GPUs
    assert main(["vllm-serve", *flags, "2"]) == 0
    assert "--tensor-parallel-size 2" in capsys.readouterr().out


def test_a_dry_run_without_a_gpu_names_the_device(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["vllm-serve", "--dry_run", "--model", "some/model"]) == 0
    assert "no GPU here" in capsys.readouterr().err
    command, warnings = shown_command(capsys, "--model", "some/model", "--device", "cuda")
    assert warnings == "" and "nccl" in command[command.index("--weight-transfer-config") + 1]
