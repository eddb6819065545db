"""Two gloo processes against one: the same update, the same evaluation, checkpoints of both."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.runs import with_all_rows
from support.workers.distributed_worker import (
    OBJECTIVES,
    UPDATES,
    evaluate,
    logs_by_source,
    policy,
    sampled_run,
    update,
)
from support.workers.launch import run_ranks

pytestmark = pytest.mark.distributed

#: Every setting changes some weight by more than this.
SMALLEST_EFFECT = 1e-5
SCRIPT = Path(__file__).parents[1].joinpath("support", "workers", "distributed_worker.py")
TIMEOUT = 300  # seconds

_TIMING = re.compile(
    r"(eval_)?(time|memory)/.*|step_time|.*_runtime|.*_per_second|eval_model_preparation_time|train_loss"
)


def _launch(*arguments: str | Path) -> None:
    """Run the worker; on failure its output is the message."""
    done = run_ranks(SCRIPT, *arguments, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def _launched_once(factory: pytest.TempPathFactory, mode: str) -> Path:
    """The directory with the results of a launch that all test processes share."""
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / mode
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            begun = directory.with_suffix(".begun")
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir()
            _launch(mode, begun)
            begun.rename(directory)
    return directory


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of two processes by case."""
    return torch.load(_launched_once(tmp_path_factory, "updates") / "updates.pt")


def _assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal within less than any setting changes; runs that stand still would agree as well."""
    start = policy().state_dict()
    assert max(float((ours[name] - start[name]).abs().max()) for name in start) > 1e-3
    for name in start:  # Adam divides rounding of a gradient near 0 by its own size
        torch.testing.assert_close(ours[name], theirs[name], atol=0.8 * SMALLEST_EFFECT, rtol=0)


@pytest.mark.representative("two processes make the update of one")
@pytest.mark.slow
@pytest.mark.parametrize("case", list(UPDATES))
def test_two_processes_make_the_update_of_one(tmp_path: Path, updates: Any, case: str) -> None:
    # The single process takes the rows of both in micro-batches of the same size: so the update is the same
    # by definition also for "bnpo", whose normaliser is that of the micro-batch.
    settings = dict(UPDATES[case])
    if "kind" in settings:  # against the computation of all rows, where and when they were sampled
        settings.update(kind=with_all_rows(settings["kind"]), sequence_layout="padded")
    single = update(tmp_path, rows=6, micro_batches=2 * settings.get("accumulate", 1), **settings)
    _assert_close(updates[case], single)


@pytest.mark.representative("two processes make the update of one")
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in OBJECTIVES if name != "bnpo"])
def test_two_processes_make_the_update_of_one_large_batch(tmp_path: Path, updates: Any, case: str) -> None:
    single = update(tmp_path, rows=12, micro_batches=1, **UPDATES[case])
    _assert_close(updates[case], single)


@pytest.mark.representative("two processes make the update of one")
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in UPDATES if name.partition(",")[0] not in OBJECTIVES])
def test_every_setting_changes_the_update(updates: Any, case: str) -> None:
    # Otherwise the agreement above would be one of runs without it.
    assert any(
        (updates[case][name] - updates["dapo"][name]).abs().max() > SMALLEST_EFFECT
        for name in updates["dapo"]
    )


@pytest.mark.representative("two processes make the update of one")
@pytest.mark.slow
def test_two_processes_step_in_a_window_without_gradient_as_if_they_had_computed_all_rows(
    updates: Any,
) -> None:
    # The optimizer steps: Adam's momentum and the weight decay of the third step.
    _assert_close(updates["skip_zero_advantage=True"], updates["skip_zero_advantage=False"])


@pytest.mark.slow
def test_metrics_by_source_are_those_of_one_process(updates: Any, tmp_path: Path) -> None:
    logs, sources = logs_by_source(tmp_path, micro_batches=4)
    found = updates["by source"]
    for generation, (first, second) in enumerate(zip(*found["sources"], strict=True)):
        assert first + second == sources[generation] and set(first) != set(second)
    names = {f"{name}/{source}" for name in ("reward", "entropy") for source in ("odd", "even")}
    assert names <= logs[0].keys() & logs[2].keys() and logs[0]["entropy/odd"] != logs[0]["entropy/even"]
    for one, two in zip(logs[:3], found["logs"][:3], strict=True):
        own = {name: value for name, value in one.items() if name.endswith(("/odd", "/even"))}
        assert {name: two.get(name) for name in own} == pytest.approx(own)


def test_iterations_on_two_processes_have_one_policy_and_one_reward_model(tmp_path: Path) -> None:
    _launch("iterative", tmp_path)
    whole = [torch.load(tmp_path / f"whole_{rank}.pt") for rank in (0, 1)]
    assert _same(whole[0]["weights"], whole[1]["weights"])
    assert whole[0]["examples"] == whole[1]["examples"]
    # Each process labels three prompts of an iteration; examples of both are in the history of both.
    prompts = {re.match(r"say x*\d", text)[0] for text, *_ in whole[0]["examples"]}
    assert len(prompts) > 3
    # A run that ended before the reward model was trained repeats the steps since its checkpoint.
    for rank in (0, 1):
        resumed = torch.load(tmp_path / f"resumed_{rank}.pt")
        assert _same(resumed["weights"], whole[rank]["weights"])
        assert resumed["examples"] == whole[rank]["examples"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on two processes."""
    return _launched_once(tmp_path_factory, "train")


def _history(directory: Path, name: str) -> list[dict[str, Any]]:
    lines = json.loads((directory / f"{name}.json").read_text())
    return [{k: v for k, v in line.items() if not _TIMING.fullmatch(k)} for line in lines]


def test_a_launched_run_trains_evaluates_and_saves(trained: Path) -> None:
    history = _history(trained, "whole")
    assert [line["step"] for line in history if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in history if "eval_reward" in line] == [2, 4, 6]
    assert sorted(path.name for path in (trained / "run").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in range(1, 7)
    ]
    start, end = policy().state_dict(), torch.load(trained / "whole.pt")
    assert not _same(start, end)
    files = {path.name for path in (trained / "run" / "checkpoint-3").iterdir()}
    assert {"groupwise_state_0.pt", "groupwise_state_1.pt", "rng_state_0.pth", "rng_state_1.pth"} <= files


def test_metrics_that_one_process_logs_reach_the_log(trained: Path) -> None:
    # Steps 1 and 5 begin a generation, and only then are the rewards called.
    logged = {line["step"]: line for line in _history(trained, "whole") if "loss" in line}
    assert [step for step, line in logged.items() if "only_second" in line] == [1, 5]
    assert logged[1]["only_second"] == 2.0
    assert (logged[1]["of_rank_0"], logged[1]["of_rank_1"]) == (0.0, 1.0)


def test_processes_sample_different_completions(trained: Path) -> None:
    first, second = (json.loads((trained / f"seen_{rank}.json").read_text()) for rank in (0, 1))
    assert [len(texts) for texts in first] == [len(texts) for texts in second] == [8, 8]
    for one, other in zip(first, second, strict=True):
        assert set(one) & set(other) <= {""}  # a completion may be its end token alone
    assert set(first[0]) & set(first[1]) <= {""}


def test_every_process_names_the_rank_and_the_function_whose_reward_fails(trained: Path) -> None:
    first, second = ((trained / f"reward_error_{rank}.txt").read_text() for rank in (0, 1))
    assert second.startswith("reward function 'fails_on_second' raised KeyError: 'answer' (")
    assert first == f"rank 1: {second}"


def test_evaluation_counts_every_row_once(trained: Path, tmp_path: Path) -> None:
    # 10 rows in batches of 2 x 3: the second batch has 4 rows and 2 that only fill it up.
    # Prompt i is answered with i + 1 and i + 2 vowels: the mean reward is (1 + 2 + 3 + 4 + 5) / 5 + 1 / 2.
    two = json.loads((trained / "evaluation.json").read_text())
    one = evaluate(tmp_path, rows=10)
    assert two["eval_reward"] == pytest.approx(3.5)
    assert two["eval_pass@1"] == pytest.approx(7 / 10)  # 3 vowels or more
    # The group of the second prompt is on both processes; its answers have 2 and 3 vowels.
    assert (two["eval_reward/say x1"], two["eval_pass@1/say x1"]) == (2.5, 0.5)
    assert abs(two["eval_loss"]) > 1e-3
    own = {k: v for k, v in one.items() if not _TIMING.fullmatch(k)}
    # The spread of rewards is one of each batch by definition, and batches differ.
    own = {k: v for k, v in own.items() if k not in ("eval_rewards/vowels/std", "eval_reward_std")}
    assert {k: two.get(k) for k in own} == pytest.approx(own, abs=1e-6)


def test_evaluation_of_a_stream_is_that_of_the_same_rows_at_hand(trained: Path) -> None:
    found, expected = (
        {k: v for k, v in json.loads((trained / name).read_text()).items() if not _TIMING.fullmatch(k)}
        for name in ("evaluation_of_stream.json", "evaluation.json")
    )
    assert found == expected


_ALONE = {"eval_strategy": "no"}  # an evaluation batch of 3 rows is half a group when there is one process


def test_a_launched_run_resumes(trained: Path, tmp_path: Path) -> None:
    trainer, _ = sampled_run(tmp_path / "single", **_ALONE)
    trainer.args.max_steps = 1
    trainer.train()
    _launch("resume", trained, tmp_path / "single" / "checkpoint-1")
    for rank in (0, 1):
        refusal = (trained / f"refused_{rank}.txt").read_text()
        assert "by 1 processes, and 2 with per_device_train_batch_size=4 cannot form its 4 comp" in refusal
        assert refusal.endswith("start 1 processes, or set per_device_train_batch_size to a divisor of 2")
        locked = (trained / f"locked_{rank}.txt").read_text()
        assert "used by another run" in locked
    assert _same(torch.load(trained / "resumed.pt"), torch.load(trained / "whole.pt"))
    assert _history(trained, "resumed") == _history(trained, "whole")
