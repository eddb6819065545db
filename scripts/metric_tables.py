"""Tables of the page of metrics, from ``src/groupwise/reporting/metrics.yaml``."""

from __future__ import annotations

from groupwise.reporting.documented import documented_metrics


def metric_tables() -> list[str]:
    """Return the lines of all tables."""
    lines: list[str] = []
    for title, metrics in documented_metrics().items():
        lines += ["", f"## {title}", "", "| metric | meaning | healthy | otherwise |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {m.meaning} | {m.healthy} | {m.otherwise} |" for name, m in metrics.items()]
    return lines
