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
#: Names of credentials; "-" counts as "_".
_SECRET_NAME = re.compile(
    r"(.*_)?(token|api_?key|(secret|access|private|encryption)_key|secret|passw(or)?d|passphrase|credentials?"
    r"|authorization|bearer|cookie|headers)"
)
#: Names of tokens of a tokenizer, which are none.
_OF_TEXT = re.compile(r"(.*_)?(bos|eos|pad|unk|mask|sep|cls|stop|start|end|image|video|audio|think)_token")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
#: Password of a URL, and a parameter of its query that is a credential.
_IN_URL = re.compile(
    r"(?<=://)[^/\s@\"']+(?=@)|(?<=[?&])[\w-]*(?:token|key|secret|password|sig|signature)=[^&\s\"'#]+"
)


def is_secret_name(name: str) -> bool:
    """Return True for names like ``hub_token``, ``api-key`` and ``Authorization``."""
    plain = name.lower().replace("-", "_")
    return bool(_SECRET_NAME.fullmatch(plain)) and not _OF_TEXT.fullmatch(plain)


def masked(value: Any, name: str = "") -> Any:
    """Return a copy in which strings under names like ``hub_token`` or ``api_key`` are None, at any depth."""
    if isinstance(value, dict):
        below = is_secret_name(name)  # headers: {X-Whatever: …}
        return {key: masked(item, name if below else str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(masked(item, name) for item in value)
    if isinstance(value, str):
        return None if is_secret_name(name) else _IN_URL.sub("<removed>", value)
    return value


def redact(text: str) -> str:
    """Return the text without credentials of the environment and of URLs, and without Hub tokens.

    >>> redact("no access with hf_aaaaaaaaaaaaaaaaaaaaaaaa")
    'no access with <HF_TOKEN>'
    """
    for name in [*SECRET_VARIABLES, *filter(is_secret_name, os.environ)]:
        secret = os.environ.get(name, "")
        if len(secret) >= 8:  # a shorter one would also replace parts of words
            text = text.replace(secret, f"<{name}>")
    return _IN_URL.sub("<removed>", _HUB_TOKEN.sub("<HF_TOKEN>", text))
