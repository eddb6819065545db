"""Files: JSON of a known shape, and files that are replaced whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, shortened


def read_json(path: Path, shape: Any) -> Any:
    """Read a JSON file.

    Args:
        shape: a type, or a dictionary with the shape of each entry that is needed; of all under ``...``.

    Raises:
        ConfigError: it is no JSON, or an entry is missing or has another type.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is cut or overwritten: {error}") from error
    _check_shape(value, shape, str(path))
    return value


def _check_shape(value: Any, shape: Any, name: str) -> None:
    kind = dict if isinstance(shape, dict) else shape
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {shortened(value)}, not {getattr(kind, '__name__', kind)}")
    for key, inner in shape.items() if isinstance(shape, dict) else ():
        for each in value if key is ... else [key]:
            _check_shape(value.get(each), inner, f"{name}[{each!r}]")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: ``path`` is never a partial file. A link, a device or a pipe is kept."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # of a full disk
