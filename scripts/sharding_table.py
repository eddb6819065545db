"""Tables of updates under sharding beside those of one process, in docs/distributed.md. About 40 minutes.

PYTHONPATH=src:tests python scripts/sharding_table.py [DIRECTORY]

Results in DIRECTORY are not computed again. Differences above their limit are errors.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support.workers import sharding_worker as worker
from support.workers.launch import run_ranks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"
START, END = "<!-- written by scripts/sharding_table.py -->", "<!-- end -->"
ENGINES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
NUMBERS = (2, 4)
LABELS = {
    "all": "shared_prefix, accumulation, clipping, a rank without gradient",
    "resumed": "resumed, beside the whole run",
}
LIMIT = 2e-5  # float32
#: Its rounding error on one process is 0.4 of the change of the weights: a limit of twice that shows nothing.
NOT_IN_BF16 = ("forked, gated delta net",)
#: Orders of the same arithmetic on one process.
LAYOUTS = ("padded", "packed")


class Runs:
    """Results of runs, computed once and kept in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.of = cache(self.of)  # type: ignore[method-assign]

    def of(self, engine: str, total: int, *, alone: bool = False) -> dict[str, Any]:
        """Return the weights of all cases, of ``total`` processes or of one with their rows."""
        folder = self.directory / f"{1 if alone else total} of {total}"
        if not (folder / f"{engine}.pt").exists():
            folder.mkdir(parents=True, exist_ok=True)
            cases = [*worker.CASES, *([] if alone else ["resumed"])]
            if alone and "bf16" in engine:
                cases += [f"{case}/{layout}" for case in worker.CASES for layout in LAYOUTS]
            given: dict[str, Any] = {"timeout": 1800, "environment": {"PATIENCE": "1800"}}
            command = worker.__file__, folder, engine, total, *cases
            done = run_ranks(*command, world_size=1 if alone else total, **given)
            assert done.returncode == 0, done.stderr[-6000:]
            print(engine, folder.name, flush=True)
        return torch.load(folder / f"{engine}.pt", weights_only=True)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max((found[name] - weight).abs().max().item() for name, weight in expected.items())


def rounding(runs: Runs, engine: str, name: str) -> float:
    """Return the rounding error of bf16 on one process: the greatest in six orders of the same arithmetic.

    A layout that the model does not support is left out.
    """
    errors = []
    for total in NUMBERS:  # rows of a micro-batch
        exact = runs.of("ddp, float32", total, alone=True)[name]
        found = runs.of(engine, total, alone=True)
        orders = [found[order] for order in (name, *(f"{name}/{layout}" for layout in LAYOUTS))]
        errors += [difference(weights, exact) for weights in orders if not isinstance(weights, str)]
    return max(errors)


def names_of(dtype: str) -> list[str]:
    return [name for name in (*worker.CASES, "resumed") if not (dtype and name in NOT_IN_BF16)]


def cells(runs: Runs, engine: str, dtype: str, above: list[str]) -> list[str]:
    """Return the cells of an engine: differences on 2 and 4 processes, and their limit in bf16.

    In bf16 the limit is twice the rounding error of one process under the same engine: two runs with errors
    of that size differ by their sum at most.

    Args:
        above: gets a line for each difference above its limit.
    """
    column = []
    # On one process the three stages of ZeRO have the same arithmetic.
    alone = ("zero1" if engine.startswith("zero") and dtype else engine if dtype else "ddp") + dtype
    for name in names_of(dtype):
        differences, limit = [], 0.0
        for total in NUMBERS:
            results = runs.of(engine + dtype, total)
            if isinstance(results[name], str):
                above.append(f"{engine}{dtype}, {name}, {total}: {results[name]}")
                continue
            if name == "resumed":
                expected = results["whole"]
            else:
                expected = runs.of(alone, total, alone=True)[name]
                limit = 2 * rounding(runs, alone, name) if dtype else LIMIT
            differences.append(difference(results[name], expected))
            if differences[-1] > limit:
                above.append(f"{engine}{dtype}, {name}, {total}: {differences[-1]:.1e} above {limit:.1e}")
        text = ", ".join(f"{value:.0e}" for value in differences) or "error"
        column.append(f"{text} ({limit:.0e})" if dtype and limit else text)
    return column


def main(directory: Path) -> list[str]:
    """Write the tables; returns what is above its limit."""
    runs, above, lines = Runs(directory), [], []
    for dtype, title in (("", "float32"), (", bf16", "bf16")):
        names = [LABELS.get(name, name) for name in names_of(dtype)]
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
