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
from groupwise.agents.libraries.openenv import OpenEnvSession, observation_text
from groupwise.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
#: openenv and its own versions of what it needs, which vLLM's exclude (scripts/install_test_extras.sh).
OPENENV = Path(sys.prefix) / "openenv"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> tuple[str, Path]:
    """What the worker and the example after it printed, and the directory of the example's run."""
    directory = tmp_path_factory.mktemp("openenv")
    worker = ROOT / "tests" / "support" / "workers" / "openenv_worker.py"
    example, out = ROOT / "examples" / "environment_server.py", directory / "out"
    model = save_tiny_smollm2(smollm2_path, directory / "tiny", ("name(cat)", "name(horse)"))
    paths = [str(OPENENV), str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "examples")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    flags = ["--model", model, "--max_steps", "1", "--output_dir", out]
    command = [sys.executable, *map(str, (worker, example, *flags))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return run.stdout, out


@pytest.mark.slow
@pytest.mark.real_model
def test_rollouts_with_a_server(done: tuple[str, Path]) -> None:
    (line,) = [line for line in done[0].splitlines() if line.startswith('{"prompts"')]
    found = json.loads(line)
    assert found["prompts"] == ["Count. at 0", "Count. at 1", "Count. at 2"]
    seven, ten, refused = found["results"]
    assert seven == ["at 3", "at 7"] and ten[0] == "at 10\n(the episode has ended)"
    assert "the episode has ended; no further" in ten[1]
    assert all("VALIDATION_ERROR" in text for text in refused)  # by=-1, and no argument
    assert found["rewards"] == pytest.approx([0.7, 0.9, 0.0])
    assert found["turn_rewards"] == [[pytest.approx(0.7), None], [0.9, 0.0, None], [0.0, 0.0, None]]
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
def test_the_example_trains_with_a_server(done: tuple[str, Path]) -> None:
    shown, out = done
    assert "1 steps in " in shown[shown.index('{"prompts"') :]
    logs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    metrics = next(log for log in logs if "tools/call_frequency" in log)
    assert metrics["tools/call_frequency"] > 0.5 and metrics["tools/failure_frequency"] < 0.5
    assert metrics["reward"] > 0


def test_a_turn_gets_the_rewards_of_its_own_actions() -> None:
    session = OpenEnvSession.__new__(type("Session", (OpenEnvSession,), {"_tool": "add"}))
    session._rewards = [5.0, 0.25, 0.5, 1.0]  # of reset, of two actions in a turn, of one in the next
    names = ["add", "add"], ["search"], [], ["add", "search"], ["add"]  # the last one was not executed
    calls = [[{"type": "function", "function": {"name": name}} for name in each] for each in names]
    turns = [{"role": "assistant", "content": "", "tool_calls": each} for each in calls]
    messages = [message for turn in turns for message in (turn, {"role": "tool", "content": "x"})]
    assert session._turn_rewards(messages) == [0.75, None, None, 1.0, 0.0]
    assert session.get_reward() == 6.75


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
