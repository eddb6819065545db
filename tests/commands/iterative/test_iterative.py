"""Iterative GRPO: reference, schedule and reward model over the outer iterations, and resumed runs."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.iterative_runs import has_vowel, reward_model, runner
from support.process_rewards import byte_tokenizer, step_classifier
from support.resume_runs import make_trainer, prompts, tokenizer, vowels
from support.saved_runs import files
from transformers import AutoTokenizer, TrainerCallback

from groupwise import ConfigError, GRPOConfig, IterativeConfig, IterativeGRPO, RewardError

_TIMING = re.compile(r"(time|memory)/.*|step_time|.*_runtime|.*_per_second|train_loss")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def history(trainer: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if not _TIMING.fullmatch(key)}
        for line in trainer.state.log_history
    ]


@pytest.mark.slow
def test_without_a_reward_model_the_run_is_that_of_one_trainer(tmp_path):
    """Weights, logs and the learning rates of one schedule."""
    given = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 4, "beta": 0.5}
    refresh = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 2}
    whole = make_trainer(tmp_path / "whole", **given, **refresh, num_iterations=2)
    whole.train()
    run = runner(tmp_path / "parts", [vowels], None, num_iterations=2)
    run.train()
    assert same(weights(run.trainer.model), weights(whole.model))
    assert same(weights(run.trainer.ref_model), weights(whole.ref_model))
    assert history(run.trainer) == history(whole)
    # Linear from 1e-2 to 0 over the four steps, not over the two of an iteration.
    rates = [line["learning_rate"] for line in run.trainer.state.log_history if "learning_rate" in line]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


class SeesReferences(TrainerCallback):
    """Whether the reference has the policy's weights, or the initial ones, at each checkpoint."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[bool, bool]] = {}

    def on_save(self, args, state, control, **_):
        trainer = self.run.trainer
        reference = weights(trainer.ref_model)
        self.seen[state.global_step] = same(reference, weights(trainer.model)), same(reference, self.initial)


@pytest.mark.slow
def test_the_reference_becomes_the_policy_at_the_end_of_an_iteration(tmp_path):
    callback = SeesReferences()
    callback.run = run = runner(tmp_path, callbacks=[callback])
    callback.initial = weights(run.trainer.model)
    run.train()
    assert callback.seen == {1: (False, True), 2: (True, False), 3: (False, False), 4: (True, False)}


class Stops(Exception):
    pass


def fails_at(call: int, function: Any) -> Any:
    """The function, which raises at one call: the process would have ended there."""
    calls = 0

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Stops
        return function(**given)

    return wrapped


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = runner(tmp_path_factory.mktemp("whole"), [vowels])
    run.initial = weights(run.scorer.model)
    run.train()
    return run


def labels_and_rewards_that_fail(point: str) -> tuple[Any, Any]:
    """Six prompts are labelled in six calls, one generation batch of one prompt each."""
    label_at = {"before the first update": 3}
    reward_at = {"within the first iteration": 2, "within the last iteration": 4}
    return fails_at(label_at.get(point, 0), has_vowel), fails_at(reward_at.get(point, 0), vowels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    ["within the first iteration", "before the first update", "within the last iteration"],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, whole, point):
    label_func, reward = labels_and_rewards_that_fail(point)
    with pytest.raises(RewardError, match="Stops"):
        runner(tmp_path, [reward], label_func).train()
    random.seed(99), torch.manual_seed(99)  # of the new process
    resumed = runner(tmp_path, [vowels])
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed.trainer.model), weights(whole.trainer.model))
    assert same(weights(resumed.trainer.ref_model), weights(whole.trainer.ref_model))
    assert same(weights(resumed.scorer.model), weights(whole.scorer.model))
    assert resumed.history == whole.history and resumed.reward_metrics == whole.reward_metrics
    assert history(resumed.trainer)[:4] == history(whole.trainer)[:4]


@pytest.mark.slow
@pytest.mark.parametrize("label_func", [None, has_vowel], ids=["reference", "reward model"])
def test_a_finished_run_loads_its_policy(tmp_path, label_func):
    first = runner(tmp_path, [vowels], label_func)
    first.train()
    first.trainer.save_model()
    before = files(tmp_path)
    resumed = runner(tmp_path, [vowels], label_func)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.trainer.state.global_step == 4 and files(tmp_path) == before
    assert same(weights(resumed.trainer.model), weights(first.trainer.model))
    assert resumed.trainer.run_directory.has_result()


@pytest.mark.slow
def test_the_reward_model_learns_its_pairs_with_a_share_of_earlier_ones(whole, tmp_path):
    assert not same(weights(whole.scorer.model), whole.initial)
    first, second = whole.reward_metrics
    assert [first["iteration"], second["iteration"]] == [1, 2]
    assert first["num_examples"] == first["num_fresh"] > 9
    assert second["num_examples"] == second["num_fresh"] + round(second["num_fresh"] / 9)
    assert all(line["loss_after"] < line["loss_before"] for line in (first, second))
    assert len(whole.history) == first["num_fresh"] + second["num_fresh"]
    # each pair: two completions of one prompt, of which the first has a vowel
    for example in whole.history:
        (prompt,) = [row["prompt"] for row in prompts(12) if example.text.startswith(row["prompt"])]
        assert example.other.startswith(prompt)
        made, other = example.text.removeprefix(prompt), example.other.removeprefix(prompt)
        assert has_vowel([made, other]) == [1.0, 0.0]
    output = Path(whole.trainer.args.output_dir)
    saved = json.loads((output / "checkpoint-2" / "reward-model" / "examples.json").read_text())
    assert len(saved["history"]) == first["num_fresh"] and saved["metrics"] == [first]


@pytest.mark.slow
def test_the_policy_is_rewarded_by_the_updated_model(whole, tmp_path):
    """Without updates the second iteration has other rewards; the first one has the same."""
    fixed = runner(tmp_path, [vowels], iterative={"reward_learning_rate": 1e-30})
    fixed.train()
    name = "rewards/LlamaForSequenceClassification/mean"
    ours, theirs = ([line[name] for line in history(r.trainer)[:4]] for r in (whole, fixed))
    assert ours[:2] == theirs[:2] and ours[2] != theirs[2]


@pytest.mark.slow
def test_a_checkpoint_has_the_reward_model_of_its_step(whole):
    """The initial one until the update of the first iteration, which is before the checkpoint of its step."""
    output = Path(whole.trainer.args.output_dir)
    saved = [
        type(whole.scorer.model).from_pretrained(output / f"checkpoint-{step}" / "reward-model")
        for step in (1, 2, 3, 4)
    ]
    assert same(weights(saved[0]), whole.initial)
    assert same(weights(saved[2]), weights(saved[1])) and not same(weights(saved[1]), whole.initial)
    assert same(weights(saved[3]), weights(whole.scorer.model))
    tokens = AutoTokenizer.from_pretrained(output / "checkpoint-1" / "reward-model")
    assert tokens.get_vocab() == tokenizer().get_vocab()


@pytest.mark.slow
def test_the_update_draws_no_random_number_of_the_run(tmp_path):
    """The policy samples the same completions after an update that does not change the reward model."""
    with_update = runner(tmp_path / "with", [vowels], iterative={"reward_learning_rate": 1e-30})
    with_update.train()
    without = runner(tmp_path / "without", [vowels])
    without._update_reward_model = lambda iteration: None
    without.train()
    assert same(weights(with_update.trainer.model), weights(without.trainer.model))
    assert history(with_update.trainer) == history(without.trainer)


@pytest.mark.slow
def test_the_backend_knows_the_weights_of_the_step_after_an_update(tmp_path, monkeypatch):
    """A sampler that keeps a digest of the weights it has, in its state, as vLLM does."""
    run = runner(tmp_path, [vowels])
    backend, seen = run.trainer.backend, []
    load, sample, known = backend.sync_weights, backend.generate, {}

    def sync(source, *, step):
        if backend.version != step:
            known["step"] = step
        load(source, step=step)

    def generate(*given):
        seen.append((known["step"], backend.version))
        return sample(*given)

    monkeypatch.setattr(backend, "sync_weights", sync)
    monkeypatch.setattr(backend, "generate", generate)
    monkeypatch.setattr(backend, "snapshot", lambda: dict(known))
    monkeypatch.setattr(backend, "restore", known.update)
    run.train()
    assert {of_weights for of_weights, _ in seen} == {0, 1, 2, 3, 4}
    assert all(of_weights == version for of_weights, version in seen)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_the_end_of_an_iteration_is_saved_with_any_save_strategy(tmp_path, strategy):
    runner(tmp_path, save_strategy=strategy).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} >= {"checkpoint-2", "checkpoint-4"}
    resumed = runner(tmp_path, save_strategy=strategy)
    resumed.train(str(tmp_path / "checkpoint-2"))
    assert [line["iteration"] for line in resumed.reward_metrics] == [1, 2]


@pytest.mark.slow
def test_a_new_run_begins_without_examples(tmp_path):
    run = runner(tmp_path, max_steps=1, iterative={"iterations": 1})
    for _ in range(2):
        run.train()
        assert [line["iteration"] for line in run.reward_metrics] == [1]
        assert len(run.history) == run.reward_metrics[0]["num_fresh"]


def test_a_run_that_a_callback_stops_ends_there(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 1

    run = runner(tmp_path, callbacks=[Stop()])
    run.train()
    assert run.trainer.state.global_step == 1 and run.reward_metrics == []


def test_pointwise_labels_must_be_probabilities(tmp_path):
    def wrong(completions, **_):
        return [2.0] * len(completions)

    run = runner(tmp_path, label_func=wrong, iterative={"reward_objective": "pointwise"})
    with pytest.raises(RewardError, match=r"'wrong' returned 2\.0; pointwise labels are from 0 to 1"):
        run.train()


@pytest.mark.slow
def test_pointwise_training_uses_every_labelled_completion(tmp_path):
    def some(completions, **_):
        return [None if i == 0 else label for i, label in enumerate(has_vowel(completions))]

    run = runner(tmp_path, label_func=some, max_steps=2, iterative={"reward_objective": "pointwise"})
    run.train()
    assert [line["num_fresh"] for line in run.reward_metrics] == [6 * 3, 6 * 3]
    assert all(line["loss_after"] < line["loss_before"] for line in run.reward_metrics)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_steps": 5}, "max_steps=5 is no positive multiple of iterations=2; nearest valid: max_steps=4"),
        ({"max_steps": -1}, "max_steps=-1 is no positive multiple"),
        ({"sync_ref_model": True}, "set ref_model_mixup_alpha=1.0 and ref_model_sync_steps=2"),
        ({"label_func": 3}, "label_func=3 is not callable"),
        ({"label_func": None, "beta": 0.0}, "iterations have no effect with beta=0 and without label_func"),
        ({"iterative": {"reward_prompts": 13}}, "reward_prompts=13 is not allowed with 1 processes"),
    ],
)
def test_unusable_settings_are_refused(tmp_path, given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        runner(tmp_path, **given)


def test_labels_without_one_reward_model_are_refused(tmp_path):
    def build(rewards: Any, **given: Any) -> None:
        config = GRPOConfig(str(tmp_path), max_steps=2, use_cpu=True, bf16=False, report_to="none")
        loop, data = IterativeConfig(2, reward_prompts=2), given.pop("train_dataset", prompts(4))
        IterativeGRPO(
            "nowhere/at-all" if not rewards else make_trainer(tmp_path).model,
            rewards,
            config,
            iterative=loop,
            label_func=has_vowel,
            train_dataset=data,
            processing_class=tokenizer(),
            **given,
        )

    own = [tokenizer(), tokenizer()]
    with pytest.raises(ConfigError, match="reward_funcs has 2; give exactly one"):
        build([reward_model(), reward_model()], reward_processing_classes=own)
    with pytest.raises(ConfigError, match="reward_funcs has 0; give exactly one"):
        build([step_classifier()], reward_processing_classes=byte_tokenizer())
    with pytest.raises(ConfigError, match="is no stream"):
        stream = prompts(4).to_iterable_dataset()
        build([reward_model()], reward_processing_classes=own[0], train_dataset=stream)


@pytest.mark.parametrize("fails_here", [False, True], ids=["on another rank", "on this rank"])
def test_an_error_of_a_label_is_raised_on_all_ranks(tmp_path, monkeypatch, fails_here):
    events: list[Any] = []

    def gather(own: list[Any]) -> list[Any]:
        if "label" not in events:  # of the run's directory and of the step
            return own
        events.append(type(own[0][1]).__name__)
        return [*own, ([], None if fails_here else RewardError("label_func 'theirs' failed"))]

    def labels(completions: list[str], **_: Any) -> list[float]:
        events.append("label")
        if fails_here:
            raise Stops
        return has_vowel(completions)

    monkeypatch.setattr("groupwise.distributed.gather_object", gather)
    run = runner(tmp_path, label_func=labels, max_steps=2)
    release = run.trainer.backend.release
    run.trainer.backend.release = lambda: (events.append("release"), release())
    with pytest.raises(RewardError, match="Stops" if fails_here else "^rank 1: label_func 'theirs' failed$"):
        run.train()
    # First the step, then the six prompts: all are sampled before the first label, as on the other rank.
    assert events[:3] == ["release", "release", "label"]
    assert events[-1] == ("RewardError" if fails_here else "NoneType")
    assert run.reward_metrics == []


@pytest.mark.slow
def test_a_checkpoint_without_reward_model_is_refused(tmp_path):
    runner(tmp_path, [vowels], None, max_steps=2).train()
    with pytest.raises(ConfigError, match=r"checkpoint-2' has no reward-model: .* without label_func"):
        runner(tmp_path, max_steps=2).train(True)


@pytest.mark.slow
def test_examples_of_another_objective_are_refused(tmp_path):
    runner(tmp_path, max_steps=2).train()
    other = runner(tmp_path, iterative={"reward_objective": "pointwise"})
    with pytest.raises(ConfigError, match="examples of another reward_objective than 'pointwise'"):
        other.train(True)
