"""Facts that every result file records: commit and processor."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commit(checkout: Path = HERE) -> str:
    """Return the commit of a checkout, then ``-dirty`` if tracked files other than results differ from it.

    Returns:
        40 hexadecimal digits; "unknown" without git.
    """
    git = ["git", "-C", str(checkout)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    # A benchmark that writes its results after every round does not change what it measures.
    changed = subprocess.run(
        [*git, "diff", "--quiet", "HEAD", "--", ":/", ":(exclude,top)benchmarks/results"]
    )
    return head + ("-dirty" if changed.returncode else "")


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
