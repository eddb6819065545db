"""Results of a ``rollout_func`` and the completions made of them."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.errors import BackendError
from groupwise.generation.rollout_func import call_rollout_function

CHATS = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
FULL = {
    "prompt_ids": [[5], [6, 7]],
    "completion_ids": [[8, 9, 1], [8]],
    "logprobs": [[-0.5, None, -1.0], [float("nan")]],
    "env_mask": [[True, 0, 1], [1]],
    "score": [0.25, 0.75],
    "nothing": None,
}


def call(output: dict[str, Any], prompts: Any = CHATS) -> Any:
    return call_rollout_function(lambda prompts, trainer: output, prompts, None, frozenset([1]), 32)


@pytest.mark.parametrize(
    "make", [torch.tensor, np.array, lambda rows: [[torch.tensor(v) for v in r] for r in rows]]
)
def test_rows_may_be_tensors_and_arrays(make):
    given = {"prompt_ids": [[5, 6], [6, 7]], "completion_ids": [[8, 1], [8, 9]], "env_mask": [[1, 0], [0, 1]]}
    given["logprobs"] = [[-0.5, -1.0], [-2.0, float("nan")]]
    prompt_ids, completions, *_ = call({key: make(rows) for key, rows in given.items()})
    assert prompt_ids == given["prompt_ids"] and {type(v) for row in prompt_ids for v in row} == {int}
    assert [c.token_ids for c in completions] == given["completion_ids"]
    assert [c.loss_mask for c in completions] == given["env_mask"]
    assert completions[0].logps == [-0.5, -1.0] and math.isnan(completions[1].logps[1])
    assert [c.truncated for c in completions] == [False, True]


def test_all_keys_of_a_rollout_function():
    prompt_ids, completions, extra, _ = call(FULL)
    assert prompt_ids == [[5], [6, 7]]
    assert [completion.token_ids for completion in completions] == [[8, 9, 1], [8]]
    assert [completion.loss_mask for completion in completions] == [[1, 0, 1], [1]]
    assert [completion.truncated for completion in completions] == [False, True]
    assert completions[0].logps[::2] == [-0.5, -1.0]
    assert math.isnan(completions[0].logps[1]) and math.isnan(completions[1].logps[0])
    assert extra == {"score": [0.25, 0.75]}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            [[5], [6]],
            "rollout_func '<lambda>' returned [[5], [6]]; allowed: a dictionary of a list",
        ),
        ({"prompts": [1, 2]}, "rollout_func '<lambda>': a column 'prompts' would replace the trainer's own"),
        ({"log_metric": [1, 2]}, "a column 'log_metric' would replace"),
        ({"rollout_rows": [1, 2]}, "a column 'rollout_rows' would replace"),
        ({"score": 0.5}, "rollout_func '<lambda>': 'score' is 0.5; allowed: a list or an array"),
        ({"score": np.array(0.5)}, "'score' is array(0.5); allowed: a list"),
        ({"text": "ab"}, "'text' is 'ab'; allowed: a list"),
    ],
)
def test_names_and_values_of_columns_are_checked(output, message):
    with pytest.raises(BackendError, match=re.escape(message)):
        call({**FULL, **output} if isinstance(output, dict) else output)


def test_required_keys_of_a_rollout_function():
    _, completions, extra, _ = call({"prompt_ids": [[5], [6]], "completion_ids": [[1], [8, 1]]})
    assert [(c.logps, c.loss_mask, c.truncated) for c in completions] == [(None, None, False)] * 2
    assert extra == {}


def test_a_rollout_function_gets_copies_of_the_messages():
    prompts = [[dict(message) for message in prompt] for prompt in CHATS]

    def appends(given, trainer):
        for prompt in given:
            prompt[0]["content"] += "!"
            prompt.append({"role": "assistant", "content": "x"})
        return FULL

    call_rollout_function(appends, prompts, None, frozenset([1]))
    assert prompts == CHATS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_mask": [[1, 2, 0], [1]]}, "completion 0: 'env_mask' holds 2; allowed: 1 for tokens"),
        ({"env_mask": [[1, 0], [1]]}, "completion 0: 'env_mask' holds 2 values; allowed: 3, one per"),
        ({"logprobs": [[-1.0] * 3, []]}, "completion 1: 'logprobs' holds 0 values; allowed: 1, one per"),
        (
            {"completion_ids": [[8, 9, 32], [8]]},
            "completion 0: 'completion_ids' holds 32 at position 2; allowed: token ids from 0 to 31",
        ),
        ({"completion_ids": [[8, 9, 1], [-1]]}, "completion 1: 'completion_ids' holds -1 at position 0"),
        (
            {"completion_ids": [[8, 9, 1], [2**70]]},
            "completion 1: 'completion_ids' holds 1180591620717411303424",
        ),
        ({"completion_ids": [[8, 9, 1], [8.5]]}, "completion 1: 'completion_ids' holds 8.5"),
        ({"completion_ids": [[8, 9, 1], "a"]}, "completion 1: 'completion_ids' holds 'a'"),
        ({"prompt_ids": [[5], [6, 99]]}, "completion 1: 'prompt_ids' holds 99 at position 1"),
        ({"prompt_ids": [[5], []]}, "completion 1: 'prompt_ids' is empty"),
        ({"logprobs": [[-1.0, "x", 0.0], [0.0]]}, "completion 0: 'logprobs' holds 'x'"),
        ({"env_mask": torch.tensor([[1, 1, 2], [1, 0, 0]])}, "completion 0: 'env_mask' holds 2"),
        ({"score": [1.0]}, "1 entries for 'score', but there are 2 prompts"),
    ],
)
def test_invalid_results_are_named(changes, message):
    with pytest.raises(BackendError, match=re.escape(message)):
        call({**FULL, **changes})


def test_missing_keys_and_exceptions_are_named():
    with pytest.raises(BackendError, match="returned no completion_ids"):
        call({"prompt_ids": [[5], [6]]})

    def fails(prompts, trainer):
        raise ConnectionError("no server")

    with pytest.raises(BackendError, match="rollout_func 'fails' raised ConnectionError: no server"):
        call_rollout_function(fails, CHATS, None, frozenset([1]))
