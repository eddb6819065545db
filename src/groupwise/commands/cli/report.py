"""``groupwise report``: one HTML page about the runs in some output directories."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from groupwise.commands.report.html_report import report_path, write_report
from groupwise.commands.report.run_files import changes_of
from groupwise.hf.run_directory import is_training

#: Seconds between two looks at a run, after which an open page loads the file again, and without a change
#: after which a run that no process trains has ended: evaluations may follow training.
LOOK, RELOAD, REST = 5, 10, 60


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
    parser.add_argument(
        "--watch", action="store_true", help="write it again while a run goes on; an open page follows"
    )
    options = parser.parse_args(arguments)
    path, _ = report_path(options.directories, options.output, options.max_completions)

    def write(reload: int = 0) -> None:
        write_report(options.directories, path, max_completions=options.max_completions, reload=reload)

    if options.watch:
        print(f"{path} follows {', '.join(options.directories)} until its end or Ctrl-C", flush=True)
        _watch([Path(directory) for directory in options.directories], write)
    else:
        write()
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _watch(directories: Sequence[Path], write: Callable[[int], None]) -> None:
    """Write the page after every change, until every run has ended or Ctrl-C; then without reloading."""
    seen = None
    try:
        while True:
            found, began = [changes_of(directory) for directory in directories], time.monotonic()
            newest = max((change for files in found for _, change, _ in files), default=0) / 1e9
            if found != seen and all(found):
                write(RELOAD)
                seen = found
            elif all(found) and not any(map(is_training, directories)) and time.time() - newest > REST:
                break
            # At most a tenth of a core, which the run may need.
            time.sleep(max(LOOK, 9 * (time.monotonic() - began)))
    except KeyboardInterrupt:
        if seen is None:
            raise
    write(0)
