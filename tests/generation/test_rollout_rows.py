"""Rows of a rollout joined to one sequence of trained tokens, against a search over all rows."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from groupwise.errors import BackendError
from groupwise.generation.rollout_func import call_rollout_function
from groupwise.records import Completion

P, Q = [5, 6], [7]


def call(rollouts: list[list[dict]], **more):
    """Rollouts of rows with "prompt", "ids" and perhaps "mask" and "logps", through the boundary."""
    rows = [row for rollout in rollouts for row in rollout]
    output = {
        "prompt_ids": [row["prompt"] for row in rows],
        "completion_ids": [row["ids"] for row in rows],
        "rollout_ids": [10 + i for i, rollout in enumerate(rollouts) for _ in rollout],
        **more,
    }
    for key, name in (("env_mask", "mask"), ("logprobs", "logps")):
        if any(name in row for row in rows):
            default = 1 if name == "mask" else None
            output[key] = [row.get(name, [default] * len(row["ids"])) for row in rows]
    return call_rollout_function(lambda *_: output, ["p"] * len(rollouts), None, frozenset([1]), 32)


def join(*rows: dict) -> tuple[list[int], Completion]:
    (prompt,), (completion,), _, _ = call([list(rows)])
    return prompt, completion


def test_a_row_that_continues_the_one_before_is_joined_to_it():
    prompt, joined = join(
        {"prompt": P, "ids": [8, 9], "logps": [-1.0, -2.0]},
        {"prompt": [*P, 8, 9, 20, 21], "ids": [10, 1], "logps": [-3.0, None]},
    )
    assert (
        prompt == P and joined.token_ids == [8, 9, 20, 21, 10, 1] and joined.loss_mask == [1, 1, 0, 0, 1, 1]
    )
    assert joined.contexts == () and not joined.truncated
    assert joined.last_row == (4, 6) and joined.reward_ids == [10, 1]
    known = torch.tensor(joined.logps)
    assert known[[0, 1, 4]].tolist() == [-1, -2, -3] and known[[2, 3, 5]].isnan().all()


def test_a_sub_agent_between_two_turns_has_a_context_of_its_own():
    prompt, joined = join(
        {"prompt": P, "ids": [8]},
        {"prompt": Q, "ids": [11, 1]},
        {"prompt": [*P, 8, 20], "ids": [9]},
    )
    assert prompt == P and joined.token_ids == [8, 20, 9, 11, 1] and joined.loss_mask == [1, 0, 1, 1, 1]
    assert joined.contexts == ((3, Q),) and joined.last_row == (2, 3)
    assert joined.truncated  # the last row does not end in an end token, the sub-agent's does


@pytest.mark.parametrize(
    ("rows", "tokens", "mask", "contexts"),
    [
        ([(P, [8, 9]), (P, [8, 9])], [8, 9], [1, 1], ()),  # returned twice
        ([(P, [8]), (P, [8, 9])], [8, 9], [1, 1], ()),  # each row repeats the ones before
        ([(P, [8, 9]), (P, [8])], [8, 9], [1, 1], ()),
        ([(P, [8, 9]), (P, [8, 10])], [8, 9, 8, 10], [1, 1, 0, 1], ((2, P),)),  # a retry
        ([([*P, 8], [9]), (P, [8])], [9, 8], [1, 1], ((1, P),)),  # a prompt that a later row sampled
        ([(P, [8, 9]), ([*P, 8], [10])], [8, 9, 10], [1, 1, 1], ((2, [*P, 8]),)),  # a rewritten answer
    ],
)
def test_a_token_is_trained_once(rows, tokens, mask, contexts):
    prompt, joined = join(*({"prompt": prompt, "ids": ids} for prompt, ids in rows))
    assert (prompt, joined.token_ids, joined.loss_mask) == (rows[0][0], tokens, mask)
    assert joined.contexts == contexts and joined.reward_ids == rows[-1][1]


def test_a_token_that_only_a_later_row_trains_gets_its_log_prob():
    _, joined = join(
        {"prompt": P, "ids": [8, 9], "mask": [1, 0], "logps": [-1.0, None]},
        {"prompt": [*P, 8], "ids": [9, 1], "logps": [-2.0, -3.0]},
    )
    assert joined.token_ids == [8, 9, 1] and joined.loss_mask == [1, 1, 1] and joined.logps == [-1, -2, -3]


def trained(prompt: list[int], ids: list[int], mask: list[int]) -> set[tuple[int, ...]]:
    """Prefixes that end in a trained token."""
    return {(*prompt, *ids[: i + 1]) for i, flag in enumerate(mask) if flag}


@st.composite
def rows_of_a_tree(draw: st.DrawFn) -> list[dict]:
    """Rows that are paths of one tree of two token ids, each cut into prompt and completion anywhere."""
    paths = [(5,)]
    for _ in range(
        draw(st.integers(1, 8))
    ):  # a branch at a node of an earlier path, to which tokens are added
        path = draw(st.sampled_from(paths))
        branch = path[: draw(st.integers(1, len(path)))]
        paths.append((*branch, *draw(st.lists(st.sampled_from((8, 9)), min_size=1, max_size=4))))
    rows = []
    for path in draw(st.lists(st.sampled_from(paths[1:]), min_size=1, max_size=8)):
        end = draw(st.integers(2, len(path)))
        cut = draw(st.integers(1, end - 1))
        ids = list(path[cut:end])
        mask = draw(
            st.one_of(
                st.just([1] * len(ids)), st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))
            )
        )
        rows.append({"prompt": list(path[:cut]), "ids": ids, "mask": mask})
    return rows


@pytest.mark.slow
@given(rows_of_a_tree())
@example(  # the last row is in two lines, of which the first trains its token
    [
        {"prompt": P, "ids": [8, 20, 9], "mask": [1, 0, 1]},
        {"prompt": P, "ids": [8, 21, 10], "mask": [1, 0, 1]},
        {"prompt": P, "ids": [8], "mask": [1]},
    ]
)
def test_rows_of_any_tree_train_each_of_their_tokens_once(rows):
    (prompt,), (joined,), extra, metrics = call([rows])
    found: list[tuple[int, ...]] = []
    bounds = [(0, prompt), *joined.contexts, (len(joined.token_ids), [])]
    for (start, context), (end, _) in pairwise(bounds):
        assert end > start  # no empty line
        for i in range(start, end):
            if joined.loss_mask[i]:
                found.append((*context, *joined.token_ids[start : i + 1]))
    expected = set().union(*(trained(row["prompt"], row["ids"], row["mask"]) for row in rows))
    assert len(found) == len(set(found)) and set(found) == expected
    assert joined.reward_ids == rows[-1]["ids"]
    assert extra["rollout_rows"] == [[(row["prompt"], row["ids"]) for row in rows]]
    assert (
        metrics["rollouts/rows"].value() == len(rows) and 0 < metrics["rollouts/computed_share"].value() <= 1
    )


def test_columns_have_an_entry_per_row_or_per_rollout():
    rollouts = [[{"prompt": P, "ids": [8]}, {"prompt": Q, "ids": [9]}], [{"prompt": P, "ids": [8]}]]
    _, _, extra, _ = call(rollouts, score=[1, 2, 3], label=["a", "b"])
    assert extra["score"] == [2, 3] and extra["label"] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_ids": [3, 4, 3]}, "'rollout_ids' holds [3, 4, 3], without repetitions; allowed: one"),
        ({"rollout_ids": [3, 3, 3]}, "'rollout_ids' holds [3], without repetitions; allowed: one number for"),
        ({"rollout_ids": [1, 0, 0]}, "'rollout_ids' holds [1, 0], without repetitions"),
        ({"rollout_ids": [3, 3]}, "2 different"),
        ({"rollout_ids": [3, 4]}, "returned 3 entries for 'prompt_ids', but there are 2 prompts"),
        ({"score": [1, 2, 3, 4]}, "4 entries for 'score', but there are 2 prompts"),
        ({"completion_ids": [[8], [], [9, 77]]}, "completion 2: 'completion_ids' holds 77"),
    ],
)
def test_invalid_rows_are_named(changes, message):
    output = {"prompt_ids": [P, Q, P], "completion_ids": [[8], [9], [9]], "rollout_ids": [0, 0, 1], **changes}
    if message == "2 different":
        message = "'rollout_ids' holds [3], without repetitions"
    with pytest.raises(BackendError, match=re.escape(message)):
        call_rollout_function(lambda *_: output, ["p", "p"], None, frozenset([1]), 32)


# Of the last row, of an earlier one, or per rollout.
@pytest.mark.parametrize("failed", [[False, False, True], [False, True, False], [False, True]])
def test_failed_rollouts_are_dropped_or_end_the_run(failed):
    output = {
        "prompt_ids": [P, Q, P],
        "completion_ids": [[8], [9], [9]],
        "rollout_ids": [0, 1, 1],
        "failed": failed,
    }

    def call(on_error: str):
        trainer = SimpleNamespace(args=SimpleNamespace(rollout_on_error=on_error))
        return call_rollout_function(lambda *_: output, ["p", "p"], trainer, frozenset([1]), 32)

    _, completions, extra, _ = call("retry")
    assert [completion.dropped for completion in completions] == [False, True] and "failed" not in extra
    with pytest.raises(BackendError, match="rollout 1 has failed; rollout_on_error='retry' drops"):
        call("raise")
