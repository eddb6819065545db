"""Generations asked for ahead: which rows, in which order, how stale, and over a resume."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import runs
import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
from fake_vllm import FakeVLLM

from groupwise.backends.vllm.http import HttpServer
from groupwise.pipeline import LookAhead, Pipeline

GENERATE = "/inference/v1/generate"


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(HttpServer, "first_pause", 0.02)
    server = FakeVLLM()
    answer = server.answer
    own = runs.tokenizer()

    def with_tokenizer(path, query, body):
        if path == "/tokenize":
            return {"tokens": own(body["prompt"], add_special_tokens=False)["input_ids"]}
        return answer(path, query, body)

    server.answer = with_tokenizer
    server.logprob = lambda position: -math.log(32)  # about what the tiny policy gives every token
    yield server
    server.close()


def run_for(fake, directory, **given):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": fake.url, "max_steps": 4}
    return runs.trainer(directory, **{**settings, "vllm_server_timeout": 2.0, **given})


def asked(fake):
    """The first prompt token and seed of every request, in order."""
    bodies = [body for path, body in fake.bodies if path == GENERATE]
    return [(body["token_ids"], body["sampling_params"]["seed"]) for body in bodies]


def losses(run):
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def staleness(run):
    return [line.get("staleness") for line in run.state.log_history if "loss" in line]


def test_looking_ahead_takes_nothing_away():
    rows = LookAhead(iter("abc"))
    assert next(rows) == "a" and rows.peek(1) == "c" and rows.peek(2) is None
    assert list(rows) == ["b", "c"] and rows.peek(0) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_are_asked_for_ahead_and_each_once(fake, tmp_path, depth):
    run_for(fake, tmp_path / "on_policy").train()
    on_policy = asked(fake)
    fake.bodies.clear()
    ahead = run_for(fake, tmp_path / "ahead", rollout_staleness=depth)
    ahead.train()
    assert sorted(asked(fake)) == sorted(
        on_policy
    )  # the same prompts with the same seeds, none beyond the end
    assert staleness(ahead) == [min(step, depth) for step in range(4)]


def test_the_next_batch_is_asked_for_before_this_one_is_trained(fake, tmp_path):
    seen = []

    class Count(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            seen.append(fake.seen[GENERATE])

    run_for(fake, tmp_path, rollout_staleness=1, callbacks=[Count()]).train()
    assert seen[0] == 2


def test_without_one_request_for_a_completion_nothing_is_asked_ahead(tmp_path, caplog):
    config = runs.GRPOConfig(
        str(tmp_path), use_vllm=True, vllm_mode="server", rollout_staleness=1, use_cpu=True
    )
    assert Pipeline(config).depth == 1
    assert Pipeline(config, one_turn=False).depth == 0
    assert "rollout_staleness=1 is without effect" in caplog.text


def test_every_generation_is_used_as_often_as_configured(fake, tmp_path):
    given = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 1, "max_steps": 4}
    run = run_for(fake, tmp_path, rollout_staleness=1, **given)
    run.train()
    assert staleness(run)[0] == 0
    assert len(asked(fake)) == len(set(map(str, asked(fake)))) == 8  # two generations of four prompts


def test_a_resumed_run_loses_nothing_and_trains_nothing_twice(fake, tmp_path):
    whole = run_for(fake, tmp_path / "whole", rollout_staleness=1)
    whole.train()
    everything = sorted(asked(fake))
    fake.bodies.clear()
    settings = {"rollout_staleness": 1, "save_strategy": "steps", "save_steps": 2}
    first = run_for(fake, tmp_path / "parts", **settings)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    first.add_callback(Stop())
    first.train()
    first.backend.close()
    resumed = run_for(fake, tmp_path / "parts", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert set(map(str, asked(fake))) == set(map(str, everything))
    assert losses(resumed)[2:] == losses(whole)[2:]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


def test_a_server_that_stays_away_leaves_a_checkpoint_from_which_the_run_goes_on(fake, tmp_path):
    whole = run_for(fake, tmp_path / "whole")
    whole.train()
    cut = run_for(fake, tmp_path / "cut", save_strategy="steps", save_steps=100)
    roll_out = cut.roll_out

    def fail_at_third(rows):
        if cut.state.global_step == 2:
            fake.failures[GENERATE] = [500] * 4
        return roll_out(rows)

    cut.roll_out = fail_at_third
    with pytest.raises(ConnectionError, match="failed 4 times"):
        cut.train()
    assert (tmp_path / "cut" / "checkpoint-2").is_dir()
    resumed = run_for(fake, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


def test_no_checkpoint_where_none_are_wanted(fake, tmp_path):
    cut = run_for(fake, tmp_path)
    fake.failures["/update_weights"] = [200, 200] + [500] * 8
    with pytest.raises(ConnectionError):
        cut.train()
    assert not list(tmp_path.glob("checkpoint-*"))
