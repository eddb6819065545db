"""Runs that stop and go on with another number of processes have the history of one that did not stop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.workers import elastic_worker
from support.workers.launch import run_ranks

pytestmark = pytest.mark.distributed

#: A killed run (test_faults.py) samples.
CASES = ("stream", "dynamic", "chosen")
#: (processes, step to stop after).
PLANS = {"whole": [(1, 8)], "elastic": [(2, 2), (4, 5), (1, 8)]}
#: Cases of an engine that shards parameters.
SHARDED = {
    "zero3": ["sampled", "LoRA", "bf16"],
    "fsdp2": ["sampled", "LoRA"],
}


def _run(directory: Path, plan: Sequence[tuple[int, int]], cases: Sequence[str], engine: str = "ddp") -> str:
    directory.mkdir()
    said = ""
    for processes, last in plan:
        done = run_ranks(elastic_worker.__file__, directory, last, engine, *cases, world_size=processes)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        said += done.stderr
    return said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("elastic")
    said = {name: _run(base / name, plan, CASES) for name, plan in PLANS.items()}
    assert "resumed on 4 processes, the checkpoint is of 2: gradient_accumulation_steps=1" in said["elastic"]
    assert "resumed on 1 processes, the checkpoint is of 4: gradient_accumulation_steps=4" in said["elastic"]
    assert "changes the order of prompts" not in said["elastic"]
    return base


@pytest.mark.parametrize("case", CASES)
def test_weights_and_prompts_do_not_depend_on_the_number_of_processes(runs: Path, case: str) -> None:
    whole, elastic = (runs / name / case for name in PLANS)
    expected, found = (torch.load(path / "weights-8.pt") for path in (whole, elastic))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=0, msg=name)
    start = elastic_worker.policy().state_dict()
    assert max((expected[name] - start[name]).abs().max() for name in start) > 100 * 2e-5
    # Step and prompt of every completion: each prompt is consumed by the same step, once.
    assert sorted(_lines(elastic)) == sorted(_lines(whole))


def test_prompts_are_chosen_by_rates_on_any_number_of_processes(runs: Path) -> None:
    whole, elastic = (json.loads((runs / name / "chosen" / "log-8.json").read_text()) for name in PLANS)
    names = ("prompts/skipped_share", "prompts/solve_rate", "prompts/never_sampled")
    assert whole[-1]["prompts/skipped_share"] > 0
    for one, other in zip(whole, elastic, strict=True):
        assert [other[name] for name in names] == pytest.approx([one[name] for name in names])


@pytest.mark.parametrize("case", CASES)
def test_the_log_goes_on(runs: Path, case: str) -> None:
    whole, elastic = (json.loads((runs / name / case / "log-8.json").read_text()) for name in PLANS)
    assert [line["step"] for line in whole] == [line["step"] for line in elastic] == [3, 6, 8]
    for one, other in zip(whole, elastic, strict=True):
        names = {name for name in one if name.startswith("completions/m")} - {"completions/mean_length"}
        for name in {
            *names,
            "num_tokens",
        }:  # sums and extremes are exact in a log that spans two numbers
            assert other[name] == pytest.approx(one[name]), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of one process without sharding."""
    directory = tmp_path_factory.mktemp("alone") / "runs"
    _run(directory, [(1, 6)], SHARDED["fsdp2"])
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("engine", SHARDED)
def test_sharded_parameters_resume_on_another_number_of_processes(
    alone: Path, tmp_path: Path, engine: str
) -> None:
    """Four processes stop in the middle of a generation, and two go on in it and in the next one.

    Of bfloat16, what a checkpoint keeps in float32 is loaded; its updates are compared in test_sharding.py.
    """
    directory = tmp_path / engine
    said = _run(directory, [(4, 2), (2, 6)], SHARDED[engine], engine)
    assert "resumed on 2 processes, the checkpoint is of 4: gradient_accumulation_steps=2" in said
    for case in SHARDED[engine]:
        # The float32 weights of the optimizer are whole, in bf16 too.
        saved = _weights(directory, case, "weights-2")
        for name, weight in _weights(directory, case, "loaded-2").items():
            assert torch.equal(weight, saved[name]), (case, name)
        if case == "bf16":
            continue
        expected = _weights(alone, case, "weights-6")
        for name, weight in _weights(directory, case, "weights-6").items():
            torch.testing.assert_close(weight, expected[name], atol=2e-5, rtol=0, msg=f"{case}, {name}")
        assert sorted(_lines(directory / case)) == sorted(_lines(alone / case))


def _weights(directory: Path, case: str, name: str) -> dict[str, torch.Tensor]:
    return torch.load(directory / case / f"{name}.pt")


def _lines(directory: Path) -> list[str]:
    return (directory / "rows.txt").read_text().splitlines()
