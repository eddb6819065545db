"""The size of the library: lines of ``src``, members of the trainer, comments where code is hard.

A commit that adds a file or a public name says what was looked for and not found to replace.
"""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "groupwise"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

#: Lines of all of ``src``, blank lines and docstrings included.
LINES = 37_570

#: Share of comments: comments per 100 lines.
COMMENTED = {
    "trainer.py": ("trainer.py",),
    "mixins": ("mixins/",),
    "core": ("core/",),
    "layouts": ("policy/layouts/",),
    "rebalancing": ("data/rebalancing.py",),
}
LEAST_COMMENTS = 8.0

#: Methods and properties of GRPOTrainer and its own bases, and other members of these classes; refused names
#: of TRL do not count.
METHODS, ATTRIBUTES = 93, 44


def lines(name: str) -> int:
    return FILES[name].count("\n")


def comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def test_the_library_keeps_its_size() -> None:
    assert sum(map(lines, FILES)) <= LINES


@pytest.mark.parametrize("part", COMMENTED)
def test_hard_code_has_comments(part: str) -> None:
    names = [name for name in FILES if name.startswith(COMMENTED[part])]
    share = 100 * sum(comments(FILES[name]) for name in names) / sum(map(lines, names))
    assert names and share >= LEAST_COMMENTS


def test_comments_are_counted_and_strings_are_not() -> None:
    assert comments('x = "# no"  # one\n# two\n"""# no"""\n') == 2


def test_members_of_the_trainer() -> None:
    """What a reader of the trainer has to know: everything that is not ``transformers.Trainer``'s own."""
    from groupwise import GRPOTrainer
    from groupwise.compat.trl import MissingAttribute

    own = [cls for cls in GRPOTrainer.__mro__ if cls.__module__.startswith("groupwise.")]
    members = {name: value for cls in own for name, value in vars(cls).items() if not name.startswith("__")}
    methods = {name for name, value in members.items() if callable(value) or isinstance(value, property)}
    refused = {name for name, value in members.items() if isinstance(value, MissingAttribute)}
    assert len(methods) <= METHODS
    assert len(set(members) - methods - refused) <= ATTRIBUTES
