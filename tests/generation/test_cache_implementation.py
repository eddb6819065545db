"""``cache_implementation``: another cache, the same tokens."""

from __future__ import annotations

import pytest
from support import runs

from groupwise.config.grpo_config import GRPOConfig
from groupwise.generation.transformers_backend import make_backend

PROMPTS = [[4, 5, 6], [9], [7, 8, 9, 10, 11]]


def greedy(tmp_path, **given):
    fixed = {"bf16": False, "use_cpu": True, "report_to": "none", "max_completion_length": 6}
    config = GRPOConfig(str(tmp_path), generation_kwargs={"do_sample": False}, **fixed, **given)
    model = runs.policy()
    return make_backend(lambda: model, config, runs.tokenizer()).generate(PROMPTS)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_every_cache_gives_the_same_completions(name, tmp_path):
    assert greedy(tmp_path, cache_implementation=name) == greedy(tmp_path)
