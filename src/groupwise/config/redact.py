"""Removal of credentials from printed, logged and saved text and data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

#: Names of credentials in snake case, searched anywhere in a name; common words only as whole words.
_SECRET_NAME = re.compile(
    r"token(?!i[sz])|api_?key|access_?key|private_?key|secret|passw(or)?d|passphrase|credential|authorization"
    r"|(^|_)(auth|bearer|cookies?|headers|signature|sig|sas|jwt|pat|pass|pw|pwd|creds|dsn)\d*(_|$)"
    r"|._keys?(_?\d+)?$"
)
#: Parts of names that are none: tokens of a tokenizer, names of columns and entries.
_NOT_SECRET = re.compile(
    r"(\d|bos|eos|pad|unk|mask|sep|cls|stop|start|end|image|video|audio|think|special|tool|call|per|step|num|new"
    r"|max|embed|prompt|completion|input|output|total|virtual)_tokens?|tokens?_(ids?|type|level|mask|emb)|pass_at"
    r"|(public|sort|prompt|text|images?|answer|label|column|dataset|messages?|content|role|metric|reward|cache"
    r"|state|group|primary|foreign|partition|param|module|missing|unexpected)_keys?|pass_(rate|threshold)"
)
#: Credentials known by their form: tokens of services, private keys, names and passwords in URLs. Each form
#: has a limit or ends where the next one begins, so that a search takes linear time.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|sk-ant-[\w-]{20,}|sk-(?:proj-|or-v1-|svcacct-)?\w{20,}|[rs]k_(?:live|test)_\w{16,}|nvapi-[\w-]{20,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|eyJ[\w-]{8,500}\.[\w-]{8,}(?:\.[\w-]*)?)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?s:.*?)(?:-----END [A-Z ]*-----|\Z)"
    r"|(?<=\bBearer )[\w.~+/=-]{6,}"
    r"|(?<=://)(?:[^/?#\s\"']+|[^/?#\s:\"']*:(?!\d+[/?#])(?:(?!://)[^\s\"'])+)(?=@)"
)
_IN_URL = re.compile(r"(?<=[?&#;])([\w.-]+)=([^&#;\s\"']+)")
_NAMED = re.compile(
    r"(?<![\w.-])((?:(?i:api|access|private|secret) |\w+ (?=tokens?\b))?[\w.-]+)\\*[\"']?\s*[:=]+\s*"
)
#: A value without quotes and brackets: to the next space, or further after a semicolon.
_BARE = re.compile(r"(?!\w*\(|[\[{]|b?\\*[\"'])((Bearer|Basic|Token) +)?((\S*; +)*\S*[^\s,;:.)\]}\"'])?")
_QUOTED_OR_BRACKET = re.compile(r"(?<!\\)(\\*(?:'''|\"{3}|[\"']))(?s:.*?)(?:(?<!\\)\1|\Z)|[][(){}]")
_NO_VALUE = re.compile(r"(?s:None|[Nn]ull|[Tt]rue|[Ff]alse|-?\d{1,7}(\.\d*)?|[\"']{2}|[\"']?<\w+>.*)?")


@lru_cache(maxsize=4096)  # asked of every variable of the environment and every key, again and again
def is_secret_name(name: str) -> bool:
    """Return True for names like ``hub_token``, ``apiKey``, ``DB_PASSWORD_PROD`` and ``Authorization``."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[ .-]", "_", name).lower()
    return "_KEY_" in name or bool(_SECRET_NAME.search(_NOT_SECRET.sub("", plain)))


def _value(text: str, start: int) -> str:
    """Return the value that begins at ``start``, with its quotes or brackets."""
    if bare := _BARE.match(text, start):
        return bare[0]
    depth = 0
    for found in _QUOTED_OR_BRACKET.finditer(text, start):
        depth += (found[0] in "[({") - (found[0] in "])}")
        if depth <= 0:
            return text[start : found.end()]
    return text[start:]


def _without_values(text: str) -> str:
    text = _SECRET_VALUE.sub(lambda found: "<HF_TOKEN>" if found[0][:3] == "hf_" else "<removed>", text)
    return _IN_URL.sub(lambda found: f"{found[1]}=<removed>" if is_secret_name(found[1]) else found[0], text)


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
    text, done, parts = _without_values(text), 0, list[str]()
    for found in _NAMED.finditer(text):
        if found.start() >= done and is_secret_name(found[1]):
            value = _value(text, found.end())
            if not _NO_VALUE.fullmatch(value):
                parts += [text[done : found.end()], "<removed>"]
                done = found.end() + len(value)
    return "".join([*parts, text[done:]])


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without credentials: ``--api-key KEY KEY``, ``--api-key=KEY``."""
    shown, secret = [], False
    for argument in arguments:
        is_option = argument.startswith("-")
        name, equals, value = argument.partition("=") if is_option else ("", "", argument)
        secret = is_secret_name(name) if is_option else secret
        hidden = secret and not _NO_VALUE.fullmatch(value)
        shown.append(f"{name}{equals}<removed>" if hidden else redact(argument))
    return shown


def _secrets_of_environment() -> list[tuple[str, str]]:
    """Return the forms that credentials of the environment have in texts, each with its replacement."""
    forms = []
    for name in filter(is_secret_name, os.environ):
        secret = os.environ[name]
        if len(secret) >= 8 and name != "PWD":  # a shorter one would also replace parts of words
            written = (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""))
            forms += [(form, f"<{name}>") for form in written]
    return sorted(forms, key=lambda form: -len(form[0]))  # one may begin with another one


def redacted_json(data: Any) -> str:
    """Return data as JSON without credentials, which are removed before quotes in them are escaped."""
    clean = partial(redact, secrets=_secrets_of_environment())
    return json.dumps(masked(data, clean=clean), indent=1, default=lambda value: clean(str(value)))
