"""Continuous batching: the policy's own distribution, its limits, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from support import runs

pytest.importorskip("transformers", minversion="5.8")
from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import BackendError, ConfigError
from groupwise.generation.continuous_batching import batching_config, make_backend
from groupwise.policy.attention import IMPLEMENTATION, install_attention_hook
from groupwise.records import SamplingOptions

PROMPTS = [[4, 5, 6], [4, 5, 6], [9], [7, 8, 9, 10, 11]]
SMALL = {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 32}


def settings(tmp_path, **given):
    fixed = {"bf16": False, "use_cpu": True, "report_to": "none", "max_completion_length": 6}
    cache = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": SMALL}
    return GRPOConfig(str(tmp_path), **{**fixed, **cache, **given})


def backend(tmp_path, model, **given):
    return make_backend(lambda: model, settings(tmp_path, **given), runs.tokenizer())


def test_greedy_tokens_are_the_most_likely_ones(tmp_path):
    """Against plain forwards; the model keeps its attention and its mode."""
    model = runs.policy().train()
    assert install_attention_hook(model)
    sampler = backend(tmp_path, model, generation_kwargs={"do_sample": False})
    assert [path.choice for path in sampler.fast_paths(model)] == ["continuous batching"]
    completions = sampler.generate(PROMPTS)
    assert model.training
    assert model.config._attn_implementation == IMPLEMENTATION
    model.eval()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == completion.token_ids
        assert completion.truncated == (completion.token_ids[-1] != 1)
        assert len(completion.token_ids) <= 6


def test_samples_follow_the_policy(tmp_path):
    """First tokens of 400 samples: each frequency within five standard errors of its probability."""
    model = runs.policy()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        probabilities = model.eval()(torch.tensor([[4, 5, 6]])).logits[0, -1].softmax(-1)
    torch.manual_seed(0)
    completions = backend(tmp_path, model, max_completion_length=1).generate([[4, 5, 6]] * 400)
    first = torch.tensor([completion.token_ids[0] for completion in completions])
    counts = torch.bincount(first, minlength=len(probabilities)) / 400
    assert ((counts - probabilities).abs() < 5 * (probabilities / 400).sqrt() + 5 / 400).all()
    assert probabilities.max() > 0.1  # not even, or a shuffled vocabulary would pass too


def test_samples_depend_on_the_generator_alone(tmp_path):
    sampler, found = backend(tmp_path, runs.policy()), []
    for before in (1, 2):
        sampler.generator = torch.Generator().manual_seed(5)
        torch.manual_seed(before)
        state = torch.get_rng_state()
        found.append([sampler.generate(PROMPTS) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_every_row_has_its_own_limit(tmp_path):
    completions = backend(tmp_path, runs.policy()).generate(PROMPTS, SamplingOptions(max_tokens=[1, 2, 3, 6]))
    for completion, limit in zip(completions, [1, 2, 3, 6], strict=True):
        assert len(completion.token_ids) == limit or completion.token_ids[-1] == 1


def test_the_trainer_generates_with_it(tmp_path):
    given = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": SMALL,
        "sequence_layout": "shared_prefix",
    }
    trainer = runs.trainer(tmp_path, **given)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_an_unknown_setting_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"'max_batch_token'.*'max_batch_tokens'"):
        batching_config({"max_batch_token": 5})
    assert batching_config({}).max_memory_percent == 0.5
    assert batching_config({"max_memory_percent": 0.2}).max_memory_percent == 0.2


def test_unsupported_sampling_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="RepetitionPenalty"):
        backend(tmp_path, runs.policy(), repetition_penalty=1.2)


def test_a_failure_is_an_error(tmp_path, caplog):
    """A prompt that does not fit the cache: transformers gives it up and only logs it."""
    tiny = {"page_size": 16, "num_blocks": 1, "max_batch_tokens": 16}
    short = backend(tmp_path, runs.policy(), transformers_continuous_batching_config=tiny)
    with caplog.at_level(logging.CRITICAL), pytest.raises(BackendError, match="of 1 completions"):
        short.generate([[5] * 60])
