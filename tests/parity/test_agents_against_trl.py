"""The same conversation gives the same tokens, masks, messages and rewards as in TRL."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from support.fakes.mixin_hosts import host
from support.fakes.scripted import ScriptedBackend, agents, byte_tokenizer
from support.tool_chats import LOOK

from groupwise.agents.environments import EnvironmentPool
from groupwise.mixins import RolloutMixin
from groupwise.records import Completion, RolloutRequest
from groupwise.tokenization.prompts import tokenize_prompt
from groupwise.tokenization.rendering import Renderer
from groupwise.tokenization.tool_calls import TurnParser

pytestmark = pytest.mark.parity

TEMPLATES = Path(__import__("trl").__file__).parent / "chat_templates"
#: Templates that both libraries can use, and the token that ends a turn.
FAMILIES = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_vl": "<|im_end|>",
    "qwen3_5_nothink": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gptoss": "<|call|>",
    "glm4moe": "<|endoftext|>",
    "lfm2_2_5": "<|im_end|>",
    "nemotron_3_nano": "<|im_end|>",
    "gemma4": "<|tool_response>",
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>"),
    *("<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|user|>", "<|assistant|>"),
    *(
        "<|turn>",
        "<turn|>",
        "<|tool_response>",
        "<tool_response|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|pad|>",
    ),
)


def tokenizer(family: str) -> Any:
    made = byte_tokenizer(
        (TEMPLATES / f"{family}.jinja").read_text(), SPECIAL, FAMILIES.get(family, "<|im_end|>")
    )
    made.bos_token = "<|pad|>"
    made.padding_side = "left"
    return made


HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
MULTIPLY_TAGS = (
    "<tool_call>\n<function=multiply>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
    "</function>\n</tool_call>"
)
MULTIPLY_JSON = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
THINKING = [
    "<think>\nHm.\n</think>\n\nIt is 12. <|im_end|>",
    f"<think>Hm.</think>\nLet me see.\n{MULTIPLY_JSON}<|im_end|>",
    "<think>\nHm",  # truncated
    "Well. <think>Hm.</think>\n\nSo.<|im_end|>",
    " It is 12. <|im_end|>",
    '<tool_call>{"name": "multi<|im_end|>',
]
#: Turns of each family, with the end token that the policy samples.
TURNS = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_vl"), THINKING),
    "qwen3_5_think": [
        "Hm.\n</think>\n\nIt is 12.<|im_end|>",
        f"Hm.\n</think>\n\n{MULTIPLY_TAGS}<|im_end|>",
        "Hm",
    ],
    "qwen3_5_nothink": ["It is 12.<|im_end|>", f"Let me see.\n{MULTIPLY_TAGS}<|im_end|>"],
    "gptoss": [
        f"{HM}<|channel|>final<|message|>It is 12.<|return|>",
        HM + ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 3, "b": 4}<|call|>',
        "<|channel|>analysis<|message|>Hm",
    ],
    "gemma4": [
        "<|channel>thought\nHm.<channel|>It is 12.<turn|>",
        "<|channel>thought\nHm.<channel|><|tool_call>call:multiply{a:3,b:4}<tool_call|><|tool_response>",
    ],
}


@pytest.mark.parametrize("family", TURNS)
def test_messages_of_turns(family: str) -> None:
    """Thoughts, content and tool calls."""
    from transformers.utils import get_json_schema
    from trl.chat_template_utils import add_response_schema, parse_response

    text, known = tokenizer(family), add_response_schema(tokenizer(family))
    schemas = [get_json_schema(multiply)]
    messages = [{"role": "user", "content": "3 x 4?"}]
    prompt = text.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, return_dict=False)
    ends = text.convert_tokens_to_ids(["<|im_end|>", "<|call|>", "<|return|>", "<turn|>", "<|tool_response>"])
    parse = TurnParser(text, text.chat_template, ends)
    for turn in TURNS[family]:
        ids = text(turn, add_special_tokens=False)["input_ids"]
        theirs = parse_response(known, ids, prefix=prompt, tools=[multiply])
        assert parse(prompt, ids, schemas).message == theirs, turn


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2"])
def test_a_prompt_that_ends_with_an_assistant_message(family: str) -> None:
    """Both open a new turn."""
    from trl import GRPOTrainer

    text = tokenizer(family)
    prompt = [{"role": "user", "content": "3 x 4?"}, {"role": "assistant", "content": "It is"}]
    trainer = SimpleNamespace(
        _is_vlm=False,
        environment_factories=None,
        processing_class=text,
        tools=[],
        chat_template=None,
        chat_template_kwargs={},
    )
    (theirs,), _, _ = GRPOTrainer._tokenize_prompts(trainer, [prompt])
    assert tokenize_prompt(text, prompt) == theirs
    opening = text.decode(theirs).rpartition("It is")[2]
    assert FAMILIES[family] in opening and "assistant" in opening
    continued = tokenize_prompt(text, prompt, {"continue_final_message": True})
    assert text.decode(continued).endswith("It is")


def test_completions_with_a_response_template(tmp_path: Path, policy: Any) -> None:
    """Without tools, too, a tokenizer with a response template splits thoughts from content."""
    from trl.chat_template_utils import add_response_schema

    text = add_response_schema(tokenizer("qwen3"))
    turns = TURNS["qwen3"][: len(QUESTIONS)]
    trainer = their_trainer(tmp_path, policy, text, reward_funcs=lambda **_: [0.0])
    scripted_turns(trainer, text, [[turn] for turn in turns])
    prompt_ids, token_ids, _, theirs, *_ = trainer._generate(QUESTIONS)
    settings = {"chat_template_kwargs": None, "max_prompt_length": None}
    run = host(RolloutMixin, settings=settings, processing_class=text)
    request = RolloutRequest([{"prompt": prompt} for prompt in QUESTIONS], 1)
    completions = [Completion(ids) for ids in token_ids]
    ours = run.make_rollouts(request, [list(ids) for ids in prompt_ids], completions).texts
    assert same_messages(theirs, ours)
    assert [text[0].get("reasoning_content") for text in ours][:2] == ["Hm.", "Hm."]


ANSWERS = [
    [{"role": "tool", "name": "multiply", "content": "12"}],
    [
        {"role": "tool", "name": "multiply", "content": "12"},
        {"role": "tool", "name": "add", "content": "é <tool> 7"},
    ],
]


@pytest.mark.parametrize("messages", ANSWERS, ids=["one", "two"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_tool_messages(family: str, messages: list[dict[str, Any]]) -> None:
    from trl import GRPOTrainer
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

    text = tokenizer(family)
    whole = is_chat_template_prefix_preserving(text)
    theirs = GRPOTrainer._get_tool_suffix_ids(
        SimpleNamespace(
            processing_class=text,
            _tokenizer=text,
            _is_vlm=False,
            chat_template=None if whole else get_training_chat_template(text),
            chat_template_kwargs={},
        ),
        messages,
    )
    renderer = Renderer(text, frozenset([text.eos_token_id]))
    ours, _ = renderer.render_next_messages(messages, text.eos_token_id)
    if family == "gemma4" and theirs[0] == text.eos_token_id:
        theirs = theirs[1:]  # TRL appends it a second time: the policy has sampled it
    assert ours == theirs


@pytest.mark.parametrize("family", ["glm4moe", "lfm2_2_5", "lfm2_2_5_v2"])
def test_calls_are_parsed_as_the_template_renders_them(family: str) -> None:
    end = {"glm4moe": "<|observation|>"}.get(family, "<|im_end|>")
    text = byte_tokenizer((TEMPLATES / f"{family}.jinja").read_text(), (*SPECIAL, "<|observation|>"), end)
    text.bos_token = "<|pad|>"
    user = {"role": "user", "content": "?"}
    arguments = {"at": "it, (now)", "times": 3}
    function = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    turn = {"role": "assistant", "content": "Well.", "tool_calls": [function, function]}
    prompt = text.apply_chat_template([user], tools=[LOOK], tokenize=False, add_generation_prompt=True)
    whole = text.apply_chat_template([user, turn], tools=[LOOK], tokenize=False)
    pairs = enumerate(zip(prompt, whole, strict=False))
    start = next((i for i, (one, other) in pairs if one != other), len(prompt))
    said = whole[start:].removesuffix("\n").removesuffix(end) + end
    renderer = Renderer(text, frozenset([text.eos_token_id]))
    parsed = renderer.parser([], text(said)["input_ids"], [LOOK])
    assert [(each.name, each.arguments, each.error) for each in parsed.tool_calls] == [
        ("look", arguments, None)
    ] * 2
    assert parsed.message["content"].endswith("Well.")


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the one.
        b: the other.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    if a < 0:
        raise ValueError("negative")
    return a + b


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SCRIPTS = [
    ["Let me see.\n" + call("multiply", '{"a": 3, "b": 4}'), "It is 12."],
    [call("multiply", '{"a": 3, "b": 4}') + "\n" + call("multiply", '{"a": 5, "b": 6}'), "12 and 30."],
    [call("add", '{"a": 3, "b": 4}'), call("multiply", '{"a": 7, "b": 2}'), "First 7, then 14."],
    [call("add", '{"a": -3, "b": 4}'), "It failed."],
    ["No tool is needed."],
    [call("multiply", '{"a": 1, "b": 2}')] * 3,  # more than may be answered
]
QUESTIONS = [[{"role": "user", "content": f"Question {i}"}] for i in range(len(SCRIPTS))]


class Board:
    """An environment whose tool and observation depend on the row."""

    def reset(self, start: int = 0, **row: Any) -> str:
        self.number = start
        return f" Start at {start}."

    def move(self, by: int) -> str:
        """Move on.

        Args:
            by: how far.
        """
        self.number += by
        return f"at {self.number}"

    def get_reward(self) -> float:
        return float(self.number)


def their_trainer(directory: Path, policy: Any, text: Any, **given: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        str(directory),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=given.pop("max_completion_length", 1000),
        max_tool_calling_iterations=2,
        report_to="none",
        bf16=False,
        use_cpu=True,
    )
    rows = Dataset.from_dict({"prompt": QUESTIONS, "start": list(range(len(QUESTIONS)))})
    model = policy.load()
    model.config.max_position_embeddings = 4096  # longer conversations are given up
    return GRPOTrainer(model, given.pop("reward_funcs", None), args, rows, processing_class=text, **given)


def scripted_turns(trainer: Any, text: Any, scripts: list[list[str]]) -> ScriptedBackend:
    """Replace the turns of TRL's trainer by those of a scripted backend."""
    from groupwise.records import SamplingOptions

    backend = ScriptedBackend(text, scripts)

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        limits = SamplingOptions([trainer.max_completion_length] * len(prompt_ids))
        return [completion.token_ids for completion in backend.generate(prompt_ids, limits)], None

    trainer._generate_single_turn = generate
    return backend


def same_messages(theirs: list[list[dict[str, Any]]], ours: list[list[dict[str, Any]]]) -> bool:
    return [[dict(m) for m in text] for text in theirs] == [[dict(m) for m in text] for text in ours]


@pytest.mark.parametrize("limit", [1000, 150])
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_conversations_with_tools(tmp_path: Path, policy: Any, family: str, limit: int) -> None:
    text = tokenizer(family)
    trainer = their_trainer(
        tmp_path,
        policy,
        text,
        tools=[multiply, add],
        reward_funcs=lambda **_: [0.0],
        max_completion_length=limit,
    )
    scripted_turns(trainer, text, SCRIPTS)
    trainer._sync_tool_dicts = [{"multiply": multiply}] * len(SCRIPTS)
    trainer._async_tool_dicts = [{"add": add}] * len(SCRIPTS)
    prompt_ids, token_ids, masks, messages, *_ = trainer._generate(QUESTIONS)
    loop = agents(text, [multiply, add], max_completion_length=limit, max_tool_calling_iterations=2)
    rollout = loop.generate_rollouts(
        [{"prompt": prompt} for prompt in QUESTIONS], ScriptedBackend(text, SCRIPTS)
    )
    assert rollout.prompt_ids == [list(ids) for ids in prompt_ids]
    assert [completion.token_ids for completion in rollout.completions] == token_ids
    assert [completion.loss_mask for completion in rollout.completions] == masks
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name in ("tools/call_frequency", "tools/failure_frequency"):
        assert rollout.metrics[name].value() == pytest.approx(metrics[name][-1])
    if limit == 1000:
        assert same_messages(messages, rollout.texts)


def test_conversations_with_an_environment(tmp_path: Path, policy: Any) -> None:
    text = tokenizer("qwen2_5")
    scripts = [[call("move", f'{{"by": {i}}}'), "There."] for i in range(len(QUESTIONS))]
    trainer = their_trainer(tmp_path, policy, text, environment_factory=Board)
    scripted_turns(trainer, text, scripts)
    rows = [dict(row) for row in trainer.train_dataset]
    given = trainer._generate_and_score_completions([dict(row) for row in rows])
    environments = EnvironmentPool(Board)
    loop = agents(text, (), environments, max_tool_calling_iterations=2)
    rollout = loop.generate_rollouts(rows, ScriptedBackend(text, scripts))
    counts = given["completion_mask"].sum(-1).tolist()
    assert [c.token_ids for c in rollout.completions] == [
        ids[:count] for ids, count in zip(given["completion_ids"].tolist(), counts, strict=True)
    ]
    assert [c.loss_mask for c in rollout.completions] == [
        mask[:count] for mask, count in zip(given["tool_mask"].tolist(), counts, strict=True)
    ]
    assert rollout.prompt_ids == [
        [token for token, real in zip(ids, mask, strict=True) if real]
        for ids, mask in zip(given["prompt_ids"].tolist(), given["prompt_mask"].tolist(), strict=True)
    ]
    (reward,) = environments.reward_funcs()
    assert trainer.reward_func_names == [reward.__name__]
    assert reward(**rollout.extra, completions=rollout.texts) == [float(2 * i) for i in range(len(QUESTIONS))]
    assert [e.get_reward() for e in trainer.environments] == reward(
        **rollout.extra, completions=rollout.texts
    )


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Interrupt the body by an alarm signal, which only the main thread can receive."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"no result after {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def evidence_reward(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """Rows that the queries found, less one for each query that failed."""
    results = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]
    return [sum(len(rows) if isinstance(rows, list) else -1.0 for rows in every) for every in results]


def test_an_agent_that_queries_a_database_under_an_alarm(tmp_path: Path, policy: Any) -> None:
    """After TRL's published agent example: SQL on a read-only database, with ``signal.alarm`` in the tool."""
    path = tmp_path / "genes.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE interactions (gene TEXT, partner TEXT)")
        database.executemany(
            "INSERT INTO interactions VALUES (?, ?)", [("TP53", "MDM2"), ("TP53", "EP300"), ("EGFR", "GRB2")]
        )
    database.close()

    def query(sql: str) -> list[tuple]:
        """Run a query on the table of interactions.

        Args:
            sql: a SELECT statement.

        Returns:
            The rows.
        """
        with limited(5):
            connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            try:
                return connection.execute(sql).fetchall()
            finally:
                connection.close()

    def ask(sql: str) -> str:
        return call("query", json.dumps({"sql": sql}))

    partners = "SELECT partner FROM interactions WHERE gene = 'TP53'"
    scripts = [
        [ask("SELECT name FROM sqlite_master"), ask(partners), "MDM2 and EP300."],
        [ask("SELECT x FROM interactions"), ask("SELECT * FROM interactions WHERE gene = '?'"), "None."],
        [ask("DROP TABLE interactions"), "I could not."],
        ["No idea."],
        [ask(partners) + "\n" + ask(partners.replace("TP53", "EGFR")), "Three."],
        [ask("SELECT COUNT(*) FROM interactions"), "Three interactions."],
    ]
    text = tokenizer("qwen2_5")
    trainer = their_trainer(tmp_path, policy, text, tools=[query], reward_funcs=evidence_reward)
    theirs = scripted_turns(trainer, text, scripts)
    trainer._sync_tool_dicts = [{"query": query}] * len(scripts)
    trainer._async_tool_dicts = [{}] * len(scripts)
    prompt_ids, token_ids, masks, messages, *_ = trainer._generate(QUESTIONS)
    backend = ScriptedBackend(text, scripts)
    loop = agents(text, [query], max_tool_calling_iterations=2)
    rollout = loop.generate_rollouts([{"prompt": prompt} for prompt in QUESTIONS], backend)
    assert backend.calls == theirs.calls  # the context of every turn
    assert rollout.prompt_ids == [list(ids) for ids in prompt_ids]
    assert [completion.token_ids for completion in rollout.completions] == token_ids
    assert [completion.loss_mask for completion in rollout.completions] == masks
    assert same_messages(messages, rollout.texts)
    assert messages[0][3]["content"] == [("MDM2",), ("EP300",)]
    assert evidence_reward(rollout.texts) == evidence_reward(messages) == [3.0, -1.0, -1.0, 0.0, 3.0, 1.0]
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name in ("tools/call_frequency", "tools/failure_frequency"):
        assert rollout.metrics[name].value() == pytest.approx(metrics[name][-1])
    assert rollout.metrics["tools/failure_frequency"].value() == pytest.approx(2 / 8)
