"""MultiTurnRollouts with a scripted policy and real tools."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest
from support.scripted import CHAT, ScriptedBackend, agents, byte_tokenizer, call, question, run

from groupwise.agents import time_limit
from groupwise.errors import AgentError, ConfigError
from groupwise.records import RolloutBatch, SamplingOptions


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


@time_limit(0.05)
def slow(a: int) -> int:
    """Take long.

    Args:
        a: anything.
    """
    time.sleep(5)
    return a


@time_limit(0.05)
async def slow_async(a: int) -> int:
    """Take long, too.

    Args:
        a: anything.
    """
    await asyncio.sleep(5)
    return a


TOOLS = [add, double, broken, slow, slow_async]


@pytest.mark.parametrize(
    ("text", "name", "content", "failed"),
    [
        (call("add", a=2, b=3), "add", "5", 0),
        (call("double", a=4), "double", "8", 0),
        (call("broken", a=7), "broken", "{'error': 'no 7 today'}", 1),
        (call("slow", a=1), "slow", "{'error': 'slow took longer than 0.05 seconds.'}", 1),
        (call("slow_async", a=1), "slow_async", "{'error': 'slow_async took longer than 0.05 seconds.'}", 1),
        (call("ad", a=1), "ad", "Tool ad not found. Available: add, double, broken, slow, slow_async.", 1),
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


def test_calls_of_a_turn_are_concurrent():
    """Each call waits for the other: sequential calls would fail."""
    meeting = threading.Barrier(2)

    def meet(a: int) -> str:
        """Meet.

        Args:
            a: anything.
        """
        meeting.wait(timeout=20)
        return "met"

    rollout, _ = run([[call("meet", a=1) + call("meet", a=2), "x"]], [meet])
    assert [message["content"] for message in rollout.texts[0][1:-1]] == ["met", "met"]


def test_tokens_are_those_of_the_rendered_conversation_and_the_mask_those_of_the_policy():
    tokenizer = byte_tokenizer()
    rollout, _ = run(
        [["Let me see." + call("add", a=2, b=3), call("double", a=5), "It is 10."]], TOOLS, tokenizer
    )
    schemas = [tool.schema for tool in agents(tokenizer, TOOLS).tools]
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


def test_a_template_that_rewrites_history_forks_the_rollout_at_the_first_mismatch():
    """The template adds a note to earlier turns after the result "5"; the rewritten tokens have no loss."""
    rewriting = CHAT.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + message.content + ('(noted)' if messages[-1].content == '5' else '')",
    )
    tokenizer = byte_tokenizer(rewriting)
    script = ["Sum: " + call("add", a=2, b=3), "It is 5."]
    rollout, backend = run([script], TOOLS, tokenizer)
    completion = rollout.completions[0]
    text = tokenizer.decode(completion.token_ids)
    assert text.startswith("Sum:(noted)") and text.endswith("It is 5.<|im_end|>")
    sampled = [token for token, mask in zip(completion.token_ids, completion.loss_mask, strict=True) if mask]
    # The common prefix, and the turn sampled after the fork.
    assert tokenizer.decode(sampled) == "Sum:" + "It is 5.<|im_end|>"
    context = rollout.prompt_ids[0] + completion.token_ids[: -len("It is 5.") - 1]
    assert backend.calls[1][0] == context
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
    loop = agents(tokenizer, tools, template_kwargs={"continue_final_message": continued})
    rollout = loop.generate_rollouts([row], ScriptedBackend(tokenizer, [["is 5."]]))
    assert rollout.texts[0] == [{"role": "assistant", "content": text}]
    opening = "" if continued else "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rollout.prompt_ids[0]).endswith("The sum " + opening)


def test_later_turns_open_a_turn_after_a_continued_message():
    tokenizer = byte_tokenizer()
    row = {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Well."}]}
    loop = agents(tokenizer, TOOLS, template_kwargs={"continue_final_message": True})
    rollout = loop.generate_rollouts(
        [row], ScriptedBackend(tokenizer, [[" So: " + call("add", a=2, b=3), "5."]])
    )
    assert [message["content"] for message in rollout.texts[0]] == ["Well. So:", "5", "5."]


def test_a_blocked_event_loop_is_reported(monkeypatch):
    monkeypatch.setattr("groupwise.agents.multi_turn.BLOCKED_MARGIN", 0.2)
    release = threading.Event()

    @time_limit(0.1)
    async def blocks(a: int) -> str:
        """Block.

        Args:
            a: anything.
        """
        release.wait(timeout=30)
        return "too late"

    try:
        with pytest.raises(AgentError, match="no results of the tools blocks"):
            run([[call("blocks", a=1), "x"]], [blocks])
    finally:
        release.set()


def test_a_tool_may_return_text_blocks_or_any_list():
    def blocks(a: int) -> list:
        """Give blocks.

        Args:
            a: anything.
        """
        return [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}] if a else [1, 2]

    rollout, _ = run([[call("blocks", a=1) + call("blocks", a=0), "x"]], [blocks])
    assert [message["content"] for message in rollout.texts[0][1:-1]] == ["one two", "[1, 2]"]


def test_images_without_a_processor_are_refused():
    def picture(a: int) -> list:
        """Give an image.

        Args:
            a: anything.
        """
        return [{"type": "image", "image": "?"}]

    with pytest.raises(ConfigError, match=r"a tool returned .*reads text only"):
        run([[call("picture", a=1), "x"]], [picture])
    row = {**question("?"), "image": "cat.png"}
    with pytest.raises(ConfigError, match=r"1 image\(s\).*reads text only"):
        agents(byte_tokenizer(), TOOLS).generate_rollouts([row], ScriptedBackend(byte_tokenizer(), [["x"]]))
