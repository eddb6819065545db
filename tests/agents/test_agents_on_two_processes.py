"""Two ranks with tools and different numbers of turns: equal generate calls, equal weights.

With batches ahead, the update is that of the same tokens on one rank, and SIGTERM changes no history.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.oracles.oracle_advantages import process_advantages
from support.workers.launch import run_ranks
from transformers import TrainerCallback

pytestmark = pytest.mark.distributed

TIMEOUT = 240  # seconds


STEPS = 4


def double_trainer(directory: Any, **given: Any) -> Any:
    """Create a trainer of four completions per step in double precision."""
    from support.agent_runs import policy, tokenizer, trainer

    settings = {"max_completion_length": 60, "generation_kwargs": None, "logprob_mismatch_check": "off"}
    model = policy(len(tokenizer())).double()
    return trainer(directory, model=model, max_steps=STEPS, **settings, **given)


async def measure_slowly(text: str) -> int:
    """Measure a text.

    Args:
        text: what to measure.
    """
    await asyncio.sleep(0.05)
    while terminated.is_set():
        await asyncio.sleep(0.05)
    return len(text)


measure_slowly.__name__ = "measure"
terminated = threading.Event()


def stop(run: Any) -> TrainerCallback:
    """Return a callback that sends SIGTERM to rank 1 beside calls of the next batch, which do not return."""

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                terminated.set()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:  # the next batch is complete before calls no longer return
                (batch,) = run.agents.ahead.values()
                batch.thread.result(120)
            if state.global_step == 1:
                (batch,), end = run.agents.ahead.values(), time.monotonic() + 60
                calling = []
                while not calling and time.monotonic() < end:
                    calling = [each for each in batch.rollouts if each.futures and each.request is None]
                    time.sleep(0.005)
                if args.process_index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

    return Stop()


def run_ahead(directory: str) -> None:
    """Run one rank with a batch ahead on the server at SERVER; keep rollouts, rewards and weights."""
    import torch
    from support.runs import answered_before_updates

    given = {"vllm_mode": "server", "vllm_server_base_url": os.environ["SERVER"], "use_vllm": True}
    given |= {"tools": [measure_slowly], "enable_jit_checkpoint": True}
    run = double_trainer(directory, per_device_train_batch_size=2, rollout_staleness=1, **given)
    found, in_flight = {}, []
    generate_rollouts, save_checkpoint = run.generate_rollouts, run._save_checkpoint

    def watched(request: Any) -> Any:
        found[run.state.global_step] = generate_rollouts(request)
        return found[run.state.global_step]

    def watched_save(*given: Any) -> None:
        in_flight.extend(bool(r.futures) for batch in run.agents.ahead.values() for r in batch.rollouts)
        save_checkpoint(*given)

    if "STOP" in os.environ:
        run.add_callback(stop(run))
    run.generate_rollouts, run._save_checkpoint = watched, watched_save
    answered_before_updates(run)
    run.train(resume_from_checkpoint=any(Path(directory).glob("checkpoint-*")) or None)
    result = {"found": found, "in_flight": in_flight, "step": run.state.global_step}
    result["losses"] = [line["loss"] for line in run.state.log_history if "loss" in line]
    result["weights"] = run.model.state_dict()
    torch.save(result, Path(directory, f"{run.args.process_index}.pt"))
    run.backend.close()


def main(directory: str, case: str) -> None:
    """Run one rank: its number of turns and its faults differ from the other's, generate calls must not."""
    if case == "ahead":
        return run_ahead(directory)
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


@pytest.fixture(scope="module")
def server() -> Any:
    from support.agent_runs import tokenizer, with_calls
    from support.fakes.fake_vllm import FakeVLLM

    fake = with_calls(FakeVLLM(), tokenizer())
    yield fake
    fake.close()


def train_ahead(server: Any, directory: Path, **environment: str) -> list[dict[str, Any]]:
    """Run both ranks to their end."""
    import torch

    server.bodies.clear()
    environment["SERVER"] = server.url
    done = run_ranks(__file__, directory, "ahead", timeout=TIMEOUT, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def requests(server: Any) -> set[str]:
    """Return the turns that were requested, without the token of a rank that had none while the other did."""
    from support.fakes.fake_vllm import GENERATE

    bodies = [body for path, body in server.bodies if path == GENERATE and len(body["token_ids"]) > 1]
    return {f"{body['token_ids']} {body['sampling_params']}" for body in bodies}


@pytest.fixture(scope="module")
def ahead(server: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], set[str]]:
    return train_ahead(server, tmp_path_factory.mktemp("ahead")), requests(server)


@pytest.mark.slow
def test_two_ranks_with_a_batch_ahead_make_the_update_of_the_same_tokens_on_one(ahead, tmp_path):
    import torch
    from support.agent_runs import measure

    ranks, _ = ahead
    by_hand = double_trainer(tmp_path, tools=[measure], per_device_train_batch_size=4)

    def given(request: Any) -> Any:
        step = by_hand.state.global_step
        first, second = (rank["found"][step] for rank in ranks)
        assert request.rows == first.rows + second.rows
        names = ("prompts", "prompt_ids", "completions", "texts")
        joined = {name: getattr(first, name) + getattr(second, name) for name in names}
        return replace(first, rows=request.rows, row_ids=(), **joined, **request.kept_fields())

    by_hand.generate_rollouts = given
    by_hand.train()
    versions = [
        [{*completion.versions} for rank in ranks for completion in rank["found"][step].completions]
        for step in range(STEPS)
    ]
    assert versions[0] == [{0}] * 4
    assert all({step - 1} <= each <= {step - 1, step} for step in range(1, STEPS) for each in versions[step])
    assert max(len(c.turns) for rank in ranks for r in rank["found"].values() for c in r.completions) > 2
    losses = [line["loss"] for line in by_hand.state.log_history if "loss" in line]
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-9)
    for name, weight in by_hand.model.state_dict().items():
        assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name])
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_sigterm_beside_conversations_of_a_batch_ahead_changes_no_history(server, ahead, tmp_path):
    import torch

    whole, everything = ahead
    cut = train_ahead(server, tmp_path, STOP="1")
    assert [rank["step"] for rank in cut] == [2, 2] and any(any(rank["in_flight"]) for rank in cut)
    before = requests(server)
    resumed = train_ahead(server, tmp_path)
    assert before | requests(server) == everything  # none is lost
    for mine, first, other in zip(resumed, cut, whole, strict=True):
        assert mine["losses"] == other["losses"]
        trained = [first["found"], mine["found"]]
        assert sorted(step for steps in trained for step in steps) == [*range(STEPS)]  # none twice
        for step, rollouts in other["found"].items():
            again = next(steps[step] for steps in trained if step in steps)
            assert again.rows == rollouts.rows
            assert [c.token_ids for c in again.completions] == [c.token_ids for c in rollouts.completions]
        for name, weight in other["weights"].items():
            assert torch.equal(weight, mine["weights"][name])


if __name__ == "__main__":
    main(*sys.argv[1:])
