"""Adapter of an OpenEnv server, in a process with openenv.

Files: ``agents/libraries/openenv.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_smollm2 import save_tiny_smollm2

from groupwise.agents.libraries import openenv_factory
from groupwise.agents.libraries.openenv import observation_text
from groupwise.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
#: openenv and its own versions of what it needs, which vLLM's exclude (scripts/install_test_extras.sh).
OPENENV = Path(sys.prefix) / "openenv"


def run_with_openenv(script: Path, *arguments: object) -> str:
    paths = [str(OPENENV), str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "examples")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.slow
def test_rollouts_with_a_server() -> None:
    script = ROOT / "tests" / "support" / "workers" / "openenv_worker.py"
    found = json.loads(run_with_openenv(script).splitlines()[-1])
    assert found["prompts"] == ["Count. at 0", "Count. at 1", "Count. at 2"]
    seven, ten, refused = found["results"]
    assert seven == ["at 3", "at 7"] and ten[0] == "at 10\n(the episode has ended)"
    assert "the episode has ended; no further" in ten[1]
    assert all("VALIDATION_ERROR" in text for text in refused)  # by=-1, and no argument
    assert found["rewards"] == pytest.approx([0.7, 0.9, 0.0])
    assert found["schema"]["description"] == "Add to the number."
    by = {"type": "integer", "description": "How much.", "minimum": 0}
    assert found["schema"]["parameters"]["properties"] == {"by": by}
    assert found["urls"][0] == found["urls"][2] != found["urls"][1]
    # A session ends with a request that takes too long; the next reset begins another one.
    *before, slow, late, again, after = found["session"]
    assert before == ["at 3", "at 4"] and [again, after] == ["at 5", "at 7"]
    assert slow.startswith("TimeoutError: http://127.0.0.1:") and "did not answer within" in slow
    assert late == "RuntimeError: the episode has ended; no further action is possible"


@pytest.mark.slow
@pytest.mark.real_model
def test_the_example_trains_with_a_server(smollm2_path: Path, tmp_path: Path) -> None:
    model = save_tiny_smollm2(smollm2_path, tmp_path / "tiny", ("name(cat)", "name(horse)"))
    flags = ["--model", model, "--max_steps", "1", "--output_dir", tmp_path / "out"]
    assert "1 steps in " in run_with_openenv(ROOT / "examples" / "environment_server.py", *flags)
    logs = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    metrics = next(log for log in logs if "tools/call_frequency" in log)
    assert metrics["tools/call_frequency"] > 0.5 and metrics["tools/failure_frequency"] < 0.5
    assert metrics["reward"] > 0


def test_the_extra_of_openenv_is_named_where_it_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'groupwise\[openenv\]'"):
        openenv_factory("ws://127.0.0.1:9")


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:80", "ftp://x"])
def test_an_invalid_url_or_missing_server_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OPENENV))  # the package can be found; nothing imports it
    with pytest.raises(ConfigError, match=r"no schema of actions from|openenv_factory got"):
        openenv_factory(address, timeout=1.0)


def test_observations_are_converted_to_text() -> None:
    assert observation_text({"text": "a", "metadata": {"b": 1}, "reward": None}) == "a"
    assert json.loads(observation_text({"grid": [1, 2], "moves": 3})) == {"grid": [1, 2], "moves": 3}
    assert observation_text("plain") == "plain"
