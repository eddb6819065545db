"""``cache_implementation``: another cache, the same tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
import runs

from groupwise.backends.transformers_generate import make_backend
from groupwise.config import GRPOConfig

PROMPTS = [[4, 5, 6], [9], [7, 8, 9, 10, 11]]


def greedy(tmp_path, **given):
    fixed = {"bf16": False, "use_cpu": True, "report_to": "none", "max_completion_length": 6}
    config = GRPOConfig(str(tmp_path), generation_kwargs={"do_sample": False}, **fixed, **given)
    model = runs.policy()
    return make_backend(lambda: model, config, runs.tokenizer()).generate(PROMPTS)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_every_cache_gives_the_same_completions(name, tmp_path):
    assert greedy(tmp_path, cache_implementation=name) == greedy(tmp_path)
