"""``groupwise report``: one HTML page about the runs in some output directories."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from groupwise.commands.report.html_report import write_report


def run(arguments: Sequence[str]) -> int:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(
        prog="groupwise report",
        description="Write one HTML file about runs: a verdict, curves, solve rates, completions, settings.",
    )
    parser.add_argument("directories", nargs="+", metavar="DIR", help="output directory of a run")
    parser.add_argument(
        "--output", help="file; default: report.html in DIR, of several runs in the working directory"
    )
    parser.add_argument(
        "--max_completions",
        type=int,
        default=20_000,
        help="most completions in the file, by whole groups, evenly spaced (default: 20000)",
    )
    options = parser.parse_args(arguments)
    path = write_report(options.directories, options.output, max_completions=options.max_completions)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
