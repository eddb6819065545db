"""The completions table on the console."""

from __future__ import annotations

import sys
import unicodedata

from tqdm.auto import tqdm

from groupwise.reporting.table import Cell, Table


def print_table(table: Table, title: str) -> None:
    """Print the table to stdout, above the progress bars. An empty table prints nothing."""
    # Imported here: the first import draws random numbers, which the caller restores.
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    rows = list(zip(*table.values(), strict=True))
    if not rows:
        return
    grid = RichTable(title=title, show_lines=True)
    for name in table:
        grid.add_column(Text(name), overflow="fold")
    for row in rows:
        grid.add_row(*(Text(_cell_text(value)) for value in row))  # Text: brackets are not markup
    with tqdm.external_write_mode(file=sys.stdout):  # clears the progress bars for the block
        Console().print(grid)


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
