"""One edit of the source, and the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """An edit that changes a result.

    file: path within ``src/groupwise``.
    old, new: a fragment that occurs once in the file, and its replacement.
    first: tests that are likely to fail, as arguments of pytest.
    rest: further tests, run if the first ones pass.
    """

    file: str
    old: str
    new: str
    first: tuple[str, ...]
    rest: tuple[str, ...] = ()


def edits_of(
    file: str, *edits: tuple[str, str, tuple[str, ...]], rest: tuple[str, ...] = ()
) -> list[Mutation]:
    """Return mutations of one file from (old, new, first)."""
    return [Mutation(file, old, new, first, rest) for old, new, first in edits]
