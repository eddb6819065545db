"""Findings of ``groupwise doctor`` as a plain-text table."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

#: In increasing severity.
STATUSES = ("ok", "warn", "fail")


class Finding(NamedTuple):
    """Result of one check. status: one of ``STATUSES``; subject: topic of the check; text: the result."""

    status: str
    subject: str
    text: str


ok, warn, fail = (partial(Finding, status) for status in STATUSES)

_STATUS, _SUBJECT = 6, 15  # widths of the first two columns


def table(findings: Iterable[Finding], width: int | None = None) -> str:
    """Format one row per finding; long texts are wrapped.

    Args:
        width: number of columns; default: width of the terminal.
    """
    width = width or min(shutil.get_terminal_size((110, 24)).columns, 140)
    room = max(width - _STATUS - _SUBJECT, 30)
    lines = []
    for status, subject, text in findings:
        first, *others = [part for line in text.splitlines() for part in textwrap.wrap(line, room)] or [""]
        lines.append(f"{status:<{_STATUS}}{subject:<{_SUBJECT}}{first}".rstrip())
        lines += [" " * (_STATUS + _SUBJECT) + other for other in others]
    return "\n".join(lines)


def summary(findings: Iterable[Finding]) -> str:
    """Return the numbers of problems and warnings."""
    counts = dict.fromkeys(STATUSES, 0)
    for finding in findings:
        counts[finding.status] += 1
    return f"{counts['fail']} problem(s), {counts['warn']} warning(s), {counts['ok']} fine"
