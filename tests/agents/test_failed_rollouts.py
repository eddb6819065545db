"""Rollouts whose environment fails: repeated in a fresh environment, then dropped from their group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.agent_runs import FlakyEnvironment, calls_reward, trainer
from support.fakes.scripted import ScriptedBackend, agents, byte_tokenizer, call, question
from support.runs import trainer as tiny_run

from groupwise.agents.environments import EnvironmentPool
from groupwise.errors import AgentError
from groupwise.records import Completion
from groupwise.reporting.callback import GRPOCallback

LOOK = call("look")


class Faulty:
    """Fails as the row plans it for its first, second, … attempt, and works at later ones."""

    attempts: ClassVar[dict[str, int]] = {}
    made: ClassVar[list[Faulty]] = []

    def __init__(self) -> None:
        self.made.append(self)

    def reset(self, name: str, plan: list[str], **row: Any) -> None:
        number = self.attempts[name] = self.attempts.get(name, 0) + 1
        self.fault = plan[number - 1] if number <= len(plan) else ""
        if self.fault == "reset":
            raise OSError("no server")

    def look(self) -> str:
        """Look around."""
        if self.fault == "tool":
            raise AgentError("the session is lost")
        if self.fault == "answer":
            raise ValueError("nothing to see")
        return "seen"

    def get_reward(self) -> float:
        if self.fault == "reward":
            raise TimeoutError("no answer")
        return 1.0


@pytest.fixture(autouse=True)
def nothing_made() -> Iterator[None]:
    Faulty.attempts.clear()
    Faulty.made.clear()
    yield


def row(name: str, *plan: str) -> dict[str, Any]:
    return {**question(f"question {name}"), "name": name, "plan": list(plan)}


def test_failed_rollouts_are_repeated_in_fresh_environments_and_then_dropped(caplog) -> None:
    tokenizer = byte_tokenizer()
    pool = EnvironmentPool(Faulty)
    loop = agents(tokenizer, (), pool, max_retries=2)
    rows = [row("a"), row("b", "reset", "tool"), row("c", "reward", "reset", "tool"), row("d", "tool")]
    # Turns of all attempts of a, c, d and b, whose first attempt fails before it has a turn.
    scripts = [[LOOK, "x"], [LOOK, "x", LOOK], [LOOK, LOOK, "x"], [LOOK, LOOK, "x"]]
    batch = loop.generate_rollouts(rows, ScriptedBackend(tokenizer, scripts))
    assert [completion.dropped for completion in batch.completions] == [False, False, True, False]
    assert batch.completions[2] == Completion([tokenizer.eos_token_id], loss_mask=[0], dropped=True)
    assert batch.texts[2] == [{"role": "assistant", "content": ""}]
    assert [[m["content"] for m in text if m["role"] == "tool"] for text in batch.texts] == [
        ["seen"],
        ["seen"],
        [],
        ["seen"],
    ]
    # b, c and d are repeated once, b and c twice; each attempt has an environment of its own.
    assert batch.metrics["rollouts/retry_frequency"].value() == 5 / 4
    assert len(Faulty.made) == 1 + 3 + 3 + 2
    assert batch.metrics["tools/call_frequency"].value() == 1  # of the rollouts that are kept
    environments = batch.extra["environments"]
    assert environments[2] is None and environments[0] is Faulty.made[0]
    assert len({id(environment) for environment in environments}) == 4
    (reward,) = pool.reward_funcs()
    kept = batch.select([0, 1, 3])
    assert reward(**kept.extra, completions=kept.texts) == [1.0, 1.0, 1.0]
    assert caplog.text.count("failed rollouts are repeated in a fresh environment") == 3  # kinds of errors


def test_a_discarded_environment_is_replaced_in_the_next_batch() -> None:
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, (), EnvironmentPool(Faulty), max_retries=0)
    first = loop.generate_rollouts([row("a", "reset")], ScriptedBackend(tokenizer, [["x"]]))
    assert first.completions[0].dropped and len(Faulty.made) == 1
    second = loop.generate_rollouts([row("a", "reset")], ScriptedBackend(tokenizer, [["x"]]))
    assert not second.completions[0].dropped and len(Faulty.made) == 2


@pytest.mark.parametrize("fault", ["reset", "tool"])
def test_without_retries_the_error_is_raised(fault: str) -> None:
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, (), EnvironmentPool(Faulty))
    with pytest.raises(AgentError, match=r"no server|the session is lost"):
        loop.generate_rollouts([row("a", fault)], ScriptedBackend(tokenizer, [[LOOK, "x"]]))


def test_other_errors_of_tools_are_results() -> None:
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, (), EnvironmentPool(Faulty), max_retries=1)
    batch = loop.generate_rollouts([row("a", "answer")], ScriptedBackend(tokenizer, [[LOOK, "x"]]))
    assert batch.texts[0][1]["content"] == "{'error': 'nothing to see'}"
    assert batch.metrics["rollouts/retry_frequency"].value() == 0


def test_failing_calls_are_reported_beside_a_discarded_environment(caplog) -> None:
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, (), EnvironmentPool(Faulty), max_retries=0)
    rows = [row("a", "reset"), row("b", "answer")]  # the first environment is discarded
    batch = loop.generate_rollouts(rows, ScriptedBackend(tokenizer, [[LOOK, "x"]]))
    assert [completion.dropped for completion in batch.completions] == [True, False]
    assert "all 1 tool calls of a generation failed; the first one: look()" in caplog.text


def test_a_factory_that_fails_is_called_again() -> None:
    calls = []

    def factory() -> Faulty:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ConnectionError("no server")
        return Faulty()

    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, (), EnvironmentPool(factory), max_retries=1)
    backend = ScriptedBackend(tokenizer, [["x"], ["y"]])
    batch = loop.generate_rollouts([row("a"), row("b")], backend)
    assert len(calls) == 3 and not any(completion.dropped for completion in batch.completions)


def test_ranks_repeat_together() -> None:
    """Another rank repeats rollouts twice: this one joins its generate calls."""
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, (), EnvironmentPool(Faulty), max_retries=2)
    # One turn; a retry of the other rank with one turn; another retry with one turn.
    others = iter([True, False, True, True, False, True, True, False])
    loop.any_rank = lambda here: next(others) or here
    backend = ScriptedBackend(tokenizer, [["x"], [""], [""]])
    loop.generate_rollouts([row("a")], backend)
    assert [len(prompts) for prompts in backend.calls] == [1, 1, 1]
    assert next(others, None) is None


@pytest.mark.slow
def test_a_run_with_random_faults_trains_without_the_dropped_completions(tmp_path: Path) -> None:
    """20 % of the calls fail; one retry leaves enough failures to drop."""
    FlakyEnvironment.seed(1)
    run = trainer(
        tmp_path,
        environment_factory=FlakyEnvironment,
        reward_funcs=calls_reward,
        rollout_on_error="retry",
        rollout_retries=1,
        max_tool_calling_iterations=1,
        max_steps=4,
        per_device_train_batch_size=8,
        log_completions=True,
    )
    seen: list[tuple[Any, Any, Any]] = []
    make_experience = run.make_experience

    def observe(rollouts: Any, rewards: Any, size: int, **options: Any) -> Any:
        (experience,) = made = make_experience(rollouts, rewards, size, **options)
        seen.append((rollouts, rewards, experience))
        return made

    run.make_experience = observe
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train()
    assert run.state.global_step == 4
    assert any(not torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    dropped = torch.cat([torch.tensor([c.dropped for c in rollouts.completions]) for rollouts, _, _ in seen])
    assert 0 < dropped.sum() < len(dropped)
    for rollouts, rewards, experience in seen:
        gone = torch.tensor([completion.dropped for completion in rollouts.completions])
        assert (gone.view(2, 4).sum(1) != 3).all()  # a single completion has no baseline
        assert torch.equal(rewards.rewards_NF.isnan(), gone[:, None].expand(-1, 2))
        assert torch.equal(experience.loss_mask_BT.any(1), ~gone)
        assert torch.equal(~experience.kept_B, gone)
        means = torch.where(gone[:, None], 0.0, experience.advantages_BX).view(2, 4).sum(1)
        torch.testing.assert_close(means, torch.zeros(2), atol=1e-5, rtol=0)
    logs = [log for log in run.state.log_history if "rollouts/dropped_share" in log]
    assert len(logs) == 4 and any(log["rollouts/retry_frequency"] > 0 for log in logs)
    assert sum(log["rollouts/dropped_share"] for log in logs) / 4 == pytest.approx(dropped.float().mean())


def test_a_run_whose_rollouts_all_fail_goes_on_with_a_warning(tmp_path: Path, caplog) -> None:
    class Broken(FlakyEnvironment):
        def reset(self, **row: Any) -> None:
            raise OSError("no server")

    run = trainer(
        tmp_path, environment_factory=Broken, rollout_on_error="retry", rollout_retries=0, max_steps=2
    )
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train()
    assert run.state.global_step == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    assert caplog.text.count("all 4 rollouts of a generation failed") == 2
    assert [log["rollouts/dropped_groups"] for log in run.state.log_history[:2]] == [1, 1]


@pytest.mark.slow
def test_failed_rollouts_count_in_no_generation_and_not_after_a_resume(tmp_path: Path) -> None:
    """Rollout 3 of 8 fails; two steps a generation, and a checkpoint inside the second one."""
    weights: list[list[float]] = []

    def rollouts(prompts: list[Any], run: Any) -> dict[str, Any]:
        ids = [[4 + i, 5, 6] for i in range(8)]
        return {"prompt_ids": [[4]] * 8, "completion_ids": ids, "failed": [i == 3 for i in range(8)]}

    class Weights(GRPOCallback):
        def on_window_begin(self, args: Any, state: Any, control: Any, window: Any, **_: Any) -> None:
            weights.append([weight for batch in window for weight in batch.token_weights_BT[:, 0].tolist()])

    for steps in (3, 5):
        run = tiny_run(
            tmp_path,
            rollout_func=rollouts,
            callbacks=[Weights()],
            rollout_on_error="retry",
            loss_type="grpo",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_iterations=2,
            max_steps=steps,
            save_strategy="steps",
            save_steps=3,
        )
        run.train(resume_from_checkpoint=steps == 5)
    expected = [0.0 if i == 3 else 1 / 7 / 3 for i in range(8)]  # a mean over 7 sequences of 3 tokens
    assert len(weights) == 5
    for found in weights:
        assert found == pytest.approx(expected)
