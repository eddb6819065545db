"""Summaries of measurements, and the commit that result files name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str):
    """Import a file of ``benchmarks/``; the folder's ``vllm.py`` must not stay on the path."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


ratio_of_sums, commit = load("common").ratio_of_sums, load("machine").commit


def test_a_long_run_weighs_more_than_a_short_one_in_the_ratio_of_sums():
    summary = ratio_of_sums([[1.0, 2.0], [10.0]], [[4.0, 2.0], [10.0]])
    assert summary == {"ratio": 0.8125, "low": 0.5, "high": 1.0, "runs": 2}


@pytest.mark.parametrize(("one", "other"), [([], []), ([[1.0]], [[1.0], [2.0]])])
def test_a_ratio_needs_as_many_runs_of_both(one, other):
    with pytest.raises(ValueError, match="as many runs of both"):
        ratio_of_sums(one, other)


def test_the_commit_names_changes_but_not_those_of_results(tmp_path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit(tmp_path) == "unknown"
    result, source = tmp_path / "benchmarks/results/step.json", tmp_path / "source.py"
    result.parent.mkdir(parents=True)
    result.write_text("1")
    source.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "--message", "first")
    head = git("rev-parse", "HEAD")
    result.write_text("2")
    assert commit(tmp_path) == head
    source.write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
