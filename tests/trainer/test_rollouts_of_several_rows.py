"""Rollouts of several rows: the update of one row, forks as each row alone, counts of rollouts.

Files: ``core/weights.py``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import generate, policy, prompts, tokenizer, trainer

from groupwise import GRPOCallback, GRPOTrainer
from groupwise.core.weights import NORMALIZERS, WindowCounts, count_rows, weigh_rows
from groupwise.errors import ConfigError
from groupwise.records import Experience

END = 1
#: Every built-in objective, ratio level, normalizer, mask and term that counts sequences or tokens.
CASES: dict[str, dict[str, Any]] = {
    **{
        n: {"loss_type": n}
        for n in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo")
    },
    "prompt mean": {"loss_type": "scalerl"},
    "sequence ratio": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "reference": {"beta": 0.3},
    "kl in reward": {"beta": 0.3, "kl_in_reward": True},
    "sampler": {
        "rollout_func_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_truncate",
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
    "entropy": {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    "truncated masked": {"mask_truncated_completions": True},
    "steps": {"advantage_baseline": "per_token"},
}


def turns(number: int) -> list[tuple[list[int], list[int]]]:
    """Five turns of a rollout: sampled tokens and, after each, the result of a tool."""
    draw = random.Random(number)
    return [
        (
            [draw.randrange(4, 32) for _ in range(draw.randint(1, 3))],
            [draw.randrange(4, 32) for _ in range(2)],
        )
        for _ in range(5)
    ]


def rollouts_in(pieces: int, *, forks: bool = False, sampler: bool = True) -> Any:
    """A ``rollout_func`` that returns five turns as 1, 2 or 5 rows, perhaps with a sub-agent and a retry."""
    calls = 0

    def rollout(texts: list[str], run: Any) -> dict[str, list[Any]]:
        nonlocal calls
        calls += 1
        output: dict[str, list[Any]] = {
            key: [] for key in ("prompt_ids", "completion_ids", "env_mask", "rollout_ids")
        }
        output["logprobs"], scores = [], []
        for i, text in enumerate(texts):
            history = run.processing_class(text)["input_ids"]
            said = turns(100 * calls + i)
            rows: list[tuple[list[int], list[int], list[int]]] = []
            starts = {1: [0], 2: [0, 3], 5: [0, 1, 2, 3, 4]}[pieces]
            for start, stop in zip(starts, [*starts[1:], 5], strict=True):
                ids = [token for sampled, result in said[start:stop] for token in (*sampled, *result)]
                mask = [
                    flag
                    for sampled, result in said[start:stop]
                    for flag in [1] * len(sampled) + [0] * len(result)
                ]
                ids, mask = ids[: -len(said[stop - 1][1])], mask[: -len(said[stop - 1][1])]
                rows.append((list(history), ids, mask))
                history = [*history, *ids, *said[stop - 1][1]]
            if forks:
                rows.insert(1, ([30 - i % 2, 9], [7, 8 + i, END], [1, 1, 1]))  # a sub-agent
                rows.insert(2, (rows[0][0], [*rows[0][1][:1], 6, END], [1, 1, 1]))  # another answer
            rows = rows[: 1 + i % len(rows)] if forks else rows  # unequal numbers, one of them 1
            for prompt, ids, mask in rows:
                output["prompt_ids"].append(prompt)
                output["completion_ids"].append(ids)
                output["env_mask"].append(mask)
                output["logprobs"].append([-3.4 - 0.02 * (token % 3) for token in ids])
                output["rollout_ids"].append(i)
            scores.append(float(i * 7 % 5))
        if not sampler:
            del output["logprobs"]
        return {**output, "score": scores}

    return rollout


def score_reward(score: list[float], rollout_rows: list[Any], **_: Any) -> list[float]:
    return score


def last_step_reward(
    completion_ids: list[list[int]], score: list[float], **_: Any
) -> list[list[tuple[int, float]]]:
    """A step reward at the last token that the function sees."""
    return [[(len(ids) - 1, value)] for ids, value in zip(completion_ids, score, strict=True)]


def parameters(
    directory: Path, rollout: Any, reward: Any = score_reward, **given: Any
) -> dict[str, torch.Tensor]:
    run = trainer(
        directory, reward, rollout_func=rollout, num_iterations=2, optim="sgd", learning_rate=0.5, **given
    )
    run.train()
    return {name: weight.detach().clone() for name, weight in run.model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rows_that_continue_each_other_make_the_update_of_one_row(tmp_path: Path, case: str) -> None:
    reward = last_step_reward if case == "steps" else score_reward
    one, *others = (parameters(tmp_path, rollouts_in(n), reward, **CASES[case]) for n in (1, 2, 5))
    start = policy().state_dict()
    assert case == "truncated masked" or any(not torch.equal(one[name], start[name]) for name in one)
    for other in others:
        assert all(torch.equal(one[name], other[name]) for name in one)


def last_turn_reward(
    score: list[float], turn_ends: list[list[int | None]], **_: Any
) -> list[list[float | None]]:
    return [[*[None] * (len(ends) - 1), value] for ends, value in zip(turn_ends, score, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["row", *(name for name in CASES if name not in ("kl in reward", "steps"))])
def test_a_reward_of_the_last_turn_makes_the_update_of_an_outcome(tmp_path: Path, case: str) -> None:
    rollout = partial(rollouts_in, 5, forks=case != "reference")  # the main agent continues after the forks
    settings = {**CASES, "row": {"rollout_credit": "row"}}[case]
    outcome, turn = (
        parameters(tmp_path, rollout(), reward, **settings) for reward in (score_reward, last_turn_reward)
    )
    for name, weight in outcome.items():
        torch.testing.assert_close(turn[name], weight, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("by_turn", [True, False])
def test_a_rollout_function_gives_the_rewards_of_its_turns_as_a_column(tmp_path: Path, by_turn: bool) -> None:
    def rollout(texts: list[str], run: Any) -> dict[str, list[Any]]:
        steps = [[(0, float(i)), (3, 1.0)] for i in range(len(texts))]
        numbers = [[reward for _, reward in each] for each in steps]
        return {
            "prompt_ids": [run.processing_class(text)["input_ids"] for text in texts],
            "completion_ids": [[7, 9, 8, END]] * len(texts),
            "env_mask": [[1, 0, 1, 1]] * len(texts),
            "step_rewards": numbers if by_turn else steps,
        }

    def steps(step_rewards: list[Any], **_: Any) -> list[Any]:
        return step_rewards

    run = trainer(tmp_path, steps, rollout_func=rollout, max_steps=1, scale_rewards="none")
    rewards = run.compute_rewards(generate(run, [run.train_dataset[0]] * 4))
    assert rewards.turns == [((0, 1), (2, 4))] * 4
    # Rewards 0, 1, 2, 3 and 1 four times: mean 1.25. The token at index 1 is of a tool.
    expected = [[i - 1.5, 0.0, -0.25, -0.25] for i in range(4)]
    assert run.compute_advantages(rewards).tolist() == expected
    assert rewards.metrics["reward/turn_1"].value() == 1.5


class EachRowAlone(GRPOCallback):
    """Compare the log-probs that the loss gets with each row alone in the model's own forward."""

    def __init__(self) -> None:
        self.compared, self.with_contexts = 0, 0

    def on_train_begin(self, args, state, control, model=None, **_) -> None:
        self.model = model

    def on_loss(self, args, state, control, *, batch, logps_BT, loss, **_) -> None:
        for row in range(len(batch)):
            prompt = batch.prompt_ids_BL[row][batch.prompt_mask_BL[row].bool()].tolist()
            ids = batch.completion_ids_BT[row][batch.completion_mask_BT[row].bool()].tolist()
            contexts = (batch.contexts or [None] * len(batch))[row] or ()
            self.with_contexts += len(contexts)
            bounds = [(0, prompt), *contexts, (len(ids), [])]
            for (begin, context), (end, _) in pairwise(bounds):
                alone = row_logps(self.model, context, ids[begin:end])
                torch.testing.assert_close(logps_BT[row, begin:end], alone, atol=2e-6, rtol=0)
                self.compared += end - begin


def row_logps(model: Any, context: list[int], ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([[*context, *ids]])).logits[0].log_softmax(-1)
    return torch.stack([logits[len(context) - 1 + t, token] for t, token in enumerate(ids)])


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix", "forked"])
def test_forks_have_the_log_probs_of_each_row_alone(tmp_path: Path, layout: str) -> None:
    check = EachRowAlone()
    parameters(
        tmp_path, rollouts_in(5, forks=True), sequence_layout=layout, callbacks=[check],
        per_device_train_batch_size=2, gradient_accumulation_steps=2, loss_type="grpo",
    )  # fmt: skip
    assert check.compared > 40 and check.with_contexts > 5


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo"])
@pytest.mark.parametrize(
    ("level", "credit"), [("token", "rollout"), ("sequence", "rollout"), ("token", "row")]
)
def test_the_gradient_of_forks_is_the_rule_of_the_documentation(
    tmp_path: Path, loss_type: str, level: str, credit: str
) -> None:
    """On-policy: the sum over trained tokens of w_i · A_i · ∇ℓ; |o_i| counts those of the rollout or row."""
    rollout = rollouts_in(5, forks=True, sampler=False)
    seen: dict[str, list[Any]] = {}

    def reward(score, rollout_rows, **_):
        seen.update(rows=rollout_rows, score=score)
        return score

    run = trainer(
        tmp_path, reward, rollout_func=rollout, max_steps=1, optim="sgd", learning_rate=1.0,
        max_grad_norm=0.0, loss_type=loss_type, importance_sampling_level=level, scale_rewards="none",
        lr_scheduler_type="constant", max_completion_length=40, rollout_credit=credit,
    )  # fmt: skip
    model = policy().double()
    run.train()
    total = torch.zeros((), dtype=torch.float64)
    sequences: list[tuple[float, list[torch.Tensor]]] = []  # advantage and log-probs of the trained tokens
    for rows, score in zip(seen["rows"], seen["score"], strict=True):
        # Trained tokens of the rollout by their whole prefix, found without the joined form.
        trained: dict[tuple[int, ...], torch.Tensor] = {}
        home: dict[tuple[int, ...], int] = {}
        roots: list[tuple[int, ...]] = []  # of rows that continue no earlier one
        for prompt, ids in rows:
            logps = row_logps(model, prompt, ids)
            whole = (*prompt, *ids)
            found = [i for i, row in enumerate(roots) if whole[: len(row)] == row]
            roots, number = (roots, found[0]) if found else ([*roots, whole], len(roots))
            roots[number] = whole
            for t in range(len(ids)):
                trained.setdefault((*prompt, *ids[: t + 1]), logps[t])
                home.setdefault((*prompt, *ids[: t + 1]), number if credit == "row" else 0)
        advantage = score - sum(seen["score"]) / 4
        for number in sorted(set(home.values())):
            sequences.append((advantage, [trained[key] for key in trained if home[key] == number]))
    assert credit == "rollout" or len(sequences) > len(seen["rows"]) == 4
    tokens, n = sum(len(own) for _, own in sequences), len(sequences)
    for advantage, own in sequences:
        weights = {"grpo": 1 / (n * len(own)), "dapo": 1 / tokens, "dr_grpo": 1 / (40 * n), "luspo": 1 / n}
        total = total - weights[loss_type] * advantage * torch.stack(own).sum()
    total.backward()
    start = policy().state_dict()
    for name, weight in model.named_parameters():
        update = start[name].double() - run.model.state_dict()[name].double()
        torch.testing.assert_close(update, weight.grad, atol=2e-6, rtol=0)


def experience(mask_BT: torch.Tensor, groups: list[int], contexts: Any) -> Experience:
    ones_B1 = torch.ones(len(mask_BT), 1, dtype=torch.long)
    real_BT = mask_BT.flip(1).cummax(1).values.flip(1)  # up to the last loss token; results of tools too
    return Experience(
        prompt_ids_BL=ones_B1, prompt_mask_BL=ones_B1, completion_ids_BT=mask_BT, completion_mask_BT=real_BT,
        loss_mask_BT=mask_BT, group_ids_B=torch.tensor(groups), old_logps_BT=mask_BT.float(),
        contexts=contexts, advantages_BX=ones_B1.float(),
    )  # fmt: skip


def test_the_worked_example_of_the_documentation() -> None:
    """A has the rows ``P a a r b`` and ``Q c c c``, B one row of 2 tokens; maximum length 10."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]])
    batch = experience(mask, [0, 0], (((4, [9]),), None))
    assert count_rows(batch).tolist() == [2, 1]
    counts = WindowCounts(sequences=3, tokens=8, micro_batches=1, world_size=1, max_completion_length=10)
    for name, first, second in (
        ("sequence_mean", 1 / 9, 1 / 6),
        ("token_mean", 1 / 8, 1 / 8),
        ("local_token_mean", 1 / 8, 1 / 8),
        ("constant_length", 1 / 30, 1 / 30),
        ("sequence_sum", 1 / 3, 1 / 3),
    ):
        expected = mask * torch.tensor([[first], [second]])
        weights = weigh_rows(NORMALIZERS[name], batch, counts)
        torch.testing.assert_close(weights, expected)
    # Of two prompts: A has 6 of the loss tokens, in both of its rows, and B has 2.
    batch, counts = experience(mask, [0, 1], batch.contexts), replace(counts, group_tokens={0: 6, 1: 2})
    weights = weigh_rows(NORMALIZERS["prompt_mean"], batch, counts)
    torch.testing.assert_close(weights, mask * torch.tensor([[1 / 12], [1 / 4]]))


def test_a_rollout_of_masked_rows_counts_as_one_and_a_dropped_one_as_none(tmp_path: Path) -> None:
    """Three rows of one rollout, of which one has loss tokens; a rollout without any; a dropped rollout."""
    mask = torch.tensor([[0, 1, 0], [0, 0, 0], [0, 0, 0]])
    contexts = (((1, [9]), (2, [8])), ((1, [9]),), None)
    batch = replace(experience(mask, [0, 0, 0], contexts), dropped_B=torch.tensor([False, False, True]))
    assert count_rows(batch).tolist() == [1, 1, 1]
    run = trainer(
        tmp_path, score_reward, rollout_func=rollouts_in(2), rollout_credit="row", loss_type="luspo"
    )
    (weighed,) = run.set_token_weights([batch], [mask.bool()])
    assert weighed.token_weights_BT.tolist() == [[0, 0.5, 0], [0, 0, 0], [0, 0, 0]]
    assert weighed.sequence_weight_B1.tolist() == [[0.5], [0.5], [0.0]]


@pytest.mark.parametrize("loss_type", ["grpo", "luspo"])
def test_credit_by_row_changes_nothing_for_rows_that_continue_each_other(
    tmp_path: Path, loss_type: str
) -> None:
    by_rollout, by_row = (
        parameters(tmp_path, rollouts_in(5), loss_type=loss_type, rollout_credit=credit)
        for credit in ("rollout", "row")
    )
    assert all(torch.equal(by_rollout[name], by_row[name]) for name in by_row)


def test_credit_by_row_warns_where_each_rollout_is_one_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def zero(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    text = "rollout_credit='row' has no effect without a rollout_func, tools or environments"
    trainer(tmp_path, score_reward, rollout_func=rollouts_in(5), rollout_credit="row", loss_type="grpo")
    assert text not in caplog.text
    trainer(tmp_path, zero, rollout_credit="row", loss_type="grpo")
    assert caplog.text.count(text) == 1


def test_rewards_tables_and_metrics_count_rollouts(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def reward(prompts, completions, completion_ids, rollout_rows, score, **_):
        calls.append({"texts": completions, "ids": completion_ids, "rows": rollout_rows})
        return score

    run = trainer(
        tmp_path, reward, rollout_func=rollouts_in(5, forks=True), log_completions=True, max_steps=1,
        eval_dataset=prompts(3), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
    )  # fmt: skip
    run.train()
    first = calls[0]
    assert [len(column) for column in first.values()] == [4, 4, 4]  # a call per batch, an entry per rollout
    assert [rows[-1][1] for rows in first["rows"]] == first["ids"]
    assert first["texts"][0] == tokenizer().decode(first["ids"][0], skip_special_tokens=True)
    log = run.state.log_history[0]
    assert log["rollouts/rows"] == sum(len(rows) for rows in first["rows"]) / 4
    trained = [
        len({(*p, *ids[: t + 1]) for p, ids in rows for t in range(len(ids))}) for rows in first["rows"]
    ]
    assert log["completions/max_length"] <= max(trained) and log["rollouts/computed_share"] < 1
    assert "eval_rollouts/rows" in run.state.log_history[1]


@pytest.mark.parametrize("returns_to_main", [True, False])
def test_step_rewards_are_credited_in_the_order_of_time(tmp_path: Path, returns_to_main: bool) -> None:
    def rollout(texts: list[str], run: Any) -> dict[str, list[Any]]:
        output: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "rollout_ids": []}
        for i, text in enumerate(texts):  # a of the main agent, c of a sub-agent, b of the main agent
            main = run.processing_class(text)["input_ids"]
            rows = [(main, [7]), ([30, 9], [8 + i]), ([*main, 7], [6]) if returns_to_main else ([3, 5], [6])]
            for prompt, ids in rows:
                output["prompt_ids"].append(prompt)
                output["completion_ids"].append(ids)
                output["rollout_ids"].append(i)
        return output

    def steps(completion_ids: list[list[int]], **_: Any) -> list[list[tuple[int, float]]]:
        return [[(len(ids) - 1, float(i))] for i, ids in enumerate(completion_ids)]

    class Watched(GRPOTrainer):
        def compute_advantages(self, rewards: Any) -> Any:
            seen.append(super().compute_advantages(rewards))
            return seen[-1]

    seen: list[torch.Tensor] = []
    given: dict[str, Any] = {"rollout_func": rollout, "max_steps": 1, "kind": Watched}
    trainer(tmp_path, steps, **given).train()  # tokens a b | c, where c was sampled before b, or a | c | b
    assert (seen[-1] == seen[-1][:, :1]).all() and seen[-1][0, 0] != 0
    if returns_to_main:
        trainer(tmp_path, steps, **given, advantage_baseline="per_token").train()
        assert seen[-1].tolist() == [[0.0, float(i), 0.0] for i in range(4)]

    def by_turn(turn_ends: list[list[int | None]], **_: Any) -> list[list[float | None]]:
        ends.extend(turn_ends)
        return [[None, float(i), 0.0] for i in range(len(turn_ends))]

    ends: list[list[int | None]] = []
    trainer(tmp_path, by_turn, **given, scale_rewards="none").train()  # mean of the eight rewards: 0.75
    expected = [[i - 1.5, i - 1.5, -0.75] for i in range(4)]  # of a, c and b
    assert seen[-1].tolist() == [[a, b, c] if returns_to_main else [a, c, b] for a, c, b in expected][:4]
    assert ends == [[None, None, 0]] * 4


@pytest.mark.slow
def test_a_resumed_run_continues_inside_a_generation(tmp_path: Path) -> None:
    given = {
        "num_iterations": 2,
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "dynamic_sampling": True,
    }
    whole = trainer(tmp_path / "a", score_reward, rollout_func=rollouts_in(5, forks=True), **given)
    whole.train()
    again = trainer(tmp_path / "a", score_reward, rollout_func=rollouts_in(5, forks=True), **given)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    # The second step trains on the generation of the checkpoint; the third samples anew.
    logs = [run.state.log_history[1] for run in (whole, again)]
    assert logs[0]["loss"] == logs[1]["loss"] and logs[0]["grad_norm"] == logs[1]["grad_norm"] != 0


@pytest.mark.parametrize("kind", ["liger", "hooks"])
def test_what_cannot_train_forks_refuses_them_by_name(tmp_path: Path, kind: str) -> None:
    given: dict[str, Any] = {}
    if kind == "liger":
        pytest.importorskip("liger_kernel")
        given = {"use_liger_kernel": True}
    else:
        from groupwise.trl_hooks import GRPOTrainer

        given = {"kind": GRPOTrainer}
    run = trainer(tmp_path, score_reward, rollout_func=rollouts_in(5, forks=True), **given)
    with pytest.raises(ConfigError, match="rows that do not continue each other"):
        run.train()
