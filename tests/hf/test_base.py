"""Hooks of ``transformers.Trainer``: the table in ``BaseTrainer``, its window loss and its checks."""

from __future__ import annotations

import gc
import re
import weakref

import numpy as np
import pytest
import torch
from support.runs import count_reward, policy, prompts, tokenizer, trainer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    Trainer,
    TrainerCallback,
    TrainerState,
)

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.errors import TrainingError
from groupwise.hf.base import BaseTrainer, frozen_objects


def test_the_docstring_lists_every_hook_that_the_class_overrides():
    listed = re.findall(r"^ +``(\w+)`` +\d", BaseTrainer.__doc__ or "", flags=re.MULTILINE)
    overridden = {name for name in vars(BaseTrainer) if hasattr(Trainer, name) and not name.startswith("__")}
    assert len(listed) == len(set(listed)) and set(listed) == overridden


@pytest.fixture
def made(tmp_path):
    return trainer(tmp_path)


def test_trainer_adds_up_one_loss_per_window(made):
    total = torch.tensor(0.0)
    for loss, last in [(0.25, False), (0.5, True), (1.0, False), (2.0, True)]:
        returned = made.loss_to_log(torch.tensor(loss), last=last)
        assert returned.device == total.device
        total += returned
        assert type(total) is torch.Tensor
    assert total.item() == 0.75 + 3.0


def test_the_loss_inside_a_window_is_not_read_by_the_nan_filter(made):
    zero = made.loss_to_log(torch.tensor(float("nan")), last=False)
    assert torch.isnan(zero) is False and torch.isinf(zero) is False
    window_loss = made.loss_to_log(torch.tensor(1.0), last=True)
    assert torch.isnan(window_loss).item()


def test_a_new_run_drops_the_loss_and_the_size_limit_of_an_interrupted_one(tmp_path):
    made = trainer(tmp_path, max_steps=1)
    made.loss_to_log(torch.tensor(1000.0), last=False)
    made.splitter.max_tokens = 1
    made.train()
    assert made.splitter.max_tokens is None
    assert abs(made.state.log_history[-1]["train_loss"]) < 100


class Caller(TrainerCallback):
    """Calls a function of the trainer at the end of every step."""

    def __init__(self, call):
        self.call = call

    def on_step_end(self, args, state, control, **_):
        self.call(self.run)


def run_with(tmp_path, call, **given):
    caller = Caller(call)
    caller.run = trainer(tmp_path, callbacks=[caller], **given)
    caller.run.train()
    return caller.run.state.log_history


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.log({"x": 1.0}),
        lambda run: run.log({"loss": 7.0}),
        lambda run: run.log({"train_loss": 7.0}),
        lambda run: run.evaluate(),
    ],
    ids=["a metric", "loss", "train_loss", "evaluate"],
)
def test_the_log_of_a_step_stays_due_and_whole_whatever_a_callback_logs_before_it(tmp_path, call):
    history = run_with(tmp_path, call, eval_dataset=prompts(1), logging_steps=2, max_steps=2)
    logs = [log for log in history if "learning_rate" in log]
    assert [log["step"] for log in logs] == [2]
    assert all({"loss", "reward", "entropy"} <= log.keys() and log["loss"] != 7.0 for log in logs)
    others = [log for log in history if log not in logs]
    assert len(others) == 3 and not any("reward" in log for log in others)  # each step, and the end


def test_an_evaluation_of_another_dataset_leaves_the_one_of_the_step_due(tmp_path):
    def other(run):
        run.evaluate(prompts(1), metric_key_prefix="other")

    given = {"eval_dataset": {"a": prompts(1), "b": prompts(1)}, "eval_strategy": "steps", "eval_steps": 1}
    history = run_with(tmp_path, other, max_steps=1, **given)
    for name in ("other_loss", "eval_a_loss", "eval_b_loss"):
        assert len([log for log in history if name in log]) == 1


def test_completions_that_no_log_reports_are_not_kept(tmp_path):
    options = {"logging_strategy": "no", "log_completions": True, "num_completions_to_print": 0}
    kept = []
    run_with(tmp_path, lambda run: kept.append(len(run.metrics["train"].rows)), **options)
    assert kept == [4, 4]  # of the newest generation
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["completions_00002.parquet"]


def test_a_prediction_reports_its_completions(tmp_path):
    run = trainer(tmp_path, log_completions=True, num_completions_to_print=0)
    run.predict(prompts(2))
    assert [path.name for path in (tmp_path / "completions_test").iterdir()] == ["completions_00000.parquet"]


def test_values_of_a_log_are_plain_in_checkpoints(tmp_path):
    given = {"a": np.float32(0.5), "b": torch.tensor([2]), "c": np.array(True), 3: "text", "d": [1, None]}
    run = trainer(tmp_path)
    run.log(given)
    run.state.save_to_json(str(tmp_path / "state.json"))
    (saved,) = TrainerState.load_from_json(str(tmp_path / "state.json")).log_history
    assert saved == {"a": 0.5, "b": 2, "c": True, "3": "text", "d": [1, None], "step": 0, "epoch": 0}
    for value in (np.zeros(2), torch.zeros(2), {1, 2}, [np.float32(1)]):
        with pytest.raises(ValueError, match=r"trainer\.log: 'x' is .*; allowed: a value that"):
            run.log({"x": value})


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_gradient_norm_that_is_not_finite_ends_the_run(made, norm):
    model = torch.nn.Linear(1, 1)
    assert made._get_grad_norm(model, torch.tensor(2.0)) == 2.0
    with pytest.raises(TrainingError, match=f"the gradient norm of step 1 is {norm}; training ends before"):
        made._get_grad_norm(model, torch.tensor(norm))


@pytest.mark.parametrize("use_cache", [True, False])
def test_checkpoints_have_the_model_s_own_use_cache(tmp_path, use_cache):
    run = trainer(tmp_path, model=policy(use_cache=use_cache), max_steps=1)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    assert AutoConfig.from_pretrained(tmp_path / "saved").use_cache is use_cache


@pytest.mark.parametrize("side", ["left", "right"])
def test_checkpoints_have_the_padding_side_of_the_tokenizer(tmp_path, side):
    words = tokenizer()
    words.padding_side = side
    words.save_pretrained(tmp_path / "model")
    policy().save_pretrained(tmp_path / "model")
    given = {"max_completion_length": 6, "per_device_train_batch_size": 4, "num_generations": 4}
    config = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False, **given)
    run = GRPOTrainer(str(tmp_path / "model"), count_reward, config, prompts())
    run.save_model(str(tmp_path / "saved"))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").padding_side == side
    assert run.processing_class.padding_side == "left"  # scripts pad prompts with it


@pytest.mark.parametrize(
    ("given", "removed"),
    [({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7}, "temperature.*top_p"),
     ({"do_sample": False, "typical_p": 0.5}, "typical_p")],
    ids=["temperature", "typical_p"],
)  # fmt: skip
def test_a_generation_config_that_cannot_be_saved_is_repaired_when_the_trainer_is_built(
    tmp_path, caplog, given, removed
):
    model = policy()
    for name, value in given.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match="invalid"):
        model.generation_config.save_pretrained(tmp_path)
    run = trainer(tmp_path, model=model)
    assert re.search(f"cannot be saved with .*{removed}", caplog.text)
    run.save_model(str(tmp_path / "saved"))
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert saved.do_sample is False and saved.max_new_tokens == given.get("max_new_tokens")
    assert saved.eos_token_id == model.config.eos_token_id


def test_a_generation_config_that_can_be_saved_stays(tmp_path, caplog):
    model = policy()
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=5)
    given = model.generation_config.to_dict()
    trainer(tmp_path, model=model)
    assert model.generation_config.to_dict() == given and "cannot be saved" not in caplog.text


class Cycle:
    """Object that only the garbage collector frees."""

    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("is_frozen", [False, True])
def test_collections_during_a_run_leave_out_what_was_there_before(tmp_path, is_frozen):
    class Count(TrainerCallback):
        def on_step_begin(self, *_, **__):
            counts.append(gc.get_freeze_count())
            assert (earlier() is None) == (not is_frozen)  # collected at the start, or the caller's

    counts, run = [], trainer(tmp_path, callbacks=[Count()], max_steps=1)
    gc.unfreeze()
    gc.collect(0)  # the next one is not due before the object is frozen
    try:
        earlier = weakref.ref(Cycle())
        if is_frozen:
            gc.freeze()
        run.train()
        assert counts[0] > 100_000 and (gc.get_freeze_count() > 0) is is_frozen
        with pytest.raises(KeyError), frozen_objects():
            raise KeyError
        assert (gc.get_freeze_count() > 0) is is_frozen
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
