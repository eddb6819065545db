"""Table of updates under sharding beside those of one process, in docs/distributed.md. About ten minutes.

PYTHONPATH=src:tests python scripts/sharding_table.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from support.workers import sharding_worker as worker
from support.workers.launch import run_ranks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"
START, END = "<!-- written by scripts/sharding_table.py -->", "<!-- end -->"
ENGINES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}


def cell(found: dict[str, torch.Tensor] | str, expected: dict[str, torch.Tensor]) -> str:
    """Return the greatest difference of a weight; a string is the error of a combination that is refused."""
    if isinstance(found, str):
        return "refused"
    return f"{max((found[name] - weight).abs().max().item() for name, weight in expected.items()):.0e}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        alone = {name: worker.update(output / "alone", name, processes=1) for name in worker.CASES}
        columns: dict[str, list[str]] = {}
        for engine in ENGINES:
            done = run_ranks(worker.__file__, output, engine, *worker.CASES, timeout=550)
            assert done.returncode == 0, done.stderr[-6000:]
            results = torch.load(output / f"{engine}.pt", weights_only=True)
            cells = [cell(results[name], alone[name]) for name in worker.CASES]
            columns[engine] = [*cells, cell(results["resumed"], results["whole"])]
    names = [*worker.CASES, "resumed, beside the whole run"]
    names[names.index("all")] = "shared_prefix, accumulation, clipping, a rank without gradient"
    lines = [f"| | {' | '.join(ENGINES.values())} |", f"|---|{'---|' * len(ENGINES)}"]
    lines += [f"| {' | '.join(row)} |" for row in zip(names, *columns.values(), strict=True)]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text("\n".join([before + START, "", *lines, "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
