"""Removal of credentials from printed, logged and saved text and data."""

from __future__ import annotations

import os
import re
from typing import Any

#: Environment variables that hold credentials.
SECRET_VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "WANDB_API_KEY", "OPENAI_API_KEY"),
    *("TRACKIO_TOKEN", "AWS_SECRET_ACCESS_KEY"),
)
_SECRET_NAME = re.compile(
    r"(token|(.*_)?(api_key|(auth|hub|hf|access)_token|password|secret))", re.IGNORECASE
)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")


def masked(value: Any, name: str = "") -> Any:
    """Return a copy in which strings under names like ``hub_token`` or ``api_key`` are None, at any depth."""
    if isinstance(value, dict):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(masked(item) for item in value)
    return None if isinstance(value, str) and _SECRET_NAME.fullmatch(name) else value


def redact(text: str) -> str:
    """Return the text without credentials of the environment and without strings that look like Hub tokens.

    >>> redact("no access with hf_aaaaaaaaaaaaaaaaaaaaaaaa")
    'no access with <HF_TOKEN>'
    """
    for name in SECRET_VARIABLES:
        secret = os.environ.get(name, "")
        if len(secret) >= 8:  # a shorter one would also replace parts of words
            text = text.replace(secret, f"<{name}>")
    return _HUB_TOKEN.sub("<HF_TOKEN>", text)
