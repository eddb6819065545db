"""The list of edits in ``mutations.py`` keeps up with the source; ``mutate.py`` tries them."""

from __future__ import annotations

import ast

from mutate import PACKAGE, ROOT, matches
from mutations import MUTATIONS


def test_every_edit_applies_to_one_place_and_parses():
    assert [f"{m.file}: {m.old}" for m in MUTATIONS if matches(m) != 1 or m.old == m.new] == []
    for mutation in MUTATIONS:
        source = (ROOT / "src" / PACKAGE / mutation.file).read_text()
        ast.parse(source.replace(mutation.old, mutation.new), filename=f"{mutation.file}: {mutation.new}")


def test_no_edit_is_listed_twice():
    edits = [mutation[:3] for mutation in MUTATIONS]
    assert len(set(edits)) == len(edits)
