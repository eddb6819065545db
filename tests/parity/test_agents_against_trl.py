"""The same conversation gives the same tokens, masks, messages and rewards as in TRL."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from support.scripted import ScriptedBackend, agents, byte_tokenizer

from groupwise.agents import EnvironmentPool, Renderer

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
    made = byte_tokenizer((TEMPLATES / f"{family}.jinja").read_text(), SPECIAL, FAMILIES[family])
    made.bos_token = "<|pad|>"
    made.padding_side = "left"
    return made


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


def scripted_turns(trainer: Any, text: Any, scripts: list[list[str]]) -> None:
    """Replace the turns of TRL's trainer by those of a scripted backend."""
    from groupwise.records import SamplingOptions

    backend = ScriptedBackend(text, scripts)

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        limits = SamplingOptions([trainer.max_completion_length] * len(prompt_ids))
        return [completion.token_ids for completion in backend.generate(prompt_ids, limits)], None

    trainer._generate_single_turn = generate


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
    assert reward(**rollout.extra) == [float(2 * i) for i in range(len(QUESTIONS))]
    assert [e.get_reward() for e in trainer.environments] == reward(**rollout.extra)
