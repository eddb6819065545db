"""Episodes of verifiers environments against a real vLLM server, through its own training client.

Files: ``agents/libraries/verifiers.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny_smollm2 import save_tiny_smollm2
from support.workers.vllm_process import ServerProcess

from groupwise.agents.libraries import VerifiersEnvironment, rubric_reward, verifiers_dataset
from groupwise.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
#: verifiers with its own versions of what it needs (scripts/install_test_extras.sh).
VERIFIERS = Path(sys.prefix) / "verifiers"
KEY = "the key of server and trainer"
#: Tokens of a call, few so that the model learns it at once, and its answers: with a call, and without.
TOKENS = ("<tool_call>", '{"name": "price", "arguments": {}}', "</tool_call>")
ANSWERS = ("So: " + "".join(TOKENS), "It costs 3.")
needs_verifiers = pytest.mark.skipif(not VERIFIERS.exists(), reason="verifiers is not installed")


def run_script(script: Path, *arguments: object) -> str:
    paths = [str(VERIFIERS), str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "examples")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def done(tmp_path_factory, smollm2_path):
    """Output of the worker and of the example after it, and the directory of the example's run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        directory = tmp_path_factory.mktemp("server")
        save_tiny_smollm2(smollm2_path, directory / "model", ANSWERS, TOKENS)
        process = ServerProcess(directory, ("--max-model-len", "1024")).start().wait()
        try:
            worker = ROOT / "tests" / "support" / "workers" / "verifiers_worker.py"
            served, out = (process.url, directory / "model"), directory / "out"
            flags = ["--model", served[1], "--server", served[0], "--max_steps", "2", "--output_dir", out]
            example = ROOT / "examples" / "environment_verifiers.py"
            yield run_script(worker, *served, directory / "run", example, *flags), out
        finally:
            process.kill()


@pytest.mark.slow
@needs_verifiers
@pytest.mark.vllm
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_rows_and_rewards_of_episodes(done):
    (line,) = [line for line in done[0].splitlines() if line.startswith('{"output"')]
    found = json.loads(line)
    output = found["output"]
    rows = [[] for _ in output["failed"]]
    for i, rollout in enumerate(output["rollout_ids"]):
        rows[rollout].append({key: output[key][i] for key in ("prompt_ids", "completion_ids", "env_mask")})
    one, tools, sub_agent, once, dies, silent = rows
    assert output["failed"] == [False] * 4 + [True] * 2
    assert [len(one), len(sub_agent), len(once)] == [1, 2, 1]
    assert [rollout[0]["env_mask"] for rollout in (dies, silent)] == [[0], [0]]
    assert sub_agent[1]["prompt_ids"][: len(one[0]["prompt_ids"])] != sub_agent[0]["prompt_ids"]
    # The chat template omits calls: the prompt after the result does not continue the turn with the call.
    assert all(row["env_mask"] == [1] * len(row["completion_ids"]) for row in tools)
    *_, made, last = tools
    assert len(last["prompt_ids"]) > len(made["prompt_ids"])
    for own, given, mask in zip(found["own"], output["logprobs"], output["env_mask"], strict=True):
        pairs = [(a, b) for a, b, sampled in zip(own, given, mask, strict=True) if sampled]
        assert all(a == pytest.approx(b, abs=1e-3) for a, b in pairs)
        assert pairs or mask == [0]
    # The weight of the reward is 2; a harness is called again after its error.
    assert set(output["verifiers_reward"][:2]) <= {0.0, 2.0} and output["verifiers_reward"][4:] == [None] * 2
    replies = [metrics["replies"] for metrics in output["verifiers_metrics"][:4]]
    assert replies == [1, len(tools), 2, 1] and output["verifiers_metrics"][1]["results"] == 1
    failed, pinned = found["messages"]
    assert failed.startswith("BackendError: rollout 0") and "the harness's own error" in failed
    assert pinned.startswith("ConfigError: the agent 'agent' samples with settings of its own")
    for log in found["logs"]:
        assert log["verifiers/replies"] >= 1 and log["agent/failures"] == 0
        assert log["sampling/sampling_logp_difference/max"] < 1e-3
    assert max(log["grad_norm"] for log in found["logs"]) > 0


@pytest.mark.slow
@needs_verifiers
@pytest.mark.vllm
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_the_example_trains_two_turns(done):
    shown, out = done
    assert "2 steps in " in shown[shown.index('{"output"') :]
    logs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logs = [log for log in logs if "agent/calls" in log]
    assert len(logs) == 2 and {log["agent/calls"] for log in logs} == {2}
    assert all("verifiers/found" in log for log in logs)


class Tasks(list):
    bounded = True


def environment(prompts=("a", "b"), **changes):
    tasks = [SimpleNamespace(data=SimpleNamespace(idx=i, prompt_text=text)) for i, text in enumerate(prompts)]
    return SimpleNamespace(taskset=Tasks(tasks), run_episode=None, **changes)


def test_a_row_of_the_dataset_names_its_task():
    rows = verifiers_dataset(environment(("same", "same")))
    assert rows["prompt"][1] == [{"role": "user", "content": "same", "task": 1}]


def test_other_objects_and_endless_tasksets_are_refused():
    for function in (VerifiersEnvironment, verifiers_dataset):
        with pytest.raises(ConfigError, match=r"got a dict.*verifiers\.v1\.load_environment"):
            function({})
    endless = environment()
    endless.taskset.bounded = False
    with pytest.raises(ConfigError, match=r"taskset\.take\(1000\)"):
        VerifiersEnvironment(endless)


def test_the_parts_of_a_reward_are_logged():
    logged = {}
    metrics = [{"found": 1.0, "length": 4}, {"found": 0.0, "length": None}, None]
    assert rubric_reward([1.0, 0.0, None], metrics, log_metric=logged.__setitem__) == [1.0, 0.0, None]
    assert logged == {"verifiers/found": 0.5, "verifiers/length": 4}
