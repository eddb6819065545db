"""Findings of ``groupwise doctor`` and their plain-text table."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from groupwise.config.redact import redact
from groupwise.errors import ConfigError

T = TypeVar("T")

#: In increasing severity.
STATUSES = ("ok", "warn", "fail")


class Finding(NamedTuple):
    """Result of one check. status: one of ``STATUSES``; subject: topic of the check; text: the result."""

    status: str
    subject: str
    text: str


ok, warn, fail = (partial(Finding, status) for status in STATUSES)
#: Finding that is nothing to change by itself.
SKIPPED = warn("trial", "skipped because of the problems above")

_STATUS, _SUBJECT = 6, 15  # widths of the first two columns


class Report:
    """Collects findings and prints each at once, because some checks take minutes.

    Args:
        as_json: print one JSON object at the end instead.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.findings: list[Finding] = []
        self.as_json = as_json

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            if not self.as_json:
                print(redact(table([finding])), flush=True)

    def attempt(self, subject: str, work: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Return the result of ``work(*args, **kwargs)``; if it raises, add a finding and return None."""
        try:
            return work(*args, **kwargs)
        except Exception as error:
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            self.add([fail(subject, f"{kind}{error}")])
            return None

    @property
    def failed(self) -> bool:
        return any(finding.status == "fail" for finding in self.findings)

    @property
    def first(self) -> list[Finding]:
        """The findings to act on first, at most three: problems, then warnings."""
        urgent = [one for status in ("fail", "warn") for one in self.findings if one.status == status]
        return [one for one in urgent if one != SKIPPED][:3]

    def close(self) -> int:
        """Print the numbers of problems and warnings and what to change first; return the exit code."""
        if self.as_json:
            shown = {"failed": self.failed, "findings": _plain(self.findings), "first": _plain(self.first)}
            print(json.dumps(shown, indent=2, ensure_ascii=False))
        else:
            print(summary(self.findings))
            if self.first:
                print("Change first:\n" + redact(table(self.first)))
        return int(self.failed)


def _plain(findings: Iterable[Finding]) -> list[dict[str, str]]:
    return [{**finding._asdict(), "text": redact(finding.text)} for finding in findings]


def table(findings: Iterable[Finding]) -> str:
    """Format one row per finding; long texts are wrapped to the width of the terminal."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 140)
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
