"""The plan of rebalancing: which rows are computed, in which micro-batch and on which rank.

Files: ``data/budget.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.fakes.ranks import on_ranks

from groupwise.cpu import cache_sized
from groupwise.data.budget import MicroBatchBudget
from groupwise.data.rebalancing import (
    WindowRows,
    WindowStats,
    plan,
    rebalance,
    rows_needing_logps,
    rows_with_gradient,
)
from groupwise.records import MicroBatch
from groupwise.records.images import ImageInputs
from groupwise.records.serialization import host_copy


def window(prompt_lengths, completion_lengths, advantages, rows, first=0):
    """Micro-batches of ``rows`` rows; rows with the same prompt length have the same prompt.

    Row i starts with completion token ``first`` + i; its other fields are functions of that number.
    """
    count, width, prompt_width = len(prompt_lengths), max(completion_lengths), max(prompt_lengths)
    prompts = torch.zeros(count, prompt_width).long()
    prompt_mask, mask = torch.zeros_like(prompts), torch.zeros(count, width).long()
    for row, (prompt, size) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        prompts[row, prompt_width - prompt :] = 2 + prompt
        prompt_mask[row, prompt_width - prompt :] = 1
        mask[row, :size] = 1
    number_B1 = torch.arange(first, first + count)[:, None]
    batch = MicroBatch(
        prompt_ids_BL=prompts,
        prompt_mask_BL=prompt_mask,
        completion_ids_BT=number_B1 * mask,
        completion_mask_BT=mask,
        loss_mask_BT=mask,
        group_ids_B=torch.tensor(prompt_lengths),
        old_logps_BT=(-1.0 - number_B1).masked_fill(mask == 0, math.nan),
        advantages_BX=torch.tensor(advantages)[:, None],
        token_weights_BT=mask / count,
        entropy_mask_BT=mask,
        sequence_weight_B1=torch.full((count, 1), 1 / count),
    )
    return batch.split(rows)


def budget(rows, length, **changes):
    """Micro-batches of ``rows`` sequences with completions of up to ``length`` tokens."""
    return replace(MicroBatchBudget(False, rows, length, skip_zero_advantage=True), **changes)


def rows_of(batches):
    """The rows of each micro-batch; None for one that is not needed."""
    return [None if b is None else sorted(b.completion_ids_BT[:, 0].tolist()) for b in batches]


def rebalance_on_ranks(windows, layout, limits):
    """Results of ``rebalance`` on every rank, and the rows that each rank received from others."""
    received = [[] for _ in windows]

    def on_rank(rank, gather, exchange):
        def counted(outgoing):
            assert outgoing[rank] is None  # rows that stay are not serialized
            incoming = exchange(outgoing)
            received[rank] += [
                row for part in incoming if part is not None for row in part.completion_ids_BT[:, 0].tolist()
            ]
            return incoming

        own = replace(limits, world_size=len(windows), rank=rank)
        return rebalance(windows[rank], layout, own, gather, counted)

    return on_ranks(len(windows), on_rank), received


def test_rows_without_gradient_need_no_log_probs():
    tokens = MicroBatch.concatenate(window([2] * 4, [3] * 4, [0.0, 1.0, 0.0, -1.0], 4))
    flat_B1 = torch.zeros(4, 1)
    one, two = budget(4, 3), budget(4, 3, world_size=2)
    for limits in (one, two):
        assert rows_needing_logps(tokens, tokens.advantages_BX, limits, 2) == [1, 3]
    assert rows_needing_logps(tokens, flat_B1, one, 2) == []
    # every rank runs the same number of forwards, so one row of each micro-batch
    assert rows_needing_logps(tokens, flat_B1, two, 2) == [0, 2]
    assert rows_needing_logps(tokens, flat_B1, two, 3) == [0, 3]
    last_B1 = torch.tensor([[0.0], [0.0], [0.0], [1.0]])
    assert rows_needing_logps(tokens, last_B1, two, 2) == [0, 3]
    for limits in (budget(4, 3, fixed=True), budget(4, 3, skip_zero_advantage=False)):
        assert rows_needing_logps(tokens, flat_B1, limits, 2) == [0, 1, 2, 3]


def test_masked_tokens_have_no_gradient():
    (tokens,) = window([1, 2, 3, 4], [2, 2, 2, 2], [0.0] * 4, 4)
    tokens = replace(
        tokens,
        loss_mask_BT=torch.tensor([[1, 0], [0, 1], [0, 0], [0, 0]]),
        dropped_B=torch.tensor([False, False, False, True]),
    )
    # row 0 has an advantage only where it has no loss
    advantages_BT = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    for skips, expected in (
        ({}, [False, True, False, False]),
        ({"skip_zero_advantage": False}, [True, True, False, False]),
        # a loss that may have a gradient in any row
        ({"skip_zero_advantage": False, "skip_masked": False}, [True, True, True, False]),
    ):
        assert rows_with_gradient(tokens, advantages_BT, budget(4, 2, **skips)).tolist() == expected


def test_fixed_micro_batches_stay_as_they_are():
    given = window([2, 3, 4, 5], [3, 1, 2, 2], [0.0, 1.0, 0.0, -1.0], 2)
    batches, stats = rebalance(given, "packed", budget(2, 3, fixed=True))
    assert all(ours is theirs for ours, theirs in zip(batches, given, strict=True))
    # 2 x (3 + 3) + 2 x (5 + 2) = 26 tokens for 22 real ones, every row computed
    assert stats == WindowStats(rows=4, skipped_rows=0, tokens=22, computed_tokens=26, padding_tokens=4)


def test_groups_stay_together_in_as_few_micro_batches_as_hold_them():
    # two groups: 10 + 4 x 5 = 30 and 12 + 4 x 5 = 32 tokens; a micro-batch holds 2 x (12 + 6) = 36
    given = window([10] * 4 + [12] * 4, [5] * 8, [1.0] * 8, 2)
    batches, stats = rebalance(given, "shared_prefix", budget(2, 6))
    assert rows_of(batches) == [None, None, [4, 5, 6, 7], [0, 1, 2, 3]]
    assert (stats.tokens, stats.computed_tokens, stats.padding_tokens) == (8 * 5 + 4 * 22, 62, 0)


def test_a_group_that_does_not_fit_is_split():
    # a micro-batch holds 1 x (10 + 12) = 22 tokens: two completions of 5 after the prompt of 10
    batches, _ = rebalance(window([10] * 4, [5] * 4, [1.0] * 4, 1), "shared_prefix", budget(1, 12))
    assert rows_of(batches) == [None, None, [0, 1], [2, 3]]


def test_a_group_may_fill_a_micro_batch():
    # 10 + 5 + 5 tokens in 1 x (10 + 10)
    batches, _ = rebalance(window([10] * 2, [5] * 2, [1.0] * 2, 1), "shared_prefix", budget(1, 10))
    assert rows_of(batches) == [None, [0, 1]]


def test_the_longest_prompt_counts_in_the_size_of_a_micro_batch():
    # 2 + 5 and 10 + 5 tokens in 2 x (10 + 5)
    batches, stats = rebalance(window([2, 10], [5, 5], [1.0] * 2, 1), "packed", budget(2, 5))
    assert rows_of(batches) == [None, [0, 1]] and stats.computed_tokens == 22


def test_two_ranks_hold_twice_as_much():
    # 4 rows of 5 tokens of one prompt; a micro-batch holds 2 x (2 + 3) = 10, so each rank needs one
    rows = WindowRows([2] * 4, [3] * 4, [0] * 4, [True] * 4, [2, 2], frozenset())
    assert plan(rows, "packed", budget(2, 3, world_size=2), 2) == [[[0, 2]], [[1, 3]]]


def test_a_packed_prompt_counts_for_every_completion():
    _, stats = rebalance(window([10] * 2, [5] * 2, [1.0] * 2, 2), "packed", budget(2, 5))
    assert stats.computed_tokens == stats.tokens == 30


def test_completions_of_different_prompts_do_not_share_a_prefix():
    # equal lengths, but two groups: 2 x (10 + 5 + 5) = 40 tokens, and a micro-batch holds 2 x (10 + 5) = 30
    given = [
        replace(batch, group_ids_B=torch.tensor([number, number]))
        for number, batch in enumerate(window([10] * 4, [5] * 4, [1.0] * 4, 2))
    ]
    batches, _ = rebalance(given, "shared_prefix", budget(2, 5))
    assert rows_of(batches) == [[0, 1], [2, 3]]


def test_tokens_are_balanced_in_a_layout_without_padding():
    given = window([1, 2, 3, 4], [9, 1, 1, 8], [1.0] * 4, 2)
    batches, stats = rebalance(given, "packed", budget(2, 9))
    # costs 10, 3, 4, 12, of which 2 x (4 + 9) = 26 fit: two parts, 12 + 3 and 10 + 4
    assert rows_of(batches) == [[1, 3], [0, 2]]
    assert (stats.tokens, stats.computed_tokens, stats.padding_tokens) == (29, 29, 0)


def test_as_many_micro_batches_as_the_largest_part_needs():
    # costs 4, 4, 4 in parts of at most 1 x (2 + 4) = 6: their sum fits two, but two would hold 8 and 4
    batches, _ = rebalance(window([2] * 3, [2] * 3, [1.0] * 3, 1), "packed", budget(1, 4))
    assert rows_of(batches) == [[0], [1], [2]]


def test_padded_rows_of_similar_length_come_together():
    given = window([1, 2, 3, 4], [9, 1, 2, 8], [1.0] * 4, 2)
    batches, stats = rebalance(given, "padded", budget(2, 9))
    assert rows_of(batches) == [[0, 3], [1, 2]]
    # 2 x (4 + 9) + 2 x (3 + 2) = 36 tokens for 30 real ones
    assert (stats.padding_tokens, stats.computed_tokens, stats.tokens) == (6, 36, 30)
    assert stats.metrics()["padding_share"].value() == pytest.approx(6 / 36)


def test_the_length_of_a_padded_row_includes_its_prompt():
    # rows of 10, 4, 9 and 5 tokens; the completions alone would pair 0 with 1 and 2 with 3
    batches, _ = rebalance(window([1, 2, 8, 4], [9, 2, 1, 1], [1.0] * 4, 2), "padded", budget(2, 9))
    assert rows_of(batches) == [[0, 2], [1, 3]]


def test_tokens_without_loss_count_in_lengths():
    (given,) = window([2, 3], [4, 1], [1.0, 1.0], 2)
    given = replace(given, loss_mask_BT=torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]]))
    rows = WindowRows.of(given, budget(2, 4))
    assert rows == WindowRows(
        [2, 3], [4, 1], [2, 3], [True, True], [2], frozenset(given.tensors())
    )  # fmt: skip


def test_rows_per_rank_may_differ():
    one, other = (
        WindowRows.of(batch, budget(3, 1))
        for size in (1, 3)
        for batch in window([2] * size, [1] * size, [1.0] * size, size)
    )
    rows = WindowRows.concatenate([one, other, one])
    assert [rows.of_rank(rank) for rank in range(3)] == [range(0, 1), range(1, 4), range(4, 5)]


def test_groups_are_split_until_every_rank_has_rows():
    # costs of the long row and of the group of two: 1 + 30 and 3 + 1 + 1 tokens, in 2 x 2 micro-batches
    rows = WindowRows([1, 3, 3], [30, 1, 1], [0, 1, 1], [True] * 3, [2, 1], frozenset())
    assert plan(rows, "shared_prefix", budget(1, 8, world_size=2), 2) == [[[0], [2]], [[1], []]]


def test_sent_tensors_have_a_storage_of_their_own_size():
    # rows by length are 0, 4, 7, 6, 5, 3, 2, 1, one per micro-batch: rank 0 sends the short rows 1 and 3
    windows = [window([3] * 4, [9, 1, 2, 3], [1.0] * 4, 1), window([3] * 4, [8, 4, 5, 6], [1.0] * 4, 1, 4)]
    sizes = []

    def on_rank(rank, gather, exchange):
        def counted(outgoing):
            tensors = [
                tensor
                for part in outgoing
                if part is not None
                for tensor in host_copy(part).tensors().values()
            ]
            sizes.extend((tensor.untyped_storage().nbytes(), tensor.nbytes) for tensor in tensors)
            return exchange(outgoing)

        own = budget(1, 9, world_size=2, rank=rank)
        return rebalance(windows[rank], "padded", own, gather, counted)

    on_ranks(2, on_rank)
    assert sizes and all(storage == used for storage, used in sizes)


def test_padded_rows_divide_evenly_with_the_longest_rows_in_the_larger_part():
    # 5 rows in micro-batches of at most 4: two, of 3 and 2
    given = window([1] * 5, [2, 9, 8, 3, 7], [1.0] * 5, 4)
    batches, _ = rebalance(given, "padded", budget(4, 9))
    assert rows_of(batches) == [[1, 2, 4], [0, 3]]


def test_rows_without_gradient_are_skipped_and_the_others_keep_their_weight():
    given = window([2] * 4, [3, 3, 3, 3], [0.0, 1.0, 0.0, -1.0], 2)
    for layout in ("padded", "packed", "shared_prefix"):
        batches, stats = rebalance(given, layout, budget(2, 3))
        assert rows_of(batches) == [None, [1, 3]]
        assert (stats.skipped_rows, stats.rows, stats.skipped_weight) == (2, 4, 0.5)
        assert batches[1].sequence_weight_B1.tolist() == [[0.25], [0.25]]
        values = {name: mean.value() for name, mean in stats.metrics().items()}
        assert values == {"skipped_share": 0.5, "padding_share": 0.0}


def test_rows_without_loss_tokens_are_skipped_without_the_setting():
    given = window([2] * 4, [3] * 4, [0.0] * 4, 2)
    given[0] = replace(given[0], loss_mask_BT=torch.zeros_like(given[0].loss_mask_BT))
    batches, stats = rebalance(given, "padded", budget(2, 3, skip_zero_advantage=False))
    assert rows_of(batches) == [None, [2, 3]] and stats.skipped_rows == 2


def test_a_cpu_computes_few_tokens_at_a_time_largest_part_first_but_no_prompt_twice(monkeypatch):
    monkeypatch.setattr("groupwise.cpu._CACHE_TOKENS", 20)
    # groups of 10 + 4 x 2 = 18 and 3 + 4 x 2 = 11 tokens and one of 4 + 2 x 4 = 12
    batch = MicroBatch.concatenate(window([10] * 4 + [3] * 4 + [4] * 2, [2] * 8 + [4] * 2, [1.0] * 10, 10))
    assert rows_of(cache_sized(batch, shared=True)) == [[0, 1, 2, 3], [8, 9], [4, 5, 6, 7]]
    # rows of 12, 5 and 8 tokens, taken in their order
    assert rows_of(cache_sized(batch, shared=False)) == [[3, 4], [8, 9], [5, 6, 7], [0], [1], [2]]
    full = MicroBatch.concatenate(window([10, 6], [2, 2], [1.0] * 2, 2))
    assert rows_of(cache_sized(full, shared=False)) == [[0, 1]]  # 12 + 8 tokens
    small = batch.select([0, 1])
    assert cache_sized(small, shared=True) == [small]


LAYOUTS = ["padded", "packed", "shared_prefix"]
SHORT, LONG = ([3] * 4, [2, 1, 2, 1]), ([4] * 4, [9, 8, 9, 8])


def unequal_windows():
    """Rank 0 sampled the short completions 0 to 3, rank 1 the long completions 4 to 7."""
    return [window(*SHORT, [1.0] * 4, 2), window(*LONG, [1.0] * 4, 2, first=4)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_computes_about_as_much_and_every_row_once(layout):
    ((first, stats), (second, other)), _ = rebalance_on_ranks(unequal_windows(), layout, budget(2, 9))
    assert [b is None for b in first] == [b is None for b in second]
    found = [row for rows in rows_of(first) + rows_of(second) if rows is not None for row in rows]
    assert sorted(found) == list(range(8))
    assert abs(stats.computed_tokens - other.computed_tokens) <= 13  # one row; 18 and 50 as sampled
    # rows and tokens are counted in equal shares: 8 rows, 4 x 3 + 6 + 4 x 4 + 34 = 68 tokens
    for work in (stats, other):
        assert (work.rows, work.skipped_rows, work.tokens) == (4, 0, 34)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_rows_that_change_rank_are_sent(layout):
    results, received = rebalance_on_ranks(unequal_windows(), layout, budget(2, 9))
    for rank, (batches, _) in enumerate(results):
        trained = {row for rows in rows_of(batches) if rows is not None for row in rows}
        assert sorted(received[rank]) == sorted(row for row in trained if row // 4 != rank)
    assert received[0] and received[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_computes_the_micro_batches_of_the_plan(layout):
    windows, limits = unequal_windows(), budget(2, 9, world_size=2)
    rows = WindowRows.concatenate([WindowRows.of(MicroBatch.concatenate(w), limits) for w in windows])
    planned = plan(rows, layout, limits, len(windows[0]))
    results, _ = rebalance_on_ranks(windows, layout, limits)
    assert [[part for part in rows_of(batches) if part is not None] for batches, _ in results] == planned


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_on_the_micro_batches_of_one_process(layout):
    windows = unequal_windows()
    # a field that only one rank has
    windows[1] = [replace(batch, dropped_B=torch.tensor([False, False])) for batch in windows[1]]
    joined = MicroBatch.concatenate([*windows[0], *windows[1]]).split(2)
    results, _ = rebalance_on_ranks(windows, layout, budget(2, 9))
    rows = {}
    for batches, _ in results:
        for batch in batches:
            for row in range(0 if batch is None else len(batch)):
                alone = batch.select([row])
                rows[int(alone.completion_ids_BT[0, 0])] = alone
    for number, expected in enumerate(row for batch in joined for row in batch.split(1)):
        for name, tensor in expected.tensors().items():
            assert torch.equal(rows[number].tensors()[name].nan_to_num(9.0), tensor.nan_to_num(9.0))


def test_nothing_is_exchanged_when_no_row_moves():
    def refuse(outgoing):
        raise AssertionError("an exchange of nothing")

    # one row each, of the same length
    windows = [window([2], [3], [1.0], 1, first=rank) for rank in (0, 1)]

    def on_rank(rank, gather, exchange):
        return rebalance(windows[rank], "packed", budget(1, 3, world_size=2, rank=rank), gather, refuse)

    (first, _), (second, _) = on_ranks(2, on_rank)
    assert rows_of(first) == [[0]] and rows_of(second) == [[1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_without_rows_computes_a_row_of_weight_zero(layout):
    windows = [
        window([2] * 4, [3] * 4, [0.0, 0.0, 0.0, 1.0], 2),
        window([2] * 4, [3, 2, 3, 3], [0.0] * 4, 2, first=4),
    ]
    windows[1] = [replace(batch, entropy_weights_BT=batch.loss_mask_BT.float()) for batch in windows[1]]
    ((busy, other), (idle, stats)), received = rebalance_on_ranks(windows, layout, budget(2, 3))
    assert rows_of(busy) == [None, [3]] and rows_of(idle) == [None, [5]]  # the shortest row of this rank
    assert received == [[], []]
    for name in ("loss_mask_BT", "token_weights_BT", "entropy_mask_BT", "entropy_weights_BT"):
        assert not idle[1].tensors()[name].any()
    assert idle[1].old_logps_BT[0, 0] == -6.0
    # each rank counts the rows that it skipped: 3 of 4 and 4 of 4
    assert (busy[1].sequence_weight_B1.tolist(), other.skipped_weight) == ([[0.25]], 0.75)
    assert (idle[1].sequence_weight_B1.tolist(), stats.skipped_weight) == ([[0.0]], 1.0)
    assert (stats.rows, stats.skipped_rows, stats.computed_tokens) == (4, 3.5, 0)


def test_a_group_of_two_ranks_is_one_group():
    # 4 completions of 5 tokens after a prompt of 10 on two ranks: 30 tokens, and micro-batches hold 2 x 16
    windows = [window([10] * 2, [5] * 2, [1.0] * 2, 2, first=first) for first in (0, 2)]
    rows = WindowRows.concatenate([WindowRows.of(batch, budget(2, 6)) for (batch,) in windows])
    assert rows.shape.groups() == [[0, 1, 2, 3]]
    assert [rows.of_rank(rank) for rank in (0, 1)] == [range(0, 2), range(2, 4)]
    # a second rank without rows would wait: the group is halved
    ((first, _), (second, _)), received = rebalance_on_ranks(windows, "shared_prefix", budget(2, 6))
    assert rows_of(first) + rows_of(second) == [[0, 1], [2, 3]] and received == [[], []]


def test_log_probs_that_only_one_sampler_reports_are_nan_on_the_other_rank():
    windows = unequal_windows()
    reported = [replace(batch, sampler_logps_BT=batch.old_logps_BT) for batch in windows[1]]
    results, _ = rebalance_on_ranks([windows[0], reported], "packed", budget(2, 9))
    for batches, _ in results:
        for batch in batches:
            for row in range(0 if batch is None else len(batch)):
                number = int(batch.completion_ids_BT[row, 0])
                reported_BT = ~batch.sampler_logps_BT[row].isnan()
                assert torch.equal(reported_BT, (batch.completion_mask_BT[row] == 1) & (number >= 4))
    # the same without any row that moves
    alone = [
        window([2], [3], [1.0], 1),
        [replace(b, sampler_logps_BT=b.old_logps_BT) for b in window([2], [3], [1.0], 1)],
    ]
    ((first,), _), _ = rebalance_on_ranks(alone, "packed", budget(1, 3))[0]
    assert first.sampler_logps_BT.isnan().all()


def test_images_of_a_group_stay_shared_and_move_once():
    images = [ImageInputs({"pixel_values": torch.full((1, 3), float(rank))}) for rank in (0, 1)]
    windows = [
        [replace(batch, images=(images[rank],) * len(batch)) for batch in batches]
        for rank, batches in enumerate(unequal_windows())
    ]
    sent = [[], []]

    def on_rank(rank, gather, exchange):
        def counted(outgoing):
            copies = [host_copy(part) for part in outgoing if part is not None]
            sent[rank] += [len({id(row) for row in part.images}) for part in copies]
            return exchange(outgoing)

        own = budget(2, 9, world_size=2, rank=rank)
        return rebalance(windows[rank], "packed", own, gather, counted)

    for batches, _ in on_ranks(2, on_rank):
        for batch in batches:
            for row, image in enumerate(batch.images if batch is not None else ()):
                assert image.arrays["pixel_values"][0, 0] == batch.completion_ids_BT[row, 0] // 4
    assert sent == [[1], [1]]
