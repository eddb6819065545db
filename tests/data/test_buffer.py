"""Rows of a generation on several ranks: which optimizer step trains on them, and their division anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupwise.data.buffer import ExperienceBuffer
from groupwise.data.exchange import in_row_order
from groupwise.errors import ConfigError
from groupwise.records import Experience


def rows_of(numbers: Any) -> Experience:
    """One token per row, the number of the row."""
    ids = torch.tensor(list(numbers)).unsqueeze(1)
    names = ("prompt_ids_BL", "completion_ids_BT", "completion_mask_BT", "loss_mask_BT", "prompt_mask_BL")
    return Experience(
        **{name: ids if "ids" in name else torch.ones_like(ids) for name in names},
        group_ids_B=ids[:, 0] // 4,
        old_logps_BT=torch.full(ids.shape, torch.nan),
        advantages_BX=ids.float(),
    )


def rows(entries: list[Experience]) -> list[int]:
    return [row for entry in entries for row in entry.completion_ids_BT[:, 0].tolist()]


def config(rank: int, ranks: int, size: int, accumulation: int, steps: int) -> Any:
    return SimpleNamespace(
        process_index=rank,
        world_size=ranks,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        splits_generation=accumulation % steps != 0,
    )


def generation(ranks: int, size: int, accumulation: int, num_rows: int = 24) -> list[list[Experience]]:
    """The entries of every rank, as they come into its buffer."""
    own, steps = num_rows // ranks, num_rows // ranks // size
    sampled = [rows_of(range(rank * own, (rank + 1) * own)).split(size) for rank in range(ranks)]
    if accumulation == steps:
        return sampled  # an optimizer step has all rows
    sent: dict[int, Any] = {}
    for rank, entries in enumerate(sampled):  # first what each sends
        in_row_order(
            entries,
            config(rank, ranks, size, accumulation, steps),
            lambda outgoing, _, rank=rank: sent.update({rank: outgoing}) or [],
        )
    return [
        in_row_order(
            entries,
            config(rank, ranks, size, accumulation, steps),
            lambda *_, rank=rank: [sent[sender][rank] for sender in range(ranks)],
        )
        for rank, entries in enumerate(sampled)
    ]


@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (2, 2), (4, 2), (2, 1), (4, 1)])
def test_an_optimizer_step_has_the_same_rows_on_any_number_of_ranks(ranks: int, size: int) -> None:
    accumulation = 8 // ranks // size  # 8 rows a step, three steps a generation
    parts = generation(ranks, size, accumulation)
    for step in range(3):
        window = slice(step * accumulation, (step + 1) * accumulation)
        found = [row for entries in parts for row in rows(entries[window])]
        assert sorted(found) == list(range(step * 8, step * 8 + 8))


@pytest.mark.parametrize("accumulated", [8, 24])
@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 2)), ((4, 2), (1, 2)), ((1, 4), (2, 1))])
def test_rows_left_in_a_checkpoint_are_those_of_the_same_steps(
    before: tuple[int, int], after: tuple[int, int], accumulated: int
) -> None:
    ranks, size = before
    taken = 8 if accumulated == 8 else 24  # within the first pass of two, or at its end
    snapshots = [
        {"entries": entries, "num_iterations": 2, "cursor": taken // ranks // size, "num_groups": 6}
        for entries in generation(ranks, size, accumulated // ranks // size)
    ]
    now, each = after
    left: list[int] = []
    for rank in range(now):
        buffer = ExperienceBuffer()
        own = config(rank, now, each, accumulated // now // each, 24 // now // each)
        buffer.restore(buffer.merge(snapshots, own))
        left += rows(buffer.take(accumulated // now // each))
    assert sorted(left) == (list(range(8, 16)) if accumulated == 8 else list(range(24)))
    assert (buffer.num_groups, buffer.num_left) == (6, (48 - taken - accumulated) // now // each)


def test_rows_that_do_not_divide_are_refused() -> None:
    state = {"entries": rows_of(range(6)).split(2), "num_iterations": 1, "cursor": 0, "num_groups": 1}
    with pytest.raises(ConfigError, match=r"=1 x 4 process\(es\) cannot divide .* has 6 completions, 0 of"):
        ExperienceBuffer().merge([state], config(0, 4, 1, 1, 1))
    spent = {**state, "entries": []}
    assert ExperienceBuffer().merge([spent], config(0, 4, 1, 1, 1)) == spent


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 4)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_of_another_size_have_the_rows_of_the_same_steps(
    before: int, after: int, ranks: int
) -> None:
    """8 rows a step, three steps a generation of two passes; the checkpoint is made after step 4."""
    left: list[list[int]] = []
    for entries in generation(ranks, before, 8 // ranks // before):
        state = {"entries": entries, "num_iterations": 2, "cursor": 32 // ranks // before, "num_groups": 6}
        buffer = ExperienceBuffer()
        buffer.restore(buffer.cut(state, after))
        assert {len(entry) for entry in buffer.entries} == {after}
        left.append([rows(buffer.take(8 // ranks // after)) for _ in range(2)])
        assert (buffer.is_empty, buffer.num_groups) == (True, 6)
    for step in range(2):  # steps 5 and 6 are the last two of the second pass
        first = (step + 1) * 8
        assert sorted(row for own in left for row in own[step]) == list(range(first, first + 8))


def test_micro_batches_of_a_size_that_does_not_divide_the_rest_are_refused() -> None:
    state = {"entries": rows_of(range(8)).split(2), "num_iterations": 1, "cursor": 2, "num_groups": 1}
    with pytest.raises(
        ConfigError, match=r"=8 x 1 .* cannot divide .* has 8 .* 4 of them trained on; set a divisor of 4"
    ):
        ExperienceBuffer.cut(state, 8)
    spent = {**state, "entries": []}
    assert ExperienceBuffer.cut(spent, 8) is spent and ExperienceBuffer.cut(state, 2) is state
