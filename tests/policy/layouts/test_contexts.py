"""Rollouts whose tokens follow several contexts: log-probs, gradients and computed tokens of every layout."""

from __future__ import annotations

import random

import pytest
import torch
from support.runs import policy

from groupwise.core.padding import length_mask, pad_sequences
from groupwise.generation.rollout_func import call_rollout_function
from groupwise.policy.attention import install_attention_hook
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layouts.contexts import pack_tree, split_contexts
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import TokenBatch
from groupwise.records.sampling_mask import SamplingMask

Rows = list[tuple[list[int], list[int]]]


def agent(draw: random.Random, system: list[int]) -> Rows:
    """A main line of four turns, a compaction after two, and two sub-agents with the system prompt."""

    def some(low: int, high: int) -> list[int]:
        return [draw.randrange(4, 32) for _ in range(draw.randint(low, high))]

    rows: Rows = []
    history = [*system, *some(3, 5)]
    for turn in range(4):
        if turn == 2:
            history = [*system, *some(2, 4)]  # a summary in place of what was said
        said = some(1, 5)
        rows.append((list(history), said))
        if turn in (0, 2):
            task = [*system, *some(2, 3)]
            rows += [(task, first := some(1, 3)), ([*task, *first, *some(1, 2)], some(1, 2))]
        history += [*said, *some(1, 3)]
    return rows


def batch_of(rollouts: list[Rows], *, truncated: bool = False) -> TokenBatch:
    rows = [row for rollout in rollouts for row in rollout]
    output = {
        "prompt_ids": [prompt for prompt, _ in rows],
        "completion_ids": [ids for _, ids in rows],
        "rollout_ids": [i for i, rollout in enumerate(rollouts) for _ in rollout],
    }
    prompts, completions, _, _ = call_rollout_function(
        lambda *_: output, [""] * len(rollouts), None, frozenset(), 32
    )
    ids = [completion.token_ids for completion in completions]
    prompt_ids, completion_ids = pad_sequences(prompts, 0, left=True), pad_sequences(ids, 0)
    mask = length_mask([len(row) for row in ids], completion_ids.shape[1])
    return TokenBatch(
        prompt_ids_BL=prompt_ids,
        prompt_mask_BL=length_mask([len(row) for row in prompts], prompt_ids.shape[1], left=True),
        completion_ids_BT=completion_ids,
        completion_mask_BT=mask,
        loss_mask_BT=pad_sequences([completion.loss_mask for completion in completions], 0),
        group_ids_B=torch.zeros(len(ids), dtype=torch.long),
        old_logps_BT=torch.full(mask.shape, torch.nan),
        contexts=tuple(completion.contexts or None for completion in completions),
        sampling_mask=tuple(SamplingMask.from_lists([[t, 4, 5] for t in row]) for row in ids)
        if truncated
        else None,
    )


def logps_and_gradient(layout: str, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = policy()
    install_attention_hook(model)
    computer = LogprobComputer(layout, LogprobHead("chunked"))
    output = computer(model, batch, with_entropy=True)
    assert computer.layout == layout  # the check has passed
    weights = torch.linspace(-1, 1, output.logps_BT.numel()).view_as(output.logps_BT) * batch.loss_mask_BT
    ((output.logps_BT + 0.1 * output.entropy_BT) * weights).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return output.logps_BT * batch.completion_mask_BT, output.entropy_BT * batch.completion_mask_BT, gradient


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("layout", ["packed", "shared_prefix", "forked"])
def test_layouts_agree_with_the_padded_one(layout: str, truncated: bool) -> None:
    draw = random.Random(3)
    system = [7, 8, 9, 10, 11, 12]
    batch = batch_of(
        [agent(draw, system), agent(draw, system), [([*system, 5], [6, 1])]], truncated=truncated
    )
    assert sum(len(contexts or ()) for contexts in batch.contexts) >= 6
    for ours, theirs in zip(
        logps_and_gradient(layout, batch), logps_and_gradient("padded", batch), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(20))
def test_a_common_beginning_is_computed_once(seed: int) -> None:
    draw = random.Random(seed)
    system = [7, 8, 9, 10, 11, 12]
    rollouts = [agent(draw, system) for _ in range(3)]
    packed = pack_tree(split_contexts(batch_of(rollouts)).rows)
    # Every different beginning of a row is one token of the model.
    sequences = [prompt + ids for rollout in rollouts for prompt, ids in rollout]
    distinct = {tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))}
    assert packed.num_tokens() == len(distinct) < sum(map(len, sequences)) / 2


def test_rows_of_several_rollouts_come_back_in_their_places() -> None:
    draw = random.Random(1)
    batch = batch_of([agent(draw, [7]), [([5], [6])], agent(draw, [8])])
    parts = split_contexts(batch)
    assert parts.rollout_R[:3] == [0, 1, 2] and len(parts.rows) == len(parts.rollout_R) > 3
    found = parts.rows.completion_ids_BT.flatten()[parts.index_BT] * batch.completion_mask_BT
    assert torch.equal(found, batch.completion_ids_BT)
    assert parts.rows.completion_mask_BT.sum() == batch.completion_mask_BT.sum()
    assert parts.rows.loss_mask_BT.sum() == batch.loss_mask_BT.sum()
