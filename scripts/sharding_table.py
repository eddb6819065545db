"""Tables of updates under sharding beside those of one process, in docs/distributed.md. About 40 minutes.

PYTHONPATH=src:tests python scripts/sharding_table.py [DIRECTORY]

Results in DIRECTORY are not computed again. Differences above their limit are errors.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.workers import sharding_worker as worker
from support.workers.launch import run_ranks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"
START, END = "<!-- written by scripts/sharding_table.py -->", "<!-- end -->"
ENGINES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
NUMBERS = (2, 4)
LABELS = {"all": "shared_prefix, accumulation, clipping, a rank without gradient"}
RESUMED = "resumed, beside the whole run"
LIMIT = 2e-5  # float32


class Runs:
    """Results of runs, computed once and kept in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def of(self, engine: str, total: int, *, alone: bool = False) -> dict[str, Any]:
        """Return the weights of all cases, of ``total`` processes or of one with their rows."""
        folder = self.directory / f"{1 if alone else total} of {total}"
        if not (folder / f"{engine}.pt").exists():
            folder.mkdir(parents=True, exist_ok=True)
            cases = [*worker.CASES, *([] if alone else ["resumed"])]
            command = worker.__file__, folder, engine, total, *cases
            given: dict[str, Any] = {"timeout": 1800, "environment": {"PATIENCE": "1800"}}
            done = run_ranks(*command, world_size=1 if alone else total, **given)
            assert done.returncode == 0, done.stderr[-6000:]
            print(engine, folder.name, flush=True)
        return torch.load(folder / f"{engine}.pt", weights_only=True)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max((found[name] - weight).abs().max().item() for name, weight in expected.items())


def cells(runs: Runs, engine: str, dtype: str, above: list[str]) -> list[str]:
    """Return the cells of an engine: differences on 2 and 4 processes, and their limit in bf16.

    In bf16 the limit is twice the rounding error of one process, its difference from float32: two runs whose
    errors are of that size differ by their sum at most.

    Args:
        above: gets a line for each difference above its limit.
    """
    column = []
    for name in [*worker.CASES, "resumed"]:
        differences, limits = [], []
        for total in NUMBERS:
            results = runs.of(engine + dtype, total)
            if isinstance(results[name], str):
                continue
            if name == "resumed":
                expected, limit = results["whole"], 0.0
            else:
                exact = runs.of("ddp", total, alone=True)[name]
                expected = runs.of(engine + dtype, total, alone=True)[name] if dtype else exact
                limit = 2 * difference(expected, exact) if dtype else LIMIT
            differences.append(difference(results[name], expected))
            limits.append(limit)
            if differences[-1] > limit:
                above.append(f"{engine}{dtype}, {name}, {total}: {differences[-1]:.1e} above {limit:.1e}")
        text = ", ".join(f"{value:.0e}" for value in differences) or "refused"
        shown = f" ({min(limits):.0e})" if dtype and differences and name != "resumed" else ""
        column.append(text + shown)
    return column


def main(directory: Path) -> list[str]:
    """Write the tables; returns what is above its limit."""
    runs, above, lines = Runs(directory), [], []
    names = [*(LABELS.get(name, name) for name in worker.CASES), RESUMED]
    for dtype, title in (("", "float32"), (", bf16", "bf16")):
        columns = [cells(runs, engine, dtype, above) for engine in ENGINES]
        lines += ["", f"| {title} | {' | '.join(ENGINES.values())} |", f"|---|{'---|' * len(ENGINES)}"]
        lines += [f"| {' | '.join(row)} |" for row in zip(names, *columns, strict=True)]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text("\n".join([before + START, *lines, "", END]) + after, encoding="utf-8")
    return above


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit("\n".join(main(Path(sys.argv[1] if sys.argv[1:] else folder))) or 0)
