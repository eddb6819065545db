"""Hooks of mkdocs: pages are written to be read in the repository too, where links may leave ``docs/``."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files beside ``docs/`` become their text; the site does not have those files."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
