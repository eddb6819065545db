"""Rows of the completions table, and the table as columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from groupwise.records import RewardBatch, RolloutBatch
from groupwise.tokenization.images import prompt_images, row_images, thumbnail
from groupwise.tokenization.text import is_content_blocks, replace_surrogates

#: Value of a cell; None is an empty cell.
Cell = str | int | float | bool | None

#: Chat message of strings: "role", "content", and, if the message has them, "reasoning_content", "thinking",
#: "name" and "tool_calls"; arguments of calls are JSON. Content blocks of a prompt are dictionaries of "type"
#: and "text" (None for an image); those of a completion are joined, and an image is "<image>".
PlainMessage = dict[str, Any]

#: Columns of equal length by name: step, prompt, completion, the rewards, advantage, extra columns.
Table = dict[str, list[Cell]]


class CompletionRow(TypedDict):
    """One completion: strings or messages, numbers, and the images of its prompt as PNG bytes.

    ``weight_version`` is the optimizer step of the oldest weights that sampled a token; it is before ``step``
    with a sampler that runs behind.
    """

    step: int
    weight_version: int
    prompt: str | list[PlainMessage]
    completion: str | list[PlainMessage]
    rewards: dict[str, float | None]
    advantage: float
    columns: dict[str, Cell]
    images: list[bytes]


def completion_rows(
    rollouts: RolloutBatch,
    rewards: RewardBatch,
    advantages: torch.Tensor,
    reward_names: Sequence[str],
    step: int,
    *,
    multimodal: bool = False,
) -> list[CompletionRow]:
    """Return one row per completion of this rank.

    Args:
        advantages: (B,) or (B, T); a row holds the mean.
        multimodal: add thumbnails of the prompts' images.
    """
    rewards_NF = rewards.with_step_sums().rewards_NF[rewards.local]  # without padding rows
    rows: list[CompletionRow] = []
    last = None  # position of the row before
    for i, rewards_F in enumerate(rewards_NF.tolist()):
        if rollouts.completions[i].dropped:
            continue
        # An override of compute_rewards may return more columns than there are functions.
        named = zip(reward_names, rewards_F, strict=False)
        row: CompletionRow = {
            "step": step,
            "weight_version": min(rollouts.completions[i].versions or (step,)),
            "prompt": plain_text(rollouts.prompts[i], keep_blocks=True),
            "completion": plain_text(rollouts.texts[i]),
            "rewards": {name: None if math.isnan(reward) else reward for name, reward in named},
            "advantage": advantages[i].mean().item(),
            "columns": {name: _cell(values[i]) for name, values in rewards.columns.items()},
            "images": [],
        }
        if rollouts.completions[i].weight_digest is not None:
            row["columns"]["weight_digest"] = rollouts.completions[i].weight_digest
        if multimodal and rollouts.images is not None:
            shared = last is not None and rollouts.images[i] is rollouts.images[last]
            given = prompt_images(rollouts.prompts[i]) or row_images(rollouts.rows[i])
            row["images"] = rows[-1]["images"] if shared else [thumbnail(image) for image in given]
        rows.append(row)
        last = i
    return rows


def plain_text(
    text: str | Sequence[Mapping[str, Any]], *, keep_blocks: bool = False
) -> str | list[PlainMessage]:
    """Return a text unchanged, and chat messages as plain values, without images."""
    return text if isinstance(text, str) else [_plain_message(message, keep_blocks) for message in text]


def _plain_message(message: Mapping[str, Any], keep_blocks: bool) -> PlainMessage:
    plain: PlainMessage = {
        "role": str(message["role"]),
        "content": _content(message.get("content"), keep_blocks=keep_blocks),
    }
    plain.update({key: str(message[key]) for key in (*_THOUGHTS, "name") if message.get(key)})
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if functions:
        plain["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": str(call["name"]), "arguments": _json(call.get("arguments"))},
            }
            for call in functions
        ]
    return plain


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)


def row_text(text: str | Sequence[PlainMessage]) -> str:
    """Return a string unchanged, and chat messages as lines ``role: content``."""
    if isinstance(text, str):
        return str(text)  # of a subclass, such as numpy's, too
    return "\n".join(f"{message['role']}: {_message_text(message)}" for message in text)


def _message_text(message: PlainMessage) -> str:
    """Return thoughts, content and tool calls of a message."""
    thoughts = [f"<think>{message[key]}</think>" for key in _THOUGHTS if key in message]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [f"{call['name']}({call['arguments']})" for call in functions]
    return " ".join(part for part in (*thoughts, _content(message["content"]), *calls) if part)


def _content(content: object, *, keep_blocks: bool = False) -> Any:
    """Return a content as text, or its blocks without images: an image has no text, as in TRL's files."""
    if not is_content_blocks(content):
        return str(content or "")  # also of a list that a tool returned
    if keep_blocks:
        return [{"type": b["type"], "text": None if b["type"] == "image" else b["text"]} for b in content]
    return "".join(block["text"] if block["type"] == "text" else "<image>" for block in content)


def _cell(value: object) -> Cell:
    """Return a plain value: a checkpoint that contains numpy scalars cannot be loaded."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    kinds: tuple[type[str | int | float], ...] = (bool, int, float)
    plain = (kind(value) for kind in kinds if isinstance(value, kind))  # subclasses too
    return next(plain, None if value is None else str(value))


_THOUGHTS = ("reasoning_content", "thinking")  # "thinking" in the templates of GPT-OSS and LFM2.5
_FIXED = ("step", "prompt", "completion", "advantage")


def as_table(rows: Sequence[CompletionRow]) -> Table:
    """Return one column per field, reward and extra column of any row; None where a row lacks it.

    Underscores are appended to the name of a reward or extra column that is already taken.
    """
    taken = set(_FIXED)
    rewards = _columns([row["rewards"] for row in rows], taken)
    extra = _columns([row["columns"] for row in rows], taken)
    return {
        "step": [row["step"] for row in rows],
        "prompt": [replace_surrogates(row_text(row["prompt"])) for row in rows],
        "completion": [replace_surrogates(row_text(row["completion"])) for row in rows],
        **rewards,
        "advantage": [row["advantage"] for row in rows],
        **extra,
    }


def message_columns(rows: Sequence[CompletionRow]) -> dict[str, list[list[PlainMessage]]]:
    """Return "prompt" and "completion" as chat messages, each where all rows have messages.

    If a message of a column has content blocks, all have: a string becomes one text block.
    """
    texts = {"prompt": [row["prompt"] for row in rows], "completion": [row["completion"] for row in rows]}
    columns = {}
    for name, chats in texts.items():
        if not any(isinstance(chat, str) for chat in chats):
            contents = [message["content"] for chat in chats for message in chat]  # type: ignore[index]
            as_blocks = any(isinstance(content, list) for content in contents)
            columns[name] = [[_message(message, as_blocks) for message in chat] for chat in chats]
    return columns


def _message(message: Any, as_blocks: bool) -> PlainMessage:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if as_blocks and isinstance(content, str) else content
    return replace_surrogates({**message, "content": blocks})


def _columns(parts: Sequence[Mapping[str, Cell]], taken: set[str]) -> Table:
    columns: Table = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        name = key
        while name in taken:
            name += "_"
        taken.add(name)
        columns[name] = [replace_surrogates(part.get(key)) for part in parts]
    return columns


def reward_columns(table: Iterable[str]) -> list[str]:
    """Return the names of the reward columns of :func:`as_table`."""
    names = list(table)
    return names[names.index("completion") + 1 : names.index("advantage")]
