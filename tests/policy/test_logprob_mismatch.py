"""The sampler's log-probs against the trainer's: every planted fault exceeds the tolerance."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support import runs
from support.batches import token_batch

from groupwise import BackendError
from groupwise.core.metrics import Mean
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.logprob_mismatch import LogprobMismatchCheck
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import SamplerSettings
from groupwise.records.sampling_mask import SamplingMask

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
    """Log-probs of a sampler, one row at a time from the model's logits: (B, C)."""
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


def make_check(action="warn", every=20):
    computer = LogprobComputer("padded", LogprobHead("chunked"))
    return LogprobMismatchCheck(computer, Accelerator(cpu=True), action, every)


def test_the_same_policy_passes_and_the_difference_is_a_metric(caplog):
    model, rows = sharp_policy(), batch()
    rows = replace(rows, sampler_logps_BT=reported(model, rows))
    metrics = make_check("error").check(model, rows, FRESH)
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
    "plant", [stale, temperature, truncated, extra_token, lost_token, other_start, half_precision]
)
def test_a_planted_fault_is_measured_and_reported(plant, caplog):
    model, rows = sharp_policy(), batch()
    rows = replace(rows, sampler_logps_BT=plant(model, rows))
    with caplog.at_level(logging.WARNING, "groupwise"):
        gap = make_check().check(model, rows, FRESH)["sampling/logprob_mismatch"].value()
    expected = (rows.sampler_logps_BT - reported(model, rows)).abs().mean().item()
    assert gap == pytest.approx(expected, rel=1e-2)
    assert f"differ from the trainer's by {gap:.2g} nats" in caplog.text and "at most 0.002" in caplog.text
    with pytest.raises(BackendError, match="give both sides one temperature"):
        make_check("error").check(model, rows, FRESH)


def test_the_message_links_to_a_section_that_exists(caplog):
    model, rows = sharp_policy(), batch()
    make_check().check(model, replace(rows, sampler_logps_BT=stale(model, rows)), FRESH)
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert "give both sides one temperature" in caplog.text
    assert "## Log-prob mismatch" in page.read_text().splitlines()


def test_a_sampling_temperature_other_than_one(caplog):
    model, rows = sharp_policy(), batch()
    rows = replace(rows, sampler=SamplerSettings(temperature=0.8))
    right = replace(rows, sampler_logps_BT=reported(model, rows, temperature=0.8))
    make_check("error").check(model, right, FRESH)
    raw = replace(rows, sampler_logps_BT=reported(model, rows))
    with pytest.raises(BackendError):
        make_check("error").check(model, raw, FRESH)


def test_the_first_two_generations_are_checked_and_then_one_in_an_interval():
    model, rows = sharp_policy(), batch()
    rows = replace(rows, sampler_logps_BT=reported(model, rows))
    one = make_check(every=4)
    assert [bool(one.check(model, rows, FRESH)) for _ in range(9)] == [
        *(True, True, False, True),
        *(False, False, False, True, False),
    ]


def test_tokens_without_a_report_do_not_count_and_nothing_reported_is_nothing_compared():
    model, rows = sharp_policy(), batch()
    assert make_check("error").check(model, rows, FRESH) == {}
    logps = reported(model, rows)
    logps[:, ::2] = torch.nan
    logps[0] += 100.0
    masked = rows.loss_mask_BT.clone()
    masked[0] = 0
    partly = replace(rows, sampler_logps_BT=logps, loss_mask_BT=masked)
    assert make_check("error").check(model, partly, FRESH)["sampling/logprob_mismatch"].value() < 1e-4


def test_truncated_log_probs_are_compared_with_truncated_ones():
    model, rows = sharp_policy(), batch()
    kept = []
    for row in range(ROWS):  # as in `reported`: the taken token and those more probable
        prompt = rows.prompt_ids_BL[row][rows.prompt_mask_BL[row].bool()]
        completion = rows.completion_ids_BT[row]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        taken = logits.gather(1, completion[:, None])
        kept.append(SamplingMask.from_lists([(part.nonzero()[:, 0]).tolist() for part in logits >= taken]))
    sampled = replace(rows, sampler_logps_BT=truncated(model, rows))
    known = replace(sampled, sampling_mask=tuple(kept))
    gap = make_check("error").check(model, known, FRESH)["sampling/logprob_mismatch"].value()
    assert gap < 1e-4
    with pytest.raises(BackendError):
        make_check("error").check(model, replace(known, sampling_mask=(*kept[1:], None)), FRESH)


def test_without_the_kept_tokens_only_differences_that_truncation_cannot_explain_count():
    model, rows = sharp_policy(), batch()
    exact = reported(model, rows)
    bound = -math.log(0.8)  # of top_p=0.8
    above = replace(rows, sampler_logps_BT=exact + 0.9 * bound)
    gap = make_check("error").check(model, above, FRESH, truncation=bound)["sampling/logprob_mismatch"]
    assert gap.value() < 1e-4
    for difference, counted in ((bound + 0.3, 0.3), (-0.2, 0.2)):
        other = replace(rows, sampler_logps_BT=exact + difference)
        gap = make_check().check(model, other, FRESH, truncation=bound)["sampling/logprob_mismatch"]
        assert gap.value() == pytest.approx(counted, abs=1e-4)
    assert make_check("error").check(model, above, FRESH, truncation=math.inf)


def test_rows_of_earlier_weights_are_not_compared():
    model, rows = sharp_policy(), batch()
    logps = reported(model, rows)
    logps[1:] -= 1.0
    rows = replace(rows, sampler_logps_BT=logps)
    only_first = make_check("error").check(model, rows, [True, False, False, False])
    assert only_first["sampling/logprob_mismatch"].value() < 1e-4
    assert make_check("error").check(model, rows, [False] * ROWS) == {}
    with pytest.raises(BackendError):
        make_check("error").check(model, rows, FRESH)


def test_switched_off_it_computes_nothing():
    rows = replace(batch(), sampler_logps_BT=torch.zeros(ROWS, COMPLETION))
    assert make_check("off").check(runs.policy(), rows, FRESH) == {}


def wrong_logps(prompts, trainer):
    """A rollout function that reports log-probs of nothing."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {
        "prompt_ids": ids,
        "completion_ids": [[4 + row % 7, 5, 6, 1] for row in range(len(prompts))],
        "logprobs": [[-9.0, -0.1, -9.0, -0.1]] * len(prompts),
    }


def test_mode_error_stops_before_training_on_mismatched_completions(tmp_path):
    trainer = runs.trainer(tmp_path, rollout_func=wrong_logps, logprob_mismatch_check="error")
    with pytest.raises(BackendError, match="the sampler's log-probs differ from the trainer's"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_run_goes_on_with_a_warning_and_logs_the_difference(tmp_path, caplog):
    trainer = runs.trainer(tmp_path, rollout_func=wrong_logps)
    with caplog.at_level(logging.WARNING, "groupwise"):
        trainer.train()
    assert trainer.state.global_step == 2 and caplog.text.count("give both sides one temperature") == 2
    assert trainer.state.log_history[0]["sampling/logprob_mismatch"] > 1.0
