"""The comparison of a step with TRL's, on a tiny model: agreement, and differences that it must find."""

from __future__ import annotations

import json

import methods
import pytest
import run
import same_step
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.slow
def test_samples_and_updates_agree(tmp_path):
    found = same_step.main(["--tiny", "--train_steps", "1", "--questions", "4", "--output", str(tmp_path)])
    assert found["steps"] == 3 and found["same_questions"] and found["difference_of_updates"] < 1e-4
    kinds = [(one["train_steps"], one["library"]) for one in found["samples"]]
    assert kinds == [(0, "groupwise"), (0, "trl"), (1, "groupwise"), (1, "trl")]
    for one in found["samples"]:
        assert one["completions"] == 32 and abs(one["excess"]) < 4 * one["excess_error"]
    assert json.loads((tmp_path / "same_step.json").read_text()) == found


@pytest.mark.slow
def test_another_loss_is_seen_in_the_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(same_step, "OURS", run.Cell(settings={"loss_type": "dr_grpo"}))
    path = run.tiny_model(tmp_path)
    model, words = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    found = same_step.updates(model, words, run.Scale(3, 4, 4, 16), 0)
    assert found["same_questions"] and found["difference_of_updates"] > 0.01


def test_samples_are_scored_under_their_whole_prompt(tmp_path, monkeypatch):
    path, scale, scored = run.tiny_model(tmp_path), run.Scale(1, 2), []
    model, words = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    logprobs = methods.token_logprobs

    def watched(model, prompts, completions):
        scored.extend(prompts)
        return logprobs(model, prompts, completions)

    monkeypatch.setattr(methods, "token_logprobs", watched)
    same_step.samples(run.Cell(), model, words, scale, 0)
    expected = methods.chat_ids([row["prompt"] for row in run.train_rows(scale)], words)
    assert len(scored) == 16 and {*map(tuple, scored)} == {*map(tuple, expected)}


@pytest.mark.slow
def test_samples_of_another_temperature_are_seen(tmp_path):
    path = run.tiny_model(tmp_path)
    model, words = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)  # far from uniform, so that temperature matters
    scale = run.Scale(1, 8)
    plain = same_step.samples(run.Cell(), model, words, scale, 0)
    hot = same_step.samples(run.Cell(settings={"temperature": 2.0}), model, words, scale, 0)
    assert abs(plain["excess"]) < 4 * plain["excess_error"] and hot["excess"] > 4 * hot["excess_error"]


def test_an_error_of_training_is_not_taken_for_the_end(tmp_path):
    path = run.tiny_model(tmp_path)
    model, words = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)

    def broken(completions, **_):
        raise ValueError("no reward today")

    with pytest.raises(Exception, match="no reward today"):
        same_step.train(run.Cell(), model, broken, run.TINY, 0, processing_class=words)
