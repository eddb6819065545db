"""Recorded decoding steps beside eager ones: the same tokens, and eager steps where none can be recorded.

A CPU has no graphs: what is replayed here is a list of operators on the same memory.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from support.fakes.recorded_graph import Recording
from test_decoding import PROMPTS, forward_shapes, settings, tiny
from transformers import GenerationConfig

from groupwise import GRPOConfig
from groupwise.commands.sweeps.sampler import SharedBackend
from groupwise.errors import BackendError
from groupwise.generation import transformers_backend
from groupwise.generation.decoding_graph import StepGraphs, mean_difference
from groupwise.generation.growing_cache import GrowingLayer
from groupwise.generation.transformers_backend import TransformersBackend
from groupwise.records import Completion, SamplingOptions

SEEDS = [100 + row for row in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def stock_linears(monkeypatch):
    """A GPU has no packed weights."""
    monkeypatch.setattr(transformers_backend, "cpu_generation", transformers_backend.stock_linears)


def backend(model, config: GenerationConfig, capture=None) -> TransformersBackend:
    """Backend with a generator; with ``capture``, it records steps."""
    made = TransformersBackend(lambda: model, config)
    made.generator = torch.Generator()
    made.graphs = None if capture is None else StepGraphs(capture)
    return made


def completions(backend: TransformersBackend, prompts=PROMPTS) -> list[Completion]:
    return backend.generate(prompts, SamplingOptions(seeds=SEEDS[: len(prompts)]))


def sampling(**changes) -> GenerationConfig:
    return settings(do_sample=True, **changes)


def flat(name: str, seed: int = 0):
    """A tiny model whose next token is not nearly certain."""
    model = tiny(name, seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.div_(5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("ends", [None, [3], [3, 8, 9, 10]])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_sampled_completions_are_those_of_eager_steps(name, ends):
    model, config = flat(name), sampling(max_new_tokens=120, eos_token_id=ends)
    expected = completions(backend(model, config))
    recording = Recording()
    recorded = backend(model, config, recording)
    shapes = forward_shapes(model)
    assert recorded.fast_paths(model)[1].choice == "CUDA graph once it is checked"
    assert completions(recorded) == expected
    assert completions(recorded) == expected  # a second generation records anew
    assert recorded.fast_paths(model)[1].choice == "CUDA graph"
    longest = max(len(row.token_ids) for row in expected)
    assert ends is None or len({len(row.token_ids) for row in expected}) > 3
    assert recording.replayed > longest
    # Of each recording: an eager step, one that prepares, one that records. All other tokens are replayed.
    assert len(shapes) <= 2 * (1 + 3 * 8) and max(rows for rows, _ in shapes) == len(PROMPTS)
    if ends is None:
        assert len(recording.recorded) > 2  # the cache has grown
        assert len(shapes) == 2 + 3 * len(recording.recorded)


def test_a_recorded_step_is_replayed_until_the_cache_is_full():
    model, config = flat("llama"), sampling(max_new_tokens=80, eos_token_id=None)
    recording, shapes = Recording(), forward_shapes(model)
    completions(backend(model, config, recording), PROMPTS[:1])
    # The prompt; then of each recording an eager step, one that prepares, one that records.
    assert len(recording.recorded) > 1 and len(shapes) == 1 + 3 * len(recording.recorded)


def test_rows_that_ended_are_removed_when_half_have_ended():
    model, config = flat("llama", 1), sampling(max_new_tokens=60)
    expected = completions(backend(model, config))
    lengths = sorted(len(row.token_ids) for row in expected)
    recording = Recording()
    shapes = forward_shapes(model)
    assert completions(backend(model, config, recording)) == expected
    rows = [rows for rows, new in shapes[1:] if new == 1]
    assert rows[0] == 8 and rows[-1] <= 4 and rows == sorted(rows, reverse=True)
    assert len(set(lengths)) > 3


def test_greedy_completions_of_padded_prompts_are_those_of_eager_steps():
    """Positions differ by row, and the mask hides the padding of each."""
    for seed in range(3):
        model = tiny("qwen2", seed)
        recording = Recording()
        graphed = backend(model, settings(), recording).generate(PROMPTS)
        assert graphed == backend(model, settings()).generate(PROMPTS)
        assert recording.replayed


def test_truncated_samples_have_the_masks_of_eager_steps():
    config = sampling(max_new_tokens=40, top_k=4, top_p=0.9)
    model, recording = flat("llama"), Recording()
    expected = completions(backend(model, config))
    graphed = completions(backend(model, config, recording))
    assert [row.token_ids for row in graphed] == [row.token_ids for row in expected]
    assert recording.replayed
    for one, two in zip(graphed, expected, strict=True):
        assert torch.equal(one.sampling_mask.ids, two.sampling_mask.ids)
        assert torch.equal(one.sampling_mask.counts, two.sampling_mask.counts)


def test_steps_under_autocast_are_those_of_eager_steps():
    """Keys are float32 and values bfloat16; casts of weights are made once, before the recording."""
    model, config = flat("llama"), sampling(max_new_tokens=25, eos_token_id=None)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    expected = completions(backend(model, config))
    recording = Recording()
    assert completions(backend(model, config, recording)) == expected
    assert recording.replayed > 15


def test_new_weights_are_used_in_the_next_generation():
    model, config = flat("llama"), sampling(max_new_tokens=20)
    recorded = backend(model, config, Recording())
    before = completions(recorded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.roll(1, 0)  # at another address
    after = completions(recorded)
    assert after == completions(backend(model, config)) != before


def test_nothing_is_kept_after_a_generation():
    made: list[weakref.ref] = []
    original = GrowingLayer.fix

    def fix(self, position_1):
        made.append(weakref.ref(self))
        original(self, position_1)

    model, config = flat("llama"), sampling(max_new_tokens=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrowingLayer, "fix", fix)
        completions(recorded := backend(model, config, Recording()))
    gc.collect()
    assert made and not any(ref() for ref in made) and recorded.graphs is not None


def failing(step):
    step()
    raise RuntimeError("operation not permitted when stream is capturing")


def asserting(step):
    step()
    raise AssertionError


def stale(step):
    """Run once more and repeat nothing: the logits are those of another position."""
    step()
    step()
    return lambda: None


@pytest.mark.parametrize(
    "name, capture, reason",
    [
        ("llama", failing, "recording failed with RuntimeError('operation not permitted"),
        ("llama", asserting, "recording failed with AssertionError()"),
        ("llama", lambda step: None, "recording failed with TypeError"),
        ("llama", stale, "log-probs differ from those of an eager step"),
        ("mistral_sliding", Recording(), "MistralForCausalLM has sliding windows"),
    ],
)
def test_what_cannot_be_recorded_is_eager_with_its_reason(name, capture, reason, caplog):
    caplog.set_level(logging.INFO)
    model, config = flat(name), sampling(max_new_tokens=40, eos_token_id=None)
    expected = completions(backend(model, config))
    recorded = backend(model, config, capture)
    assert completions(recorded) == expected
    path = recorded.fast_paths(model)[1]
    assert path.choice == "eager" and reason in path.reason
    assert path.warns == (name == "llama")
    assert sum("not recorded as CUDA graphs" in record.message for record in caplog.records) == 1
    assert completions(recorded) == expected  # without another attempt
    assert sum("not recorded as CUDA graphs" in record.message for record in caplog.records) == 1


def test_a_step_that_cannot_be_prepared_is_eager(monkeypatch):
    """The failure comes between two layers of the cache, one of which is fixed."""
    model, config = flat("llama"), sampling(max_new_tokens=40, eos_token_id=None)
    expected = completions(backend(model, config))
    fix, fixed = GrowingLayer.fix, []

    def fail_at_the_second(layer, position_1):
        fixed.append(layer)
        if len(fixed) == 2:
            raise ValueError("no more memory of this kind")
        fix(layer, position_1)

    monkeypatch.setattr(GrowingLayer, "fix", fail_at_the_second)
    recorded = backend(model, config, Recording())
    assert completions(recorded) == expected and len(fixed) == 2
    assert "recording failed with ValueError" in recorded.fast_paths(model)[1].reason


def test_nan_is_reported():
    model = flat("llama")
    recorded = backend(model, sampling(max_new_tokens=40, eos_token_id=None), Recording())
    forward = copy.copy(model.forward)
    calls: list[int] = []

    def broken(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) > 2:
            outputs.logits = outputs.logits * torch.nan
        return outputs

    model.forward = broken
    with pytest.raises(BackendError, match="logits are NaN or infinite"):
        completions(recorded)


def test_difference_of_log_probs():
    expected = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 0.5, 0.1]])
    assert mean_difference(expected.clone(), expected) == 0
    other = expected + torch.tensor([[0.1, 0.0, 0.0], [0.0, 0.0, 0.0]])
    probabilities = expected[0, :2].double().softmax(-1)
    exact = (probabilities * (other[0, :2].double().log_softmax(-1) - probabilities.log()).abs()).sum() / 2
    assert mean_difference(other, expected) == pytest.approx(float(exact), rel=1e-4)
    assert mean_difference(other * torch.nan, expected) != mean_difference(other * torch.nan, expected)  # NaN


@pytest.mark.parametrize(
    "kind, replay, reason",
    [
        (TransformersBackend, "disabled", ""),
        (TransformersBackend, "R3", "R3"),
        (SharedBackend, "R2", "sweep"),
    ],
)
def test_a_run_on_a_gpu_says_why_its_steps_are_eager(kind, replay, reason, tmp_path):
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", router_replay=replay)
    path = kind(lambda: flat("llama"), sampling(), config)._step_graphs(torch.device("cuda")).path()
    assert (path.choice == "eager") == bool(reason) and reason in path.reason
