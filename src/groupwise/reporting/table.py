"""Rows of the completions table, and the table as columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch

from groupwise.records import RewardBatch, RolloutBatch
from groupwise.tokenization.images import prompt_images, row_images, thumbnail

#: Value of a cell; None is an empty cell.
Cell = str | int | float | bool | None

#: Columns of equal length by name: step, prompt, completion, the rewards, advantage, extra columns.
Table = dict[str, list[Cell]]

#: Images of every row as PNG bytes; an empty list if no row has images.
Images = list[list[bytes]]


class _Row(TypedDict):
    step: int
    prompt: str
    completion: str
    rewards: dict[str, float | None]
    advantage: float
    columns: dict[str, Cell]


class CompletionRow(_Row, total=False):
    """One completion: plain strings and numbers, and PNG bytes of the prompt's images."""

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
    rewards_NF = rewards.rewards.rewards_NF[rewards.local]  # without padding rows
    rows: list[CompletionRow] = []
    for i, rewards_F in enumerate(rewards_NF.tolist()):
        # An override of compute_rewards may return more columns than there are functions.
        named = zip(reward_names, rewards_F, strict=False)
        row: CompletionRow = {
            "step": step,
            "prompt": _plain_text(rollouts.prompts[i]),
            "completion": _plain_text(rollouts.texts[i]),
            "rewards": {name: None if math.isnan(reward) else reward for name, reward in named},
            "advantage": advantages[i].mean().item(),
            "columns": {name: _cell(values[i]) for name, values in rewards.columns.items()},
        }
        if multimodal and rollouts.images is not None:
            shared = i > 0 and rollouts.images[i] is rollouts.images[i - 1]
            given = prompt_images(rollouts.prompts[i]) or row_images(rollouts.rows[i])
            row["images"] = rows[-1]["images"] if shared else [thumbnail(image) for image in given]
        rows.append(row)
    return rows


def _plain_text(text: str | Sequence[Mapping[str, object]]) -> str:
    """Return a string unchanged, and chat messages as lines ``role: content``."""
    if isinstance(text, str):
        return text
    return "\n".join(f"{message['role']}: {_message_text(message)}" for message in text)


def _message_text(message: Mapping[str, object]) -> str:
    """Return the content of a message followed by its tool calls."""
    calls = message.get("tool_calls") or []
    functions = [call.get("function", call) for call in calls]  # type: ignore[attr-defined]
    shown = [
        f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False, default=str)})"
        for call in functions
    ]
    return " ".join(part for part in (_content(message.get("content")), *shown) if part)


def _content(content: object) -> str:
    if not isinstance(content, list):
        return str(content or "")
    blocks = [block.get("text") if block["type"] == "text" else f"<{block['type']}>" for block in content]
    return "".join(block or "" for block in blocks)


def _cell(value: object) -> Cell:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


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
        "prompt": [_utf8(row["prompt"]) for row in rows],
        "completion": [_utf8(row["completion"]) for row in rows],
        **rewards,
        "advantage": [row["advantage"] for row in rows],
        **extra,
    }


def image_column(rows: Sequence[CompletionRow]) -> Images:
    """Return the images of the rows, which only dashboards show."""
    images = [list(row.get("images", ())) for row in rows]
    return images if any(images) else []


def _columns(parts: Sequence[Mapping[str, Cell]], taken: set[str]) -> Table:
    columns: Table = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        name = key
        while name in taken:
            name += "_"
        taken.add(name)
        columns[name] = [_utf8(part.get(key)) for part in parts]
    return columns


def reward_columns(table: Table) -> list[str]:
    """Return the names of the reward columns of :func:`as_table`."""
    names = list(table)
    return names[names.index("completion") + 1 : names.index("advantage")]


def _utf8(value: Cell) -> Cell:
    """Replace lone surrogates by "?": JSON can carry them into a dataset, but they cannot be encoded."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
