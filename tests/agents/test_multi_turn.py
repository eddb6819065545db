"""MultiTurnRollouts with a scripted policy and real tools.

Files: ``threads.py``, ``agents/tools.py``, ``agents/trajectory.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from support.fakes.scripted import CHAT, ScriptedBackend, agents, byte_tokenizer, call, question, run

from groupwise.agents import allow_image_paths, make_tool, thread_safe
from groupwise.agents.tools import ToolResult, tool_result
from groupwise.errors import ConfigError
from groupwise.records import RolloutBatch, SamplingOptions
from groupwise.threads import CallExecutor, Invocation
from groupwise.tokenization.tool_calls import ToolCall


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    return a + b


async def double(a: int) -> int:
    """Double a number.

    Args:
        a: the number.
    """
    await asyncio.sleep(0)
    return 2 * a


def broken(a: int) -> int:
    """Fail.

    Args:
        a: anything.
    """
    raise ValueError(f"no {a} today")


TOOLS = [add, double, broken]


@pytest.mark.parametrize(
    ("text", "name", "content", "failed"),
    [
        (call("add", a=2, b=3), "add", "5", 0),
        (call("double", a=4), "double", "8", 0),
        (call("broken", a=7), "broken", "{'error': 'no 7 today'}", 1),
        (call("ad", a=1), "ad", "Tool ad not found. Available: add, double, broken.", 1),
        (call("add", a=1), "add", "missing 1 required positional argument: 'b'", 1),
        (call("add", c=1), "add", "got an unexpected keyword argument 'c'", 1),
        ('<tool_call>{"name": "add", "argu</tool_call>', "unknown", "is not valid JSON", 1),
        ('<tool_call>{"arguments": {}}</tool_call>', "unknown", "is not an object with the name", 1),
        (
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
            "add",
            "arguments are not an object",
            1,
        ),
    ],
)
def test_a_tool_call_yields_a_message_and_is_counted(text, name, content, failed):
    rollout, _ = run([[text, "done"]], TOOLS)
    assistant, tool, answer = rollout.texts[0]
    assert (assistant["role"], tool["role"], tool["name"]) == ("assistant", "tool", name)
    assert content in tool["content"] if failed else tool["content"] == content
    assert answer == {"role": "assistant", "content": "done"}
    assert rollout.metrics["tools/call_frequency"].value() == 1
    assert rollout.metrics["tools/failure_frequency"].value() == failed


def test_frequencies_are_per_completion_and_per_call():
    rollout, _ = run([[call("add", a=1, b=1) + call("broken", a=1), call("double", a=1), "x"], ["y"]], TOOLS)
    assert rollout.metrics["tools/call_frequency"].value() == 3 / 2
    assert rollout.metrics["tools/failure_frequency"].value() == pytest.approx(1 / 3)


def test_results_are_in_the_order_of_the_calls():
    text = call("double", a=1) + call("add", a=1, b=2) + call("double", a=3) + call("broken", a=1)
    rollout, _ = run([[text, "done"]], TOOLS)
    assert [message["content"] for message in rollout.texts[0][1:-1]] == [
        "2",
        "3",
        "6",
        "{'error': 'no 1 today'}",
    ]
    assert [c["function"]["name"] for c in rollout.texts[0][0]["tool_calls"]] == [
        "double",
        "add",
        "double",
        "broken",
    ]


def test_sync_tools_run_in_this_thread_in_order_and_async_ones_concurrently():
    """The async calls meet: each waits for the other. They start first and run beside the sync calls."""
    events: list[tuple[str, bool]] = []
    met = asyncio.Event()

    def note(a: str) -> str:
        """Note.

        Args:
            a: anything.
        """
        events.append((a, threading.current_thread() is threading.main_thread()))
        return a

    async def wait_for_other(a: int) -> str:
        """Wait.

        Args:
            a: anything.
        """
        await asyncio.wait_for(met.wait(), 20)
        return "met"

    async def come(a: int) -> str:
        """Come.

        Args:
            a: anything.
        """
        met.set()
        return "came"

    first = call("note", a="1") + call("wait_for_other", a=1) + call("note", a="2") + call("come", a=1)
    rollout, _ = run([[first, "x"], [call("note", a="3"), "y"]], [note, wait_for_other, come])
    assert [message["content"] for message in rollout.texts[0][1:-1]] == ["1", "met", "2", "came"]
    assert events == [("1", True), ("2", True), ("3", True)]


def test_a_tool_leaves_the_gradient_mode_as_it_was(caplog):

    def switch() -> None:
        torch.set_grad_enabled(False)

    (future,) = CallExecutor().start([Invocation(functools.partial(switch))])
    assert future.result() is None and torch.is_grad_enabled()
    assert (
        "function 'switch' of a tool or environment left torch.set_grad_enabled(False) behind" in caplog.text
    )


def test_sync_tools_marked_thread_safe_run_concurrently():
    """Each call waits for the other: sequential calls would fail."""
    meeting = threading.Barrier(2)

    @thread_safe
    def meet(a: int) -> str:
        """Meet.

        Args:
            a: anything.
        """
        meeting.wait(timeout=20)
        return "met"

    rollout, _ = run([[call("meet", a=1) + call("meet", a=2), "x"]], [meet])
    assert [message["content"] for message in rollout.texts[0][1:-1]] == ["met", "met"]


@pytest.mark.parametrize("limit", [None, 20.0])
def test_a_tool_may_use_signal_alarm(limit):
    """Only the main thread can set signal handlers; the time limit uses another signal."""

    def query(a: int) -> str:
        """Query.

        Args:
            a: anything.
        """

        def expire(*_: object) -> None:
            raise ValueError("query interrupted")

        previous = signal.signal(signal.SIGALRM, expire)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            time.sleep(5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        return "late"

    rollout, _ = run([[call("query", a=1), "x"]], [query], tool_timeout=limit)
    assert rollout.texts[0][1]["content"] == "{'error': 'query interrupted'}"


def slow(a: int) -> int:
    """Take long, and try again after an error.

    Args:
        a: anything.
    """
    for _ in range(3):
        with contextlib.suppress(Exception):
            time.sleep(5)
    return a


async def slow_async(a: int) -> int:
    """Take long, too.

    Args:
        a: anything.
    """
    await asyncio.sleep(5)
    return a


@thread_safe
def slow_thread(a: int) -> int:
    """Take long in a thread.

    Args:
        a: anything.
    """
    time.sleep(5)
    return a


@pytest.mark.parametrize("tool", [slow, slow_async, slow_thread])
def test_tool_timeout_limits_a_call(tool):
    previous = signal.getsignal(signal.SIGVTALRM)
    text = call(tool.__name__, a=1) + call("add", a=1, b=2)
    # Enough for the other call on a busy machine.
    rollout, _ = run([[text, "x"]], [tool, add], tool_timeout=1.0)
    assert [message["content"] for message in rollout.texts[0][1:-1]] == [
        "{'error': 'no result within 1 seconds (tool_timeout)'}",
        "3",
    ]
    assert signal.getsignal(signal.SIGVTALRM) == previous


def test_sync_tools_have_a_time_limit_outside_the_main_thread_too():
    with ThreadPoolExecutor(1) as pool:
        rollout, _ = pool.submit(run, [[call("slow", a=1), "x"]], [slow], tool_timeout=0.05).result(20)
    assert "no result within 0.05 seconds (tool_timeout)" in rollout.texts[0][1]["content"]


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("kind", ["sync", "async", "thread"])
def test_exceptions_that_end_a_process_or_task_are_failures_of_the_tool(error, kind):
    def end(a: int) -> int:
        """End.

        Args:
            a: anything.
        """
        raise error

    async def end_async(a: int) -> int:
        """End.

        Args:
            a: anything.
        """
        raise error

    end_async.__name__ = "end"
    tool = {"sync": lambda: end, "async": lambda: end_async, "thread": lambda: thread_safe(end)}[kind]()
    rollout, _ = run([[call("end", a=1), call("add", a=1, b=2), "x"]], [tool, add])
    assert type(error).__name__ in rollout.texts[0][1]["content"]
    assert rollout.texts[0][3]["content"] == "3"
    assert rollout.metrics["tools/failure_frequency"].value() == 1 / 2


def leave(*_: object) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("name", "handler", "error"),
    [("SIGINT", signal.default_int_handler, KeyboardInterrupt), ("SIGTERM", leave, SystemExit)],
)
def test_a_signal_during_a_sync_tool_ends_the_rollouts(name, handler, error):
    """Ctrl-C, and a handler that exits on SIGTERM."""

    def interrupted(a: int) -> str:
        """Wait.

        Args:
            a: anything.
        """
        signal.raise_signal(getattr(signal, name))
        return "not interrupted"

    previous = signal.signal(getattr(signal, name), handler)
    try:
        with pytest.raises(error):
            run([[call("interrupted", a=1), "x"]], [interrupted])
    finally:
        signal.signal(getattr(signal, name), previous)


def test_a_task_that_exits_does_not_end_the_event_loop():
    async def spawn(a: int) -> str:
        """Start a task.

        Args:
            a: anything.
        """

        async def leave() -> None:
            raise SystemExit(0)

        await asyncio.wait({asyncio.ensure_future(leave())})
        return "spawned"

    rollout, _ = run([[call("spawn", a=1), call("double", a=2), "x"]], [spawn, double])
    assert [m["content"] for m in rollout.texts[0] if m["role"] == "tool"] == ["spawned", "4"]


def test_one_warning_shows_the_first_error_when_every_call_of_a_generation_fails(caplog):
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, TOOLS)

    def generate(*scripts: list[str]) -> list[str]:
        caplog.clear()
        loop.generate_rollouts([question("?")] * len(scripts), ScriptedBackend(tokenizer, scripts))
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    failing = [call("broken", a=7) + call("broken", a=8), "x"]
    assert generate(failing, [call("add", a=1, b=1), "y"]) == []
    assert generate(["z"], failing) == [
        "all 2 tool calls of a generation failed; the first one: broken(a=7): 'ValueError: no 7 today'"
    ]
    assert generate(failing) == []  # once per tool and kind of error
    assert len(generate([call("add", a=1), "x"])) == 1


def test_tokens_are_those_of_the_rendered_conversation_and_the_mask_those_of_the_policy():
    tokenizer = byte_tokenizer()
    rollout, _ = run(
        [["Let me see." + call("add", a=2, b=3), call("double", a=5), "It is 10."]], TOOLS, tokenizer
    )
    schemas = [tool.schema for tool in agents(tokenizer, TOOLS).loop.all_tools]
    whole = tokenizer.apply_chat_template(
        rollout.prompts[0] + rollout.texts[0], tools=schemas, tokenize=False
    )
    completion = rollout.completions[0]
    assert tokenizer.decode(rollout.prompt_ids[0] + completion.token_ids) + "\n" == whole
    sampled = [token for token, mask in zip(completion.token_ids, completion.loss_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == "".join(
        [
            "Let me see.",
            call("add", a=2, b=3),
            "<|im_end|>",
            call("double", a=5),
            "<|im_end|>",
            "It is 10.<|im_end|>",
        ]
    )
    assert not completion.truncated


def test_sampled_tokens_are_never_tokenized_again():
    """A policy may sample several tokens for a word that its tokenizer encodes as one."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["numbers"])
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "numbers"]
    assert tokenizer("numbers")["input_ids"] != spelled
    backend = ScriptedBackend(tokenizer, [["", "done"]])
    answer = backend._answer

    def spell_out(prompt, limit):
        given = answer(prompt, limit)
        if backend.turns[0] == 1:
            given.token_ids[:0] = spelled + tokenizer(call("add", a=1, b=2))["input_ids"]
            backend.contexts[0] = prompt + given.token_ids
        return given

    backend._answer = spell_out
    rollout = agents(tokenizer, [add]).generate_rollouts([question("?")], backend)
    assert rollout.completions[0].token_ids[:7] == spelled
    assert backend.calls[1][0][len(rollout.prompt_ids[0]) :][:7] == spelled
    assert rollout.texts[0][0]["content"] == "numbers"


def test_logprobs_are_nan_on_tokens_that_were_not_sampled():
    rollout, _ = run([[call("add", a=2, b=3), "5"]], TOOLS, logps=True)
    completion = rollout.completions[0]
    assert completion.logps is not None
    assert [not math.isnan(logp) for logp in completion.logps] == [
        bool(mask) for mask in completion.loss_mask
    ]
    assert run([["no tool"]], TOOLS)[0].completions[0].logps is None


def test_one_generate_call_continues_all_rollouts():
    scripts = [[call("add", a=1, b=i), "done"] for i in range(3)] + [["done at once"]]
    _, backend = run(scripts, TOOLS)
    assert [len(prompts) for prompts in backend.calls] == [4, 3]


def test_a_slow_tool_delays_its_own_rollout_only():
    """It returns only after the next turn of the others: waiting for it would end in its error message."""
    tokenizer = byte_tokenizer()
    others_went_on = threading.Event()

    @thread_safe
    def wait_for_others(a: int) -> str:
        """Wait.

        Args:
            a: anything.
        """
        return "in time" if others_went_on.wait(timeout=30) else "too late"

    def watch(backend):
        if len(backend.calls) == 2:
            others_went_on.set()

    backend = ScriptedBackend(
        tokenizer, [[call("wait_for_others", a=1), "end"], [call("add", a=1, b=1), "end"]]
    )
    backend.before_call = watch
    rollout = agents(tokenizer, [add, wait_for_others]).generate_rollouts(
        [question("slow"), question("quick")], backend
    )
    assert [len(prompts) for prompts in backend.calls] == [2, 1, 1]
    assert rollout.texts[0][1]["content"] == "in time"


def test_generation_kwargs_reach_every_call_of_the_backend():
    tokenizer, kwargs = byte_tokenizer(), {"temperature": 0.5}
    backend = ScriptedBackend(tokenizer, [[call("add", a=1, b=1), "done"]])
    agents(tokenizer, TOOLS).generate_rollouts([question("?")], backend, generation_kwargs=kwargs)
    given = [SamplingOptions(sampling.max_tokens, None, kwargs) for sampling in backend.sampling]
    assert len(given) == 2 and backend.sampling == given


def test_max_tool_calling_iterations_limits_the_turns():
    rollout, _ = run([[call("add", a=1, b=1)] * 5], TOOLS, max_tool_calling_iterations=2)
    assert [message["role"] for message in rollout.texts[0]] == ["assistant", "tool"] * 2 + ["assistant"]
    assert not rollout.completions[0].truncated


def test_a_turn_is_truncated_at_max_completion_length():
    full, _ = run([[call("add", a=1, b=1), "a long answer"]], TOOLS)
    limit = len(full.completions[0].token_ids) - 5
    cut, _ = run([[call("add", a=1, b=1), "a long answer"]], TOOLS, max_completion_length=limit)
    assert cut.completions[0].token_ids == full.completions[0].token_ids[:limit]
    assert cut.completions[0].loss_mask == full.completions[0].loss_mask[:limit]
    assert cut.completions[0].truncated
    assert cut.texts[0][-1]["content"] == "a long an"  # the five tokens are "swer" and the end


def test_a_tool_result_that_leaves_no_token_ends_the_rollout():
    first, _ = run([[call("add", a=1, b=1)]], TOOLS, max_tool_calling_iterations=0)
    length = len(first.completions[0].token_ids)
    cut, backend = run([[call("add", a=1, b=1), "x"]], TOOLS, max_completion_length=length + 10)
    assert cut.completions[0].token_ids == first.completions[0].token_ids
    assert cut.completions[0].truncated and len(backend.calls) == 1
    assert [message["role"] for message in cut.texts[0]] == ["assistant"]
    assert cut.metrics["tools/call_frequency"].value() == 1  # the call was executed


@pytest.mark.parametrize("of_backend", [False, True])
def test_the_context_length_ends_a_rollout(of_backend, monkeypatch):
    full, _ = run([[call("add", a=1, b=1), "a long answer"]], TOOLS)
    prompt, whole = len(full.prompt_ids[0]), full.completions[0].token_ids

    def within(context: int) -> RolloutBatch:
        monkeypatch.setattr(ScriptedBackend, "context_length", context if of_backend else None)
        settings = {} if of_backend else {"context_length": context}
        return run([[call("add", a=1, b=1), "a long answer"]], TOOLS, **settings)[0]

    cut = within(prompt + len(whole) - 5).completions[0]  # within the second turn
    assert cut.token_ids == whole[:-5] and cut.truncated
    first = full.completions[0].loss_mask.index(0)  # the tokens of the first turn
    cut = within(prompt + first + 10).completions[0]  # within the tool result
    assert cut.token_ids == whole[:first] and cut.truncated
    with pytest.raises(
        ConfigError, match=rf"row 0: the prompt with its tools has {prompt} tokens.*context of"
    ):
        within(prompt)


def test_a_truncated_turn_calls_no_tool():
    said = call("add", a=1, b=1) + call("add", a=1, b=1)
    cut, _ = run([[said, "x"]], TOOLS, max_completion_length=len(said) - 3)
    assert cut.completions[0].truncated
    assert [message["role"] for message in cut.texts[0]] == ["assistant"]
    assert cut.metrics["tools/call_frequency"].value() == 0


def test_a_template_that_rewrites_history_forks_the_rollout():
    """The template adds a note to earlier turns after the result "5"; the rewritten tokens have no loss."""
    rewriting = CHAT.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + message.content + ('(noted)' if messages[-1].content == '5' else '')",
    )
    tokenizer = byte_tokenizer(rewriting)
    script = ["Sum: " + call("add", a=2, b=3), "It is 5."]
    rollout, backend = run([script], TOOLS, tokenizer)
    completion = rollout.completions[0]
    assert tokenizer.decode(completion.token_ids) == "<|im_end|>".join([*script, ""]) and set(
        completion.loss_mask
    ) == {1}
    ((start, context),) = completion.contexts
    assert tokenizer.decode(completion.token_ids[start:]) == "It is 5.<|im_end|>"
    assert "Sum:(noted)" in tokenizer.decode(context) and backend.calls[1][0] == context
    assert rollout.metrics["tools/fork_frequency"].value() == 1


def test_a_rank_whose_rollouts_have_ended_joins_the_generate_calls_of_others():
    tokenizer = byte_tokenizer()
    loop = agents(tokenizer, TOOLS)
    others = iter([True, True, True, False])  # another rank has two more turns than this one
    loop.any_rank = lambda here: next(others) or here
    backend = ScriptedBackend(tokenizer, [["at once"], [""], [""]])
    rollout = loop.generate_rollouts([question("?")], backend)
    assert [len(prompts) for prompts in backend.calls] == [1, 1, 1]
    assert len(rollout.texts) == 1 and rollout.texts[0][0]["content"] == "at once"


def test_a_text_prompt_is_refused():
    with pytest.raises(ConfigError, match="row 0 has a text prompt"):
        agents(byte_tokenizer(), TOOLS).generate_rollouts(
            [{"prompt": "2 + 3 ="}], ScriptedBackend(byte_tokenizer(), [["5"]])
        )


@pytest.mark.parametrize(("continued", "text"), [(True, "The sum is 5."), (False, "is 5.")])
@pytest.mark.parametrize("tools", [TOOLS, []])
def test_an_assistant_message_at_the_end_of_the_prompt_is_continued_if_set(tools, continued, text):
    tokenizer = byte_tokenizer()
    row = {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "The sum "}]}
    loop = agents(tokenizer, tools, chat_template_kwargs={"continue_final_message": continued})
    rollout = loop.generate_rollouts([row], ScriptedBackend(tokenizer, [["is 5."]]))
    assert rollout.texts[0] == [{"role": "assistant", "content": text}]
    opening = "" if continued else "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rollout.prompt_ids[0]).endswith("The sum " + opening)


def test_later_turns_open_a_turn_after_a_continued_message():
    tokenizer = byte_tokenizer()
    row = {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Well."}]}
    loop = agents(tokenizer, TOOLS, chat_template_kwargs={"continue_final_message": True})
    rollout = loop.generate_rollouts(
        [row], ScriptedBackend(tokenizer, [[" So: " + call("add", a=2, b=3), "5."]])
    )
    assert [message["content"] for message in rollout.texts[0]] == ["Well. So:", "5", "5."]


def test_calls_fail_while_an_async_tool_blocks_the_event_loop(monkeypatch, caplog):
    """Later calls have a new event loop."""
    monkeypatch.setattr("groupwise.threads.BLOCKED_MARGIN", 0.2)
    release = threading.Event()

    async def blocks(a: int) -> str:
        """Block.

        Args:
            a: anything.
        """
        release.wait(timeout=30)
        return "too late"

    try:
        script = [call("blocks", a=1) + call("double", a=1), call("double", a=2), "x"]
        rollout, _ = run([script], [blocks, double], tool_timeout=1.0)
    finally:
        release.set()
    results = [message["content"] for message in rollout.texts[0] if message["role"] == "tool"]
    assert results == ["{'error': 'no result within 1.2 seconds (tool_timeout)'}"] * 2 + ["4"]
    assert "blocks the event loop" in caplog.text


def returning(value: object):
    def give(a: int) -> object:
        """Give something.

        Args:
            a: anything.
        """
        return value

    return give


@pytest.mark.parametrize(
    ("value", "content", "rendered"),
    [
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], None, "one two"),
        ([1, (2, "x")], None, "[1, (2, 'x')]"),
        ([], None, "[]"),
        ([{"type": "folder", "name": "a"}], None, "[{'type': 'folder', 'name': 'a'}]"),
        ([{"type": "text"}], None, "[{'type': 'text'}]"),
        ((1, 2), "(1, 2)", "(1, 2)"),
        ({"a": None}, "{'a': None}", "{'a': None}"),
        ("caf\u00e9 \ud83d!", "caf\u00e9 \ufffd!", "caf\u00e9 \ufffd!"),
        (["\udfff"], ["\ufffd"], "['\ufffd']"),
    ],
)
def test_a_list_that_a_tool_returns_stays_a_list_for_rewards(value, content, rendered):
    """``content`` None: the value itself."""
    tokenizer = byte_tokenizer()
    rollout, _ = run([[call("give", a=1), "x"]], [returning(value)], tokenizer)
    assert rollout.texts[0][1]["content"] == (value if content is None else content)
    completion = rollout.completions[0]
    seen = [token for token, mask in zip(completion.token_ids, completion.loss_mask, strict=True) if not mask]
    assert f"<|im_start|>tool\n{rendered}<|im_end|>" in tokenizer.decode(seen)


def test_a_later_change_of_the_list_does_not_change_the_record():
    items: list[int] = []

    def push(a: int) -> list[int]:
        """Push.

        Args:
            a: what to push.
        """
        items.append(a)
        return items

    rollout, _ = run([[call("push", a=1), call("push", a=2), "x"]], [push])
    assert [m["content"] for m in rollout.texts[0] if m["role"] == "tool"] == [[1], [1, 2]]


class Unprintable:
    def __str__(self) -> str:
        raise SystemExit(0)


@pytest.mark.parametrize("value", [10**5000, Unprintable()], ids=["number", "object"])
def test_a_result_without_a_text_is_a_failure(value):
    rollout, _ = run([[call("give", a=1), "x"]], [returning(value)])
    assert rollout.texts[0][1]["content"].startswith("{'error': ")
    assert rollout.metrics["tools/failure_frequency"].value() == 1


def test_lone_surrogates_in_tool_calls_are_replaced():
    given = []

    def keep(a: str) -> str:
        """Keep.

        Args:
            a: anything.
        """
        given.append(a)
        return a

    text = '<tool_call>{"name": "keep", "arguments": {"a": "x\\ud800y"}}</tool_call>'
    unknown = '<tool_call>{"name": "k\\udfff", "arguments": {"\\ud800": 1}}</tool_call>'
    rollout, _ = run([[text + unknown, "done"]], [keep])
    assert given == ["x\ufffdy"]
    assert [m["name"] for m in rollout.texts[0][1:-1]] == ["keep", "k\ufffd"]
    json.dumps(rollout.texts[0], ensure_ascii=False).encode()  # every text can be written


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    ],
    ids=["nested", "digits"],
)
def test_json_that_python_cannot_parse_is_a_failed_call(text):
    rollout, _ = run([[text, "done"]], TOOLS, max_completion_length=200_000)
    assert "error" in rollout.texts[0][1]["content"] and rollout.texts[0][2]["content"] == "done"


def test_a_result_of_many_megabytes_is_not_tokenized(monkeypatch):
    """Each token has at most 12 characters ("<|im_start|>"): more cannot fit into the completion."""
    tokenizer = byte_tokenizer()
    tokenized: list[int] = []
    encode = type(tokenizer).__call__

    def measured(self, text, *arguments, **options):
        tokenized.append(len(text))
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", measured)
    script = [call("give", a=1), "x"]
    rollout, backend = run([script], [returning("x" * 54_000_000)], tokenizer)
    assert rollout.completions[0].truncated and len(backend.calls) == 1
    assert [message["role"] for message in rollout.texts[0]] == ["assistant"]
    assert max(tokenized) < 10_000
    longest = 12 * (1000 - len(rollout.completions[0].token_ids))
    run([script], [returning("x" * longest)], tokenizer)
    assert max(tokenized) > longest  # within the bound, the tokens decide


def result_of(function, **options) -> ToolResult:
    tool = make_tool(function)
    (future,) = CallExecutor().run_all([Invocation(lambda: function(1))])
    return tool_result(ToolCall("give", {}), {tool.name: tool}, future, images=True, **options)


@pytest.mark.parametrize(
    "image", ["?", "http://127.0.0.1:9/a.png", {"path": "/etc/hostname"}, [[0, 1]], None]
)
@pytest.mark.parametrize("key", ["image", "path", "url", "base64"])
def test_image_blocks_with_paths_and_urls_are_text(image, key, caplog):
    value = [{"type": "image", key: image}]
    assert result_of(returning(value)) == ToolResult(str(value))
    assert "allow_image_paths" in caplog.text


def test_image_objects_are_images_and_paths_only_where_the_tool_allows_them(tmp_path):
    path, image = tmp_path / "a.png", Image.new("RGB", (3, 2))
    image.save(path)
    pixels = np.zeros((2, 2, 3))
    for value in (image, pixels, {"bytes": path.read_bytes(), "path": "/etc/hostname"}):
        (block,) = result_of(returning([{"type": "image", "image": value}])).content
        assert block["image"] is value or block["image"].size == (3, 2)
    value = [{"type": "image", "path": str(path)}]
    (block,) = result_of(allow_image_paths(returning(value))).content
    assert block["image"].size == (3, 2)
    missing = result_of(allow_image_paths(returning([{"type": "image", "path": str(tmp_path / "b.png")}])))
    assert "cannot be opened" in missing.failure


def test_images_without_a_processor_are_failed_calls_or_refused():
    rollout, _ = run(
        [[call("give", a=1), "x"]], [returning([{"type": "image", "image": np.zeros((2, 2, 3))}])]
    )
    assert rollout.texts[0][1]["content"] == (
        "{'error': 'the tool returned an image, but the model reads text only'}"
    )
    row = {**question("?"), "image": "cat.png"}
    with pytest.raises(ConfigError, match=r"1 image\(s\).*reads text only"):
        agents(byte_tokenizer(), TOOLS).generate_rollouts([row], ScriptedBackend(byte_tokenizer(), [["x"]]))
