"""The completions table on the console: with rich if installed, else as plain text."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Sequence

from tqdm.auto import tqdm

from groupwise.reporting.table import Cell, Table

logger = logging.getLogger(__name__)

#: Minimum width of a column with long cells, in characters.
_MIN_WIDTH = 20


def print_table(table: Table, title: str) -> None:
    """Print the table to stdout, above the progress bars. An empty table prints nothing."""
    cells = {name: [_cell_text(value) for value in values] for name, values in table.items()}
    if not any(cells.values()):
        return
    # clears the progress bars while the table is printed
    with tqdm.external_write_mode(file=sys.stdout):
        try:
            _print_rich(cells, title)
        except ImportError:
            _warn_rich_missing()
            print(plain_table(cells, title, shutil.get_terminal_size().columns), flush=True)


def _print_rich(cells: dict[str, list[str]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(title=title, show_lines=True)
    for name in cells:
        grid.add_column(Text(name), overflow="fold")
    for row in zip(*cells.values(), strict=True):
        grid.add_row(*(Text(cell) for cell in row))  # Text: brackets in a completion are not markup
    Console().print(grid)


@functools.cache
def _warn_rich_missing() -> None:
    logger.warning("completions are printed as plain text; for a formatted table: pip install rich")


def plain_table(cells: dict[str, list[str]], title: str, width: int) -> str:
    """Format the table as plain text, about ``width`` characters wide; long cells are wrapped."""
    longest = {name: _longest([name, *values]) for name, values in cells.items()}
    wide = [name for name in longest if longest[name] > _MIN_WIDTH]
    left = width - 3 * (len(cells) - 1) - sum(longest[name] for name in longest if name not in wide)
    share = max(left // max(len(wide), 1), _MIN_WIDTH)
    widths = [min(longest[name], share) if name in wide else longest[name] for name in cells]
    rule = "-+-".join("-" * size for size in widths)
    lines = [title]
    for row in [list(cells), *zip(*cells.values(), strict=True)]:
        lines += [*_plain_row(row, widths), rule]
    return "\n".join(lines)


def _longest(values: list[str]) -> int:
    return max(len(line) for value in values for line in value.split("\n"))


def _plain_row(row: Sequence[str], widths: list[int]) -> list[str]:
    folded = [
        [part for line in cell.split("\n") for part in textwrap.wrap(line, size) or [""]]
        for cell, size in zip(row, widths, strict=True)
    ]
    height = max(len(parts) for parts in folded)
    columns = [parts + [""] * (height - len(parts)) for parts in folded]
    return [
        " | ".join(part.ljust(size) for part, size in zip(line, widths, strict=True)).rstrip()
        for line in zip(*columns, strict=True)
    ]


def _cell_text(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "".join(_printable(character) for character in str(value))


def _printable(character: str) -> str:
    """Escape control characters, which could move the cursor."""
    if character == "\t":
        return " "
    if character != "\n" and unicodedata.category(character) == "Cc":
        return character.encode("unicode_escape").decode("ascii")
    return character
