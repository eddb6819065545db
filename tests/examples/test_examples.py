"""Every example runs, with the steps cut to one; the launch configurations are accepted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: A module that the others import, and the run that `make quickstart` makes (a step of it is 64 rows).
NOT_RUN = {"smollm2.py", "quickstart.py"}
#: Example -> what it needs beside the packages of the tests.
NEEDS = {
    "vllm_server.py": "vllm",
    "vllm_colocate.py": "vllm",
    "environment_verifiers.py": "verifiers",
    "environment_reasoning_gym.py": "reasoning_gym",
}
SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name not in NOT_RUN]
CONFIGS = sorted((EXAMPLES / "accelerate").glob("*.yaml"))
LAUNCHED = "distributed.py"


def run(command: list[str], directory: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.real_model
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, smollm2_path, tmp_path):
    if script.name in NEEDS and importlib.util.find_spec(NEEDS[script.name]) is None:
        pytest.skip(f"{NEEDS[script.name]} is not installed")
    command, flags = [sys.executable], []
    if script.name == LAUNCHED:
        command += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        command += ["--main_process_port", "0"]
        flags = ["--use_cpu"]
    shown = run(
        [*command, str(script), "--max_steps", "1", "--output_dir", str(tmp_path / "out"), *flags], tmp_path
    )
    assert "'train_runtime'" in shown
    if script.name == LAUNCHED:
        assert "trained on 2 processes" in shown


@pytest.mark.parametrize("script", [*SCRIPTS, EXAMPLES / "quickstart.py"], ids=lambda path: path.stem)
def test_examples_are_short_and_say_what_they_are(script):
    text = script.read_text()
    assert len(text.splitlines()) <= (80 if script.name == "quickstart.py" else 60)
    assert text.startswith('"""')


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_takes_the_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))  # refuses unknown keys at the top
    kinds = {"ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
    assert config.distributed_type.value == kinds[path.stem]
    flags = {action.dest for action in launch_command_parser()._actions}
    nested = [part for part in yaml.safe_load(path.read_text()).values() if isinstance(part, dict)]
    assert {name for part in nested for name in part} <= flags


def test_shell_scripts_parse():
    for script in EXAMPLES.rglob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
        assert os.access(script, os.X_OK)
