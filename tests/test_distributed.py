"""Rows of a rank, and agreement of ranks in one process; several processes are in tests/distributed."""

from __future__ import annotations

import re

import pytest
import torch
from accelerate import Accelerator

import groupwise.distributed
from groupwise.distributed import (
    RankSlice,
    RankStages,
    any_rank,
    broadcast_from_first,
    gather_or_raise,
    gathers_in_forwards,
    is_sharded,
    largest,
    rows_of_rank,
)
from groupwise.errors import ConfigError, TrainingError
from groupwise.threads import TimeLimitError


def test_the_rows_of_all_ranks_are_disjoint_and_in_rank_order():
    assert [list(range(6))[rows_of_rank(rank, 2)] for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("rank", "rows", "prompts"), [(0, range(0, 2), [0]), (1, range(2, 4), [0, 1]), (2, range(4, 6), [1])]
)
def test_a_group_may_be_split_over_ranks(rank, rows, prompts):
    """Two prompts of three completions: six rows, of which each of three ranks has two."""
    own = RankSlice(num_generations=3, rank=rank, world_size=3)
    assert own.rows(2) == rows and own.prompts(2) == prompts


def test_one_process_agrees_with_itself_and_shards_nothing():
    accelerator = Accelerator(cpu=True)
    assert any_rank(accelerator, True) and not any_rank(accelerator, False)
    assert largest(accelerator, 3) == 3 and not gathers_in_forwards(accelerator)
    assert not is_sharded(accelerator)
    with pytest.raises(ZeroDivisionError):
        broadcast_from_first(lambda: 1 / 0, True, 1)


def test_the_message_of_a_failure_has_the_stages_of_other_ranks(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ranks = [RankStages(rank, world_size=3, timeout=60) for rank in range(3)]
        for rank, phase in zip(ranks, ("reward", "reward", "generate"), strict=True):
            rank.enter(f"{phase} of step 3")
        failed = "failed in reward of step 3: ValueError: no judge"
        found = ranks[0].describe_failure(ValueError("no\njudge"))
        assert found == f"rank 0 {failed}. Others: rank 2: generate of step 3; rank 1: reward of step 3"
        assert f"Others: rank 0: {failed}; rank 2: gen" in ranks[1].describe_failure(RuntimeError("closed"))
    finally:
        torch.distributed.destroy_process_group()


def test_without_a_process_group_a_failure_has_its_own_stage(monkeypatch):
    monkeypatch.setattr("groupwise.distributed.Thread.join", lambda self, seconds: None)
    stages = RankStages(0, world_size=2, timeout=60)
    assert (
        stages.describe_failure(ValueError("x")) == "rank 0 failed in start: ValueError: x. Others: no answer"
    )


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (ConfigError("no rows"), ConfigError),
        (TimeLimitError(2.0, "tool_timeout"), OSError),  # its constructor takes no message
        (KeyError("answer"), TrainingError),  # of any class: it may not be picklable
    ],
)
def test_the_error_of_a_rank_is_raised_on_the_others_whatever_its_class_takes(monkeypatch, failure, raised):
    sent = []
    monkeypatch.setattr(groupwise.distributed, "gather_object", lambda given: sent.extend(given) or given)
    with pytest.raises(type(failure)) as own:
        gather_or_raise(None, failure)
    assert own.value is failure
    monkeypatch.setattr(groupwise.distributed, "gather_object", lambda given: [*given, *sent])
    with pytest.raises(raised, match=re.escape(f"rank 1: {sent[0][1]}")):
        gather_or_raise(None, None)
