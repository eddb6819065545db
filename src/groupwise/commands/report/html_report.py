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
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from groupwise.commands.report.documented import documentation_of
from groupwise.commands.report.run_files import RunFiles, SavedCompletion, read_run
from groupwise.errors import ConfigError
from groupwise.reporting.model_card import public_name

_PAGE = Path(__file__).with_name("page")
#: Settings that differ between runs anyway, and say nothing about them.
_NAMES_OF_RUNS = {"output_dir", "logging_dir", "run_name", "hub_model_id"}
#: Prompts in the lists of changed completions and of groups without a gradient.
CHANGED, WITHOUT_GRADIENT = 20, 20


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
        max_completions: most completions of all runs in the file, evenly spaced.

    Raises:
        ConfigError: a directory is not that of a run.
    """
    paths = [Path(directory) for directory in directories]
    if not paths or max_completions < 1:
        raise ConfigError(
            f"a report needs a directory and max_completions of 1 or more, not {max_completions}"
        )
    target = Path(output or (paths[0] / "report.html" if len(paths) == 1 else "report.html"))
    page = report_page(dict(zip(_names(paths), map(read_run, paths), strict=True)), max_completions)
    if target.is_dir():
        raise ConfigError(f"output {str(target)!r} is a directory; write {str(target / 'report.html')!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
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
    page = Template(_read("page.html")).substitute(
        title=html.escape(f"Report: {', '.join(runs)}"),
        policy=f"{policy}; form-action 'none'",
        style=style,
        script=script,
        data=_inert(data),
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the source expression of a content security policy that allows this element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(data: str) -> str:
    """Escape characters of JSON strings that an HTML parser or a script could act on."""
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def report_data(runs: Mapping[str, RunFiles], max_completions: int) -> dict[str, Any]:
    """Return the data of the page: plain lists and numbers, completions as columns over all runs."""
    rows = [(run, row) for run, files in enumerate(runs.values()) for row in files.completions]
    totals = [total for files in runs.values() for total in _totals(files)]
    changed = most_changed(rows, totals)
    # Evenly spaced, and those that the comparison shows.
    shown = {i * len(rows) // max_completions for i in range(max_completions)}
    kept = sorted(shown | {row for first, last, _ in changed for row in (first, last)})
    kept = kept if len(rows) > max_completions else list(range(len(rows)))
    place = {row: position for position, row in enumerate(kept)}
    prompts: dict[str, int] = {}  # each text once, by its position

    def prompt_index(prompt: str) -> int:
        return prompts.setdefault(prompt, len(prompts))

    described = []
    for index, (name, files) in enumerate(runs.items()):
        mine = [(row, total) for (run, row), total in zip(rows, totals, strict=True) if run == index]
        without_gradient = groups_without_gradient([row for row, _ in mine], [total for _, total in mine])
        without_gradient["prompts"] = [
            (prompt_index(prompt), *rest) for prompt, *rest in without_gradient["prompts"]
        ]
        described.append(
            {
                "name": name,
                "model": public_name(str(files.settings.get("model") or "")),
                "checkpoints": files.checkpoints,
                "completions": len(files.completions),
                "without_gradient": without_gradient,
                "groups": group_spread([row for row, _ in mine], [total for _, total in mine]),
                **_log_columns(files.logs),
            }
        )
    names = {name for run in described for name in run["logs"]}
    functions = dict.fromkeys(name for _, row in rows for name in row.rewards)
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
        "completions": {
            "run": [rows[i][0] for i in kept],
            "mode": [rows[i][1].mode for i in kept],
            "step": [rows[i][1].step for i in kept],
            "prompt": [prompt_index(rows[i][1].prompt) for i in kept],
            "text": [rows[i][1].text for i in kept],
            "total": [_short(totals[i]) for i in kept],
            "advantage": [_short(rows[i][1].advantage) for i in kept],
            "rewards": {name: [_short(rows[i][1].rewards.get(name)) for i in kept] for name in functions},
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
    # The page shows text: `code` and [links](of the documentation) of Markdown without their marks.
    plain = {
        key: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "") for key, text in texts.items()
    }
    return {**plain, "range": metric.range}


def _totals(files: RunFiles) -> list[float | None]:
    """Return the sum of each completion's rewards, weighted as the run weighted them."""
    weights = files.settings.get("reward_weights")
    totals: list[float | None] = []
    for row in files.completions:
        used = (
            weights
            if isinstance(weights, list)
            and len(weights) == len(row.rewards)
            and None not in map(_short, weights)
            else [1.0] * len(row.rewards)
        )
        parts = [w * r for w, r in zip(used, row.rewards.values(), strict=True) if r is not None]
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


def _groups(
    rows: Sequence[SavedCompletion], totals: Sequence[float | None]
) -> dict[tuple[int, str], list[tuple[float, float | None]]]:
    """Return (advantage, reward) of training completions by step and prompt, without groups of one."""
    groups: dict[tuple[int, str], list[tuple[float, float | None]]] = {}
    for row, total in zip(rows, totals, strict=True):
        if row.mode == "train":
            groups.setdefault((row.step, row.prompt), []).append((row.advantage, total))
    return {key: group for key, group in groups.items() if len(group) > 1}


def groups_without_gradient(
    rows: Sequence[SavedCompletion], totals: Sequence[float | None]
) -> dict[str, Any]:
    """Count the groups of a run without any advantage, by their reward.

    Returns:
        the numbers of ``groups``, of those with ``equal`` rewards, and of those with the run's ``best`` or
        ``worst`` reward; ``prompts``: (prompt, times, times sampled, mean reward) of the most frequent.
    """
    groups = _groups(rows, totals)
    known = [total for total in totals if total is not None]
    counts, times, sampled = Counter[str](), Counter[str](), Counter[str]()
    rewards: dict[str, list[float | None]] = {}
    for (_, prompt), group in groups.items():
        sampled[prompt] += 1
        if any(abs(advantage) > 1e-8 for advantage, _ in group):
            continue
        total = group[0][1]
        times[prompt] += 1
        rewards.setdefault(prompt, []).append(total)
        counts[
            "best"
            if total == max(known, default=None)
            else "worst"
            if total == min(known, default=None)
            else "other"
        ] += 1
    prompts = [
        (prompt, count, sampled[prompt], _short(_mean(rewards[prompt])))
        for prompt, count in times.most_common(WITHOUT_GRADIENT)
    ]
    return {
        "groups": len(groups),
        "equal": sum(counts.values()),
        "best": counts["best"],
        "worst": counts["worst"],
        "prompts": prompts,
    }


def group_spread(rows: Sequence[SavedCompletion], totals: Sequence[float | None]) -> dict[str, list[Any]]:
    """Return median, 10 % and 90 % quantile of the groups' mean rewards by step of a run."""
    means: dict[int, list[float]] = {}
    for (step, _), group in _groups(rows, totals).items():
        if (mean := _mean(total for _, total in group)) is not None:
            means.setdefault(step, []).append(mean)
    spread: dict[str, list[Any]] = {"step": [], "low": [], "median": [], "high": []}
    for step, values in sorted(means.items()):
        if len(values) > 1:
            cuts = statistics.quantiles(values, n=10, method="inclusive")
            for name, value in zip(spread, (step, cuts[0], cuts[4], cuts[8]), strict=True):
                spread[name].append(_short(value))
    return spread


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
