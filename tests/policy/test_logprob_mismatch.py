"""The sampler's log-probs against the trainer's: every planted cause of a difference has to be named."""

import logging
from dataclasses import replace

import pytest
import torch
from support import runs
from support.batches import token_batch

from groupwise import BackendError
from groupwise.core.metrics import Mean
from groupwise.policy.layouts import HeadSettings
from groupwise.policy.logprob_mismatch import LogprobMismatchCheck, LogprobMismatchSettings

ROWS, PROMPT, COMPLETION = 4, 5, 12
FRESH = [True] * ROWS


def batch(seed=0):
    """Prompts of two lengths, padded on the left with 0, and completions of the full length."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(4, 32, (ROWS, PROMPT), generator=generator)
    prompt_mask = torch.ones_like(prompts)
    prompts[::2, 0], prompt_mask[::2, 0] = 0, 0
    completions = torch.randint(4, 32, (ROWS, COMPLETION), generator=generator)
    ones = torch.ones_like(completions)
    return token_batch(prompts, prompt_mask, completions, ones)


def sharp_policy(seed=0):
    """With larger weights than at the start of training, so that its distributions are far from uniform."""
    model = runs.policy(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0) if parameter.ndim > 1 else None
    return model.eval()


@torch.no_grad()
def reported(model, rows, temperature=1.0, front=(), dropped=0, autocast=False, nucleus=None):
    """What a sampler would report, one row at a time from the model's logits: (B, C)."""
    logps = []
    for prompt, mask, completion in zip(
        rows.prompt_ids_BL, rows.prompt_mask_BL, rows.completion_ids_BT, strict=True
    ):
        prompt = [*front, *prompt[mask.bool()].tolist()[dropped:]]
        ids = torch.tensor([[*prompt, *completion.tolist()]])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        if nucleus is not None:  # everything below the taken token's own probability is cut off
            taken = logits.gather(1, completion[:, None])
            logits = logits.masked_fill(logits < taken, -torch.inf)
        logps.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return torch.stack(logps)


def gate(action="warn", every=20, temperature=1.0, prepended=None, truncating=""):
    settings = LogprobMismatchSettings(action, every, prepended=prepended, truncating=truncating)
    return LogprobMismatchCheck(settings, HeadSettings("chunked", temperature), lambda total: total)


def test_the_same_policy_passes_and_says_how_close_it_is(caplog):
    model, rows = sharp_policy(), batch()
    rows = replace(rows, sampler_logps_BT=reported(model, rows))
    metrics = gate("error").check(model, rows, FRESH)
    assert list(metrics) == ["sampling/logprob_mismatch"]
    assert (
        isinstance(metrics["sampling/logprob_mismatch"], Mean)
        and metrics["sampling/logprob_mismatch"].value() < 1e-4
    )
    assert caplog.text == ""


def stale(model, rows):
    return reported(sharp_policy(seed=1), rows)


def temperature(model, rows):
    return reported(model, rows, temperature=0.7)


def truncated(model, rows):
    return reported(model, rows, nucleus=True)


def extra_token(model, rows):
    return reported(model, rows, front=[2])


def lost_token(model, rows):
    return reported(model, rows, dropped=1)


def other_start(model, rows):
    """Only the first tokens see the difference."""
    logps = reported(model, rows)
    logps[:, :3] = reported(sharp_policy(seed=1), rows)[:, :3]
    return logps


def half_precision(model, rows):
    return reported(model, rows, autocast=True)


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (stale, "stale weights"),
        (temperature, "the temperature: the sampler's log-probs are those at 0.7"),
        (truncated, "truncates its distribution (top_p=0.9)"),
        (extra_token, "one more beginning-of-text token"),
        (lost_token, "without its first token"),
        (other_start, "the first tokens of the completions"),
        (half_precision, "the dtype"),
    ],
)
def test_a_planted_cause_is_named(plant, named, caplog):
    model, rows = sharp_policy(), batch()
    rows = replace(rows, sampler_logps_BT=plant(model, rows))
    checked = {"prepended": 2, "truncating": "top_p=0.9"}
    with caplog.at_level(logging.WARNING, "groupwise"):
        gap = gate(**checked).check(model, rows, FRESH)["sampling/logprob_mismatch"].value()
    expected = (rows.sampler_logps_BT - reported(model, rows)).abs().mean().item()
    assert gap == pytest.approx(expected, rel=1e-2)
    assert named in caplog.text
    with pytest.raises(BackendError, match="probable cause"):
        gate("error", **checked).check(model, rows, FRESH)


def test_the_trainer_at_another_temperature_than_one(caplog):
    model, rows = sharp_policy(), batch()
    right = replace(rows, sampler_logps_BT=reported(model, rows, temperature=0.8))
    gate("error", temperature=0.8).check(model, right, FRESH)
    raw = replace(rows, sampler_logps_BT=reported(model, rows))
    with caplog.at_level(logging.WARNING, "groupwise"):
        gate(temperature=0.8).check(model, raw, FRESH)
    assert "those at 1.0, the trainer's at 0.8" in caplog.text and "processed_logprobs" in caplog.text


def test_it_looks_at_the_first_two_generations_and_then_every_so_often():
    model, rows = sharp_policy(), batch()
    rows = replace(rows, sampler_logps_BT=reported(model, rows))
    one = gate(every=4)
    assert [bool(one.check(model, rows, FRESH)) for _ in range(9)] == [
        *(True, True, False, True),
        *(False, False, False, True, False),
    ]


def test_tokens_without_a_report_do_not_count_and_nothing_reported_is_nothing_compared():
    model, rows = sharp_policy(), batch()
    assert gate("error").check(model, rows, FRESH) == {}
    logps = reported(model, rows)
    logps[:, ::2] = torch.nan
    logps[0] += 100.0
    masked = rows.loss_mask_BT.clone()
    masked[0] = 0
    partly = replace(rows, sampler_logps_BT=logps, loss_mask_BT=masked)
    assert gate("error").check(model, partly, FRESH)["sampling/logprob_mismatch"].value() < 1e-4


def test_rows_of_earlier_weights_are_not_compared():
    model, rows = sharp_policy(), batch()
    logps = reported(model, rows)
    logps[1:] -= 1.0
    rows = replace(rows, sampler_logps_BT=logps)
    only_first = gate("error").check(model, rows, [True, False, False, False])
    assert only_first["sampling/logprob_mismatch"].value() < 1e-4
    assert gate("error").check(model, rows, [False] * ROWS) == {}
    with pytest.raises(BackendError):
        gate("error").check(model, rows, FRESH)


def test_switched_off_it_computes_nothing():
    rows = replace(batch(), sampler_logps_BT=torch.zeros(ROWS, COMPLETION))
    assert gate("off").check(runs.policy(), rows, FRESH) == {}


def wrong_logps(prompts, trainer):
    """A rollout function that reports log-probs of nothing."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {
        "prompt_ids": ids,
        "completion_ids": [[4 + row % 7, 5, 6, 1] for row in range(len(prompts))],
        "logprobs": [[-9.0, -0.1, -9.0, -0.1]] * len(prompts),
    }


def test_a_run_stops_before_it_trains_on_them(tmp_path):
    trainer = runs.trainer(tmp_path, rollout_func=wrong_logps, logprob_mismatch_check="error")
    with pytest.raises(BackendError, match="stale weights, or another model"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_goes_on_with_a_warning_and_logs_the_difference(tmp_path, caplog):
    trainer = runs.trainer(tmp_path, rollout_func=wrong_logps)
    with caplog.at_level(logging.WARNING, "groupwise"):
        trainer.train()
    assert trainer.state.global_step == 2 and caplog.text.count("probable cause") == 2
    assert trainer.state.log_history[0]["sampling/logprob_mismatch"] > 1.0
