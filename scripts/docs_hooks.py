"""Hooks of mkdocs: pages are written to be read in the repository too, and the site needs nothing else."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files beside ``docs/`` become their text; the site does not have those files."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas become MathML, which browsers show without a script."""
    formula = r'<(span|div) class="arithmatex">\\[\(\[](.*?)\\[\)\]]</\1>'
    return re.sub(formula, _as_mathml, content, flags=re.DOTALL)


def _as_mathml(found: re.Match[str]) -> str:
    return convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")
