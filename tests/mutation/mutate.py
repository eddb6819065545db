"""Show that the tests can fail: ``python tests/mutation/mutate.py [--jobs N] [--only TEXT]``.

Every edit of ``mutations.py`` is made in a copy of ``src/``, one at a time, and the tests that it names run
against that copy. Exit code 1 if an edit survives, breaks the tests instead of failing one, or no longer
matches the source exactly once.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutation import Mutation
from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("groupwise")
PASSED, FAILED = 0, 1


def matches(mutation: Mutation) -> int:
    return (ROOT / "src" / PACKAGE / mutation.file).read_text().count(mutation.old)


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
    command += ["-o", f"pythonpath={source} tests examples scripts", *selection]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def copied_source(folder: str) -> Path:
    source = Path(folder) / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return source


def judge(mutation: Mutation) -> tuple[str, str]:
    """Return the verdict and its reason."""
    found = matches(mutation)
    if found != 1:
        return "STALE", f"the fragment occurs {found} times"
    with tempfile.TemporaryDirectory() as folder:
        source = copied_source(folder)
        target = source / PACKAGE / mutation.file
        target.write_text(target.read_text().replace(mutation.old, mutation.new))
        for selection in filter(None, (mutation.first, mutation.rest)):
            result = run_tests(source, selection)
            if result.returncode == FAILED:
                failures = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
                return "killed", failures[0].split()[1].split("[")[0] if failures else selection[0]
            if result.returncode != PASSED:
                return "BROKEN", result.stdout.strip().splitlines()[-1][:90]
    return "SURVIVED", ""


def baseline(mutations: Sequence[Mutation]) -> str | None:
    """Return the output of the named tests if they fail on an unedited copy or import another copy."""
    with tempfile.TemporaryDirectory() as folder:
        source = copied_source(folder)
        selections = dict.fromkeys(m.rest or m.first for m in mutations)
        for selection in selections:
            result = run_tests(source, selection)
            if result.returncode != PASSED:
                return result.stdout[-2000:]
        for edited in {m.file for m in mutations}:
            (source / PACKAGE / edited).write_text("raise ImportError('edited')\n")
        if run_tests(source, next(iter(selections))).returncode == PASSED:
            return "the tests do not import the copy"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="edits tried at the same time")
    parser.add_argument("--only", default="", help="only edits whose file or fragment contains this")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.only in m.file or options.only in m.old]
    problem = baseline(chosen)
    if problem:
        print(f"without any edit:\n{problem}")
        return 1
    started = time.monotonic()
    verdicts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutation, (verdict, reason) in zip(chosen, pool.map(judge, chosen), strict=True):
            verdicts[verdict] += 1
            print(
                f"{verdict:8} {mutation.file:26} {mutation.old} -> {mutation.new or '(nothing)'}", flush=True
            )
            print(f"{'':35} {reason}", flush=True)
    seconds = time.monotonic() - started
    counts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
    print(f"{len(chosen)} edits in {seconds:.0f} s: {counts}")
    return 0 if verdicts["killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
