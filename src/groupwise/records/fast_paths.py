"""States of a run's fast paths: what computes each part, and why it is not the fast way."""

from __future__ import annotations

from typing import NamedTuple


class FastPath(NamedTuple):
    """State of one fast path.

    name: part of the run, such as "decoding".
    choice: what computes it.
    reason: why it is not the fast one; "": it is.
    warns: the reason is not a choice of the user.
    """

    name: str
    choice: str
    reason: str = ""
    warns: bool = False

    @property
    def state(self) -> str:
        return f"{self.choice} ({self.reason})" if self.reason else self.choice

    def __str__(self) -> str:
        return f"{self.name}: {self.state}"
