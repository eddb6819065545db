"""Hooks of mkdocs for pages that are also read in the repository."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside ``docs/`` by their text; the site does not have those files."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers render without a script."""
    formula = r'<(span|div) class="arithmatex">\\[\(\[](.*?)\\[\)\]]</\1>'
    return re.sub(formula, _as_mathml, content, flags=re.DOTALL)


def _as_mathml(found: re.Match[str]) -> str:
    return convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")
