"""Rebalanced windows and skipped rows: the same update from less computation."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from support.runs import (
    TermOfEveryRow,
    TermOfTrainedRows,
    experience,
    policy,
    prompts,
    trainer,
    weighed,
    with_all_rows,
)

from groupwise import GRPOTrainer
from groupwise.core.surrogates import clipped
from groupwise.data.rebalancing import rebalance
from groupwise.hf.base import BaseTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def some_reward(prompts, completion_ids, **_):
    """No variance in the groups of every other prompt."""
    return [
        float(sum(ids) % 5) if len(prompt.split()) % 2 else 1.0
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def no_variance(completion_ids, **_):
    return [1.0] * len(completion_ids)


def train(tmp_path, name, rewards=some_reward, **settings):
    run = trainer(
        tmp_path / name,
        rewards,
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "max_steps": 2,
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "train_dataset": prompts(16),
            **settings,
        },
    )
    run.train()
    return run


def assert_same_weights(run, other, tolerance):
    moved = 0.0
    for ours, theirs in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < tolerance
        moved = max(moved, float(ours.detach().abs().max()))
    assert moved > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_type", "layout"),
    [*((name, "shared_prefix") for name in LOSSES), ("grpo", "padded"), ("vespo", "packed")],
)
def test_skipping_and_rebalancing_do_not_change_the_update(tmp_path, loss_type, layout):
    extra = {"epsilon_high": 2.0} if loss_type == "cispo" else {}
    settings = {"loss_type": loss_type, "num_iterations": 2, **extra}
    full = train(tmp_path, "full", sequence_layout="padded", skip_zero_advantage=False, **settings)
    cut = train(tmp_path, "cut", sequence_layout=layout, **settings)
    # learning rate 1e-2 times gradients of order 1: a hundred float32 roundings of 6e-8
    assert_same_weights(cut, full, 1e-6)
    # half of the groups; a single completion may hit the mean of its group as well
    assert 0.5 <= cut.state.log_history[0]["skipped_share"] < 0.7
    assert full.state.log_history[0]["skipped_share"] == 0.0
    assert cut.state.log_history[0]["loss"] == pytest.approx(full.state.log_history[0]["loss"], abs=1e-5)


def test_the_update_of_a_window_without_any_gradient_is_zero_and_not_absent(tmp_path):
    run = train(tmp_path, "none", no_variance, weight_decay=0.1, optim="adamw_torch", max_steps=1)
    full = train(
        tmp_path,
        "full",
        no_variance,
        weight_decay=0.1,
        optim="adamw_torch",
        max_steps=1,
        skip_zero_advantage=False,
    )
    assert run.state.log_history[0]["skipped_share"] == 1.0
    assert run.state.log_history[0]["grad_norm"] == 0.0
    assert_same_weights(run, full, 1e-12)  # the weight decay alone


MASKED = {"mask_truncated_completions": True}
ALL_MASKED = {**MASKED, "generation_kwargs": {"suppress_tokens": [1]}}  # no completion ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "skipped"),
    [
        (TermOfEveryRow, MASKED, (0, 0)),
        (TermOfTrainedRows, {**MASKED, "num_iterations": 2}, (0.4, 0.99)),
        (TermOfTrainedRows, ALL_MASKED, (1, 1)),
    ],
)
def test_a_term_of_a_subclass_has_the_value_and_gradient_of_all_rows(tmp_path, kind, settings, skipped):
    full = train(tmp_path, "full", kind=with_all_rows(kind), sequence_layout="padded", **settings)
    pairs = zip(full.model.parameters(), policy().parameters(), strict=True)
    moved = max(float((after - before).detach().abs().max()) for after, before in pairs)
    assert (moved > 1e-4) is (skipped != (1, 1))
    for layout in ("padded", "shared_prefix"):
        cut = train(tmp_path, layout, kind=kind, sequence_layout=layout, **settings)
        assert_same_weights(cut, full, 1e-7)
        for ours, theirs in zip(cut.state.log_history[:-1], full.state.log_history[:-1], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
            assert skipped[0] <= ours["skipped_share"] <= skipped[1]


def varied_at(*generations):
    """Rewards that vary within groups in the given generations only."""
    calls = itertools.count()

    def reward(completion_ids, **_):
        varies = next(calls) in generations
        return [float(sum(ids) % 5) if varies else 1.0 for ids in completion_ids]

    return reward


@pytest.mark.slow
def test_a_window_without_any_gradient_computes_one_row_and_steps_all_the_same(tmp_path):
    def run(name, **given):
        model, rows = policy(), []
        unused = torch.nn.Parameter(torch.ones(3))  # never has a gradient, and so no weight decay
        model.register_parameter("unused", unused)

        def count(module, args, kwargs):
            if torch.is_grad_enabled():
                rows.append(len(kwargs["input_ids"]))

        model.register_forward_pre_hook(count, with_kwargs=True)
        settings = {"optim": "adamw_torch", "weight_decay": 0.1, "max_grad_norm": 1.0, "max_steps": 6}
        # Windows 0, 2, 3 and 5 have no gradient.
        given |= {"model": model, "rewards": varied_at(1, 4)}
        return train(tmp_path, name, **settings, **given), rows

    skipping, rows = run("skipping")
    full, all_rows = run("full", skip_zero_advantage=False)
    assert_same_weights(skipping, full, 1e-6)
    assert torch.equal(skipping.model.unused, torch.ones(3))
    assert rows[0] == 1 and rows[-1] == 1 and len(rows) < len(all_rows)
    for ours, theirs in zip(skipping.state.log_history[:-1], full.state.log_history[:-1], strict=True):
        for name in ("loss", "grad_norm", "reward", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name
    assert [line["skipped_share"] for line in skipping.state.log_history[:-1:3]] == [1, 1]
    assert [line["grad_norm"] > 0 for line in skipping.state.log_history[:-1]] == [0, 1, 0, 0, 1, 0]


class Scored:
    """Counts the tokens that a model computes log-probs of without a gradient."""

    def __init__(self, model):
        self.tokens = self.forwards = 0
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def before_forward(self, module, args, kwargs):
        if not torch.is_grad_enabled() and kwargs.get("use_cache") is False:
            self.forwards += 1
            self.tokens += kwargs["input_ids"].numel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reuse"),
    [("packed", {"num_iterations": 2}), ("shared_prefix", {"steps_per_generation": 4})],
)
def test_old_log_probs_are_computed_only_for_rows_with_a_gradient(tmp_path, monkeypatch, layout, reuse):
    monkeypatch.setattr("groupwise.policy.layouts.check.choose_way", lambda *_: None)  # tokens count

    def run(name):
        model = policy()
        scored = Scored(model)
        settings = {"max_steps": 4, "num_generations": 2, "gradient_accumulation_steps": 2, **reuse}
        settings["logprob_mismatch_check"] = "off"
        # two groups in a micro-batch, of which the second has variance
        settings |= {"train_dataset": prompts(17).select(range(1, 17)), "shuffle_dataset": False}
        return train(tmp_path, name, model=model, sequence_layout=layout, **settings), scored

    few, scored_few = run("few")
    monkeypatch.setattr("groupwise.trainer.rows_needing_logps", lambda *_: None)
    everything, scored_all = run("everything")
    assert_same_weights(few, everything, 1e-6)  # batches of another size round differently
    for ours, theirs in zip(few.state.log_history[:-1], everything.state.log_history[:-1], strict=True):
        kept = {name: v for name, v in theirs.items() if not re.search("time|second|memory", name)}
        assert {name: ours.get(name) for name in kept} == pytest.approx(kept, abs=1e-5)
    # One of two groups; their lengths differ a little.
    assert 0 < scored_few.tokens <= 0.6 * scored_all.tokens


@pytest.mark.parametrize("setting", [{"beta": 0.1}, {"beta": 0.1, "kl_in_reward": True}])
def test_log_probs_are_computed_for_all_rows_with_a_reference(tmp_path, monkeypatch, setting):
    monkeypatch.setattr("groupwise.policy.layouts.check.choose_way", lambda *_: None)  # forwards count
    model = policy()
    scored = Scored(model)
    setting = {**setting, "logprob_mismatch_check": "off", "sequence_layout": "padded", "max_steps": 1}
    run = train(
        tmp_path, "run", model=model, rewards=no_variance, **{**setting, "beta": 0.0, "kl_in_reward": False}
    )
    assert scored.forwards == 0
    run = train(tmp_path, "kl", model=model, num_iterations=2, **setting)
    assert scored.forwards == run.args.steps_per_generation
    assert not any((batch.old_logps_BT == 0).all(-1).any() for batch in run.buffer.entries)
    assert not any((batch.ref_logps_BT == 0).all(-1).any() for batch in run.buffer.entries)


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.1}, {"entropy_coef": 0.01}, {"use_adaptive_entropy": True}, {"skip_zero_advantage": False}],
)
def test_rows_that_something_else_needs_are_computed(tmp_path, settings):
    run = train(tmp_path, "run", max_steps=1, **settings)
    assert run.state.log_history[0]["skipped_share"] == 0.0


def test_no_row_is_skipped_for_an_objective_without_zero_grad_at_zero_advantage(tmp_path):
    from groupwise import register_objective

    def pulled(terms, settings):
        return clipped(terms, settings) + 0.1 * terms.ratio_BX

    register_objective("test_pulled_to_one", pulled, "token_mean")
    run = train(tmp_path, "run", loss_type="test_pulled_to_one", max_steps=1)
    assert run.state.log_history[0]["skipped_share"] == 0.0


def test_a_loss_of_a_subclass_sees_every_row(tmp_path):
    from support.runs import tokenizer

    from groupwise import GRPOConfig

    class OwnLoss(GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class OwnObjective(GRPOTrainer):
        def compute_policy_loss(self, batch, logprobs):
            return super().compute_policy_loss(batch, logprobs)

    class DeclaredLoss(OwnObjective):
        zero_grad_at_zero_advantage = True

        def compute_policy_loss(self, batch, logprobs):
            return super().compute_policy_loss(batch, logprobs)

    class OwnReward(GRPOTrainer):
        def compute_rewards(self, *args):
            return super().compute_rewards(*args)

    for kind, skips in ((OwnLoss, False), (OwnObjective, False), (DeclaredLoss, True), (OwnReward, True)):
        size = {"per_device_train_batch_size": 8, "max_completion_length": 8}
        config = GRPOConfig(str(tmp_path), **size, bf16=False, use_cpu=True)
        run = kind(policy(), no_variance, config, prompts(), processing_class=tokenizer())
        assert run.micro_batch_budget.skip_zero_advantage is run.micro_batch_budget.skip_masked is skips
    run.compute_policy_loss = run.compute_policy_loss  # a method replaced on the instance
    run.refresh_settings()
    assert run.micro_batch_budget.skip_zero_advantage is run.micro_batch_budget.skip_masked is False


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_a_micro_batch_reads_nothing_back_from_the_device(tmp_path, layout, monkeypatch):
    run = train(tmp_path, "run", sequence_layout=layout, max_steps=1)  # what is checked once is checked now
    rows = [{"prompt": text} for text in prompts(4)["prompt"] for _ in range(4)]
    window = weighed(run, experience(run, rows))
    batches, _ = rebalance(window, layout, run.micro_batch_budget)
    batches = [run.logprob_computer.prepare(batch) for batch in batches if batch is not None]

    forbid_reading(monkeypatch, lambda: True)
    run.model.train()
    for batch in batches:
        run.compute_loss(run.model, batch).backward()


def forbid_reading(monkeypatch, forbidden):
    """Let whatever reads a tensor's value raise while ``forbidden()``."""

    def guarded(read):
        def checked(*args, **kwargs):
            assert not forbidden(), "a value was read back from the device"
            return read(*args, **kwargs)

        return checked

    for name in (
        *("item", "tolist", "cpu", "numpy", "nonzero"),
        *("__bool__", "__int__", "__float__", "__index__"),
    ):
        monkeypatch.setattr(torch.Tensor, name, guarded(getattr(torch.Tensor, name)))


class BetweenMicroBatches:
    """Replaces what a micro-batch returns; true from there until the next one."""

    def __init__(self, monkeypatch, losses=None):
        self.now, self.last, self.losses = False, [], iter(losses or ())
        whole, part = GRPOTrainer.training_step, BaseTrainer.training_step
        monkeypatch.setattr(GRPOTrainer, "training_step", lambda *given: self.around(whole, *given))
        if losses is not None:
            monkeypatch.setattr(BaseTrainer, "training_step", lambda *given: self.replace(part, *given))

    def around(self, training_step, trainer, *given):
        self.now = False
        loss = training_step(trainer, *given)
        self.now = not trainer.accelerator.sync_gradients
        self.last.append(not self.now)
        return loss

    def replace(self, training_step, trainer, *given):
        training_step(trainer, *given)
        return torch.tensor(next(self.losses))


ALL_ROWS = {"skip_zero_advantage": False, "sequence_layout": "padded"}


def test_nothing_is_read_back_between_micro_batches(tmp_path, monkeypatch):
    between = BetweenMicroBatches(monkeypatch)
    forbid_reading(monkeypatch, lambda: between.now)
    run = train(tmp_path, "run", **ALL_ROWS)
    assert between.last == [False, False, False, True] * 2
    assert run.args.logging_nan_inf_filter is True


@pytest.mark.parametrize("filtered", [True, False])
def test_a_window_whose_loss_is_not_a_number_leaves_the_logged_loss_alone(tmp_path, monkeypatch, filtered):
    BetweenMicroBatches(monkeypatch, [0.25, 0.75, math.nan, 1.0, 2.0, 0.0])
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "logging_steps": 10, **ALL_ROWS}
    run = train(tmp_path, "run", logging_nan_inf_filter=filtered, **settings)
    # windows of 1, NaN and 2; in place of NaN the mean so far, which Trainer takes to be 1 / 2 steps
    expected = (1 + 1 / 2 + 2) / 3 if filtered else math.nan
    assert run.state.log_history[-1]["train_loss"] == pytest.approx(expected, nan_ok=True)
    assert run.args.logging_nan_inf_filter is filtered


def test_truncated_completions_without_loss_are_not_computed(tmp_path):
    run = train(tmp_path, "run", mask_truncated_completions=True, beta=0.1, max_steps=1)
    log = run.state.log_history[0]
    assert log["skipped_share"] == pytest.approx(log["completions/clipped_ratio"])
    assert 0 < log["skipped_share"] < 1
