"""Kept tokens travel with their rows: selection, concatenation, truncation, checkpoints, exchange.

Files: ``records/tensors.py``.
"""

from __future__ import annotations

import torch
from support.batches import token_batch
from support.serialization import reloaded

from groupwise.records import Experience, MicroBatch, OldAndRefLogps, TokenBatch
from groupwise.records.sampling_mask import SamplingMask
from groupwise.records.serialization import host_copy

ROWS = [[[3, 4], [], [5]], [[6, 7, 8]], None, [[9], [1, 2]]]


def lists(kept):
    return None if kept is None else [part.tolist() for part in kept.ids.split(kept.counts.tolist())]


def batch(rows=ROWS, width=4):
    """Completions as long as their sampling masks; two tokens where those are unknown."""
    lengths = torch.tensor([2 if row is None else len(row) for row in rows])
    mask = (torch.arange(width) < lengths[:, None]).long()
    ones = torch.ones(len(rows), 2).long()
    kept = tuple(None if row is None else SamplingMask.from_lists(row) for row in rows)
    return token_batch(ones, ones, mask, mask, sampling_mask=kept)


def kept_of(tokens: TokenBatch):
    return [lists(row) for row in tokens.sampling_mask]


def test_rows_are_selected_split_and_joined_with_their_kept_tokens():
    tokens = batch()
    assert kept_of(tokens.select([3, 0])) == [ROWS[3], ROWS[0]]
    parts = tokens.split(3)
    assert [kept_of(part) for part in parts] == [ROWS[:3], ROWS[3:]]
    assert kept_of(TokenBatch.concatenate(parts)) == ROWS
    assert kept_of(tokens.to("cpu")) == ROWS


def test_a_batch_without_kept_tokens_beside_one_with_them_keeps_the_whole_vocabulary():
    plain = token_batch(*[torch.ones(2, 3).long()] * 4)
    assert plain.sampling_mask is None
    assert TokenBatch.concatenate([plain, plain]).sampling_mask is None
    assert kept_of(TokenBatch.concatenate([plain, batch()])) == [None, None, *ROWS]


def test_shortened_completions_lose_the_kept_tokens_behind_them():
    short = batch().shortened(1, 1)
    assert kept_of(short) == [[[3, 4]], [[6, 7, 8]], None, [[9]]]


def test_experience_and_checkpoints_hold_them():
    tokens = batch()
    logps = OldAndRefLogps(tokens.old_logps_BT, None)
    entry = Experience.from_tokens(tokens, torch.zeros(4), logps)
    assert kept_of(entry) == ROWS
    assert kept_of(reloaded(entry)) == ROWS
    assert reloaded(entry.select([2])).sampling_mask == (None,)


def test_rows_sent_to_another_rank_carry_theirs_alone():
    tokens = batch()
    fields = dict.fromkeys(("token_weights_BT", "entropy_mask_BT"), tokens.completion_mask_BT)
    window = MicroBatch(
        **vars(tokens), **fields, advantages_BX=torch.zeros(4, 1), sequence_weight_B1=torch.ones(4, 1)
    )
    sent = host_copy(window.select([1, 2]))
    assert sent.sampling_mask[0].ids.untyped_storage().nbytes() == 4 * 3
    assert kept_of(reloaded(sent)) == [ROWS[1], None]
