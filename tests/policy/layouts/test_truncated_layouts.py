"""Log-probs of truncated distributions in every layout and head, against scalar loops over logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.architectures import RIGHT, build, completions
from support.batches import packed, token_batch
from support.truncation import kept_by_top_p, logp_and_entropy, slopes

from groupwise.policy.attention import install_attention_hook
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import SamplerSettings
from groupwise.records.sampling_mask import SamplingMask

LAYOUTS = {
    "padded": compute_padded_logprobs,
    "packed": packed(shared=False),
    "shared_prefix": packed(shared=True),
}
T = 0.7


def real_tokens(ids, mask):
    return ids[mask.bool()]


def model_logits(model, batch, row):
    """Logits that predict the completion of one row, computed alone: (C, V), differentiable."""
    prompt = real_tokens(batch.prompt_ids_BL[row], batch.prompt_mask_BL[row])
    completion = real_tokens(batch.completion_ids_BT[row], batch.completion_mask_BT[row])
    ids = torch.cat([prompt, completion])[None]
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1], completion.tolist()


def with_sampling_mask(model, batch, top_p=0.6):
    """The batch with the sets of a sampler; the third row has none, the second position of others neither."""
    rows = []
    for row in range(len(batch)):
        logits, completion = model_logits(model, batch, row)
        lists = [
            [] if place == 1 else sorted({*kept_by_top_p(values, T, top_p), target})
            for place, (values, target) in enumerate(zip(logits.tolist(), completion, strict=True))
        ]
        rows.append(None if row == 2 else SamplingMask.from_lists(lists))
    return replace(batch, sampling_mask=tuple(rows), sampler=SamplerSettings(temperature=T))


def lists_of(kept, length):
    if kept is None:
        return [[]] * length
    return [part.tolist() for part in kept.ids.split(kept.counts.tolist())]


def by_loops(model, batch, weights_BT):
    """Log-probs and entropies (B, T), and the gradients of Σ w (logp + 0.3 H), from scalar loops."""
    shape = batch.completion_ids_BT.shape
    logps, entropy = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        logits, completion = model_logits(model, batch, row)
        upstream = torch.zeros_like(logits)
        kept = lists_of(batch.sampling_mask[row], len(completion))
        for t, target in enumerate(completion):
            values, ids = logits[t].tolist(), kept[t] or list(range(logits.shape[1]))
            logps[row, t], entropy[row, t] = logp_and_entropy(values, T, ids, target)
            d_logp, d_entropy = slopes(values, T, ids, target)
            both = [one + 0.3 * other for one, other in zip(d_logp, d_entropy, strict=True)]
            upstream[t] = weights_BT[row, t] * torch.tensor(both, dtype=torch.float64)
        total = total + (logits * upstream).sum()
    gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return logps, entropy, gradients


@pytest.mark.parametrize("head", ["dense", "chunked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_the_scalar_loop(layout, head):
    model = build(*RIGHT["gpt2"]).double().eval()  # no layer casts to float32
    batch = with_sampling_mask(model, completions())
    sizes = {len(ids) for row in batch.sampling_mask if row is not None for ids in lists_of(row, 0)}
    assert 0 in sizes and len(sizes) > 4 and max(sizes) < 60
    mask_BT = batch.completion_mask_BT
    weights_BT = torch.linspace(0.5, 2.0, mask_BT.numel(), dtype=torch.float64).view_as(mask_BT) * mask_BT
    expected = by_loops(model, batch, weights_BT)
    if layout != "padded":
        assert install_attention_hook(model)
    scores = LAYOUTS[layout](model, batch, LogprobHead(head), with_entropy=True)
    for ours, truth in ((scores.logps_BT, expected[0]), (scores.entropy_BT, expected[1])):
        assert ((ours - truth) * mask_BT).abs().max() < 1e-12
    # Padding may hold any value, which a weight of zero must not multiply.
    values_BT = (scores.logps_BT + 0.3 * scores.entropy_BT).masked_fill(mask_BT == 0, 0.0)
    gradients = torch.autograd.grad(
        (values_BT * weights_BT).sum(), list(model.parameters()), allow_unused=True
    )
    for ours, truth in zip(gradients, expected[2], strict=True):
        assert (ours is None) == (truth is None)
        assert ours is None or (ours - truth).abs().max() < 1e-11


def test_the_check_of_a_layout_compares_truncated_distributions(caplog):
    model = build(*RIGHT["llama"])
    batch = with_sampling_mask(model, completions())
    computer = LogprobComputer("shared_prefix", LogprobHead("chunked"))
    scores = computer(model, batch, with_entropy=False)
    assert computer.layout == "shared_prefix" and caplog.text == ""
    full = computer(model, replace(batch, sampling_mask=None), with_entropy=False).logps_BT
    truncated = (scores.logps_BT - full) * batch.completion_mask_BT
    assert (truncated[0] > 1e-3).any() and truncated.min() > -1e-5  # every kept token is more probable
    assert torch.equal(truncated[2], torch.zeros_like(truncated[2]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_expected_gradient_over_all_completions_is_that_of_the_expected_reward(layout):
    """All completions of two tokens that truncated sampling can give: Σ p ∇ log p · A = ∇ Σ p · A."""
    model = build(*RIGHT["gpt2"]).double().eval()  # no layer casts to float32
    prompt = [5, 9, 4]

    def logits_after(tokens):
        return model(input_ids=torch.tensor([tokens])).logits[0, -1]

    rewards = torch.randn(67, 67, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs, rows, expected_reward, mass = [], [], torch.zeros((), dtype=torch.float64), 0.0
    first = logits_after(prompt)
    first_kept = kept_by_top_p(first.tolist(), T, 0.4)
    for a in first_kept:
        second = logits_after([*prompt, a])
        second_kept = kept_by_top_p(second.tolist(), T, 0.3)
        for b in second_kept:
            p = (first / T)[first_kept].softmax(0)[first_kept.index(a)]
            p = p * (second / T)[second_kept].softmax(0)[second_kept.index(b)]
            expected_reward = expected_reward + p * rewards[a, b]
            mass += p.item()
            pairs.append([a, b])
            rows.append(SamplingMask.from_lists([first_kept, second_kept]))
    assert mass == pytest.approx(1.0, abs=1e-12) and 10 < len(pairs) < 400
    (truth,) = torch.autograd.grad(expected_reward, model.lm_head.weight)

    tokens, prompts = torch.tensor(pairs), torch.tensor([prompt] * len(pairs))
    ones = torch.ones_like
    sampled = {"sampling_mask": tuple(rows), "sampler": SamplerSettings(temperature=T)}
    batch = token_batch(prompts, ones(prompts), tokens, ones(tokens), **sampled)
    if layout != "padded":
        assert install_attention_hook(model)
    logps_B = LAYOUTS[layout](model, batch, LogprobHead("chunked"), with_entropy=False).logps_BT.sum(-1)
    estimate = (logps_B.detach().exp() * logps_B * rewards[tokens[:, 0], tokens[:, 1]]).sum()
    (update,) = torch.autograd.grad(estimate, model.lm_head.weight)
    assert truth.abs().max() > 1e-3
    assert (update - truth).abs().max() <= 1e-12
