"""Removal of credentials from printed, logged and saved text and data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

#: Environment variables that hold credentials.
SECRET_VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "WANDB_API_KEY", "OPENAI_API_KEY"),
    *("TRACKIO_TOKEN", "AWS_SECRET_ACCESS_KEY"),
)
#: Names of credentials in snake case: endings of any word (``PGPASSWORD``), and whole last words.
_SECRET_NAME = re.compile(
    r".*(token|api_?keys?|access_?key(_?id)?|secrets?|passw(or)?ds?|passphrase|credentials?)"
    r"|(.*_)?(authorization|auth|bearer|cookies?|headers|signature|sig|sas|jwt|pat|pass|pw|pwd|creds|dsn)"
    r"|.+_keys?"
)
#: Names with these endings that are none: tokens of a tokenizer, names of columns and entries.
_NOT_SECRET = re.compile(
    r"(.*_)?(bos|eos|pad|unk|mask|sep|cls|stop|start|end|image|video|audio|think|special|tool|call|per)_?token"
    r"|(.*_)?(public|sort|prompt|text|image|images|answer|label|column|dataset|message|messages|content|role"
    r"|metric|reward|cache|state|group|primary|foreign|partition|param|module|missing|unexpected)_keys?"
)
#: Credentials known by their form: tokens of services, private keys, names and passwords in URLs.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|sk-ant-[\w-]{20,}|sk-(?:proj-|or-v1-|svcacct-)?\w{20,}|[rs]k_(?:live|test)_\w{16,}|nvapi-[\w-]{20,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|(?<=\bBearer )[\w.~+/=-]{6,}"
    r"|(?<=://)(?:[^/?#\s\"']+|[^/?#\s:\"']*:(?!\d+[/?#])[^\s\"']+)(?=@)"
)
_PAIR = (
    r"(?P<name>(?<![\w.-])[A-Za-z][\w.-]*)(?P<equals>\\?[\"']?\s*[:=]\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\\\".*?\\\"|\[+[^\[\]]*\]"
    r"|(?:(?:Bearer|Basic|Token) )?[^\s,;&\"'#=)}\]]+)"
)
#: ``name: value`` and ``name=value`` in text, and parameters of a URL.
_IN_TEXT, _IN_URL = re.compile(_PAIR), re.compile(rf"(?<=[?&#;]){_PAIR}")
_NO_VALUE = re.compile(r"None|[Nn]ull|[Tt]rue|[Ff]alse|\d{1,7}|[\"']{2}|[\"']?<.*")


@lru_cache(maxsize=4096)  # asked of every variable of the environment and every key, again and again
def is_secret_name(name: str) -> bool:
    """Return True for names like ``hub_token``, ``apiKey``, ``PGPASSWORD`` and ``Authorization``."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[.-]", "_", name).lower()
    return bool(_SECRET_NAME.fullmatch(plain)) and not _NOT_SECRET.fullmatch(plain)


def _without_pair(found: re.Match[str]) -> str:
    head, value = found["name"] + found["equals"], found["value"]
    if is_secret_name(found["name"]):
        return found[0] if _NO_VALUE.fullmatch(value) else f"{head}<removed>"
    return head + value[:1] + found.re.sub(_without_pair, value[1:])  # the value is quoted text, or JSON


def _without_values(text: str) -> str:
    text = _SECRET_VALUE.sub(lambda found: "<HF_TOKEN>" if found[0][:3] == "hf_" else "<removed>", text)
    return _IN_URL.sub(_without_pair, text)


def masked(value: Any, name: str = "", clean: Callable[[str], str] = _without_values) -> Any:
    """Return a copy in which strings under names like ``hub_token`` or ``api_key`` are None, at any depth.

    Args:
        clean: applied to other strings; default: removes credentials that are known by their form, and
            parameters of URLs.
    """
    if isinstance(value, dict):
        below = is_secret_name(name)  # headers: {X-Whatever: …}
        return {
            clean(key) if isinstance(key, str) else key: masked(item, name if below else str(key), clean)
            for key, item in value.items()
        }
    if type(value) in (list, tuple, set):
        return type(value)(masked(item, name, clean) for item in value)
    if isinstance(value, str | bytes) and is_secret_name(name):
        return None
    return clean(value) if isinstance(value, str) else value


def redact(text: str, secrets: Sequence[tuple[str, str]] | None = None) -> str:
    """Return the text without credentials: of the environment, of URLs, after their names, by their form.

    Args:
        secrets: those of the environment, where they were read for many texts.

    >>> redact("no access with hf_aaaaaaaaaaaaaaaaaaaaaaaa")
    'no access with <HF_TOKEN>'
    """
    for form, shown in _secrets_of_environment() if secrets is None else secrets:
        text = text.replace(form, shown)
    return _IN_TEXT.sub(_without_pair, _without_values(text))


def _secrets_of_environment() -> list[tuple[str, str]]:
    """Return the forms that credentials of the environment have in texts, each with its replacement."""
    forms = []
    for name in [*SECRET_VARIABLES, *filter(is_secret_name, os.environ)]:
        secret = os.environ.get(name, "")
        if len(secret) >= 8 and name != "PWD":  # a shorter one would also replace parts of words
            written = (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""))
            forms += [(form, f"<{name}>") for form in written]
    return forms


def redacted_json(data: Any) -> str:
    """Return data as JSON without credentials, which are removed before quotes in them are escaped."""
    clean = partial(redact, secrets=_secrets_of_environment())
    return json.dumps(masked(data, clean=clean), indent=1, default=lambda value: clean(str(value)))
