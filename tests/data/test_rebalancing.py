"""A window cut anew: the same update, with less of it computed."""

from __future__ import annotations

import math

import pytest
import torch
from support.batches import micro_batch
from support.runs import experience, policy, prompts, trainer, weighed

from groupwise import GRPOTrainer
from groupwise.core.surrogates import clipped
from groupwise.data.rebalancing import MicroBatchBudget, cache_sized, rebalance, rows_to_score
from groupwise.hf.base import BaseTrainer
from groupwise.records import MicroBatch

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


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_skipping_and_recutting_leave_the_update_as_it_is(tmp_path, loss_type, layout):
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


class Scored:
    """Counts the tokens that a model computes log-probs of without a gradient."""

    def __init__(self, model):
        self.tokens = self.forwards = 0
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def before_forward(self, module, args, kwargs):
        if not torch.is_grad_enabled() and kwargs.get("use_cache") is False:
            self.forwards += 1
            self.tokens += kwargs["input_ids"].numel()


@pytest.mark.parametrize("reuse", [{"num_iterations": 2}, {"steps_per_generation": 4}])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_a_reused_generation_is_scored_only_where_rows_will_be_computed(tmp_path, monkeypatch, layout, reuse):
    def run(name):
        model = policy()
        scored = Scored(model)
        settings = {"max_steps": 4, "num_generations": 2, "gradient_accumulation_steps": 2, **reuse}
        # two groups in a micro-batch, of which the second has variance
        settings |= {"train_dataset": prompts(17).select(range(1, 17)), "shuffle_dataset": False}
        return train(tmp_path, name, model=model, sequence_layout=layout, **settings), scored

    few, scored_few = run("few")
    monkeypatch.setattr("groupwise.trainer.rows_to_score", lambda *_: None)
    everything, scored_all = run("everything")
    assert_same_weights(few, everything, 1e-6)  # batches of another size round differently
    for ours, theirs in zip(few.state.log_history[:-1], everything.state.log_history[:-1], strict=True):
        kept = {name: value for name, value in theirs.items() if "time" not in name and "second" not in name}
        assert {name: ours.get(name) for name in kept} == pytest.approx(kept, abs=1e-5)
    assert 0 < scored_few.tokens <= scored_all.tokens / 2


@pytest.mark.parametrize("setting", [{"beta": 0.1}, {"beta": 0.1, "kl_in_reward": True}])
def test_every_row_is_scored_where_the_reference_needs_it(tmp_path, setting):
    model = policy()
    scored = Scored(model)
    run = train(tmp_path, "run", model=model, max_steps=1, sequence_layout="padded", rewards=no_variance)
    assert scored.forwards == 0
    run = train(
        tmp_path, "kl", model=model, max_steps=1, sequence_layout="padded", num_iterations=2, **setting
    )
    assert scored.forwards == run.args.steps_per_generation
    assert not any((batch.old_logps_BT == 0).all(-1).any() for batch in run.buffer.entries)
    assert not any((batch.ref_logps_BT == 0).all(-1).any() for batch in run.buffer.entries)


def test_every_rank_scores_something_in_every_micro_batch():
    (batch,) = window([2] * 4, [3] * 4, [0.0, 1.0, 0.0, -1.0], 4)
    (flat,) = window([2] * 4, [3] * 4, [0.0] * 4, 4)
    one, two = MicroBatchBudget(False, 4, 3, True), MicroBatchBudget(False, 4, 3, True, ranks=2)
    advantages_B1, zeros_B1 = batch.advantages_BX, flat.advantages_BX
    for budget in (one, two):
        assert rows_to_score(batch, advantages_B1, budget, 4) == [1, 3]
    assert rows_to_score(flat, zeros_B1, one, 4) == [] and rows_to_score(flat, zeros_B1, two, 4) == [0]
    assert rows_to_score(flat, zeros_B1, two, 2) == [0, 2]  # one row of every micro-batch
    for budget in (MicroBatchBudget(True, 4, 3, True), MicroBatchBudget(False, 4, 3, False)):
        assert rows_to_score(flat, zeros_B1, budget, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.1}, {"entropy_coef": 0.01}, {"use_adaptive_entropy": True}, {"skip_zero_advantage": False}],
)
def test_rows_that_something_else_needs_are_computed(tmp_path, settings):
    run = train(tmp_path, "run", max_steps=1, **settings)
    assert run.state.log_history[0]["skipped_share"] == 0.0


def test_an_objective_that_does_not_promise_to_be_flat_sees_every_row(tmp_path):
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
        def compute_policy_loss(self, batch, scores):
            return super().compute_policy_loss(batch, scores)

    class OwnReward(GRPOTrainer):
        def compute_rewards(self, *args):
            return super().compute_rewards(*args)

    for kind, skips in ((OwnLoss, False), (OwnObjective, False), (OwnReward, True)):
        size = {"per_device_train_batch_size": 8, "max_completion_length": 8}
        config = GRPOConfig(str(tmp_path), **size, bf16=False, use_cpu=True)
        run = kind(policy(), no_variance, config, prompts(), processing_class=tokenizer())
        assert run.micro_batch_budget.skip_zero_advantage is skips


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_a_micro_batch_reads_nothing_back_from_the_device(tmp_path, layout, monkeypatch):
    run = train(tmp_path, "run", sequence_layout=layout, max_steps=1)  # what is checked once is checked now
    rows = [{"prompt": text} for text in prompts(4)["prompt"] for _ in range(4)]
    window = weighed(run, experience(run, rows))
    batches, _ = run.rebalance_micro_batches(window, layout)
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


def window(prompt_lengths, completion_lengths, advantages, rows):
    """Micro-batches of ``rows`` rows; rows with the same prompt length have the same prompt."""
    count, width, prompt_width = len(prompt_lengths), max(completion_lengths), max(prompt_lengths)
    prompts = torch.zeros(count, prompt_width).long()
    prompt_mask, mask = torch.zeros_like(prompts), torch.zeros(count, width).long()
    for row, (prompt, size) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        prompts[row, prompt_width - prompt :] = 2 + prompt
        prompt_mask[row, prompt_width - prompt :] = 1
        mask[row, :size] = 1
    batch = micro_batch(
        prompts,
        prompt_mask,
        torch.arange(count)[:, None] * mask,
        mask,
        advantages_BX=torch.tensor(advantages)[:, None],
        token_weights_BT=mask / count,
        sequence_weight_B1=torch.full((count, 1), 1 / count),
    )
    return list(batch.split(rows))


def rows_of(batches):
    """The rows of each micro-batch; None for one that is not needed."""
    return [None if b is None else sorted(b.completion_ids_BT[:, 0].tolist()) for b in batches]


def test_groups_stay_together_in_as_few_micro_batches_as_hold_them():
    # two groups: 10 + 4 x 5 = 30 and 12 + 4 x 5 = 32 tokens; a micro-batch holds 2 x (12 + 6) = 36
    given = window([10] * 4 + [12] * 4, [5] * 8, [1.0] * 8, 2)
    batches, _ = rebalance(given, "shared_prefix", MicroBatchBudget(False, 2, 6, True))
    assert rows_of(batches) == [None, None, [4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_group_that_does_not_fit_is_parted():
    # a micro-batch holds 1 x (10 + 12) = 22 tokens: two completions of 5 after the prompt of 10
    batches, _ = rebalance(
        window([10] * 4, [5] * 4, [1.0] * 4, 1), "shared_prefix", MicroBatchBudget(False, 1, 12, True)
    )
    assert rows_of(batches) == [None, None, [0, 1], [2, 3]]


def test_without_padding_tokens_are_balanced():
    batches, _ = rebalance(
        window([1, 2, 3, 4], [9, 1, 1, 8], [1.0] * 4, 2), "packed", MicroBatchBudget(False, 2, 9, True)
    )
    # costs 10, 3, 4, 12, of which 2 x (4 + 9) = 26 fit: two parts, 12 + 3 and 10 + 4
    assert rows_of(batches) == [[1, 3], [0, 2]]


def test_padded_rows_of_similar_length_come_together():
    given = window([1, 2, 3, 4], [9, 1, 2, 8], [1.0] * 4, 2)
    batches, work = rebalance(given, "padded", MicroBatchBudget(False, 2, 9, True))
    assert rows_of(batches) == [[0, 3], [1, 2]]
    # 2 x (4 + 9) + 2 x (3 + 2) = 36 tokens for 30 real ones
    assert (work.padding, work.computed_tokens, work.tokens) == (6, 36, 30)


def test_rows_without_gradient_are_left_out_and_what_counts_rows_still_counts_them():
    given = window([2] * 4, [3, 3, 3, 3], [0.0, 1.0, 0.0, -1.0], 2)
    for layout in ("padded", "packed", "shared_prefix"):
        batches, work = rebalance(given, layout, MicroBatchBudget(False, 2, 3, True))
        assert rows_of(batches) == [None, [1, 3]]
        assert (work.skipped_rows, work.rows) == (2, 4)
        assert batches[1].sequence_weight_B1.sum() == pytest.approx(1.0)


def test_a_cpu_computes_few_tokens_at_a_time_but_no_prompt_twice(monkeypatch):
    monkeypatch.setattr("groupwise.data.rebalancing._CACHE_TOKENS", 20)
    # groups of 10 + 4 x 2 = 18 and 3 + 4 x 2 = 11 tokens and one of 4 + 2 x 4 = 12
    batch = MicroBatch.concatenate(window([10] * 4 + [3] * 4 + [4] * 2, [2] * 8 + [4] * 2, [1.0] * 10, 10))
    assert rows_of(cache_sized(batch, "shared_prefix")) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    # rows of 12, 5 and 8 tokens, in their order
    assert rows_of(cache_sized(batch, "packed")) == [[0], [1], [2], [3, 4], [5, 6, 7], [8, 9]]
    assert cache_sized(batch.select([0, 1]), "shared_prefix")[0].packed is None


def test_every_rank_has_about_the_same_to_do_and_every_row_is_somewhere():
    # rank 0 sampled the short completions, rank 1 the long ones
    short, long = ([3] * 4, [2, 1, 2, 1]), ([3] * 4, [9, 8, 9, 8])
    everything = MicroBatch.concatenate(window(short[0] + long[0], short[1] + long[1], [1.0] * 8, 4))
    for layout in ("padded", "packed", "shared_prefix"):
        of_rank = []
        for rank, (prompts_of, sizes) in enumerate((short, long)):
            own = window(prompts_of, sizes, [1.0] * 4, 2)
            cut = MicroBatchBudget(False, 2, 9, True, ranks=2, rank=rank)
            of_rank.append(rebalance(own, layout, cut, lambda _: everything))
        (first, work), (second, other) = of_rank
        assert [b is None for b in first] == [b is None for b in second]
        found = [row for rows in rows_of(first) + rows_of(second) if rows is not None for row in rows]
        assert sorted(found) == list(range(8))
        assert abs(work.computed_tokens - other.computed_tokens) <= 12  # a row; 26 and 64 as sampled


def test_a_rank_without_rows_takes_part_with_one_that_counts_for_nothing():
    given = window([2] * 4, [3] * 4, [0.0, 0.0, 0.0, 1.0], 2)
    for layout in ("padded", "packed", "shared_prefix"):
        cuts = [MicroBatchBudget(False, 2, 3, True, ranks=2, rank=rank) for rank in (0, 1)]
        (busy, _), (idle, _) = (rebalance(given, layout, cut) for cut in cuts)
        assert rows_of(busy) == [None, [3]]
        assert idle[0] is None and len(idle[1]) == 1
        assert idle[1].token_weights_BT.sum() == 0 and idle[1].loss_mask_BT.sum() == 0
        assert busy[1].sequence_weight_B1.sum() + idle[1].sequence_weight_B1.sum() == pytest.approx(1.0)
