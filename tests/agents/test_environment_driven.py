"""Environment-driven rollouts: messages are appended, changed histories fork, failures are named."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.agent_runs import trainer
from support.configs import config_of
from support.fakes.scripted import ScriptedBackend, byte_tokenizer, call, retries

from groupwise.agents import MaxLengthReachedError, make_tool
from groupwise.agents.environment_driven import EnvironmentLoop
from groupwise.agents.multi_turn import MultiTurnRollouts
from groupwise.errors import AgentError
from groupwise.records import SamplingOptions


class Dialogue:
    """Requests a turn, replies "more" as often as the row says, and counts the turns."""

    time_limit = 20.0
    uses_tools = False

    async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": row["question"]}]
        turns = 0
        while turns <= row.get("more", 0):
            response = await chat(messages, [])
            messages = self.remember([*messages, response.message])
            messages.append({"role": "user", "content": "more"})
            turns += 1
        return {"turns": turns}

    def remember(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return messages

    def reward_funcs(self) -> list[Any]:
        return [turns_reward]


def turns_reward(turns: list[int], **_: Any) -> list[float]:
    return [float(count) for count in turns]


def generate_rollouts(
    environment: Any,
    scripts: list[list[str]],
    rows: list[dict[str, Any]],
    generation_kwargs: dict[str, Any] | None = None,
    *,
    context_length: int | None = None,
    max_retries: int | None = None,
    **settings: Any,
):
    tokenizer = byte_tokenizer()
    config = config_of(**{"max_completion_length": 500, **settings, **retries(max_retries)})
    loop = MultiTurnRollouts(
        EnvironmentLoop(environment),
        tokenizer,
        config,
        frozenset([tokenizer.eos_token_id]),
        context_length=context_length,
    )
    backend = ScriptedBackend(tokenizer, scripts)
    return loop.generate_rollouts(rows, backend, generation_kwargs), backend, tokenizer


def test_messages_are_appended_and_turns_share_generate_calls():
    rows = [{"question": "a", "more": 2}, {"question": "b", "more": 0}]
    rollout, backend, tokenizer = generate_rollouts(Dialogue(), [["one", "two", "three"], ["only"]], rows)
    assert [len(prompts) for prompts in backend.calls] == [2, 1, 1]
    assert rollout.prompts == [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    assert [message["content"] for message in rollout.texts[0]] == ["one", "more", "two", "more", "three"]
    whole = tokenizer.apply_chat_template(rollout.prompts[0] + rollout.texts[0], tokenize=False)
    completion = rollout.completions[0]
    assert tokenizer.decode(rollout.prompt_ids[0] + completion.token_ids) + "\n" == whole
    sampled = [token for token, mask in zip(completion.token_ids, completion.loss_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    assert rollout.extra == {"turns": [3, 1]}
    assert rollout.metrics["tools/fork_frequency"].value() == 0


def test_a_rewritten_history_forks_the_rollout():
    class Forgetful(Dialogue):
        def remember(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [
                *messages[:-1],
                {**messages[-1], "content": messages[-1]["content"].replace("secret", "***")},
            ]

    rows = [{"question": "a", "more": 1}]
    rollout, _, tokenizer = generate_rollouts(Forgetful(), [["my secret is out", "two"]], rows)
    completion = rollout.completions[0]
    assert tokenizer.decode(completion.token_ids) == "my secret is out<|im_end|>two<|im_end|>"
    assert set(completion.loss_mask) == {1}  # nothing that was sampled is lost
    ((start, history),) = completion.contexts  # of the second turn
    assert tokenizer.decode(completion.token_ids[start:]) == "two<|im_end|>"
    assert "my *** is out<|im_end|>\n<|im_start|>user\nmore" in tokenizer.decode(history)
    assert completion.last_row == (start, len(completion.token_ids))
    assert rollout.metrics["tools/fork_frequency"].value() == 1
    assert [message["content"] for message in rollout.texts[0]] == ["my *** is out", "more", "two"]


def test_generation_kwargs_reach_every_call_of_the_backend():
    kwargs = {"temperature": 0.5}
    _, backend, _ = generate_rollouts(Dialogue(), [["one", "two"]], [{"question": "a", "more": 1}], kwargs)
    given = [SamplingOptions(sampling.max_tokens, None, kwargs) for sampling in backend.sampling]
    assert len(given) == 2 and backend.sampling == given


def test_a_history_with_another_prompt_is_the_context_of_later_turns():
    class Restarting(Dialogue):
        def remember(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": "summary"}]

    rollout, _, tokenizer = generate_rollouts(
        Restarting(), [["one"], ["two"]], [{"question": "a", "more": 1}]
    )
    completion = rollout.completions[0]
    assert tokenizer.decode(completion.token_ids) == "one<|im_end|>two<|im_end|>"
    ((start, history),) = completion.contexts
    assert tokenizer.decode(completion.token_ids[start:]) == "two<|im_end|>"
    assert "summary" in tokenizer.decode(history) and "summary" not in tokenizer.decode(rollout.prompt_ids[0])


def test_max_completion_length_ends_a_rollout():
    rollout, _, _ = generate_rollouts(
        Dialogue(), [["a" * 20] * 9], [{"question": "a", "more": 8}], max_completion_length=100
    )
    completion = rollout.completions[0]
    assert completion.truncated and len(completion.token_ids) <= 100
    assert rollout.extra == {}  # run_rollout did not return


def test_the_context_length_ends_a_rollout():
    row = [{"question": "a", "more": 8}]
    whole, _, _ = generate_rollouts(Dialogue(), [["a" * 20] * 9], row)
    context = len(whole.prompt_ids[0]) + 100
    rollout, _, _ = generate_rollouts(Dialogue(), [["a" * 20] * 9], row, context_length=context)
    completion = rollout.completions[0]
    assert completion.truncated and len(completion.token_ids) <= 100
    assert completion.token_ids == whole.completions[0].token_ids[: len(completion.token_ids)]


def test_a_new_history_that_fills_the_context_ends_the_rollout():
    class Growing(Dialogue):
        def remember(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": "summary " * 200}]

    rollout, _, tokenizer = generate_rollouts(
        Growing(), [["one"], ["two"]], [{"question": "a", "more": 1}], context_length=500
    )
    assert rollout.completions[0].truncated and len(rollout.prompt_ids[0]) < 500
    assert tokenizer.decode(rollout.completions[0].token_ids) == "one<|im_end|>"


def test_an_environment_may_catch_the_maximum_length():
    class Careful(Dialogue):
        async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
            try:
                return await super().run_rollout(row, chat)
            except MaxLengthReachedError:
                return {"turns": -1}

    rollout, _, _ = generate_rollouts(
        Careful(), [["a" * 20] * 9], [{"question": "a", "more": 8}], max_completion_length=100
    )
    assert rollout.extra == {"turns": [-1]}


def test_tool_calls_are_parsed_into_messages():
    def look(at: str) -> str:
        """Look.

        Args:
            at: at what.
        """
        return at

    class WithTools(Dialogue):
        uses_tools = True

        async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
            messages = [{"role": "user", "content": "?"}]
            response = await chat(messages, [make_tool(look).schema])
            (made,) = response.message["tool_calls"]
            assert made["function"] == {"name": "look", "arguments": {"at": "it"}}
            messages += [response.message, {"role": "tool", "name": "look", "content": "a cat"}]
            await chat(messages, [make_tool(look).schema])
            return {}

    rollout, _, tokenizer = generate_rollouts(WithTools(), [[call("look", at="it"), "A cat."]], [{}])
    assert "look" in tokenizer.decode(rollout.prompt_ids[0])
    assert "a cat<|im_end|>" in tokenizer.decode(rollout.completions[0].token_ids)


class Failing(Dialogue):
    async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
        await chat([{"role": "user", "content": "?"}], [])
        raise OSError("the server is gone")


class WithoutTurn(Dialogue):
    async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
        return {}


class Columns(Dialogue):
    """Returns other columns."""

    def __init__(self, columns: Any) -> None:
        self.columns = columns

    async def run_rollout(self, row: dict[str, Any], chat: Any) -> Any:
        await super().run_rollout(row, chat)
        return self.columns


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"completions": "a"}, "'Columns', method 'run_rollout': a column 'completions' would replace"),
        ({"completion_ids": [1]}, "a column 'completion_ids' would replace"),
        (0.5, "'Columns', method 'run_rollout' returned 0.5; allowed: a dictionary"),
    ],
)
def test_columns_of_an_environment_do_not_replace_arguments_of_rewards(columns, message):
    with pytest.raises(AgentError, match=message):
        generate_rollouts(Columns(columns), [["x"]], [{"question": "a"}])


class Stuck(Dialogue):
    time_limit = 0.1

    async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
        await asyncio.sleep(30)
        return {}


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Failing,
            r"'Failing', method 'run_rollout' \(given sample=0\) raised OSError: the server is gone",
        ),
        (WithoutTurn, "rollout 0 ended without a turn of the policy"),
        (Stuck, r"'Stuck', method 'run_rollout' .*no result within 0.1 seconds \(time_limit\)"),
    ],
)
def test_failures_raise_with_the_name_of_the_environment(cls, message):
    with pytest.raises(AgentError, match=message):
        generate_rollouts(cls(), [["x"]], [{"question": "a"}])


def test_failed_rollouts_are_repeated_and_then_dropped():
    attempts: dict[str, int] = {}

    class Faulty(Dialogue):
        time_limit = 2.0

        async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
            name = row["question"]
            attempts[name] = attempts.get(name, 0) + 1
            if name == "stuck" and attempts[name] == 1:
                await asyncio.sleep(30)
            result = await super().run_rollout(row, chat)
            if name == "gone" or (name == "once" and attempts[name] == 1):
                raise SystemExit(0)
            return result

    rows = [{"question": name} for name in ("good", "gone", "once", "stuck")]
    scripts = [["1"], ["2", "3"], ["4", "5"], ["6"]]
    rollout, backend, tokenizer = generate_rollouts(Faulty(), scripts, rows, max_retries=1)
    assert [completion.dropped for completion in rollout.completions] == [False, True, False, False]
    assert rollout.completions[1].token_ids == rollout.prompt_ids[1] == [tokenizer.eos_token_id]
    assert [text[-1]["content"] for text in rollout.texts] == ["1", "", "5", "6"]
    assert [len(prompts) for prompts in backend.calls] == [3, 3]
    assert rollout.extra == {"turns": [1, None, 1, 1]}
    assert rollout.metrics["rollouts/retry_frequency"].value() == 3 / 4


def test_a_slow_rollout_does_not_block_the_others():
    """It requests a turn only after the other has ended: waiting for it would raise."""
    ended = threading.Event()

    class Uneven(Dialogue):
        async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
            if row["question"] == "late":
                assert await asyncio.to_thread(ended.wait, 60)
                return await super().run_rollout(row, chat)
            result = await super().run_rollout(row, chat)
            ended.set()
            return result

    rows = [{"question": "late"}, {"question": "early", "more": 1}]
    rollout, backend, _ = generate_rollouts(Uneven(), [["1", "2"], ["3"]], rows)
    assert [len(prompts) for prompts in backend.calls] == [1, 1, 1]
    assert rollout.extra == {"turns": [1, 2]}


@pytest.mark.slow
def test_a_run_with_an_environment_that_runs_rollouts(tmp_path):
    class Seeded(Dialogue):
        async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
            return await super().run_rollout({"question": f"game {row['seed']}", "more": 1}, chat)

    run = trainer(tmp_path, environment_factory=Seeded(), train_dataset=None, reward_funcs=None)
    run.train()
    logs = [log for log in run.state.log_history if "rewards/turns_reward/mean" in log]
    assert len(logs) == 2 and run.state.global_step == 2
