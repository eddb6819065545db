"""A tool ``look`` and chat messages that call it, for tests of chat templates and of parsing."""

from __future__ import annotations

from typing import Any

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "description": "What."},
                "times": {"type": "integer", "description": "How often."},
            },
            "required": ["at"],
        },
    },
}


def look_call_message(content: str = "") -> dict[str, Any]:
    """An assistant message that calls ``look(at="it")``."""
    function = {"name": "look", "arguments": {"at": "it"}}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }
