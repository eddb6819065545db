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
    """Convert formulas to MathML, which needs no script, and let code in running text break after dots."""
    formula = r'<(span|div) class="arithmatex">\\[\(\[](.*?)\\[\)\]]</\1>'
    content = re.sub(formula, _as_mathml, content, flags=re.DOTALL)
    # Blocks wrap at spaces; a <wbr> inside them would be part of what is selected and searched.
    parts = re.split(r"(<pre>.*?</pre>)", content, flags=re.DOTALL)
    parts[::2] = [re.sub(r"<code>([^<]*)</code>", _with_breaks, part) for part in parts[::2]]
    return re.sub(r"<table>.*?</table>", _as_stack, "".join(parts), flags=re.DOTALL)


def _as_stack(found: re.Match[str]) -> str:
    """Mark a table of three columns or more with long texts: on a phone its rows are lists with labels."""
    head, _, body = found[0].partition("</thead>")
    titles = re.findall(r"<th[^>]*>(.*?)</th>", head, flags=re.DOTALL)
    rows = re.findall(r"<tr>.*?</tr>", body, flags=re.DOTALL)
    cells = [re.findall(r"<td([^>]*)>(.*?)</td>", row, flags=re.DOTALL) for row in rows]
    texts = [re.sub(r"<[^>]+>", "", text) for row in cells for _, text in row]
    if len(titles) < 3 or max(map(len, texts), default=0) < 40:
        return found[0]
    labels = [html.escape(re.sub(r"<[^>]+>", "", html.unescape(title))) for title in titles]
    for row, given in zip(rows, cells, strict=True):
        lines = [
            f'<td data-label="{label}"{style}>{text}</td>'
            for label, (style, text) in zip(labels, given, strict=True)
        ]
        body = body.replace(row, f"<tr>{''.join(lines)}</tr>", 1)
    return f"{head.replace('<table>', '<table data-stacked>')}</thead>{body}"


def _with_breaks(found: re.Match[str]) -> str:
    """Allow line breaks in code after dots, slashes and brackets, in long code also after =."""
    marks = r"[./(\[]+" if len(found[1]) <= 30 else r"[./=(\[]+"
    return "<code>" + re.sub(rf"(?<=\w)({marks})(?=[\w\"'\[{{])", r"\1<wbr>", found[1]) + "</code>"


def _as_mathml(found: re.Match[str]) -> str:
    """Convert a formula; a displayed one gets a frame, which scrolls where the page is narrow."""
    is_block = found[1] == "div"
    latex = html.unescape(found[2])
    # \big is a fixed size in MathML: as \left and \right, fences are as high as what they enclose.
    latex = re.sub(r"\\[bB]ig([\[(])", r"\\left\1", latex)
    latex = re.sub(r"\\[bB]ig([\])])", r"\\right\1", latex)
    latex = re.sub(r"\\[bB]ig/", "/", latex)
    mathml = convert(latex, display="block" if is_block else "inline")
    return f'<div class="formula">{mathml}</div>' if is_block else mathml
