"""Output directories as runs leave them: written without training, or read whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from groupwise.reporting.completions import write_parquet

#: Texts that break pages which paste them: the ends of elements, handlers, comments, separators of lines.
HOSTILE = (
    "</script><script>hacked = 1; fetch('/hacked')</script>",
    "<img src=/hacked onerror='hacked = 2'>",
    "<!--<script>",
    "\u2028hacked = 3\u2029//",
    '"});hacked = 4;({"a": "',
    "${hacked = 5} $data $$ %(x)s {{ 6 }} &lt;b&gt; \x00 \x1b[2J \u202e",
    "<svg onload=hacked=7><style>*{display:none}</style><base href=/hacked>",
)

#: (step, prompt, text, reward, advantage)
Row = tuple[int, str, str, float | None, float]


def save_run(
    directory: Path,
    logs: Iterable[dict[str, Any]] = (),
    settings: dict[str, Any] | None = None,
    rows: Iterable[Row] = (),
    evaluated: Iterable[Row] = (),
) -> Path:
    """Write the files of a run; a log without a step has that of its position, beginning with 1."""
    directory.mkdir(parents=True)
    lines = [{"step": at, "time": 1e9 + 30 * at, **log} for at, log in enumerate(logs, 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if settings is not None:
        saved = {"model": "tiny", "world_size": 1, "settings": settings}
        (directory / "settings.json").write_text(json.dumps(saved))
    for folder, given in (("completions", list(rows)), ("completions_eval", list(evaluated))):
        if given:
            steps, prompts, texts, rewards, advantages = map(list, zip(*given, strict=True))
            table = {"step": steps, "prompt": prompts, "completion": texts, "correct": rewards}
            table |= {"advantage": advantages, "parsed": texts}
            write_parquet(table, directory / folder / "completions_00001.parquet", ["correct", "advantage"])
    return directory


def files(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return time of the last change and contents of every file."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}
