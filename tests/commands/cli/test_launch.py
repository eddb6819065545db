"""The command line on two processes, started by accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.workers.launch import run, run_ranks

pytestmark = pytest.mark.distributed

COMMAND = ["-m", "groupwise.cli", "train", "--config"]


def test_two_processes_train_one_run(run_file):
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    config = run_file(per_device_train_batch_size=2)
    done = run(*launcher, "--main_process_port", "0", *COMMAND, config, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    card = Path("out/README.md").read_text()
    assert "| world_size | 2 |" in card and "| generation_batch_size | 4 |" in card


def test_invalid_input_is_reported_by_one_rank(run_file):
    # 4 x 2 processes make 8 completions at a time: no multiple of 3.
    done = run_ranks(*COMMAND, run_file(num_generations=3), timeout=240)
    assert done.returncode != 0
    assert "groupwise [rank 0]: error: GRPOConfig" in done.stderr
    assert "nearest valid: generation_batch_size 24, or num_generations 2 or 4" in done.stderr
