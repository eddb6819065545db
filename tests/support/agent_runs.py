"""Short runs of a tiny random policy that calls a tool with about every second letter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.errors import AgentError
from support.fakes.fake_vllm import GENERATE, with_tokenizer
from support.fakes.scripted import byte_tokenizer

LETTERS = "abcdefgh"

#: A turn such as "hacf" calls the tool with "c": the text between one of "abcd" and one of "efgh".
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": "[abcd]",
            "close_pattern": r"[efgh]|<\|im_end\|>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "measure", "arguments": {"text": "{content}"}},
            },
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def tokenizer() -> Any:
    made = byte_tokenizer()
    made.response_template = RESPONSE
    made.padding_side = "left"
    return made


def with_calls(fake: Any, text: Any) -> Any:
    """The stand-in of a server, whose turns call the tool or end, as their seeds decide."""
    letters = text.convert_tokens_to_ids(list(LETTERS))
    fake.info["model_config"]["max_model_len"] = 1024
    answer = with_tokenizer(fake, text).answer

    def calling(path: str, query: Any, body: Any) -> Any:
        found = answer(path, query, body)
        for choice in found["choices"] if path == GENERATE else ():
            seed = body["sampling_params"]["seed"] + choice["index"]
            first = letters[0] if seed % 3 else letters[6]  # "a" begins a call
            tokens, content = (
                [first, letters[seed % 8], letters[4], text.eos_token_id],
                choice["logprobs"]["content"],
            )
            for entry, token in zip(content, tokens, strict=False):  # fewer at the length limit
                entry["token_id"] = token
            choice["token_ids"] = tokens[: len(content)]
            choice["finish_reason"] = "stop" if len(content) == len(tokens) else "length"
        return found

    fake.answer = calling
    return fake


def policy(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=1024,
            bos_token_id=None,
        )
    )


def measure(text: str) -> int:
    """Measure a text.

    Args:
        text: what to measure.
    """
    if not text:
        raise ValueError("nothing to measure")
    return len(text)


class FlakyEnvironment:
    """An environment with a random fault in 20 % of the calls of ``reset``, its tool and ``get_reward``."""

    random = random.Random(0)

    @classmethod
    def seed(cls, seed: int) -> None:
        cls.random.seed(seed)

    def _call(self) -> None:
        if self.random.random() < 0.2:
            raise AgentError("the server is gone")

    def reset(self, **row: Any) -> None:
        self._call()
        self.total = 0

    def measure(self, text: str) -> int:
        """Measure a text.

        Args:
            text: what to measure.
        """
        self._call()
        self.total += len(text)
        return len(text)

    def get_reward(self) -> float:
        self._call()
        return float(self.total)


def calls_reward(completions: list[Any], **_: Any) -> list[float]:
    """Number of tool messages; ties are broken by the length of the last message."""
    return [
        sum(m["role"] == "tool" for m in messages) + len(messages[-1]["content"]) / 100
        for messages in completions
    ]


def turn_reward(completions: list[Any], **_: Any) -> list[list[float | None]]:
    """Number of calls of each turn and its length / 100; None for the second of three turns or more."""
    turns = [[m for m in messages if m["role"] == "assistant"] for messages in completions]
    return [
        [
            None if i == 1 and len(each) > 2 else len(m.get("tool_calls") or ()) + len(str(m)) / 100
            for i, m in enumerate(each)
        ]
        for each in turns
    ]


def chats(count: int = 8) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"go {i}"}] for i in range(count)]})


def trainer(directory: Path | str, kind: type[GRPOTrainer] = GRPOTrainer, **given: Any) -> GRPOTrainer:
    """Create a trainer; ``given`` has configuration fields and trainer arguments."""
    names = (
        "tools",
        "environment_factory",
        "reward_funcs",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "rollout_func",
        "callbacks",
        "peft_config",
    )
    arguments: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
    arguments.setdefault("processing_class", tokenizer())
    arguments.setdefault("train_dataset", chats())
    arguments.setdefault("reward_funcs", calls_reward)
    text = arguments["processing_class"]
    allowed = {*text.convert_tokens_to_ids(list(LETTERS)), text.eos_token_id}
    model = given.pop("model", None)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 120,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "generation_kwargs": {"suppress_tokens": [i for i in range(len(text)) if i not in allowed]},
    }
    config = GRPOConfig(str(directory), **{**settings, **given})
    return kind(policy(len(text)) if model is None else model, args=config, **arguments)
