"""Hooks of mkdocs for pages that are also read in the repository."""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the files outside ``docs/`` that pages link: Markdown as pages, others as plain text."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while waiting:
        page, text = waiting.pop()
        for path in _linked(page, text):
            uri = _uri(path)
            if uri is None or path.startswith("docs/") or files.get_file_from_path(uri):
                continue
            content = (ROOT / path).read_text()
            if path.endswith(".md"):
                waiting.append((path, content))
                content = "---\nsearch: {exclude: true}\n---\n\n" + _with_links(
                    content, path, config.repo_url
                )
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead links to files outside ``docs/`` to their copies in the site."""
    if page.file.src_uri.startswith("source/"):  # done in on_files
        return markdown
    return _with_links(markdown, f"docs/{page.file.src_uri}", config.repo_url)


def _linked(page: str, text: str) -> Iterator[str]:
    """Yield the paths in the repository to which a page links."""
    for found in LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(page), found[1]))


def _uri(path: str) -> str | None:
    """Return the place in the site of a path of the repository; None for folders."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).is_file():
        return None
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.txt"


def _with_links(text: str, page: str, repository: str) -> str:
    """Return the text of a page of the repository with links for the site; folders are in the repository."""
    own = _uri(page) or ""

    def link(found: re.Match[str]) -> str:
        path = next(_linked(page, f"]({found[1]})"))
        uri = _uri(path)
        if uri is None:
            return f"{repository}/tree/main/{path}"
        return posixpath.relpath(uri, posixpath.dirname(own) or ".") + (found[2] or "")

    return LINK.sub(link, text)


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
