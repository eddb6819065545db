"""Completion rows as one flat table."""

from __future__ import annotations

from typing import Any

#: Columns of equal length by name: step, prompt, completion, the rewards, advantage, extra columns.
Table = dict[str, list[Any]]

#: The images of every row as the bytes of PNG files; empty where no row has any.
Images = list[list[bytes]]

_FIXED = ("step", "prompt", "completion", "advantage")


def as_table(rows: list[dict[str, Any]]) -> Table:
    """One column per field, reward and extra column that occurs in any row; None where a row lacks it.

    A reward or an extra column whose name is taken gets underscores behind it.
    """
    taken = set(_FIXED)
    rewards = _columns(rows, "rewards", taken)
    extra = _columns(rows, "columns", taken)
    fixed = {name: [_utf8(row[name]) for row in rows] for name in _FIXED}
    advantage = {"advantage": fixed.pop("advantage")}
    return {**fixed, **rewards, **advantage, **extra}


def image_column(rows: list[dict[str, Any]]) -> Images:
    """The images of the rows, beside :func:`as_table`: only dashboards can show them."""
    images = [list(row.get("images", ())) for row in rows]
    return images if any(images) else []


def _columns(rows: list[dict[str, Any]], part: str, taken: set[str]) -> Table:
    columns = {}
    for key in dict.fromkeys(key for row in rows for key in row[part]):
        name = key
        while name in taken:
            name += "_"
        taken.add(name)
        columns[name] = [_utf8(row[part].get(key)) for row in rows]
    return columns


def reward_columns(table: Table) -> list[str]:
    """The columns of :func:`as_table` that hold rewards: those between the completion and the advantage."""
    names = list(table)
    return names[names.index("completion") + 1 : names.index("advantage")]


def _utf8(value: Any) -> Any:
    """Lone surrogates, which JSON can carry into a dataset, cannot be printed or saved: they become "?"."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
