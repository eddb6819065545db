"""Proof that the tests of the core can fail: ``python tests/reference/mutate.py [--jobs N] [--only TEXT]``.

Every edit of ``mutations.py`` is made in a copy of ``src/``, one at a time, and the tests run against that
copy: first the ones likely to notice, then all of ``tests/reference`` and ``tests/core``. Exit code 1 if an
edit survives, breaks the tests instead of failing one, or no longer matches the source exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
CORE = Path("groupwise") / "core"
EVERYTHING = ("tests/reference", "tests/core")
# It compares the list with the unedited source, so it says nothing about an edit.
NOT_A_JUDGE = "tests/reference/test_mutations.py"
PASSED, FAILED = 0, 1


def matches(mutation: Mutation) -> int:
    return (ROOT / "src" / CORE / mutation.file).read_text().count(mutation.old)


def run_tests(source: Path, selection: tuple[str, ...]) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=line",
    ]
    command += ["-o", f"pythonpath={source} tests examples scripts", f"--ignore={NOT_A_JUDGE}", *selection]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def copied_source(folder: str) -> Path:
    source = Path(folder) / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return source


def judge(mutation: Mutation) -> tuple[str, str]:
    """(verdict, what decided it)."""
    found = matches(mutation)
    if found != 1:
        return "STALE", f"the fragment occurs {found} times"
    with tempfile.TemporaryDirectory() as folder:
        source = copied_source(folder)
        target = source / CORE / mutation.file
        target.write_text(target.read_text().replace(mutation.old, mutation.new))
        for selection in (mutation.first, EVERYTHING):
            result = run_tests(source, selection)
            if result.returncode == FAILED:
                failures = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
                return "killed", failures[0].split()[1].split("[")[0] if failures else selection[0]
            if result.returncode != PASSED:
                return "BROKEN", result.stdout.strip().splitlines()[-1][:90]
    return "SURVIVED", ""


def baseline() -> str | None:
    """What the unedited copy says, if anything but success; also that it is the copy that gets imported."""
    with tempfile.TemporaryDirectory() as folder:
        source = copied_source(folder)
        result = run_tests(source, EVERYTHING)
        if result.returncode != PASSED:
            return result.stdout[-2000:]
        (source / CORE / "ratios.py").write_text("raise ImportError('edited')\n")
        return (
            "the tests do not import the copy" if run_tests(source, EVERYTHING).returncode == PASSED else None
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="edits tried at the same time")
    parser.add_argument("--only", default="", help="only edits whose file or fragment contains this")
    options = parser.parse_args()
    problem = baseline()
    if problem:
        print(f"without any edit:\n{problem}")
        return 1
    chosen = [m for m in MUTATIONS if options.only in m.file or options.only in m.old]
    started = time.monotonic()
    verdicts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutation, (verdict, reason) in zip(chosen, pool.map(judge, chosen), strict=True):
            verdicts[verdict] += 1
            print(
                f"{verdict:8} {mutation.file:14} {mutation.old} -> {mutation.new or '(nothing)'}", flush=True
            )
            print(f"{'':23} {reason}", flush=True)
    seconds = time.monotonic() - started
    counts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
    print(f"{len(chosen)} edits in {seconds:.0f} s: {counts}")
    return 0 if verdicts["killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
