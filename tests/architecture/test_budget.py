"""The size of the library: lines of every room, members of the trainer, comments where code is hard.

A number is raised in a commit of its own, whose message says what was looked for and not found to replace. A
room that shrinks takes its number down with it: a budget of more than 5 % above the code is refused too.
"""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "groupwise"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

#: Lines of a room, blank lines and docstrings included. The last five stand beside the trainer.
BUDGET = {
    "top level": 1387,
    "agents": 1849,
    "compat": 1138,
    "config": 2126,
    "core": 1620,
    "cpu": 430,
    "data": 2200,
    "generation": 4108,
    "hf": 1663,
    "mixins": 1053,
    "policy": 4327,
    "records": 1029,
    "reporting": 2868,
    "rewards": 1805,
    "tokenization": 1390,
    "cli": 1942,
    "recipes": 1812,
    "sandbox": 1035,
    "sweeps": 1570,
    "trl_hooks": 1660,
}
#: Slack of the rooms together: lines that the budgets allow beyond those there are, in a hundred.
SLACK = 1.0

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


def room_of(name: str) -> str:
    return name.split("/")[0] if "/" in name else "top level"


def lines(name: str) -> int:
    return FILES[name].count("\n")


def comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_keeps_its_budget(room: str) -> None:
    size = sum(lines(name) for name in FILES if room_of(name) == room)
    assert 0.95 * BUDGET[room] <= size <= BUDGET[room]


def test_the_budgets_together_leave_little_slack() -> None:
    """The sum of the rooms is the budget of the library; no total is written down beside it."""
    assert sum(BUDGET.values()) <= (1 + SLACK / 100) * sum(map(lines, FILES))


def test_every_room_has_a_budget() -> None:
    assert {room_of(name) for name in FILES} == BUDGET.keys()


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
