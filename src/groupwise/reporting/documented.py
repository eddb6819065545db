"""Documentation of every metric: meaning, healthy range and remedy, read from ``metrics.yaml``."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

#: Lowest and highest healthy value; None: no limit.
Range = tuple[float | None, float | None]


@dataclass(frozen=True)
class Metric:
    """Entry of ``metrics.yaml``.

    Attributes:
        meaning, healthy, otherwise: Markdown; what to do outside the healthy values is ``otherwise``.
        range: healthy values as numbers; None where they are not two numbers.
        range_of: choice of the name's placeholder that the range is about; "" for all.
    """

    meaning: str
    healthy: str = ""
    otherwise: str = ""
    range: Range | None = None
    range_of: str = ""


@functools.cache
def documented_metrics() -> dict[str, dict[str, Metric]]:
    """Return the metrics by section of the page and name; names contain ``<placeholders>``."""
    text = Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")
    return {
        title: {
            name: Metric(**{**entry, "range": tuple(entry["range"]) if "range" in entry else None})
            for name, entry in metrics.items()
        }
        for title, metrics in yaml.safe_load(text).items()
    }


def documentation_of(name: str) -> Metric | None:
    """Return the documentation of a logged metric, with the range only where it is about ``name``."""
    for pattern, metric in _patterns():
        if pattern.fullmatch(name):
            return metric if name.endswith(metric.range_of) else Metric(metric.meaning)
    return None


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    found = [entry for metrics in documented_metrics().values() for entry in metrics.items()]
    return [(re.compile(_pattern(name)), metric) for name, metric in found]


def plain_text(markdown: str) -> str:
    """Return a text without the marks of `code` and [links](of the documentation)."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")


def _pattern(documented: str) -> str:
    """Return the regular expression of a documented name: ``a/<b, c>`` is a/b or a/c, ``<name>`` any text."""
    parts = re.split(r"<([^>]+)>", documented)  # text and placeholders in turn
    choices = (
        f"({'|'.join(map(re.escape, part.split(', ')))})" if ", " in part else ".+" for part in parts[1::2]
    )
    return "".join(re.escape(text) + next(choices, "") for text in parts[::2])
