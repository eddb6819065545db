"""The command line on two processes, started by accelerate or by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.workers.launch import run, run_ranks

from groupwise.commands.cli import main
from groupwise.commands.cli.launch import CONFIGS

pytestmark = pytest.mark.distributed

COMMAND = ["-m", "groupwise.cli", "train", "--config"]


@pytest.mark.slow
def test_two_processes_train_one_run(run_file):
    done = run_ranks(*COMMAND, run_file(per_device_train_batch_size=2), timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_card_of_two_processes()


def assert_card_of_two_processes():
    card = Path("out/README.md").read_text()
    assert "| world_size | 2 |" in card and "| generation_batch_size | 4 |" in card


@pytest.mark.slow
def test_invalid_input_is_reported_by_one_rank(run_file):
    # 4 x 2 processes make 8 completions at a time: no multiple of 3.
    done = run_ranks(*COMMAND, run_file(num_generations=3), timeout=240)
    assert done.returncode != 0
    assert "groupwise [rank 0]: error: GRPOConfig" in done.stderr
    assert "nearest valid: generation_batch_size 24, or num_generations 2 or 4" in done.stderr


@pytest.mark.representative("`train` starts its processes")
@pytest.mark.slow
def test_train_starts_deepspeed_by_a_file_that_says_of_how_many_processes(run_file, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # Gloo alone: DeepSpeed compiles its communication in shared memory, which takes a minute.
    (tmp_path / "site").mkdir()
    without_compiler = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
    (tmp_path / "site" / "sitecustomize.py").write_text(without_compiler)
    monkeypatch.syspath_prepend(tmp_path / "site")
    own = tmp_path / "own.yaml"
    settings = {**yaml.safe_load(CONFIGS["zero3"].read_text()), "use_cpu": True, "num_processes": 2}
    own.write_text(yaml.safe_dump(settings))
    launch = ["--accelerate_config", own]
    config = run_file(per_device_train_batch_size=2, save_strategy="steps", save_steps=1, max_steps=1)
    done = run(*COMMAND, config, *launch, "--main_process_port", "0", timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    states = Path("out").glob("checkpoint-1/global_step1/zero_pp_rank_*_optim_states.pt")
    assert len([*states]) == 2  # a part of ZeRO's optimizer state from each process
    assert_card_of_two_processes()


@pytest.mark.slow
def test_train_ends_with_the_exit_code_of_its_processes(run_file, tmp_path, monkeypatch):
    # They fail before they import anything.
    (tmp_path / "site").mkdir()
    fails = 'import os\nif "RANK" in os.environ:\n    os._exit(2)\n'
    (tmp_path / "site" / "sitecustomize.py").write_text(fails)
    monkeypatch.syspath_prepend(tmp_path / "site")
    launch = ["--num_processes", "2", "--main-process-port", "0"]  # ddp
    done = run(*COMMAND, run_file(), *launch, timeout=240)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "ended with exit code 2" in done.stderr and "ChildFailedError" not in done.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--accelerate_config", "zero"],
            "fsdp2, zero2, zero3, or a path of a YAML file; nearest: zero",
        ),
        (["--accelerate_config", "no/such.yaml"], "no such configuration or file"),
        (["--num_processes", "0"], "--num_processes 0: allowed: 1 or more"),
    ],
)
def test_invalid_launch_options_start_nothing(run_file, capsys, flags, message):
    assert main(["train", "--config", run_file(), *flags]) == 2
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_launch_options_below_another_launcher_are_refused(run_file, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--config", run_file(), "--num_processes", "2"]) == 2
    assert "a launcher started this process (RANK=1)" in capsys.readouterr().err


def test_help_lists_the_launch_options_and_starts_nothing(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--num_processes", "2", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith("usage: groupwise train [flags]")
    assert "--main_process_port" in shown and "groupwise train run.yaml" in shown
