"""``groupwise replay``: output, exit codes, bundles.

Files: ``commands/cli/replay.py``.
"""

from __future__ import annotations

import gzip
import io
import logging

import pytest
import torch

from groupwise.commands.cli import main
from groupwise.records.serialization import host_copy, load


@pytest.fixture
def trained(run_file, capfd) -> None:
    """A run of two steps in ``out``, with a checkpoint after each."""
    settings = {"save_rollouts": True, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    assert main(["train", "--config", run_file(learning_rate=1e-2, **settings)]) == 0
    capfd.readouterr()


@pytest.mark.slow
def test_a_replay_prints_one_line_per_step_and_one_about_the_weights(trained, capfd):
    assert main(["replay", "out", "--step", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("from ") and lines[0].endswith("checkpoint-1")
    assert (
        lines[1].startswith("step 2 equals the record, bit for bit: ")
        and ", 1 loss, 21 gradient norms" in lines[1]
    )
    assert lines[2] == "weights after step 2, beside the checkpoint: equal, bit for bit"
    assert len(lines) == 3


@pytest.mark.slow
def test_a_step_that_leaves_the_record_has_exit_code_1(trained, tmp_path, capfd):
    path = tmp_path / "out" / "rollouts" / "step-000001.rank0.pt.gz"
    values = load(io.BytesIO(gzip.decompress(path.read_bytes())))
    values["computed"][0]["loss"] += 0.5
    content = io.BytesIO()
    torch.save(host_copy(values), content)
    path.write_bytes(gzip.compress(content.getvalue()))
    assert main(["replay", "out", "--step", "1"]) == 1
    assert logging.getLogger("groupwise").level != logging.ERROR  # only during the replay
    assert "step 1 diverges from the record at the loss: recorded " in capfd.readouterr().out


@pytest.mark.slow
def test_a_step_without_a_record_is_said_and_has_exit_code_1(trained, tmp_path, capfd):
    (tmp_path / "out" / "rollouts" / "step-000002.rank0.pt.gz").unlink()
    assert main(["replay", "out", "--step", "2"]) == 1
    assert "step 2 has no record to compare with" in capfd.readouterr().out


@pytest.mark.slow
def test_a_bundle_is_written_and_replayed(trained, tiny, capfd):
    assert main(["replay", "out", "--bundle", "bug.zip"]) == 2
    assert "--bundle needs --step" in capfd.readouterr().err
    assert main(["replay", "out", "--step", "2", "--bundle", "bug.zip"]) == 0
    assert "bug.zip: step 2 in " in capfd.readouterr().out
    assert main(["replay", "bug.zip", "--model", "out/checkpoint-1"]) == 0
    assert "step 2 equals the record, bit for bit" in capfd.readouterr().out
    assert main(["replay", "bug.zip"]) == 2
    assert "not the weights before it" in capfd.readouterr().err
