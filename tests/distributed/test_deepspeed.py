"""DeepSpeed ZeRO on two CPU processes: the update of one process, resuming, the saved model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.workers.distributed_worker import update
from support.workers.launch import run_ranks
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

CASE = {"beta": 0.5, "loss_type": "dapo"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_as_one_process_does(stage, tmp_path):
    script = Path(__file__).parents[1].joinpath("support", "workers", "deepspeed_worker.py")
    done = run_ranks(script, stage, tmp_path, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    alone = update(tmp_path / "alone", rows=12, micro_batches=2, **CASE)
    for layout in ("padded", "shared_prefix"):
        for name, weight in results[layout].items():
            torch.testing.assert_close(weight, alone[name], atol=2e-6, rtol=1e-5, msg=f"{layout}, {name}")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    for name, weight in results["whole"].items():
        assert torch.equal(weight, results["resumed"][name]), name
        assert torch.equal(weight, saved[name]), name
