"""Summaries of measurements, and the commit that result files name."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
#: Folders whose files can be imported while a script of theirs or a test runs.
SCRIPTS = ("benchmarks", "benchmarks/learning", "examples", "scripts", "tests", "tests/support")


def load(name: str):
    """Import a file of ``benchmarks/``; the folder does not stay on the path."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def package_names(pyproject: str) -> set[str]:
    """Return the import names of what ``pyproject.toml`` requires and the benchmarks compare with."""
    found = {*re.findall(r'"([A-Za-z0-9_-]+)[\[>=<;"]', pyproject), *load("common").PACKAGES}
    return {name.lower().replace("-", "_") for name in found} | set(sys.stdlib_module_names)


def test_no_script_has_the_name_of_a_package():
    """A package that is not installed is looked for in these folders, too, as ``vllm`` by transformers."""
    packages = package_names((ROOT / "pyproject.toml").read_text())
    assert {"vllm", "trl", "torch", "liger_kernel", "json"} <= packages
    on_path = [path for room in SCRIPTS for path in (ROOT / room).iterdir() if path.name != "__pycache__"]
    importable = {path.stem for path in on_path if path.suffix == ".py"}
    assert "common" in importable and not importable & packages


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
