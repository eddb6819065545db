"""The benchmark of sampling without an engine, with a tiny model: both loops end the rows on schedule."""

from __future__ import annotations

import sys

import pytest
from support.runs import policy
from test_common import BENCHMARKS
from transformers import GenerationConfig


@pytest.fixture
def generate():
    path = [*sys.path]  # the folder does not stay on it
    sys.path.append(str(BENCHMARKS))
    import generate

    sys.path[:] = path
    return generate


@pytest.mark.parametrize("method", ["groupwise", "plain"])
def test_rows_end_on_schedule(generate, method):
    lengths = generate.skewed_lengths(2 * generate.GROUP, 12)
    config = GenerationConfig(
        max_new_tokens=12, do_sample=True, top_k=0, eos_token_id=1, pad_token_id=0, bos_token_id=2
    )
    counts = getattr(generate, method)(policy(), [[3, 4, 5], [6, 7, 8, 9]], config, lengths)
    assert sorted(counts) == sorted(lengths)


def test_lengths_are_skewed_up_to_the_limit(generate):
    lengths = generate.skewed_lengths(64, 12)
    assert lengths[0] == 12 and lengths == sorted(lengths, reverse=True) and sum(lengths) / 64 < 4
