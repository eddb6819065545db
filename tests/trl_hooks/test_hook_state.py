"""The buffer of dictionaries, and metrics that hooks change as lists."""

from __future__ import annotations

import io

import pytest
import torch

from groupwise import ConfigError
from groupwise.core.metrics import Max, Mean, Sum
from groupwise.trl_hooks.state import InputsBuffer, ListMetricBuffer


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def filled(**extra):
    buffer = InputsBuffer()
    buffer.fill([{"x": torch.arange(4)[:2], **extra}, {"x": torch.arange(4)[2:], **extra}], 2, 1)
    return buffer


def test_entries_are_handed_out_as_they_are_once_per_iteration():
    buffer = filled()
    first = buffer.take(3)
    assert [part["x"].tolist() for part in first] == [[0, 1], [2, 3], [0, 1]]
    assert first[0] is first[2] and buffer.num_taken == 3
    assert len(buffer.take(5)) == 1 and buffer.is_empty and buffer.num_taken == 4


def test_a_rollback_returns_the_micro_batches_handed_out():
    buffer = filled()
    buffer.take(1)
    buffer.mark()
    buffer.take(2)
    buffer.rollback()
    assert buffer.num_taken == buffer.cursor == 1


def test_a_checkpoint_holds_the_mark_with_keys_of_a_hook():
    buffer = filled(texts=["a", "b"], table={"k": [None, 1.5]}, nothing=None, scale=torch.tensor(2.0))
    buffer.take(1)
    buffer.mark()
    buffer.take(1)
    state = saved_and_loaded(buffer.state_dict())
    assert state["entries"][0]["x"].untyped_storage().nbytes() == 2 * 8  # not the storage behind the view
    other = InputsBuffer()
    other.load_state_dict(state)
    assert other.num_taken == other.cursor == 1
    (entry,) = other.take(1)
    assert entry["x"].tolist() == [2, 3] and entry["texts"] == ["a", "b"] and entry["scale"] == 2.0
    assert entry["table"] == {"k": [None, 1.5]} and entry["nothing"] is None


def test_used_entries_are_not_saved():
    buffer = filled()
    buffer.take(4)
    buffer.mark()
    assert buffer.state_dict() == {"entries": [], "num_iterations": 2, "cursor": 0, "num_taken": 4}


def test_values_that_a_checkpoint_cannot_hold_are_named():
    buffer = filled(rows=[object()])
    buffer.mark()
    with pytest.raises(ConfigError, match=r"inputs\['rows'\] holds a object, which a checkpoint cannot"):
        buffer.state_dict()


def test_a_checkpoint_of_the_other_trainer_is_refused():
    with pytest.raises(ConfigError, match="resume with the trainer that wrote it"):
        InputsBuffer().load_state_dict({"entries": [], "num_iterations": 1, "cursor": 0, "num_groups": 4})


def drained(*ranks):
    """Log lines of all ranks: every rank gathers the same lists."""
    from support.ranks import on_ranks

    return on_ranks(len(ranks), lambda rank, gather, _: ranks[rank].drain(lambda part: gather([part]))[0])


def test_metrics_that_no_hook_touches_keep_their_reduction():
    one, other = ListMetricBuffer(), ListMetricBuffer()
    for buffer, (total, count, largest) in ((one, (1.0, 1.0, 3.0)), (other, (8.0, 3.0, 5.0))):
        buffer.record({"entropy": Mean(torch.tensor(total), count), "longest": Max(largest)})
        buffer.record({"longest": Max(1.0)})
    assert one.lists == {"entropy": [1.0], "longest": [3.0, 1.0]}  # to be read by hooks
    assert drained(one, other) == [{"entropy": 9 / 4, "longest": 5.0}] * 2
    assert one.lists == {}


def test_metrics_of_hooks_are_averaged_over_ranks():
    one, other = ListMetricBuffer(), ListMetricBuffer()
    one.lists["mine"] += [1.0, float("nan"), 2.0]
    other.lists["mine"].append(torch.tensor(6.0))
    assert drained(one, other) == [{"mine": 3.0}] * 2


def test_a_metric_that_one_rank_touches_is_the_mean_of_all_lists():
    one, other = ListMetricBuffer(), ListMetricBuffer()
    for buffer in (one, other):
        buffer.record({"longest": Max(4.0), "reward": Mean(2.0), "dropped": Mean(1.0)})
    one.lists["longest"].append(10.0)
    one.lists["reward"] = [5.0]
    for buffer in (one, other):
        del buffer.lists["dropped"]
    assert drained(one, other) == [{"longest": 6.0, "reward": 3.5}] * 2


def test_a_running_total_that_a_hook_replaces_goes_on_afterwards():
    buffer = ListMetricBuffer()
    buffer.record({"num_tokens": Sum(10.0)})
    buffer.lists["num_tokens"] = [7.0]
    assert drained(buffer) == [{"num_tokens": 7.0}]
    buffer.record({"num_tokens": Sum(10.0)})
    assert drained(buffer) == [{"num_tokens": 20.0}]


def test_lists_return_to_the_mark_and_survive_a_checkpoint():
    buffer = ListMetricBuffer()
    buffer.record({"reward": Mean(1.0)})
    buffer.lists["mine"].append(1.0)
    buffer.mark()
    held = buffer.lists  # a hook may keep the dictionary
    buffer.record({"reward": Mean(3.0)})
    buffer.lists["mine"].append(3.0)
    state = saved_and_loaded(buffer.state_dict())
    buffer.rollback()
    assert held == {"reward": [1.0], "mine": [1.0]}
    other = ListMetricBuffer()
    other.load_state_dict(state)
    for resumed in (buffer, other):
        resumed.lists["mine"].append(2.0)
        assert drained(resumed) == [{"reward": 1.0, "mine": 1.5}]
