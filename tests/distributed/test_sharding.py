"""Sharded parameters on two and four CPU processes: the updates of one process, resuming, the saved model.

A script, sharding_table, runs every case under every kind of sharding, in float32 and bf16.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import get_peft_model
from support.workers import sharding_worker as worker
from support.workers.launch import run_ranks
from transformers import AutoModelForCausalLM

from groupwise import GRPOConfig
from groupwise.commands.cli.checks import memory_finding
from groupwise.commands.cli.launch import CONFIGS

pytestmark = pytest.mark.distributed

#: The ranks of these have different numbers of forward passes.
FORKED = ("forked, gated delta net", "forked, gated delta net, LoRA")

CASES = ("all", "LoRA", "sync_ref_model", "experts", "experts, balanced over the update", *FORKED)


@pytest.mark.representative("FSDP2 trains as one process does")
@pytest.mark.slow
def test_fsdp2_trains_as_one_process_does(tmp_path: Path) -> None:
    cases = (*CASES, "resumed", "refused", "memory")
    done = run_ranks(worker.__file__, tmp_path, "fsdp2", 2, *cases, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = torch.load(tmp_path / "fsdp2.pt", weights_only=True)
    for case in CASES:
        check_updates(results[case], tmp_path / "alone", case)
    saved = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fsdp2" / "saved", dtype=torch.float32
    ).state_dict()
    for name, weight in results["whole"].items():
        assert torch.equal(weight, results["resumed"][name]), name
        assert torch.equal(weight, saved[name]), name
    check_refusals(results)
    check_memory(results["memory"], "fsdp2")


def check_updates(found: Any, output_dir: Path, case: str, total: int = 2) -> None:
    """The weights after the steps of a case are those of one process with the rows of ``total``."""
    assert not isinstance(found, str), found
    alone = worker.update(output_dir, case, processes=1, total=total)
    assert found.keys() == alone.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, alone[name], atol=2e-6, rtol=0, msg=f"{case}, {name}")
    start = worker.CASES[case].get("make_model", worker.worker.policy)().state_dict()
    moved = [(alone[name] - start.get(name, 0)).abs().max() for name in alone if "lora_A" not in name]
    assert max(moved) > 1e-4, case


def check_memory(found: list[int], engine: str) -> None:
    """The doctor computes the bytes of two ranks, of all weights and of an adapter, to 3 %."""
    launch = yaml.safe_load(CONFIGS[engine].read_text())
    config = type("GRPOConfig", (GRPOConfig,), {"world_size": 2})("out", use_cpu=True, bf16=False)
    for measured, adapter in zip(found, (None, worker.CASES["LoRA"]["peft_config"]), strict=True):
        policy = worker.wide() if adapter is None else get_peft_model(worker.wide(), adapter)
        text = memory_finding(policy, config, launch).text
        assert float(text.split(" GB")[0]) * 1e9 == pytest.approx(measured, rel=0.03), (text, measured)


def check_refusals(results: dict[str, Any]) -> None:
    """The weights of an adapter's base are compared on resume, whatever shards them."""
    same, other = results["refused"]
    assert same == ""
    assert "weights of the policy differ from those of checkpoint" in other


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_zero3_trains_the_same_and_compares_loaded_weights_with_the_checkpoint(tmp_path: Path) -> None:
    cases = FORKED[0], "experts"
    done = run_ranks(worker.__file__, tmp_path, "zero3", 2, *cases, "refused", "memory", timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = torch.load(tmp_path / "zero3.pt", weights_only=True)
    check_refusals(results)
    check_memory(results["memory"], "zero3")
    for case in cases:
        check_updates(results[case], tmp_path / "alone", case)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_doctor_computes_the_memory_of_zero2(tmp_path: Path) -> None:
    done = run_ranks(worker.__file__, tmp_path, "zero2", 2, "memory", timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    check_memory(torch.load(tmp_path / "zero2.pt", weights_only=True)["memory"], "zero2")


def of_ranks(directory: Path, processes: int, engine: str, *cases: str) -> dict[str, Any]:
    """Return the weights after the cases of four processes, or of one with the rows of four."""
    folder = directory / f"{processes}"
    folder.mkdir()
    done = run_ranks(worker.__file__, folder, engine, 4, *cases, world_size=processes, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return torch.load(folder / f"{engine}.pt", weights_only=True)


def test_fsdp2_in_bf16_differs_by_rounding_from_one_process(tmp_path: Path) -> None:
    """Two runs whose rounding errors are those of one process differ by the sum of the errors at most.

    The error of one process is its difference from float32.
    """
    cases = "all", "gradient clipping"
    four, one = (of_ranks(tmp_path, number, "fsdp2, bf16", *cases) for number in (4, 1))
    start = worker.worker.policy().state_dict()
    for case in cases:
        exact = worker.update(tmp_path / "alone", case, processes=1, total=4, **worker.UNCLIPPED)
        off, error, moved = (
            max((found[case][name] - expected[name]).abs().max().item() for name in exact)
            for found, expected in ((four, one[case]), (one, exact), (one, start))
        )
        assert error > 2e-6, case  # above the limit of float32
        assert off <= 2 * error < 0.1 * moved, case
