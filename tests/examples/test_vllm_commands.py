"""The two commands that docs/vllm.md begins with, on a server without a GPU.

Files: ``commands/cli/serve.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from support.tiny_smollm2 import save_tiny_smollm2
from support.workers import forked_server
from support.workers.launch import WITH_VLLM, Script, free_port, run

from groupwise.commands.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
SECTION = PAGE.split("\n## ")[1]
SERVE, TRAIN = re.search(r"```bash\n(.*?)```", SECTION, re.DOTALL)[1].splitlines()


def test_the_page_begins_with_them():
    assert SECTION.startswith("Two GPUs: one serves, one trains")
    gpus = [dict(part.split("=", 1) for part in shlex.split(line)[:1]) for line in (SERVE, TRAIN)]
    assert [gpu["CUDA_VISIBLE_DEVICES"] for gpu in gpus] == ["0", "1"]
    assert shlex.split(SERVE)[1:3] == ["groupwise", "vllm-serve"]
    assert shlex.split(TRAIN)[1:3] == ["python", "examples/vllm_server.py"]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_server_that_the_example_starts(monkeypatch, tmp_path, capsys, has_gpu):
    """Beside the trainer on one GPU it leaves that memory."""
    import vllm_server

    def start(command):
        raise InterruptedError(*command)

    monkeypatch.setattr("sys.argv", ["vllm_server.py", "--model", "tiny", "--output_dir", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(InterruptedError) as started:
        vllm_server.main()
    program, (command, *flags) = started.value.args[:3], started.value.args[3:]
    assert program == (sys.executable, "-m", "groupwise.cli") and command == "vllm-serve"
    assert (flags[-2:] == ["--gpu-memory-utilization", "0.4"]) is has_gpu
    assert main([command, *flags, "--device", "cuda" if has_gpu else "cpu", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "--max-model-len 256" in shown and ("--gpu-memory-utilization 0.4" in shown) is has_gpu


@pytest.mark.vllm
@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_they_train_on_cpus(smollm2_path, tmp_path):
    model = str(save_tiny_smollm2(smollm2_path, tmp_path / "tiny", ()))
    port = str(free_port())

    def command(line, program, *more):
        words = [model if word.startswith("HuggingFaceTB/") else word for word in shlex.split(line)[3:]]
        return [sys.executable, *program, *(word.replace("8000", port) for word in words), *more]

    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    # Forked, with its engine: each import of vLLM takes 13 s of processor time.
    serving = command(SERVE, [forked_server.__file__, "groupwise.cli", "vllm-serve"], "--port", port)[1:]
    server = Script(*serving, directory=tmp_path, environment=environment, imports=WITH_VLLM)
    try:
        end = time.monotonic() + 400
        while not _is_healthy(port):
            assert server.poll() is None and time.monotonic() < end, server.text(0) + server.text(1)
            time.sleep(0.5)
        more = ["--max_steps", "3", "--output_dir", str(tmp_path / "out")]
        training = command(TRAIN, [str(ROOT / "examples" / "vllm_server.py")], *more)[1:]
        done = run(*training, directory=tmp_path, environment=environment, timeout=400)
    finally:
        server.kill()
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    logs = [log for log in map(json.loads, lines) if "reward" in log]
    names = re.findall(r"`((?:time|sampling|staleness)[/\w]*)`", SECTION)
    assert {"time/sync", "time/generate", "staleness"} <= set(names)
    for name in names:  # every number that the page explains is in the log
        assert any(name in log for log in logs), name
    staleness = [log["staleness"] for log in logs]
    assert staleness[0] == 0 and all(0 < steps <= 1 for steps in staleness[1:])


def _is_healthy(port: str) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
    except OSError:
        return False
    return True
