"""Agents of stock SDKs against a real vLLM server through OpenEnv's capture.

Files: ``agents/libraries/capture.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.runs import trainer
from support.workers.vllm_process import ServerProcess

from groupwise.agents.libraries import CapturedAgent
from groupwise.agents.libraries.capture import ConcurrentRollouts
from groupwise.errors import BackendError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
#: openenv and its own versions of what it needs, which vLLM's exclude (scripts/install_test_extras.sh).
OPENENV = Path(sys.prefix) / "openenv"
KEY = "the key of server and trainer"


def run_script(script: Path, *arguments: object) -> str:
    paths = [str(OPENENV), str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "examples")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_API_KEY": KEY,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Output of the worker and of the example after it, and the directory of the example's run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        directory = tmp_path_factory.mktemp("server")
        process = ServerProcess(directory).start().wait()
        try:
            worker = ROOT / "tests" / "support" / "workers" / "captured_agents_worker.py"
            served, out = (process.url, directory / "model"), directory / "out"
            flags = ["--model", served[1], "--server", served[0], "--max_steps", "2", "--output_dir", out]
            example = ROOT / "examples" / "agent_as_it_is.py"
            yield run_script(worker, *served, directory / "run", example, *flags), out
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_every_behaviour_of_an_agent_has_a_clear_outcome(done):
    (line,) = [line for line in done[0].splitlines() if line.startswith('{"output"')]
    found = json.loads(line)
    output = found["output"]
    rows = [[] for _ in output["failed"]]
    for i, row in enumerate(output["rollout_ids"]):
        rows[row].append(
            {key: output[key][i] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
        )
    plain, other, streams, once, *failed, loops = rows
    # (the agent's calls) each a row whose prompt continues the one before
    assert len(plain) == len(other) == len(once) == 2 and len(streams) == 1
    assert len(loops) == 4  # max_calls: the proxy answers the fifth
    assert output["failed"] == [False] * 4 + [True] * 3 + [False]
    assert [row[0]["env_mask"] for row in failed] == [[0]] * 3
    for rollout in (plain, other, streams, once, loops):
        for row in rollout:
            assert 0 < len(row["completion_ids"]) == len(row["logprobs"]) <= 5 and set(row["env_mask"]) == {1}
    # Of the whole vocabulary at the run's temperature, also where an agent asked for 0 and top_p=0.1.
    for own, given, mask in zip(found["own"], output["logprobs"], output["env_mask"], strict=True):
        assert mask == [0] or own == pytest.approx(given, abs=1e-3)
    assert "rollout 0: ValueError: the agent's own error" in found["message"]
    for log in found["logs"]:  # two steps of another agent, in threads
        assert log["rollouts/rows"] == 1 and log["agent/failures"] == 0
        assert log["sampling/sampling_logp_difference/max"] < 1e-3 and log["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_example_trains_agents_of_two_makers(done):
    shown, out = done
    assert "2 steps in " in shown[shown.index('{"output"') :]
    logs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logs = [log for log in logs if "agent/calls" in log]
    assert len(logs) == 2 and {log["agent/calls"] for log in logs} == {3} and logs[0]["rollouts/rows"] == 3


@pytest.fixture
def openenv(monkeypatch):
    """The package can be found; nothing imports it."""
    monkeypatch.syspath_prepend(str(OPENENV))


def test_the_extra_is_named_where_it_is_missing():
    with pytest.raises(ConfigError, match=r"pip install 'groupwise\[capture\]'"):
        CapturedAgent(lambda prompt, endpoint: None)


def test_a_run_without_a_server_is_refused(tmp_path, openenv):
    run = trainer(tmp_path, rollout_func=CapturedAgent(lambda prompt, endpoint: None))
    with pytest.raises(BackendError, match="use_vllm=True with vllm_mode='server'"):
        run.train()


@pytest.mark.parametrize(
    ("settings", "adapter", "message"),
    [({"top_p": 0.9}, None, "leave top_p"), ({}, "adapter-3", "without --enable-lora")],
)
def test_what_the_capture_cannot_sample_is_refused(settings, adapter, message, openenv):
    plain = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "rollout_retries": 0}
    args = SimpleNamespace(rollout_on_error="raise", **{**plain, **settings})
    backend = SimpleNamespace(servers=SimpleNamespace(adapter=adapter))
    with pytest.raises(ConfigError, match=message):
        CapturedAgent(lambda prompt, endpoint: None)([""], SimpleNamespace(args=args, backend=backend))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"failed": True},
            "Agent: a column 'failed' would replace the trainer's own; .* 'own_failed'",
        ),
        ({"env_mask": 0}, "a column 'env_mask' would replace"),
        ({"prompt_ids": [7]}, "a column 'prompt_ids' would replace"),
        ({"rollout_ids": 0}, "a column 'rollout_ids' would replace"),
        ({"completions": "a"}, "a column 'completions' would replace"),
        (0.5, "Agent returned 0.5; allowed: a dictionary"),
    ],
)
def test_columns_of_an_agent_do_not_replace_the_rows(columns, message):
    with pytest.raises(BackendError, match=message):
        columns_of(columns)
    assert columns_of({"score": 0.5})["score"] == [0.5, None] and columns_of({})["failed"] == [False] * 2


def columns_of(columns):
    row = {"prompt_ids": [5], "completion_ids": [6], "logprobs": [-1.0], "env_mask": [1]}

    class Agent(ConcurrentRollouts):
        def run_rollouts(self, prompts, trainer):
            return [([row], columns, 1), ([row], {}, 1)]

    args = SimpleNamespace(rollout_on_error="raise", rollout_retries=0)
    return Agent()(["a", "b"], SimpleNamespace(args=args, record_metric=lambda *_: None))


def test_as_environments_they_are_refused(tmp_path, openenv):
    agent = CapturedAgent(lambda prompt, endpoint: None)
    with pytest.raises(ConfigError, match=r"environment_factory is a CapturedAgent.*as rollout_func"):
        trainer(tmp_path, environment_factory=agent)
