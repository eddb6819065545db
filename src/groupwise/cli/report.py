"""What ``groupwise doctor`` found, as a table of plain text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

#: In the order of their weight.
STATUSES = ("ok", "warn", "fail")


class Finding(NamedTuple):
    """status: one of ``STATUSES``; subject: what was looked at; text: what was found."""

    status: str
    subject: str
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warn(subject: str, text: str) -> Finding:
    return Finding("warn", subject, text)


def fail(subject: str, text: str) -> Finding:
    return Finding("fail", subject, text)


def table(findings: Iterable[Finding], width: int | None = None) -> str:
    """One row per finding, long texts wrapped; the subject is named once for rows that follow each other."""
    rows = list(findings)
    width = width or min(shutil.get_terminal_size((110, 24)).columns, 140)
    column = max((len(row.subject) for row in rows), default=0)
    room = max(width - column - 8, 30)
    lines = []
    previous = None
    for status, subject, text in rows:
        first, *others = [
            part for line in text.splitlines() or [""] for part in textwrap.wrap(line, room) or [""]
        ]
        shown = "" if subject == previous else subject
        lines.append(f"{status:<5} {shown:<{column}}  {first}".rstrip())
        lines += [f"{'':<{column + 8}}{other}" for other in others]
        previous = subject
    return "\n".join(lines)


def summary(findings: Iterable[Finding]) -> str:
    """How many problems and warnings there are."""
    counts = dict.fromkeys(STATUSES, 0)
    for finding in findings:
        counts[finding.status] += 1
    return f"{counts['fail']} problem(s), {counts['warn']} warning(s), {counts['ok']} fine"
