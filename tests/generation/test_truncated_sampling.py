"""Truncated sampling through the real trainer: the update is that of the distribution that was sampled.

Files: ``config/sampling.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.runs import experience, policy, prompts, trainer, weighed

from groupwise import Completion, register_objective, trl_hooks
from groupwise.agents.trajectory import Trajectory
from groupwise.config.sampling import truncated_logprob_bound
from groupwise.core.entropy import EntropyControl
from groupwise.core.objectives import OBJECTIVES, policy_loss
from groupwise.core.surrogates import clipped
from groupwise.generation.truncation import SamplingMaskRecorder
from groupwise.records.sampling_mask import SamplingMask
from groupwise.records.serialization import load

ROWS = [{"prompt": "w1 w2", "row": 0}] * 4 + [{"prompt": "w5", "row": 1}] * 4
TRUNCATION = {"top_p": 0.85, "min_p": 0.02, "temperature": 0.8}


def sharp(seed=0):
    """A policy far from uniform, so that the kept sets differ in size."""
    return policy(seed, initializer_range=0.2)


def lists(kept):
    return [part.tolist() for part in kept.ids.split(kept.counts.tolist())]


@pytest.fixture
def sampled_logps(monkeypatch):
    """Log-probs that the sampler drew from, by step: (completions, (R, V)) in the order of sampling."""
    steps = []
    record = SamplingMaskRecorder.record

    def remember(self, scores_RV, rows_R):
        steps.append((rows_R.tolist(), scores_RV.log_softmax(-1)))
        record(self, scores_RV, rows_R)

    monkeypatch.setattr(SamplingMaskRecorder, "record", remember)
    return steps


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("head", ["dense", "chunked"])
def test_log_probs_are_those_of_the_sampler(tmp_path, sampled_logps, layout, head):
    run = trainer(
        tmp_path, model=sharp(), sequence_layout=layout, logprob_head=head, num_iterations=2, beta=0.1,
        per_device_train_batch_size=8, **TRUNCATION,
    )  # fmt: skip
    (batch,) = experience(run, ROWS)
    compared = 0
    for step, (rows, logps_RV) in enumerate(sampled_logps):
        for place, row in enumerate(rows):
            if batch.completion_mask_BT[row, step : step + 1].any():
                sampler = logps_RV[place, batch.completion_ids_BT[row, step]].item()
                for trainers in (batch.old_logps_BT, batch.ref_logps_BT):
                    assert math.exp(trainers[row, step].item() - sampler) == pytest.approx(1.0, abs=1e-6)
                compared += 1
    assert compared == batch.completion_mask_BT.sum() > 16
    sizes = {len(ids) for row in batch.sampling_mask for ids in lists(row)}
    assert len(sizes) > 3 and max(sizes) < 32


@pytest.mark.parametrize("iterations", [1, 2], ids=["on_policy", "reused"])
def test_the_first_update_of_a_generation_has_ratio_one_and_no_kl(tmp_path, iterations):
    ratios = []

    def remember(inputs, settings):
        ratios.append(inputs.ratio_BX[inputs.loss_mask_BT.bool()].detach())
        return clipped(inputs, settings)

    register_objective("remember", remember, "token_mean")
    run = trainer(
        tmp_path, model=sharp(), loss_type="remember", num_iterations=iterations, beta=0.1, max_steps=2,
        **TRUNCATION,
    )  # fmt: skip
    run.train()
    assert (ratios[0] - 1).abs().max() <= 1e-6
    assert run.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    if iterations == 2:
        assert (ratios[1] - 1).abs().max() > 1e-3
    assert run.state.log_history[1]["kl"] > 1e-6


def masked_outputs(model, batch, temperature):
    """Truncated log-probs and entropies from the model's logits and an explicit mask, row by row."""
    logps_BT, entropy_BT = [], []
    width = batch.completion_ids_BT.shape[1]
    for row in range(len(batch)):
        prompt = batch.prompt_ids_BL[row][batch.prompt_mask_BL[row].bool()]
        completion = batch.completion_ids_BT[row][batch.completion_mask_BT[row].bool()]
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        mask = torch.zeros_like(logits, dtype=torch.bool)
        for place, ids in enumerate(lists(batch.sampling_mask[row])):
            mask[place, ids] = True
        all_logps = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
        entropy = -(all_logps.exp() * all_logps.masked_fill(~mask, 0.0)).sum(-1)
        padding = (0, width - len(completion))
        logps = all_logps.gather(1, completion[:, None])[:, 0]
        logps_BT.append(torch.nn.functional.pad(logps, padding))
        entropy_BT.append(torch.nn.functional.pad(entropy, padding))
    return torch.stack(logps_BT), torch.stack(entropy_BT)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.2, "entropy_coef": 0.1, "top_entropy_quantile": 0.6, "importance_sampling_level": "token"},
    ],
    ids=["plain", "kl_entropy_quantile"],
)
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_the_gradient_of_every_objective_is_that_of_the_truncated_distribution(tmp_path, loss_type, settings):
    """Two passes: the second has ratios other than 1."""
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    run = trainer(
        tmp_path, model=sharp(), loss_type=loss_type, num_iterations=2, epsilon_high=1.5,
        per_device_train_batch_size=8, sequence_layout="shared_prefix",
        **{**settings, **level, **TRUNCATION},
    )  # fmt: skip
    (entry,) = experience(run, ROWS)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1.05)
        logps_BT, entropy_BT = masked_outputs(run.model, entry, 0.8)
    (batch,) = weighed(run, [entry])
    real_BT = entry.loss_mask_BT.bool()
    if "top_entropy_quantile" in settings:
        chosen_BT = batch.entropy_mask_BT.bool()
        assert entropy_BT[chosen_BT].min() >= entropy_BT[real_BT & ~chosen_BT].max()
        assert 0 < chosen_BT.sum() < real_BT.sum()
    assert ((logps_BT - entry.old_logps_BT)[real_BT].abs() > 1e-3).any()

    loss = run.compute_loss(run.model, batch)
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    given = torch.autograd.grad(loss, parameters)
    expected_loss, _ = policy_loss(batch, *masked_outputs(run.model, batch, 0.8), run.objective_settings)
    expected = torch.autograd.grad(expected_loss, parameters)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=2e-6)
    scale = max(float(gradient.abs().max()) for gradient in expected)
    assert scale > 1e-4
    for ours, truth in zip(given, expected, strict=True):
        assert (ours - truth).abs().max() < 1e-5 * scale


@pytest.mark.slow
def test_a_resumed_run_repeats_the_run(tmp_path):
    settings = {"max_steps": 4, "num_iterations": 2, "steps_per_generation": 2, "train_dataset": prompts(16)}
    settings |= {"gradient_accumulation_steps": 1, **TRUNCATION}
    whole = trainer(tmp_path / "whole", model=sharp(), **settings, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = trainer(tmp_path / "resumed", model=sharp(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    file = next((tmp_path / "whole" / "checkpoint-1").glob("groupwise*"))
    entries = load(str(file), EntropyControl)
    assert "sampling_mask" in str(entries)[:1_000_000]
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_turns_of_an_agent_keep_their_kept_tokens():
    trajectory = Trajectory([7], max_new_tokens=20)
    trajectory.append_sampled(Completion([3, 4], sampling_mask=SamplingMask.from_lists([[3, 5], [4]])))
    assert trajectory.append_observed([8, 9])
    trajectory.append_sampled(Completion([6], sampling_mask=SamplingMask.from_lists([[6, 7, 8]])))
    completion = trajectory.completion()
    assert lists(completion.sampling_mask) == [[3, 5], [4], [], [], [6, 7, 8]]
    assert trajectory.continue_from([7, 3, 1])  # the history after the first token was rewritten
    trajectory.append_sampled(Completion([2], sampling_mask=SamplingMask.from_lists([[2, 9]])))
    forked = trajectory.completion()
    assert lists(forked.sampling_mask) == [[3, 5], [4], [], [], [6, 7, 8], [2, 9]]
    assert forked.contexts == ((5, [7, 3, 1]),) and forked.token_ids[5:] == [2]
    limited = Trajectory([7], max_new_tokens=1)
    limited.append_sampled(Completion([3, 4], sampling_mask=SamplingMask.from_lists([[3, 5], [4]])))
    assert lists(limited.completion().sampling_mask) == [[3, 5]]
    plain = Trajectory([7], max_new_tokens=9)
    plain.append_sampled(Completion([3, 4]))
    assert plain.completion().sampling_mask is None


def test_evaluation_with_settings_of_its_own(tmp_path):
    run = trainer(
        tmp_path, model=sharp(), eval_dataset=prompts(4), per_device_eval_batch_size=4,
        eval_generation_kwargs={"top_k": 1},
    )  # fmt: skip
    # A single kept token has probability 1: no entropy, and log-probs of zero.
    metrics = run.evaluate()
    assert metrics["eval_entropy"] == pytest.approx(0.0, abs=1e-6)
    batch = run.collate(run.generate_rollouts(run.make_request(ROWS)))
    assert batch.sampling_mask is None  # training has no truncation


def fixed_rollouts(given_prompts, run):
    count = len(given_prompts)
    return {
        "prompt_ids": [[4, 5]] * count,
        "completion_ids": [[6 + i % 3, 1] for i in range(count)],
        "logprobs": [[-0.5, -0.25]] * count,
    }


def test_without_the_kept_tokens_the_bias_is_named_and_logged(tmp_path, caplog):
    run = trainer(tmp_path, rollout_func=fixed_rollouts, top_p=0.9, logprob_mismatch_check="off")
    assert "top_p=0.9: completions are sampled from a truncated distribution" in caplog.text
    assert "because a rollout_func returns completions without the sampling mask" in caplog.text
    run.train()
    log = run.state.log_history[0]
    # Probabilities of the trainer are about 1/32, those of the sampler e^-0.5 and e^-0.25.
    assert 0.9 < log["sampling/truncated_mass/mean"] <= log["sampling/truncated_mass/max"] < 1.0


def test_trl_hooks_train_on_the_full_distribution_and_say_so(tmp_path, caplog):
    run = trainer(
        tmp_path, kind=trl_hooks.GRPOTrainer, model=sharp(), num_iterations=2, beta=0.1, **TRUNCATION
    )
    assert "because TRL's hooks pass completions without the sampling mask" in caplog.text
    run.train()
    assert run.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # all of the same distribution
    assert run.state.log_history[0]["clip_ratio/region_mean"] == 0


def test_truncation_in_generation_kwargs_is_named_too(tmp_path, caplog):
    kwargs = {"typical_p": 0.9, "eta_cutoff": 0.0}
    run = trainer(tmp_path, kind=trl_hooks.GRPOTrainer, generation_kwargs=kwargs)
    assert "typical_p=0.9: completions are sampled from a truncated distribution" in caplog.text
    assert run.objective_settings.truncation_unknown
    assert truncated_logprob_bound(run.args) == math.inf  # no bound on the mass that it removes


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_with_them_there_is_no_warning_and_no_bias(tmp_path, caplog, settings):
    run = trainer(tmp_path, max_steps=1, **settings)
    run.train()
    assert "truncated distribution" not in caplog.text
    assert "sampling/truncated_mass/mean" not in run.state.log_history[0]
