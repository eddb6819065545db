"""The command line started by accelerate, on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]


def launch(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
            *("--main_process_port", "0", "-m", "groupwise.cli", "train", *flags),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )


def test_two_processes_train_one_run(run_file):
    done = launch("--config", run_file(per_device_train_batch_size=2))
    assert done.returncode == 0, done.stderr[-3000:]
    card = Path("out/README.md").read_text()
    assert "| world_size | 2 |" in card and "| generation_batch_size | 4 |" in card


def test_invalid_input_is_reported_by_one_rank(run_file):
    # 4 x 2 processes make 8 completions at a time: no multiple of 3.
    done = launch("--config", run_file(num_generations=3))
    assert done.returncode != 0
    assert "groupwise [rank 0]: error: GRPOConfig" in done.stderr
    assert "nearest valid: generation_batch_size 24, or num_generations 2 or 4" in done.stderr
