"""FSDP2 on two CPU processes: the updates of one process, resuming, the saved model.

A script, sharding_table, runs every case under every kind of sharding.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import sharding_worker as worker
from support.workers.launch import run_ranks
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed

CASES = ("all", "LoRA", "sync_ref_model")


def test_fsdp2_trains_as_one_process_does(tmp_path: Path) -> None:
    done = run_ranks(worker.__file__, tmp_path, "fsdp2", *CASES, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = torch.load(tmp_path / "fsdp2.pt", weights_only=True)
    for case in CASES:
        assert not isinstance(results[case], str), results[case]
        alone = worker.update(tmp_path / "alone", case, processes=1)
        assert results[case].keys() == alone.keys()
        for name, weight in results[case].items():
            torch.testing.assert_close(weight, alone[name], atol=2e-6, rtol=0, msg=f"{case}, {name}")
        start = worker.worker.policy().state_dict()
        moved = [(alone[name] - start.get(name, 0)).abs().max() for name in alone if "lora_A" not in name]
        assert max(moved) > 1e-4, case
    saved = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fsdp2" / "saved", dtype=torch.float32
    ).state_dict()
    for name, weight in results["whole"].items():
        assert torch.equal(weight, results["resumed"][name]), name
        assert torch.equal(weight, saved[name]), name
    check_refusals(results)


def check_refusals(results: dict[str, Any]) -> None:
    """The weights of an adapter's base are compared on resume, whatever shards them."""
    same, other = results["refused"]
    assert same == ""
    assert "weights of the policy differ from those of checkpoint" in other


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_zero_compares_loaded_weights_with_the_checkpoint(tmp_path: Path, engine: str) -> None:
    done = run_ranks(worker.__file__, tmp_path, engine, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    check_refusals(torch.load(tmp_path / f"{engine}.pt", weights_only=True))
