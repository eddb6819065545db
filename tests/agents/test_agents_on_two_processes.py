"""Two ranks with tools and different numbers of turns: equal generate calls, equal weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.oracles.oracle_advantages import process_advantages
from support.workers.launch import run_ranks

pytestmark = pytest.mark.distributed

TIMEOUT = 240  # seconds


def main(directory: str, case: str) -> None:
    """Run one rank: its number of turns and its faults differ from the other's, generate calls must not."""
    import torch
    from support.agent_runs import FlakyEnvironment, measure, trainer, turn_reward

    given = {"tools": [measure], "max_steps": 2, "reward_funcs": turn_reward}
    if case == "faults":
        FlakyEnvironment.seed(int(os.environ["RANK"]))
        given = {"environment_factory": FlakyEnvironment, "max_steps": 4, "rollout_on_error": "retry"}
        given["max_tool_calling_iterations"] = 1
    run = trainer(directory, per_device_train_batch_size=2, rollout_retries=1, **given)
    assert run.accelerator.num_processes == 2
    rank = run.accelerator.process_index
    # As with an engine that all ranks share: every generate call is a collective.
    agents, backend = run.agents, run.backend
    agents.any_rank = lambda here: _any(run.accelerator, here)
    if case == "turns":
        agents.loop.max_iterations = 1 + 3 * rank
    counts, generate = [], backend.generate

    def counting_generate(prompts, sampling):
        assert _any(run.accelerator, True)
        counts.append(len(prompts))
        return generate(prompts, sampling)

    backend.generate = counting_generate
    seen, compute_advantages = [], run.compute_advantages

    def watched(rewards):
        advantages_NT = compute_advantages(rewards)
        steps, turns = (json.loads(json.dumps(each)) for each in (rewards.step_rewards.get(0), rewards.turns))
        seen.append((steps, turns, advantages_NT.tolist()))
        return advantages_NT

    run.compute_advantages = watched
    run.train()
    calls = run.accelerator.gather(torch.tensor([len(counts)])).tolist()
    total = sum(tensor.double().sum() for tensor in run.model.state_dict().values())
    sums = run.accelerator.gather(total.reshape(1)).tolist()
    if rank == 0:
        logs = [log for log in run.state.log_history if "tools/call_frequency" in log]
        result = {"calls": calls, "sums": sums, "frequency": [log["tools/call_frequency"] for log in logs]}
        result["credit"] = seen[0]
        result["dropped"] = [log.get("rollouts/dropped_share", 0.0) for log in logs]
        Path(directory, "result.json").write_text(json.dumps(result))


def _any(accelerator, here: bool) -> bool:
    import torch

    return accelerator.reduce(torch.tensor(int(here)), "sum").item() > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["turns", "faults"])
def test_ranks_make_the_same_number_of_generate_calls(tmp_path: Path, case: str) -> None:
    """Also with faults in 20 % of the calls of an environment; a group has completions of both ranks."""
    done = run_ranks(__file__, tmp_path, case, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["calls"][0] == result["calls"][1] > 2
    assert result["sums"][0] == result["sums"][1]
    assert case == "faults" or all(frequency > 0 for frequency in result["frequency"])
    # Groups of four completions: none has exactly three dropped ones.
    assert {"turns": {0.0}, "faults": {0.0, 0.25, 0.5, 1.0}}[case] >= set(result["dropped"])
    assert (sum(result["dropped"]) > 0) == (case == "faults")
    steps, turns, advantages_NT = result["credit"]
    if case == "turns":  # one group, whose completions are those of both ranks
        assert [len(each) > 1 for each in turns] != [False] * 4 and len(steps) == 4
        expected = process_advantages(steps, 4, len(advantages_NT[0]), turns=turns)
        assert [value for row in advantages_NT for value in row] == pytest.approx(
            [value for row in expected for value in row], abs=1e-5
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
