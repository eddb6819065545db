"""Evaluation: how many prompts are solved, against the first time, with sampler settings of its own."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.runs import WORDS, policy, prompts, tokenizer, trainer

from groupwise import ConfigError, GRPOConfig, register_aggregation
from groupwise.errors import RewardError
from groupwise.records import Completion, RewardBatch, RolloutBatch
from groupwise.reporting.evaluation import EvaluatedCompletion, EvaluationMetrics, own_metrics

QUANTILE = 1.959964


def questions(count=3):
    return Dataset.from_dict({"prompt": WORDS[:count], "number": list(range(count))})


def in_turn(prompts, run):
    """Completions that differ within a group: words 4, 5, 6, ... of the vocabulary."""
    ids = tokenizer()(list(prompts))["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [[4 + i % 4, 1] for i in range(len(ids))]}


#: Of 4 completions of prompts 0, 1 and 2, how many pass.
PASSED = (1, 4, 0)


def solved(number, completion_ids, **_):
    return [float(ids[0] - 4 < PASSED[n]) for n, ids in zip(number, completion_ids, strict=True)]


def run_of(directory, rewards=solved, **given):
    defaults = {
        "train_dataset": questions(),
        "eval_dataset": questions(),
        "rollout_func": in_turn,
        "eval_pass_at_k": [1, 2, 4],
        "num_generations_eval": 4,
        "per_device_eval_batch_size": 8,
    }
    return trainer(directory, rewards, **{**defaults, **given})


def interval(values):
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return QUANTILE * math.sqrt(variance / len(values))


def test_pass_at_k_of_an_evaluation(tmp_path):
    # 12 rows in batches of 8: the last batch has 4.
    metrics = run_of(tmp_path).evaluate()
    by_prompt = {
        "pass@1": [1 / 4, 1, 0],
        "pass@2": [1 - 3 / 6, 1, 0],  # of the 6 pairs, 3 have the one that passes
        "pass@4": [1, 1, 0],
        "avg@4": [1 / 4, 1, 0],
        # All answers are different, so that the vote is a draw among all.
        "maj@2": [1 / 4, 1, 0],
        "maj@4": [1 / 4, 1, 0],
    }
    for name, values in by_prompt.items():
        assert metrics[f"eval_{name}"] == pytest.approx(sum(values) / 3), name
        assert metrics[f"eval_{name}_ci95"] == pytest.approx(interval(values), abs=1e-6), name
    assert not [name for name in metrics if "maj@1" in name or "gain" in name]


def test_step_rewards_are_evaluated_by_their_sum(tmp_path):
    """The same completions pass as with `solved`, by two steps that sum to 1."""

    def stepwise(**given):
        return [[(0, passed - 0.5), (1, 0.5)] for passed in solved(**given)]

    run = run_of(tmp_path / "steps", stepwise, max_steps=1, log_completions=True, num_completions_to_print=0)
    found, outcome = run.evaluate(), run_of(tmp_path / "outcome").evaluate()
    assert found["eval_reward"] == outcome["eval_reward"] == pytest.approx(5 / 12)
    for name in ("eval_pass@2", "eval_maj@4", "eval_avg@4"):
        assert found[name] == outcome[name], name
    run.train()
    assert run.state.log_history[0]["reward"] == run.state.log_history[0]["rewards/stepwise/mean"]
    (path,) = Path(tmp_path, "steps", "completions").glob("*.parquet")
    table = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert set(table["stepwise"]) <= {0.0, 1.0} and len(table) == 4


@pytest.mark.parametrize("ks", [None, [1]])
def test_compute_metrics_gets_all_completions_with_their_rows_and_prompts(tmp_path, ks):
    given = []

    def count(prediction):
        given.append(prediction)
        first = [row["number"] for row in prediction.label_ids]
        prediction.label_ids[0]["number"] = 99  # a copy
        return {"words": len(prediction.predictions), "eval_first": first[0], "last": first[-1]}

    run = run_of(tmp_path, eval_pass_at_k=ks, compute_metrics=count)
    metrics = run.evaluate()  # 12 rows in batches of 8
    assert (metrics["eval_words"], metrics["eval_first"], metrics["eval_last"]) == (12, 0, 2)
    assert ("eval_pass@1" in metrics) == (ks is not None) and len(given) == 1
    assert given[0].inputs == [word for word in WORDS[:3] for _ in range(4)]
    assert given[0].predictions[:4] == [tokenizer().decode([4 + i]) for i in range(4)]
    assert run.evaluate()["eval_first"] == 0
    assert run.evaluate(metric_key_prefix="test")["test_words"] == 12


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"compute_metrics returned \[1.0\]; allowed: a dictionary of one number by name"),
        ({"accuracy": "3"}, "compute_metrics: 'accuracy' is '3'; allowed: one number"),
        ({"accuracy": np.zeros(2)}, "compute_metrics: 'accuracy' is array.*; allowed: one number"),
        ({"reward": 1.0}, "compute_metrics: the trainer logs 'reward' itself; .* 'custom/reward'"),
        ({"eval_loss": 1.0}, "compute_metrics: the trainer logs 'loss' itself"),
        ({"pass@1": 1.0}, "compute_metrics: the trainer logs 'pass@1' itself"),
    ],
)
def test_what_compute_metrics_must_not_return(result, message):
    with pytest.raises(RewardError, match=message):
        own_metrics(lambda prediction: result, [completion_with(("a", {}, "b"))], "eval")


def test_names_and_values_of_compute_metrics_become_plain():
    given = {2: np.array(0.5), "eval_b": torch.tensor([3]), "c": True, "d": np.float32("nan")}
    found = own_metrics(lambda prediction: given, [completion_with(("a", {}, "b"))], "eval")
    assert math.isnan(found.pop("d")) and found == {"2": 0.5, "b": 3.0, "c": 1.0}
    assert {type(value) for value in found.values()} == {float}


def completion_with(sample):
    return EvaluatedCompletion((0, 0), "b", [1.0], None, sample)


def test_failed_rollouts_do_not_reach_compute_metrics(tmp_path):
    def half(prompts, run):
        return {**in_turn(prompts, run), "failed": [i % 2 == 0 for i in range(len(prompts))]}

    given = []

    def count(prediction):
        given.append(prediction)
        return {"completions": len(prediction.predictions)}

    options = {"rollout_func": half, "compute_metrics": count, "rollout_on_error": "retry"}
    run = run_of(tmp_path, eval_pass_at_k=None, eval_dataset=questions(2), **options)
    assert run.evaluate()["eval_completions"] == 4  # of 2 prompts with 4 completions
    assert given[0].predictions == [tokenizer().decode([4 + i]) for i in (1, 3, 1, 3)]
    assert own_metrics(count, [completion_with(None)], "eval") == {}  # all have failed


def test_no_pass_at_k_metrics_by_default(tmp_path):
    assert not [name for name in run_of(tmp_path, eval_pass_at_k=None).evaluate() if "@" in name]


def test_majority_votes_use_the_answers_of_a_reward(tmp_path):
    def with_answers(number, completion_ids, log_extra, **_):
        # Prompt 0: three say x, which is right; prompt 1: two of three, which is wrong; prompt 2: no answer.
        answers = {0: ["x", "x", "y", "x"], 1: ["x", "y", "x", None], 2: [None, "[unparseable]", None, None]}
        rows = [(n, ids[0] - 4) for n, ids in zip(number, completion_ids, strict=True)]
        log_extra("answer_parsed", [answers[n][place] for n, place in rows])
        return [float(answers[n][place] == {0: "x", 1: "y", 2: "z"}[n]) for n, place in rows]

    metrics = run_of(tmp_path, with_answers).evaluate()
    assert metrics["eval_pass@1"] == pytest.approx((3 / 4 + 1 / 4 + 0) / 3)
    assert metrics["eval_maj@4"] == pytest.approx((1 + 0 + 0) / 3)


def test_the_threshold_and_missing_rewards(tmp_path):
    def partly(number, completion_ids, **_):
        # 0.0, 0.3, 0.6 and 0.9; prompt 1 has two completions without a reward, prompt 2 none with one.
        return [
            None if n == 2 or (n == 1 and ids[0] < 6) else (ids[0] - 4) * 0.3
            for n, ids in zip(number, completion_ids, strict=True)
        ]

    metrics = run_of(tmp_path, partly, eval_pass_threshold=0.5).evaluate()
    assert metrics["eval_pass@1"] == pytest.approx((2 / 4 + 2 / 2) / 2)
    assert metrics["eval_pass@4"] == 1.0  # of prompt 0 alone: the others have fewer than 4
    assert "eval_pass@4_ci95" not in metrics  # a single prompt has no spread
    assert metrics["eval_avg@4"] == pytest.approx((0.45 + 0.75) / 2)


def test_pass_at_k_of_several_reward_functions(tmp_path):
    def polite(completion_ids, **_):
        return [0.5 for _ in completion_ids]

    metrics = run_of(tmp_path, [solved, polite], reward_weights=[1.0, 2.0]).evaluate()
    assert metrics["eval_rewards/solved/pass@1"] == pytest.approx(5 / 12)
    assert metrics["eval_rewards/polite/pass@1"] == 1.0
    assert metrics["eval_pass@1"] == 1.0  # the weighted sum is above 0 everywhere
    assert metrics["eval_avg@4"] == pytest.approx(5 / 12 + 1.0)


def test_the_gain_is_the_difference_by_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.core.confidence.gain_interval", lambda _, look: (-look, look))
    passed = [1, 4, 0]

    def learning(number, completion_ids, **_):
        return [float(ids[0] - 4 < passed[n]) for n, ids in zip(number, completion_ids, strict=True)]

    run = run_of(tmp_path, learning)
    run.evaluate()
    passed[:] = [3, 4, 1]
    metrics = run.evaluate()
    gains = [2 / 4, 0, 1 / 4]
    assert metrics["eval_pass@1_gain"] == pytest.approx(sum(gains) / 3)
    assert metrics["eval_pass@1_gain_ci95"] == pytest.approx(interval(gains), abs=1e-6)
    # What prompts differ in by themselves is not in it.
    assert metrics["eval_pass@1_gain_ci95"] < metrics["eval_pass@1_ci95"]
    passed[:] = [1, 4, 0]
    again = run.evaluate()
    assert again["eval_pass@1_gain"] == 0.0  # still against the first
    assert (again["eval_pass@1_gain_low"], again["eval_pass@1_gain_high"]) == (-2, 2)  # of the second look
    assert "eval_maj@2_gain_low" in again and "eval_avg@4_gain_low" not in again


def test_other_prompts_are_not_compared(tmp_path, caplog):
    run = run_of(tmp_path)
    run.evaluate()
    metrics = run.evaluate(eval_dataset=questions(2))
    assert "eval_pass@1" in metrics and "eval_pass@1_gain" not in metrics
    assert "evaluation 'eval' has other prompts than the first time" in caplog.text
    assert "eval_pass@1_gain" in run.evaluate()
    assert "test_pass@1_gain" not in run.evaluate(eval_dataset=questions(2), metric_key_prefix="test")


@pytest.mark.slow
def test_the_best_model_by_pass_at_k_from_before_the_first_step(tmp_path):
    values = itertools.chain([1, 3, 2], itertools.repeat(0))
    state = {"passed": 0}

    def wandering(number, completion_ids, trainer_state, **_):
        if len(completion_ids) == 8:  # the first batch of an evaluation
            state["passed"] = next(values)
        return [float(ids[0] - 4 < state["passed"]) for ids in completion_ids]

    run = run_of(
        tmp_path, wandering, eval_on_start=True, eval_strategy="steps", save_strategy="steps", eval_steps=1,
        save_steps=1, max_steps=3, load_best_model_at_end=True, metric_for_best_model="eval_pass@1",
    )  # fmt: skip
    run.train()
    evaluations = [line for line in run.state.log_history if "eval_pass@1" in line]
    assert [line["eval_pass@1"] for line in evaluations] == [1 / 4, 3 / 4, 2 / 4, 0]
    assert [line["step"] for line in evaluations] == [0, 1, 2, 3]
    assert Path(run.state.best_model_checkpoint).name == "checkpoint-1"


@pytest.mark.slow
def test_the_first_evaluation_survives_a_checkpoint(tmp_path):
    given = {"eval_on_start": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    given |= {"eval_strategy": "steps", "eval_steps": 1}
    run_of(tmp_path, **given).train()
    resumed = run_of(tmp_path, **{**given, "eval_on_start": False, "save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    metrics = resumed.evaluate()
    assert metrics["eval_pass@1_gain"] == 0.0
    assert resumed.evaluation.looks == {"eval": 3}  # of steps 1 and 2, and now


def test_a_registered_aggregation_decides_what_passes(tmp_path):
    def formatted(completion_ids, **_):
        return [1.0] * len(completion_ids)

    register_aggregation("worst", lambda rewards_NF, weights_F, num_generations: rewards_NF.amin(-1))
    run = run_of(tmp_path, [solved, formatted], multi_objective_aggregation="worst")
    metrics = run.evaluate()
    # 1, 4 and 0 of 4 completions pass; their sum would be above the threshold for all.
    assert metrics["eval_pass@1"] == metrics["eval_reward"] == pytest.approx((1 / 4 + 4 / 4 + 0 / 4) / 3)
    assert metrics["eval_frac_reward_zero_std"] == pytest.approx(2 / 3)


def test_completions_of_several_ranks_make_up_the_groups():
    # Two ranks with 6 of 12 completions each, and a last batch with 4 that count: 16 in groups of 4.
    config = GRPOConfig(
        "unused", use_cpu=True, num_generations_eval=4, eval_pass_at_k=[1, 4], eval_pass_threshold=0.0
    )

    def record(rank):
        found = EvaluationMetrics()
        for start, count in ((0, 12), (12, 4)):
            rows = torch.arange(start, start + count)
            local = slice(rank * 6, rank * 6 + 6)
            solved_NF = (rows % 4 < rows // 4).float().unsqueeze(1)
            rewards = RewardBatch(solved_NF, torch.ones(1), 4, local=local)
            names = [str(start + row) for row in range(local.start, local.stop)]
            rollout = RolloutBatch(
                [{}] * 6, [str((start + row) // 4) for row in range(local.start, local.stop)], [[0]] * 6,
                [Completion([0])] * 6, names,
            )  # fmt: skip
            found.add(rollout, rewards, config)
        return found

    first, second = record(0), record(1)
    both = first.completions + second.completions
    assert len(both) == 16
    metrics = first.compute("eval", config, ["solved"], lambda own: both)
    assert metrics["pass@1"] == pytest.approx((0 + 1 / 4 + 2 / 4 + 3 / 4) / 4)
    assert metrics["pass@4"] == pytest.approx(3 / 4)


@pytest.mark.slow
def test_evaluation_samples_with_its_own_settings(tmp_path):
    model = policy()
    run = trainer(
        tmp_path, model=model, eval_dataset=prompts(3), eval_generation_kwargs={"temperature": 0.0},
        per_device_eval_batch_size=4, log_completions=True, temperature=1.3,
    )  # fmt: skip
    seen = []

    def remember(prompts, completion_ids, **_):
        seen.extend(zip(prompts, completion_ids, strict=True))
        return [0.0] * len(prompts)

    run.reward_callables = [remember]
    run.evaluate()
    for text, completion in seen:
        ids = torch.tensor([tokenizer()(text)["input_ids"]])
        greedy = model.generate(ids, attention_mask=ids * 0 + 1, do_sample=False, max_new_tokens=6)
        assert greedy[0, ids.shape[1] :].tolist() == completion
    seen.clear()
    run.train()
    assert len({tuple(completion) for _, completion in seen[:4]}) > 1  # training still samples


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"temprature": 1.0},
            "is not a sampler setting; allowed: temperature, .*; nearest valid: 'temperature'",
        ),
        ({"top_p": 1.5}, r"eval_generation_kwargs\['top_p'\]=1.5 is out of range; .*; nearest valid: 1"),
        ({"temperature": "hot"}, "is of type str; allowed: float; nearest valid: 1.0"),
    ],
)
def test_settings_of_evaluation_are_checked(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, eval_generation_kwargs=given)


def test_a_prediction_is_an_evaluation_of_other_rows(tmp_path):
    """Completions of a prompt form a group, and the metrics carry the prefix of a test."""
    evaluated = run_of(tmp_path).evaluate()
    output = run_of(tmp_path, eval_dataset=None).predict(questions())
    assert output.predictions is None and output.label_ids is None
    timed = ("time", "second", "epoch", "memory")
    wanted = {
        name.replace("eval_", "test_", 1): value
        for name, value in evaluated.items()
        if not any(part in name for part in timed)
    }
    assert wanted["test_pass@4"] == pytest.approx(2 / 3)
    assert {name: output.metrics[name] for name in wanted} == pytest.approx(wanted)


def test_an_evaluation_sampler_that_repeats_rows_is_refused(tmp_path):
    """As TRL's does: here the rows themselves are repeated."""
    run = run_of(tmp_path)
    run._get_eval_sampler = lambda rows: list(range(len(rows))) * 4
    with pytest.raises(ConfigError, match="returns 48 indices for 12 rows, which are repeated"):
        run.evaluate()
    run._get_eval_sampler = lambda rows: list(range(len(rows)))
    assert run.evaluate()["eval_pass@4"] == pytest.approx(2 / 3)
