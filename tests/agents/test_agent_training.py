"""Training with tools and environments: a tiny random policy, real tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from support.agent_runs import calls_reward, chats, measure, policy, tokenizer, trainer, turn_reward
from support.fakes.scripted import byte_tokenizer
from support.runs import experience

from groupwise import ConfigError, GRPOConfig, GRPOTrainer


@pytest.mark.slow
def test_a_run_with_a_tool_trains_on_sampled_tokens(tmp_path: Path) -> None:
    run = trainer(tmp_path, tools=[measure], log_completions=True)
    seen = []
    generate_rollouts = run.generate_rollouts
    run.generate_rollouts = lambda request: seen.append(generate_rollouts(request)) or seen[-1]
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train()
    assert any(not torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    assert run.tools == [measure] and run.environments is None
    logs = [log for log in run.state.log_history if "tools/call_frequency" in log]
    assert len(logs) == 2 and all(log["tools/call_frequency"] > 0 for log in logs)
    # Lengths count sampled tokens only; rewards get the tool messages.
    sampled = [sum(c.loss_mask) for rollout in seen for c in rollout.completions]
    assert 0 < sum(sampled) < sum(len(c.token_ids) for rollout in seen for c in rollout.completions)
    assert [log["completions/mean_length"] for log in logs] == pytest.approx(
        [sum(sampled[:4]) / 4, sum(sampled[4:]) / 4]
    )
    results = [m for rollout in seen for text in rollout.texts for m in text if m["role"] == "tool"]
    assert {m["name"] for m in results} == {"measure"}
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pylist()
    messages = [message for row in table for message in row["completion"]]
    functions = [call["function"] for message in messages for call in message["tool_calls"] or ()]
    assert {function["name"] for function in functions} == {"measure"}
    assert all("text" in json.loads(function["arguments"]) for function in functions)
    assert "1" in [message["content"] for message in messages if message["role"] == "tool"]


@pytest.mark.slow
def test_tool_results_have_loss_mask_0(tmp_path: Path) -> None:
    run = trainer(tmp_path, tools=[measure])
    (batch,) = experience(run, [chats()[0]] * 4)
    decode = run.processing_class.decode
    assert run.num_generations == len(batch) == 4
    tokens, masks, real = batch.completion_ids_BT, batch.loss_mask_BT, batch.completion_mask_BT
    for ids, mask in zip(tokens, masks, strict=True):
        assert set(decode(ids[mask.bool()], skip_special_tokens=True)) <= set("abcdefgh")
    assert any("tool" in decode(ids[mask.bool()]) for ids, mask in zip(tokens, real, strict=True))


@pytest.mark.slow
def test_rollouts_fit_into_the_context_of_the_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, tools=[measure])
    (prompt,) = {len(ids) for ids in run.generate_rollouts(run.make_request([chats()[0]] * 4)).prompt_ids}
    short = policy(len(run.processing_class))
    short.config.max_position_embeddings = prompt + 12
    run = trainer(tmp_path, model=short, tools=[measure], max_completion_length=40)
    completions = run.generate_rollouts(run.make_request([chats()[0]] * 4)).completions
    assert all(0 < len(completion.token_ids) <= 12 for completion in completions)
    assert any(completion.truncated for completion in completions)


@pytest.mark.slow
@pytest.mark.parametrize("by_turn", [False, True])
def test_a_resumed_run_repeats_the_run(tmp_path: Path, by_turn: bool) -> None:
    settings: dict[str, Any] = {"tools": [measure], "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    if by_turn:  # checkpoint 3 is between the two updates of a generation
        settings |= {"reward_funcs": turn_reward, "dynamic_sampling": True, "num_iterations": 2}
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{3 if by_turn else 2}"))
    mine, other = whole.model.state_dict(), resumed.model.state_dict()
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    last = [run.state.log_history[-2] for run in (whole, resumed)]
    names = ("tools/call_frequency", "tools/failure_frequency", "reward", "loss", "num_tokens")
    for name in names[3:] if by_turn else names:
        assert last[0][name] == last[1][name]


class Game:
    """Observation: a number that a group shares; reward: the number of calls."""

    def reset(self, seed: int, **row: Any) -> str:
        self.seed, self.measured = seed, 0
        return f"game {seed}"

    def measure(self, text: str) -> str:
        """Measure a text.

        Args:
            text: what to measure.
        """
        self.measured += 1
        return f"{len(text)}!"

    async def get_reward(self) -> float:
        return float(self.measured)


@pytest.mark.slow
def test_an_environment_provides_data_tools_and_reward(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        environment_factory=Game,
        train_dataset=None,
        reward_funcs=None,
        per_device_train_batch_size=8,
    )
    seen = []
    generate_rollouts = run.generate_rollouts
    run.generate_rollouts = lambda request: seen.append(generate_rollouts(request)) or seen[-1]
    run.train()
    assert run.reward_func_names == ["Game"] and len(run.tools) == 1
    assert len(run.environments) == 8
    prompts = [rollout.prompts for rollout in seen]
    shown = [[prompt[0]["content"] for prompt in batch] for batch in prompts]
    groups = [batch[start : start + 4] for batch in shown for start in (0, 4)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) == 4  # every group has a game of its own
    logs = [log for log in run.state.log_history if "reward" in log]
    assert [log["reward"] for log in logs] == [log["rewards/Game/mean"] for log in logs]
    assert [log["reward"] for log in logs] == pytest.approx([log["tools/call_frequency"] for log in logs])


def test_named_environments_combine_with_reward_functions(tmp_path: Path) -> None:
    class Quiet:
        def reset(self, **row: Any) -> None: ...

    given = []

    def watch(environments: list[Any], **_: Any) -> list[float]:
        given.append(list(environments))
        return [1.0] * len(environments)

    rows = Dataset.from_dict({"environment": ["game", "quiet"] * 2, "seed": [0, 1, 2, 3]})
    factories = {"game": Game, "quiet": Quiet}
    run = trainer(
        tmp_path,
        environment_factory=factories,
        train_dataset=rows,
        reward_funcs=[watch],
        reward_weights=[0.5],
        per_device_train_batch_size=8,
        max_steps=1,
    )
    run.train()
    assert run.reward_func_names == ["watch", "Game"]
    assert run.reward_weights.tolist() == [0.5, 1.0]
    assert sorted(type(e).__name__ for e in given[0]) == ["Game"] * 4 + ["Quiet"] * 4
    log = next(log for log in run.state.log_history if "reward" in log)
    # Only games have the second reward, in half of the rows: its mean is over games only.
    assert log["reward"] == pytest.approx(0.5 + log["rewards/Game/mean"] / 2)


@pytest.mark.slow
def test_evaluation_uses_the_tools(tmp_path: Path) -> None:
    run = GRPOTrainer.evaluate(_with_eval(tmp_path))
    assert run["eval_tools/call_frequency"] > 0


def _with_eval(directory: Path) -> GRPOTrainer:
    run = trainer(directory, tools=[measure], num_generations_eval=2, per_device_eval_batch_size=4)
    run.eval_dataset = chats(4)
    return run


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tools": [measure], "processing_class": byte_tokenizer("{{ messages }}")},
            "does not render tool schemas",
        ),
        ({"tools": [len]}, "tool 'len' cannot be described to the model"),
        ({"tools": [measure, measure]}, "several tools are called 'measure'"),
        ({"tools": [measure], "rollout_func": lambda prompts, trainer: {}}, "rollout_func replaces the loop"),
        (
            {"environment_factory": Game, "train_dataset": None, "max_steps": -1},
            "max_steps=-1 does not limit",
        ),
        ({"environment_factory": {"a": Game}, "train_dataset": None}, "its column 'environment' selects"),
        ({"environment_factory": Game, "reward_weights": [1.0, 1.0]}, "reward_weights has 2 entries for 1"),
    ],
)
def test_invalid_arguments_are_refused_before_the_model_is_loaded(
    given: dict[str, Any], message: str
) -> None:
    settings = {name: given.pop(name) for name in ("max_steps", "reward_weights") if name in given}
    config = GRPOConfig("unused", use_cpu=True, bf16=False, report_to="none", **settings)
    arguments = {"processing_class": tokenizer(), "train_dataset": chats(), **given}
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer("no/such-model", calls_reward, config, **arguments)
