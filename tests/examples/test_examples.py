"""Every example runs, with the steps cut to one; the launch configurations are accepted."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from groupwise import GRPOConfig

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: A module that the others import, and the run that `make quickstart` makes (a step of it is 64 rows).
NOT_RUN = {"smollm2.py", "quickstart.py"}
#: Packages that a machine may lack; the examples that need them have them in their names.
OPTIONAL = ("reasoning_gym", "verifiers", "vllm")
SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name not in NOT_RUN]
CONFIGS = sorted((EXAMPLES / "accelerate").glob("*.yaml"))
LAUNCHED = "distributed.py"


def run(command: list[str], directory: Path, *first_in_path: Path) -> str:
    """Standard output of a command that must succeed."""
    folders = [*map(str, first_in_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "PATH": os.pathsep.join(folders),
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.real_model
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, smollm2_path, tmp_path):
    for package in OPTIONAL:
        if package in script.stem and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
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


#: Stand-ins for the programs of a cluster: srun runs what follows its flags, the others say how they were
#: called; the trainer waits until the server was, because the script stops the server after it.
PROGRAMS = {
    "scontrol": "printf 'node%s\\n' 1 2 3",
    "srun": 'echo "srun $*" >> calls; while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 "$@"',
    "groupwise": 'echo "groupwise $*" >> calls',
    "accelerate": "for _ in {1..200}; do grep -q ^groupwise calls && break; sleep 0.1; done\n"
    'echo "accelerate $*" >> calls',
}


def test_the_slurm_job_serves_on_the_last_node_and_trains_on_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = EXAMPLES / "slurm" / "train_with_vllm.sh"
    assert os.access(script, os.X_OK)
    run(["bash", str(script), "run.yaml"], tmp_path, tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    (serving,) = [call for call in calls if call.startswith("srun") and "vllm-serve" in call]
    (training,) = [call for call in calls if call.startswith("srun") and "accelerate" in call]
    assert "--nodelist=node3 " in serving
    assert "--nodes=2 --ntasks=2 --nodelist=node1,node2 " in training
    (launched,) = [call for call in calls if call.startswith("accelerate")]
    assert "--num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip node1" in launched
    assert "--vllm_server_host node3" in launched
    settings = re.findall(r"--(\w+)", launched.partition("-m groupwise.cli train ")[2])
    assert set(settings) - {"config"} <= set(GRPOConfig.__dataclass_fields__) and len(settings) == 5
    assert (
        "groupwise vllm-serve --config run.yaml --host 0.0.0.0 --port 8000 --tensor_parallel_size 8" in calls
    )
