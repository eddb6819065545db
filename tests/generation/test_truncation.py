"""Sampling masks of truncated sampling, recorded by both decoding loops."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.truncation import kept_by_top_p
from test_decoding import PROMPTS, by_generate, by_groups, settings, tiny

from groupwise.generation import truncation
from groupwise.generation.settings import make_recorder
from groupwise.generation.transformers_backend import TransformersBackend
from groupwise.records import SamplingOptions

SAMPLED = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 12}
TRUNCATIONS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "top_k_and_top_p": {"top_k": 5, "top_p": 0.7},
}


def lists(kept):
    return [part.tolist() for part in kept.ids.split(kept.counts.tolist())]


@torch.no_grad()
def logits_after(model, prompt, completion):
    """Logits that each token of the completion was sampled from: (C, V)."""
    return model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]


def expected_sets(logits_CV, changes):
    """Kept ids by definition, for top_p, top_k and min_p."""
    sets = []
    for values in logits_CV.tolist():
        kept = set(range(len(values)))
        if "top_k" in changes:
            kept = set(sorted(kept, key=lambda v: -values[v])[: changes["top_k"]])
        if "min_p" in changes:
            p = torch.tensor(values).div(0.7).softmax(-1).tolist()
            kept = {v for v in kept if p[v] >= changes["min_p"] * max(p)}
        if "top_p" in changes:
            inside = [values[v] if v in kept else -1e9 for v in range(len(values))]
            kept &= set(kept_by_top_p(inside, 0.7, changes["top_p"]))
        sets.append(sorted(kept))
    return sets


@pytest.mark.parametrize("grouped", [True, False], ids=["decode_groups", "generate"])
@pytest.mark.parametrize("changes", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_the_kept_tokens_of_every_sampled_token_are_recorded(changes, grouped, monkeypatch):
    model, config = tiny("llama"), settings(**SAMPLED, **changes)
    torch.manual_seed(1)
    completions = (
        by_groups(model, PROMPTS, config) if grouped else by_generate(model, PROMPTS, config, monkeypatch)
    )
    assert len({len(completion.token_ids) for completion in completions}) > 2  # rows end at different places
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        sets = lists(completion.sampling_mask)
        assert len(sets) == len(completion.token_ids)
        assert all(
            token in ids and len(ids) < 40 for token, ids in zip(completion.token_ids, sets, strict=True)
        )
        if {"top_p", "top_k", "min_p"} & set(changes):
            assert sets == expected_sets(logits_after(model, prompt, completion.token_ids), changes)


@pytest.mark.parametrize("limit", [0, 100, 1 << 28])
def test_steps_may_wait_on_the_device_and_become_ids_together(limit, monkeypatch):
    """As on an accelerator; on a CPU each step becomes ids at once."""
    torch.manual_seed(0)
    rows = [torch.tensor(rows) for rows in ([0, 1, 2], [0, 1, 2], [2, 0], [0])]
    scores = [torch.randn(len(rows_R), 20) for rows_R in rows]
    scores = [each.masked_fill(each < 0.3, -torch.inf) for each in scores]
    scores[1][0] = 1.0  # the whole vocabulary
    monkeypatch.setitem(truncation._PENDING_BYTES, "cpu", limit)
    recorder = truncation.SamplingMaskRecorder()
    for scores_RV, rows_R in zip(scores, rows, strict=True):
        recorder.record(scores_RV, rows_R)
    for row, mask in enumerate(recorder.completions(4)):
        kept = [
            [token for token, score in enumerate(values) if score > -torch.inf]
            for scores_RV, rows_R in zip(scores, rows, strict=True)
            for index, values in zip(rows_R.tolist(), scores_RV.tolist(), strict=True)
            if index == row
        ]
        steps = [[] if len(ids) == 20 else ids for ids in kept]
        assert lists(mask) == steps + [[]] * (4 - len(steps))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_p": 1.0, "top_k": 0, "min_p": None},
        {"min_p": 0.0, "typical_p": 1.0},
        {"do_sample": False, "top_p": 0.5},
        {"suppress_tokens": [4, 5]},
    ],
    ids=str,
)
def test_nothing_is_recorded_without_truncation(changes, monkeypatch):
    model, config = tiny("llama"), settings(**{**SAMPLED, "max_new_tokens": 2, **changes})
    assert make_recorder(model, config) is None
    for completion in by_groups(model, PROMPTS, config) + by_generate(model, PROMPTS, config, monkeypatch):
        assert completion.sampling_mask is None


def test_settings_of_one_call_count_and_those_of_the_model_do_not():
    model = tiny("llama")
    backend = TransformersBackend(lambda: model, settings(**SAMPLED, top_p=1.0))
    (completion,) = backend.generate([[5]], SamplingOptions([3], generation_kwargs={"top_k": 2}))
    assert [len(ids) for ids in lists(completion.sampling_mask)] == [2] * len(completion.token_ids)
    greedy = SamplingOptions([3], generation_kwargs={"top_k": 2, "temperature": 0})
    assert backend.generate([[5]], greedy)[0].sampling_mask is None
    model.generation_config.min_p = 0.5  # not used: only settings of the run are
    assert backend.generate([[5]])[0].sampling_mask is None


def test_a_set_of_all_tokens_takes_no_memory():
    model = tiny("llama")
    (completion,) = by_groups(model, [[5]], settings(**SAMPLED, top_k=40))
    assert lists(completion.sampling_mask) == [[]] * len(completion.token_ids)


def test_the_length_limit_of_a_row_ends_its_kept_tokens():
    model = tiny("llama")
    backend = TransformersBackend(lambda: model, settings(**SAMPLED, top_k=3, eos_token_id=None))
    completions = backend.generate([[5], [5], [6]], SamplingOptions([1, 4, 2]))
    assert [len(completion.sampling_mask) for completion in completions] == [1, 4, 2]
    assert [len(completion.sampling_mask.ids) for completion in completions] == [3, 12, 6]


def test_backends_say_if_they_report_kept_tokens():
    model = tiny("llama")
    backend = TransformersBackend(lambda: model, settings(**SAMPLED, top_k=3))
    assert backend.reports_sampling_mask({})
    model.generate = partial(model.generate)  # a decoding loop of its own
    assert not backend.reports_sampling_mask({})
    assert backend.generate([[5]])[0].sampling_mask is None
