"""The buffer of dictionaries, and metrics that hooks change as lists.

Files: ``trl_hooks/state.py``.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.fakes.ranks import on_ranks
from support.serialization import reloaded

from groupwise import ConfigError, GRPOConfig
from groupwise.core.metrics import Max, Mean, Min, Sum
from groupwise.data.prompt_source import PromptSource, RankSlice
from groupwise.records.serialization import host_copy
from groupwise.trl_hooks.state import InputsBuffer, ListMetricBuffer


def filled(step=4, **extra):
    buffer = InputsBuffer(step=step)
    buffer.fill([{"x": torch.arange(4)[:2], **extra}, {"x": torch.arange(4)[2:], **extra}], 2)
    return buffer


def test_the_step_selects_an_entry_once_per_iteration():
    buffer = filled()
    assert buffer.is_empty  # as in TRL: at the step of the generation, samples are generated again
    first, seen = buffer.current, [buffer.current["x"].tolist()]
    for buffer.step in (5, 6, 7):
        assert not buffer.is_empty
        seen.append(buffer.current["x"].tolist())
    assert seen == [[0, 1], [2, 3], [0, 1], [2, 3]]
    buffer.step = 6
    assert buffer.current is first  # the object that a hook may have changed
    for buffer.step in (3, 8):
        assert buffer.is_empty


def numbers(count):
    return PromptSource(lambda epoch: [{"prompt": str(i)} for i in range(count)], RankSlice(2))


def test_rows_are_given_once_per_micro_batch_and_again_after_a_resume():
    prompts, buffer = numbers(6), InputsBuffer()

    config = GRPOConfig("x", per_device_train_batch_size=4, num_generations=2, num_iterations=3)

    def given(source, kept):
        return [row["prompt"] for row in kept.next_rows(source, config)]

    assert [given(prompts, buffer) for _ in range(4)] == [["0", "0", "1", "1"]] * 3 + [["2", "2", "3", "3"]]
    source, resumed = numbers(6), InputsBuffer()
    source.restore(prompts.snapshot())
    resumed.restore(reloaded(buffer.snapshot()))
    resumed.read_rows_again(source, config)
    assert [given(source, resumed) for _ in range(3)] == [["2", "2", "3", "3"]] * 2 + [["4", "4", "5", "5"]]


def test_a_checkpoint_holds_the_mark_with_keys_of_a_hook():
    buffer = filled(texts=["a", "b"], table={"k": [None, 1.5]}, nothing=None, scale=torch.tensor(2.0))
    buffer.step = 5
    mark = buffer.snapshot()
    buffer.step = 6
    state = reloaded(mark)
    assert state["entries"][0]["x"].untyped_storage().nbytes() == 2 * 8  # not the storage behind the view
    other = InputsBuffer()
    other.restore(state)
    assert other.step == 5 and not other.is_empty
    entry = other.current
    assert entry["x"].tolist() == [2, 3] and entry["texts"] == ["a", "b"] and entry["scale"] == 2.0
    assert entry["table"] == {"k": [None, 1.5]} and entry["nothing"] is None
    buffer.restore(mark)
    assert buffer.step == 5


def test_used_entries_are_not_saved():
    buffer = filled()
    buffer.step = 8
    assert buffer.snapshot()["entries"] == []


def test_values_that_a_checkpoint_cannot_hold_are_named():
    buffer = filled(rows=[object()])
    with pytest.raises(ConfigError, match=r"\['entries'\]\[0\]\['rows'\]\[0\] holds a object, which a ch"):
        host_copy(buffer.snapshot())


def test_a_checkpoint_of_the_other_trainer_is_refused():
    with pytest.raises(ConfigError, match="resume with the trainer that wrote it"):
        InputsBuffer().restore({"entries": [], "num_iterations": 1, "cursor": 0, "num_groups": 4})


def drained(*runs):
    """Log lines of all ranks: a buffer each, to which the functions ``runs`` have added metrics."""

    def log_line(rank, gather, _):
        buffer = ListMetricBuffer()
        buffer.gather = gather
        runs[rank](buffer)
        return buffer.drain(lambda part: gather([part]))[0]

    return on_ranks(len(runs), log_line)


def test_a_record_is_merged_over_ranks_and_the_log_is_the_mean_over_records():
    def run(total, count, largest, buffer):
        buffer.record({"entropy": Mean(torch.tensor(total), count), "longest": Max(largest)})
        buffer.record({"entropy": Mean(2.0), "longest": Max(1.0)})
        assert buffer.lists == {"entropy": [9 / 4, 2.0], "longest": [5.0, 1.0]}  # to be read by hooks

    lines = drained(partial(run, 1.0, 1.0, 3.0), partial(run, 8.0, 3.0, 5.0))
    assert lines == [{"entropy": (9 / 4 + 4 / 2) / 2, "longest": (5.0 + 1.0) / 2}] * 2


def test_a_metric_that_a_rank_lacks_in_one_record_stays_with_its_record():
    def run(shortest, buffer):
        for value in shortest:
            buffer.record({"rows": Mean(4.0)} | ({} if value is None else {"shortest": Min(value)}))

    lines = drained(partial(run, [4.0, None]), partial(run, [6.0, 8.0]))
    assert lines == [{"rows": 4.0, "shortest": (4.0 + 8.0) / 2}] * 2


def test_the_loss_rates_sums_and_metrics_of_the_user_keep_their_reduction():
    def run(buffer):
        buffer.record({"loss": Mean(1.0, 0.5), "tokens_per_second": Mean(90.0, 1.0), "num_tokens": Sum(3.0)})
        buffer.record({"loss": Mean(3.0, 1.0), "tokens_per_second": Mean(30.0, 2.0), "num_tokens": Sum(4.0)})
        buffer.record_metric("custom/longest", 3.0, "max")
        buffer.record_metric("custom/longest", 5.0, "max")
        assert not buffer.lists

    expected = {"loss": 4 / 1.5, "tokens_per_second": 40.0, "num_tokens": 7.0, "custom/longest": 5.0}
    assert drained(run) == [expected]


def test_metrics_of_hooks_are_averaged_over_ranks():
    def run(values, buffer):
        buffer.lists["mine"] += values

    assert (
        drained(partial(run, [1.0, torch.nan, 2.0]), partial(run, [torch.tensor(6.0)])) == [{"mine": 3}] * 2
    )


def test_a_metric_that_one_rank_touches_is_the_mean_of_all_lists():
    def run(buffer):
        buffer.record({"longest": Max(4.0), "reward": Mean(2.0), "dropped": Mean(1.0)})
        del buffer.lists["dropped"]

    def changed(buffer):
        run(buffer)
        buffer.lists["longest"].append(10.0)
        buffer.lists["reward"] = [5.0]

    assert drained(changed, run) == [{"longest": 6.0, "reward": 3.5}] * 2


def test_a_running_total_that_a_hook_replaces_goes_on_afterwards():
    buffer, gather = ListMetricBuffer(), lambda part: [part]
    buffer.record({"num_tokens": Sum(10.0)})
    buffer.lists["num_tokens"] = [7.0]
    assert buffer.drain(gather)[0] == {"num_tokens": 7.0}
    buffer.record({"num_tokens": Sum(10.0)})
    assert buffer.drain(gather)[0] == {"num_tokens": 20.0}


def test_lists_return_to_the_mark_and_survive_a_checkpoint():
    buffer = ListMetricBuffer()
    buffer.record({"reward": Mean(1.0)})
    buffer.lists["mine"].append(1.0)
    mark = buffer.snapshot()
    held = buffer.lists  # a hook may keep the dictionary
    buffer.record({"reward": Mean(3.0)})
    buffer.lists["mine"].append(3.0)
    state = reloaded(mark)
    buffer.restore(mark)
    assert held == {"reward": [1.0], "mine": [1.0]}
    other = ListMetricBuffer()
    other.restore(state)
    for resumed in (buffer, other):
        resumed.lists["mine"].append(2.0)
        assert resumed.drain(lambda part: [part])[0] == {"reward": 1.0, "mine": 1.5}
