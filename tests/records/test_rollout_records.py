"""Kept tokens travel with their rows: selection, concatenation, truncation, checkpoints, exchange.

Files: ``records/rollout.py``, ``records/tensors.py``.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import torch
from support.batches import token_batch
from support.serialization import reloaded

from groupwise.mixins import logprob
from groupwise.mixins.logprob import LogprobMixin
from groupwise.records import Completion, Experience, MicroBatch, OldAndRefLogps, RolloutBatch, TokenBatch
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


def test_groups_of_rows_of_several_batches_keep_padding_values_and_shared_tensors():
    wide, narrow = batch(), replace(batch(ROWS[:2], 3), old_logps_BT=torch.full((2, 3), -2.0))
    made = TokenBatch.regroup([wide, narrow], [[1, 4], [5], []])
    assert [kept_of(part) for part in made] == [[ROWS[1], ROWS[0]], [ROWS[1]], []]
    assert [part.completion_ids_BT.shape for part in made] == [(2, 3), (1, 1), (0, 1)]
    assert made[0].old_logps_BT[1].tolist() == [-2.0] * 3 and made[0].old_logps_BT[0].isnan().all()
    for part in made:  # one tensor is one mask of loss and of real tokens, as before
        assert part.loss_mask_BT is part.completion_mask_BT
        assert part.completion_ids_BT.untyped_storage().nbytes() == part.completion_ids_BT.nbytes
    # One object for prompts and completions is two fields, which lose columns on different sides.
    ids, mask = torch.tensor([[5, 6]]), torch.tensor([[1, 0]])
    both = token_batch(ids, mask.flip(1), ids, mask).select([0])
    assert (both.prompt_ids_BL.item(), both.completion_ids_BT.item()) == (6, 5)


def test_a_batch_without_kept_tokens_beside_one_with_them_keeps_the_whole_vocabulary():
    plain = token_batch(*[torch.ones(2, 3).long()] * 4)
    assert plain.sampling_mask is None
    assert TokenBatch.concatenate([plain, plain]).sampling_mask is None
    assert kept_of(TokenBatch.concatenate([plain, batch()])) == [None, None, *ROWS]


def test_shortened_completions_lose_the_kept_tokens_behind_them():
    tokens = batch()
    shorter = replace(tokens, completion_mask_BT=(torch.arange(4) < 1).long().expand(4, 4))
    assert kept_of(shorter.select(range(4))) == [[[3, 4]], [[6, 7, 8]], None, [[9]]]
    assert shorter.select(range(4)).completion_ids_BT.shape == (4, 1)


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


def test_numbers_of_a_completion_are_lists_for_readers_and_tensors_in_memory_and_files():
    given = {"logps": [-0.5, -1.25], "versions": [3, 4]}
    packed = Completion([5, 6], **{name: torch.tensor(numbers) for name, numbers in given.items()})
    assert packed == Completion([5, 6], **given) and packed != Completion([5, 6])
    assert type(packed.logps) is list and [*packed.versions] == [3, 4]
    assert Completion([5, 6], **given).logps is given["logps"]  # a list stays the object that was given
    assert Completion([5]).logps is None and Completion([5]).versions is None
    for copy in (pickle.loads(pickle.dumps(packed)), reloaded(packed)):
        assert copy == packed and [type(value) for value in vars(copy).values()].count(torch.Tensor) == 2
    assert reloaded(Completion([5, 6], **given)) == packed  # of a file before, with lists
    assert replace(packed, truncated=True).logps == given["logps"]
    of_one_step = replace(packed, versions=torch.tensor(3).expand(2))
    assert of_one_step.versions == [3, 3] and type(of_one_step.versions[0]) is int
    assert reloaded(of_one_step) == pickle.loads(pickle.dumps(of_one_step)) == of_one_step


def test_padded_log_probs_are_read_without_lists(monkeypatch):
    rows = [torch.tensor([-0.5, -1.25]), [-2.0]]
    rollouts = RolloutBatch(
        [{}] * 2, [""] * 2, [[4]] * 2, [Completion([5] * len(row), logps=row) for row in rows], [""] * 2
    )
    collated, padded = LogprobMixin(), []
    collated.metrics_column = ""
    collated.accelerator = SimpleNamespace(device=torch.device("cpu"), process_index=0)
    collated.processing_class = SimpleNamespace(pad_token_id=0)
    collated.args = SimpleNamespace(
        pad_to_multiple_of=None, mask_truncated_completions=False, use_liger_kernel=False
    )
    pad = logprob.pad_sequences

    def kept(rows, *given, **more):
        padded.append(rows)
        return pad(rows, *given, **more)

    monkeypatch.setattr(logprob, "pad_sequences", kept)
    logps_BT = collated.collate(rollouts).sampler_logps_BT
    assert torch.allclose(logps_BT, torch.tensor([[-0.5, -1.25], [-2.0, torch.nan]]), equal_nan=True)
    assert [type(row) for row in padded[-1]] == [torch.Tensor, list]
