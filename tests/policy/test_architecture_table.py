"""Every architecture that transformers has, with default settings: right, or refused with the reason.

The script `scripts/architecture_table.py` writes it into `docs/models.md`.
"""

from __future__ import annotations

import re

import architecture_table as table
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from groupwise.compat.transformers import supports_cache_in_checkpoints

#: Before transformers 5.19, whose caches several tokens continue, models take other ways.
pytestmark = pytest.mark.skipif(not supports_cache_in_checkpoints(), reason="transformers before 5.19")

#: Models that stand for kinds: layout, decoding, and tokens computed of distinct ones.
KINDS = {
    "llama": ("shared_prefix", "own loop", 1.0),
    "gemma3_text": ("shared_prefix", "own loop", 1.0),  # windows
    "qwen3_moe": ("shared_prefix", "own loop", 1.0),  # a balancing loss
    "deepseek_v3": ("shared_prefix", "own loop", 1.0),  # values narrower than keys
    "gemma3n_text": ("shared_prefix", "own loop", 1.0),  # layers that share keys
    "gpt_oss": ("forked", "own loop", 1.5),  # sinks
    "qwen3_5_text": ("forked", "own loop", 1.3),  # states
    "jamba": ("padded", "own loop", 3.9),  # a scan that one token alone continues
    "mamba": ("padded", "`generate`", 3.9),  # no attention
    "recurrent_gemma": ("equal_length", "`generate`, rows of equal length", 1.6),  # states through padding
    "xglm": ("padded", "own loop", 3.9),  # dropout of attention
    "qwen2_vl": ("forked", "own loop", 1.3),  # images
}

#: Models that no way of sampling reproduces, with a word of the reason.
REFUSED = {"rwkv": "samples tokens with other log-probs"}


def names_to_check() -> list[str]:
    """Return all names that stand for no kind; with another transformers, those that are not in the page."""
    names = [name for name in table.NAMES if name not in KINDS]
    pinned = f"transformers=={table.transformers.__version__}\n"
    if pinned in (table.ROOT / "constraints.txt").read_text():
        return names
    page = (table.ROOT / "docs" / "models.md").read_text()
    listed = re.compile("|".join([r"^\| (\w+)", r"^- (\w+): "]), re.MULTILINE)
    known = {text for match in listed.finditer(page) for text in match.groups() if text}
    return [n for n in table.TYPES if n in names and not {n, table.kind_of(CLASSES[n])} & known]


def check(row: table.Row) -> None:
    # Gemma 4 rounds by 3e-5 with AVX-512, by 6.4e-5 with AVX2.
    assert row.refused or max(row.gradient, row.sampled) < 1e-4, row
    assert not row.refused or "log-probs" in row.refused, row  # which comparison failed


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_right_in_its_layout(name):
    row = table.row_of(name)
    layout, decoding, most = KINDS[name]
    check(row)
    assert (row.layout, row.decoding) == (layout, decoding) and row.tokens <= most, row


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_right_way_is_refused(name):
    assert REFUSED[name] in table.row_of(name).refused


@pytest.mark.slow
@pytest.mark.parametrize("name", names_to_check())
def test_every_model_is_right_or_refused(name):
    try:
        row = table.row_of(name)
    except table.NotBuiltError as error:
        pytest.skip(f"not built small: {error}")
    check(row)
