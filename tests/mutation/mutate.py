"""Show that the tests can fail: ``python tests/mutation/mutate.py [--jobs N] [--only TEXT]``.

Every edit of ``mutations.py`` is made in a copy of ``src/``, one at a time, and the tests that it names run
against that copy. Exit code 1 if an edit survives, breaks the tests instead of failing one, or no longer
matches the source exactly once.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from mutation import Mutation
from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("groupwise")
PASSED, FAILED = 0, 1
HEAVY = ("torch", "transformers.trainer", "transformers.models.llama", "accelerate", "datasets", "hypothesis")
FORK = multiprocessing.get_context("fork")


def matches(mutation: Mutation) -> int:
    return (ROOT / "src" / PACKAGE / mutation.file).read_text().count(mutation.old)


def run_tests(source: Path, selection: tuple[str, ...]) -> tuple[int, str]:
    """Run tests against the package in ``source``, in a fork that has the heavy libraries imported.

    Returns:
        exit code of pytest and its output.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        process = FORK.Process(target=_run_pytest, args=(source, selection, output.name))
        process.start()
        process.join()
        return process.exitcode or 0, output.read()


def _run_pytest(source: Path, selection: tuple[str, ...], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    options = [
        "-x",
        "--timeout=120",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-m",
        "not slow or representative",  # what `make test` runs kills every edit
    ]
    code = pytest.main([*options, "-o", f"pythonpath={source} tests examples scripts", *selection])
    sys.stdout.flush()
    os._exit(code)


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
            code, output = run_tests(source, selection)
            if code == FAILED:
                failures = [line for line in output.splitlines() if line.startswith("FAILED")]
                return "killed", failures[0].split()[1].split("[")[0] if failures else selection[0]
            if code != PASSED:
                return "BROKEN", (output.strip().splitlines() or ["no output"])[-1][:90]
    return "SURVIVED", ""


def baseline(mutations: Sequence[Mutation]) -> str | None:
    """Return the output of the named tests if they fail on an unedited copy or import another copy."""
    with tempfile.TemporaryDirectory() as folder:
        source = copied_source(folder)
        selections = dict.fromkeys(m.rest or m.first for m in mutations)
        for selection in selections:
            code, output = run_tests(source, selection)
            if code != PASSED:
                return output[-2000:]
        for edited in {m.file for m in mutations}:
            (source / PACKAGE / edited).write_text("raise ImportError('edited')\n")
        if run_tests(source, next(iter(selections)))[0] == PASSED:
            return "the tests do not import the copy"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="edits tried at the same time")
    parser.add_argument("--only", default="", help="only edits whose file or fragment contains this")
    options = parser.parse_args()
    os.environ.update(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1"
    )
    for library in HEAVY:  # once, not once per edit
        importlib.import_module(library)
    chosen = [m for m in MUTATIONS if options.only in m.file or options.only in m.old]
    problem = baseline(chosen)
    if problem:
        print(f"without any edit:\n{problem}")
        return 1
    started = time.monotonic()
    verdicts: Counter[str] = Counter()
    with ProcessPoolExecutor(options.jobs, FORK) as pool:
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
