"""The list of edits in ``mutations.py`` keeps up with the source; ``mutate.py`` tries them."""

from __future__ import annotations

import ast

import pytest
from mutate import PACKAGE, ROOT, matches
from mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}: {m.old} -> {m.new}")
def test_every_edit_applies_to_one_place_and_parses(mutation):
    assert matches(mutation) == 1
    assert mutation.old != mutation.new
    ast.parse((ROOT / "src" / PACKAGE / mutation.file).read_text().replace(mutation.old, mutation.new))


def test_no_edit_is_listed_twice():
    edits = [mutation[:3] for mutation in MUTATIONS]
    assert len(set(edits)) == len(edits)
