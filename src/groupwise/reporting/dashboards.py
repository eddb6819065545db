"""Completions in dashboards: a table in wandb, traces in trackio."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from groupwise.errors import log_boundary
from groupwise.reporting.table import CompletionRow, PlainMessage, Table
from groupwise.tokenization.text import replace_surrogates

logger = logging.getLogger(__name__)


def log_completions(
    rows: Sequence[CompletionRow], table: Table, key: str, step: int, report_to: Collection[str]
) -> None:
    """Log completions as ``key`` to every dashboard in ``report_to`` that has an active run.

    ``train/global_step`` is logged with them, as transformers does for metrics. Errors are warnings.

    Args:
        table: ``rows`` as columns.
    """
    for name, (is_active, shown) in _DASHBOARDS.items():
        # A dashboard with an active run is already imported.
        module = sys.modules.get(name)
        if name not in report_to or module is None:
            continue
        with log_boundary(logger, f"the completions of step {step} in {name}"):
            if is_active(module):
                module.log({key: shown(module, rows, table), "train/global_step": step})


def _images(module: ModuleType, row: CompletionRow) -> list[Any]:
    """Return the images of a row as image objects of the dashboard."""
    if not row["images"]:
        return []
    from PIL import Image

    return [module.Image(Image.open(io.BytesIO(image))) for image in row["images"]]


def _wandb_table(wandb: ModuleType, rows: Sequence[CompletionRow], table: Table) -> Any:
    """Return a table; images are its last column."""
    columns: dict[str, list[Any]] = {**table}
    if any(row["images"] for row in rows):
        name = "images"
        while name in table:
            name += "_"
        columns[name] = [_images(wandb, row) for row in rows]
    data = [list(values) for values in zip(*columns.values(), strict=True)]
    return wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)


def _traces(trackio: ModuleType, rows: Sequence[CompletionRow], table: Table) -> list[Any]:
    """Return a trace per row: messages, a span per tool call, and the other columns as metadata."""
    names = [name for name in table if name not in ("prompt", "completion")]
    traces = []
    for i, row in enumerate(rows):
        metadata: dict[str, Any] = {name: table[name][i] for name in names}
        metadata["weight_version"] = row["weight_version"]
        if row["images"]:
            metadata["images"] = _images(trackio, row)
        answer = _messages(row["completion"], "assistant")
        messages = [*_messages(row["prompt"], "user"), *answer]
        messages, spans = replace_surrogates((messages, tool_spans(answer)))
        traces.append(trackio.Trace(messages, metadata=metadata, spans=spans))
    return traces


def _messages(text: str | list[PlainMessage], role: str) -> list[PlainMessage]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def tool_spans(messages: Sequence[PlainMessage]) -> list[dict[str, Any]]:
    """Return a span per tool call of a conversation, with the call's arguments and the tool's answer.

    The tool messages after a message answer its calls in order; a call without an answer has no output.
    """
    spans: list[dict[str, Any]] = []
    open_calls: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and open_calls:
            open_calls.pop(0)["output"] = message["content"]
        for call in message.get("tool_calls", ()):
            function: Mapping[str, str] = call["function"]
            span = {"id": f"call-{len(spans)}", "name": function["name"], "kind": "tool"}
            spans.append({**span, "input": function["arguments"]})
            open_calls.append(spans[-1])
    return spans


#: By name: True if a run is active, and the completions as the dashboard takes them.
_DASHBOARDS: dict[
    str, tuple[Callable[[Any], bool], Callable[[ModuleType, Sequence[CompletionRow], Table], Any]]
] = {
    "wandb": (lambda wandb: wandb.run is not None, _wandb_table),
    "trackio": (lambda trackio: trackio.context_vars.current_run.get() is not None, _traces),
}
