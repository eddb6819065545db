"""The package as it is published: sdist -> wheel -> an installation that runs the lines of README."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.runs import policy, tokenizer

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"
#: What a build reads; a checkout holds environments and results beside it.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel of the sdist without its dependencies, which the tests have."""
    folder = tmp_path_factory.mktemp("distribution")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        source = ROOT / name
        unbuilt = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source, checkout / name, ignore=unbuilt) if source.is_dir() else shutil.copy(
            source, checkout / name
        )

    def build(kind: str, directory: Path) -> Path:
        command = [sys.executable, "-c", BUILD.format(kind), str(folder)]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return folder / done.stdout.splitlines()[-1]

    with tarfile.open(build("sdist", checkout)) as archive:
        archive.extractall(folder, filter="data")
        name = archive.getnames()[0].split("/")[0]
    wheel = build("wheel", folder / name)
    target = folder / "installed"
    install = ["pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=120)
    return target


@pytest.mark.representative("an installation runs README")
@pytest.mark.slow
def test_an_installation_runs_the_lines_of_readme(installed: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    code = "\n".join(blocks)  # the second continues the first
    policy().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    assert "SmolLM2-135M-Instruct" in code and "max_steps=20" in code
    code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "model")
    code = code.replace("max_steps=20", "max_steps=1, use_cpu=True, bf16=False")
    code += "\nimport groupwise; print(groupwise.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(installed)) and (tmp_path / "capitals").is_dir()


def test_an_installation_has_all_files_of_the_package(installed: Path) -> None:
    """The page of the report, the table of metrics and configurations of accelerate are no modules."""
    package = ROOT / "src" / "groupwise"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {"uPlot-LICENSE", "metrics.yaml", "zero3.yaml", "py.typed"} <= {path.name for path in files}
    for path in files:
        assert (installed / "groupwise" / path.relative_to(package)).read_bytes() == path.read_bytes()


def test_the_configurations_of_accelerate_are_those_of_the_examples() -> None:
    shipped = ROOT / "src" / "groupwise" / "commands" / "cli" / "accelerate"
    for path in (ROOT / "examples" / "accelerate").glob("*.yaml"):
        assert (shipped / path.name).read_text() == path.read_text()


def test_the_command_prints_the_version_of_the_package(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "groupwise.cli", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    (folder,) = installed.glob("groupwise-*.dist-info")
    assert folder.name == f"groupwise-{done.stdout.strip()}.dist-info"
    assert "groupwise.generation.vllm.plugin:register" in (folder / "entry_points.txt").read_text()
