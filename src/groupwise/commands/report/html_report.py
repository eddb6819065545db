"""One self-contained HTML page about one or several runs, from the files that they wrote.

The page is ``page/page.html`` with a style sheet, scripts and the data of the runs as JSON. uPlot, whose
script is part of the package (MIT license), draws the charts. A content security policy lets the browser run
these scripts only and load nothing; the data cannot end their element, because every "<" is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

from groupwise.commands.report.run_files import RunFiles, SavedCompletion, read_run
from groupwise.errors import ConfigError
from groupwise.files import replace_file
from groupwise.reporting.documented import documentation_of, plain_text
from groupwise.reporting.model_card import public_name

_PAGE = Path(__file__).with_name("page")
#: Settings that differ between runs anyway, and say nothing about them.
_NAMES_OF_RUNS = {"output_dir", "logging_dir", "run_name", "hub_model_id"}
#: Prompts in the list of changed completions.
CHANGED = 20


def write_report(
    directories: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    *,
    max_completions: int = 20_000,
) -> Path:
    """Write a report about the runs in ``directories`` and return its path.

    Args:
        directories: output directories of runs.
        output: file; default: ``report.html`` in the only directory, or in the working directory.
        max_completions: most completions of all runs in the file, by whole groups, evenly spaced.

    Raises:
        ConfigError: a directory is not that of a run, or ``output`` is a directory.
    """
    paths = [Path(directory) for directory in directories]
    if not paths or max_completions < 1:
        raise ConfigError(
            f"a report needs a directory and max_completions of 1 or more, not {max_completions}"
        )
    target = Path(output or (paths[0] / "report.html" if len(paths) == 1 else "report.html"))
    if target.is_dir():
        raise ConfigError(f"output {str(target)!r} is a directory; write {str(target / 'report.html')!r}")
    runs = dict(zip(_names(paths), map(read_run, paths), strict=True))
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, report_page(runs, max_completions).encode())
    return target


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last components of the paths, or as many as distinguish them."""
    parts = [path.resolve().parts for path in paths]
    for size in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-size:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"two directories are the same: {', '.join(map(str, paths))}")


def report_page(runs: Mapping[str, RunFiles], max_completions: int = 20_000) -> str:
    """Return the page of these runs by name."""
    style = _read("uPlot.min.css") + _read("page.css")
    script = _read("uPlot.iife.min.js") + _read("page.js")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"
    data = json.dumps(report_data(runs, max_completions), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":  # in strings; an HTML parser or a script could act on them
        data = data.replace(character, f"\\u{ord(character):04x}")
    page = Template(_read("page.html")).substitute(
        title=html.escape(f"Report: {', '.join(runs)}"),
        policy=f"{policy}; form-action 'none'",
        style=style,
        script=script,
        data=data,
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the source expression of a content security policy that allows this element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def report_data(runs: Mapping[str, RunFiles], max_completions: int) -> dict[str, Any]:
    """Return the data of the page: plain lists and numbers, completions as columns over all runs."""
    rows = [(run, row) for run, files in enumerate(runs.values()) for row in files.completions]
    totals = [total for files in runs.values() for total in _totals(files)]
    changed = most_changed(rows, totals)
    kept = _kept(rows, max_completions, {row for first, last, _ in changed for row in (first, last)})
    place = {row: position for position, row in enumerate(kept)}
    prompts: dict[str, int] = {}  # each text once, by its position
    right, shares = right_or_wrong(rows, totals)
    described = []
    for index, (name, files) in enumerate(runs.items()):
        mine = [share for (run, _), share in zip(rows, shares, strict=True) if run == index]
        described.append(
            {
                "name": name,
                "model": public_name(str(files.settings.get("model") or "")),
                "checkpoints": files.checkpoints,
                "completions": len(files.completions),
                "rates": solve_rates(files.completions, mine),
                **_log_columns(files.logs),
            }
        )
    names = {name for run in described for name in run["logs"]}
    differing, common = _compared([files.settings for files in runs.values()])
    return {
        "runs": described,
        "metrics": {name: _documented(name) for name in sorted(names) if documentation_of(name)},
        "differing": differing,
        "common": common,
        "changed": [
            {"first": place[first], "last": place[last], "change": _short(change)}
            for first, last, change in changed
        ],
        "omitted": len(rows) - len(kept),
        "right": right,
        "completions": {
            "run": [rows[i][0] for i in kept],
            "mode": [rows[i][1].mode for i in kept],
            "step": [rows[i][1].step for i in kept],
            "prompt": [prompts.setdefault(rows[i][1].prompt, len(prompts)) for i in kept],
            "text": [rows[i][1].text for i in kept],
            "total": [_short(totals[i]) for i in kept],
            "advantage": [_short(rows[i][1].advantage) for i in kept],
            "rewards": {
                name: [_short(rows[i][1].rewards.get(name)) for i in kept] for name in _functions(rows)
            },
            "extra": [" · ".join(f"{name}: {v}" for name, v in rows[i][1].extra.items()) for i in kept],
        },
        "prompts": list(prompts),  # complete only now
    }


def _log_columns(logs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return numbers of the logs as columns: steps, minutes since the first log, and one per metric."""
    times = [None if _short(log.get("time")) is None else log["time"] for log in logs]  # not rounded
    began = next((time for time in times if time is not None), None)
    numbers = [{name: v for name, v in log.items() if _short(v) is not None} for log in logs]
    names = dict.fromkeys(name for log in numbers for name in log if name not in ("step", "time"))
    return {
        "step": [_short(log.get("step")) or 0 for log in logs],
        "minutes": [None if time is None or began is None else _short((time - began) / 60) for time in times],
        "logs": {name: [_short(log.get(name)) for log in numbers] for name in names},
    }


def _short(value: Any) -> float | int | None:
    """Return a number with six digits; None for anything else and for values that JSON does not have."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _documented(name: str) -> dict[str, Any]:
    metric = documentation_of(name)
    assert metric is not None
    texts = {"meaning": metric.meaning, "healthy": metric.healthy, "otherwise": metric.otherwise}
    return {**{key: plain_text(text) for key, text in texts.items()}, "range": metric.range}


def _totals(files: RunFiles) -> list[float | None]:
    """Return the sum of each completion's rewards, weighted as the run weighted them."""
    weights = files.settings.get("reward_weights") or []  # the reward of environments follows, with weight 1
    totals: list[float | None] = []
    for row in files.completions:
        pairs = zip(row.rewards.values(), chain(weights, repeat(1.0)), strict=False)
        parts = [reward * weight for reward, weight in pairs if reward is not None]
        totals.append(sum(parts) if parts else None)
    return totals


def most_changed(
    rows: Sequence[tuple[int, SavedCompletion]], totals: Sequence[float | None]
) -> list[tuple[int, int, float | None]]:
    """Compare the first and the last completions of every prompt that was sampled at several steps.

    Prompts are ordered by the change of their mean reward, divided by the range of all rewards, plus the
    share of different words.

    Returns:
        (row of the first step, row of the last step, change of the mean reward) of at most ``CHANGED``
        prompts; each row is the one with the median reward of its group.
    """
    by_prompt: dict[tuple[int, str, str], dict[int, list[int]]] = {}
    for i, (run, row) in enumerate(rows):
        by_prompt.setdefault((run, row.mode, row.prompt), {}).setdefault(row.step, []).append(i)
    known = [total for total in totals if total is not None]
    span = (max(known) - min(known) if known else 0.0) or 1.0
    found = []
    for steps in by_prompt.values():
        if len(steps) < 2:
            continue
        sides = [sorted(steps[at], key=lambda i: totals[i] or 0.0) for at in (min(steps), max(steps))]
        first, last = (side[len(side) // 2] for side in sides)
        before, after = (_mean(totals[i] for i in side) for side in sides)
        change = None if before is None or after is None else after - before
        words, others = (set(rows[i][1].text.split()) for i in (first, last))
        different = 1 - len(words & others) / max(len(words | others), 1)
        found.append((abs(change or 0.0) / span + different, first, last, change))
    found.sort(key=lambda one: -one[0])
    return [(first, last, change) for score, first, last, change in found[:CHANGED] if score > 0]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def right_or_wrong(
    rows: Sequence[tuple[int, SavedCompletion]], totals: Sequence[float | None]
) -> tuple[dict[str, Any], list[float | None]]:
    """Scale the reward that separates right from wrong to 0 and 1.

    That is the total if it has at most two values, or else the function with two whose mean is lowest;
    without one, the total from its lowest to its highest value.

    Returns:
        ``name`` of the function, "" for the total, its rewards ``low`` and ``high`` of 0 and 1, ``binary``;
        the scaled reward of every completion, None without one.
    """
    values = [_short(total) for total in totals]  # None for infinities too
    columns = {name: [_short(row.rewards.get(name)) for _, row in rows] for name in _functions(rows)}
    two_values = [name for name, column in columns.items() if len({*column} - {None}) == 2]
    name = min(two_values, key=lambda name: _mean(columns[name]) or 0.0, default="")
    name = "" if len({*values} - {None}) <= 2 else name
    values = columns[name] if name else values
    known = {value for value in values if value is not None}
    low, high = min(known, default=0.0), max(known, default=0.0)
    low = low if low < high else min(low, 0.0)  # a single value above 0 is right
    shares = [None if value is None else (value - low) / ((high - low) or 1.0) for value in values]
    return {"name": name, "low": low, "high": high, "binary": len(known) <= 2}, shares


def _functions(rows: Iterable[tuple[int, SavedCompletion]]) -> list[str]:
    return list(dict.fromkeys(name for _, row in rows for name in row.rewards))


def solve_rates(rows: Sequence[SavedCompletion], shares: Sequence[float | None]) -> dict[str, Any]:
    """Count the groups of every training step, of two or more, by the number of their right completions.

    Returns:
        ``step``; ``counts``: per step, the groups with 0, 1, ... ``size`` right; ``size``: the usual size of
        a group, at most 16, to which others are scaled.
    """
    groups: dict[tuple[int, str], list[float]] = {}
    for row, share in zip(rows, shares, strict=True):
        if row.mode == "train" and share is not None:
            groups.setdefault((row.step, row.prompt), []).append(share)
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    sizes = Counter(map(len, groups.values()))
    size = min(sizes.most_common(1)[0][0], 16) if sizes else 1
    counts: dict[int, list[int]] = {step: [0] * (size + 1) for step in sorted({step for step, _ in groups})}
    for (step, _), group in groups.items():
        counts[step][round(size * fmean(group))] += 1
    return {"size": size, "step": list(counts), "counts": list(counts.values())}


def _kept(rows: Sequence[tuple[int, SavedCompletion]], most: int, also: set[int]) -> list[int]:
    """Return the rows of evenly spaced groups, about ``most``, and the rows ``also``."""
    groups: dict[tuple[int, str, int, str], list[int]] = {}
    for i, (run, row) in enumerate(rows):
        groups.setdefault((run, row.mode, row.step, row.prompt), []).append(i)
    members = list(groups.values())
    count = min(max(most * len(groups) // max(len(rows), 1), 1), len(groups))
    return sorted(also.union(*(members[i * len(groups) // count] for i in range(count))))


def _compared(
    settings: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[str, list[str | None]]], list[tuple[str, list[str]]]]:
    """Return the settings that differ between runs with their values, and those that are equal with one."""
    differing, common = [], []
    for name in sorted(set().union(*settings) - _NAMES_OF_RUNS):
        values = [_text(one[name]) if name in one else None for one in settings]
        if len(set(values)) > 1:
            differing.append((name, values))
        else:
            common.append((name, [str(values[0])]))
    return differing, common


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
