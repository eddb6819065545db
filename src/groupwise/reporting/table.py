"""Completion rows as one flat table."""

from __future__ import annotations

from typing import Any

#: Columns of equal length by name: step, prompt, completion, the rewards, advantage, extra columns.
Table = dict[str, list[Any]]

_FIXED = ("step", "prompt", "completion", "advantage")


def as_table(rows: list[dict[str, Any]]) -> Table:
    """One column per field, reward and extra column that occurs in any row; None where a row lacks it.

    A reward or an extra column whose name is taken gets underscores behind it.
    """
    taken = set(_FIXED)
    rewards = _columns(rows, "rewards", taken)
    extra = _columns(rows, "columns", taken)
    fixed = {name: [row[name] for row in rows] for name in _FIXED}
    advantage = {"advantage": fixed.pop("advantage")}
    return {**fixed, **rewards, **advantage, **extra}


def _columns(rows: list[dict[str, Any]], part: str, taken: set[str]) -> Table:
    columns = {}
    for key in dict.fromkeys(key for row in rows for key in row[part]):
        name = key
        while name in taken:
            name += "_"
        taken.add(name)
        columns[name] = [row[part].get(key) for row in rows]
    return columns
