"""Results of a ``rollout_func`` and the completions made of them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

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
    return call_rollout_function(lambda prompts, trainer: output, prompts, None, frozenset([1]))


def test_all_keys_of_a_rollout_function():
    prompt_ids, completions, extra = call(FULL)
    assert prompt_ids == [[5], [6, 7]]
    assert [completion.token_ids for completion in completions] == [[8, 9, 1], [8]]
    assert [completion.loss_mask for completion in completions] == [[1, 0, 1], [1]]
    assert [completion.truncated for completion in completions] == [False, True]
    assert completions[0].logps[::2] == [-0.5, -1.0]
    assert math.isnan(completions[0].logps[1]) and math.isnan(completions[1].logps[0])
    assert extra == {"score": [0.25, 0.75]}


def test_required_keys_of_a_rollout_function():
    _, completions, extra = call({"prompt_ids": [[5], [6]], "completion_ids": [[1], [8, 1]]})
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
        ({"env_mask": [[1, 0], [1]]}, "completion 0: 2 values in 'env_mask' for 3 tokens"),
        ({"logprobs": [[-1.0] * 3, []]}, "completion 1: 0 values in 'logprobs' for 1 tokens"),
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
