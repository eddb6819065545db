"""Words of the project: docstrings open with a verb or a noun of the field; invented words are absent."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "groupwise").rglob("*.py"))
PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "examples/*.py", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
]

#: A docstring that begins with one of these describes its subject in a clause instead of naming it.
OPENINGS = ("What", "Whether", "Those", "That", "Where", "How", "Who", "There")

#: Personification: code does not speak, listen, own or give.
PERSONS = (
    "tells",
    "told",
    "hears",
    "heard",
    "lends",
    "lent",
    "brings",
    "brought",
    "nobody",
    "somebody",
    "whoever",
)
#: Names of the first edition, each replaced by the field's word (docs/glossary.md).
OLD_NAMES = ("keeper", "keepers", "ledger", "logbook", "recut", "hearer", "scorer", "unheard")
BANNED = re.compile(rf"\b({'|'.join((*PERSONS, *OLD_NAMES))})\b", flags=re.IGNORECASE)


def texts(source: str) -> str:
    """Return the comments and strings of a Python source, docstrings and messages included."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(token.string for token in tokens if token.type in kinds)


def docstrings(source: str) -> list[str]:
    """Return every docstring of a Python source."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for text in found if text]


def openings(source: str) -> list[str]:
    """Return the first lines of docstrings that open with one of ``OPENINGS``."""
    lines = [text.splitlines()[0] for text in docstrings(source)]
    return [line for line in lines if re.match(rf"({'|'.join(OPENINGS)})\b", line)]


def banned(text: str) -> list[str]:
    return sorted({word.lower() for word in BANNED.findall(text)})


def problems(path: Path) -> list[str]:
    """Return old openings and banned words; of the package only those in comments and strings."""
    text = path.read_text()
    found = openings(text) if path.suffix == ".py" else []
    return found + banned(texts(text) if path in SOURCES else text)


#: Sentences of a page are at most this long; tables, lists of settings and blocks are no sentences.
MAX_WORDS = 35
#: The end of a sentence, with the quotation marks and brackets that close behind it.
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])[)\"*]*\s+")


def sentences(page: str) -> list[str]:
    """Return the sentences of a Markdown page; code and links are as long as what a reader sees of them."""
    page = re.sub(
        r"\A---\n.*?\n---\n|<!--.*?-->|^( *)```.*?^ *```$", "\n\n", page, flags=re.DOTALL | re.MULTILINE
    )
    page = re.sub(r"^:   .*$", lambda line: line[0].replace("; ", ". "), page, flags=re.MULTILINE)
    page = re.sub(
        r"^\s*(\||#|::: ).*$|<[^<>\n]+>", "\n\n", page, flags=re.MULTILINE
    )  # tables, headings, tags
    page = re.sub(r"^(?=\s*([-*]|\d+\.|: ) )", "\n\n", page, flags=re.MULTILINE)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"`[^`]*`|\$[^$]*\$", "code", page)
    paragraphs = [text for text in re.split(r"\n\s*\n", page) if " · " not in text]  # lists of links
    return [" ".join(one.split()) for text in paragraphs for one in SENTENCE_END.split(text)]


def length(sentence: str) -> int:
    """Return the number of words; dashes and signs are none."""
    return len([word for word in sentence.split() if re.search(r"\w", word)])


@pytest.mark.parametrize(
    "page",
    [path for path in PAGES if path.suffix == ".md" and path.name != "CHANGELOG.md"],
    ids=lambda path: path.stem,
)
def test_sentences_of_pages_are_short(page):
    assert [one for one in sentences(page.read_text()) if length(one) > MAX_WORDS] == []


def test_a_long_sentence_is_seen():
    words = " ".join(["word"] * 20)
    assert max(map(length, sentences(f"{words}\n{words}. End.\n"))) == 40
    assert max(map(length, sentences(f"{words}.\n{words}.\n\n| {words} {words} |\n"))) == 20
    assert max(map(length, sentences(f"```text\n{words} {words}\n```\nSee [{words}](page.md)."))) == 21


@pytest.mark.slow
def test_texts_use_the_words_of_the_field():
    found = {str(path.relative_to(ROOT)): problems(path) for path in SOURCES + PAGES}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.slow
def test_messages_give_the_remedy_and_no_page_that_an_installed_package_lacks():
    found = {}
    for path in SOURCES:
        source = path.read_text()
        strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
        pages = [text for text in strings if re.search(r"\bdocs/|\w\.md\b", str(text))]
        found[path] = [text for text in pages if inspect.cleandoc(text) not in docstrings(source)]
    names = {"README.md", "memory.md"}
    assert not {path.name: texts for path, texts in found.items() if {*texts} - names}


@pytest.mark.parametrize("word", OPENINGS)
def test_an_opening_is_seen(word):
    assert openings(f'def f():\n    """{word} is it."""\n') == [f"{word} is it."]


def test_openings_are_whole_words():
    assert openings('"""However it is."""\nclass A:\n    """Therefore."""\n') == []


def test_banned_words_are_seen_in_comments_docstrings_and_messages():
    source = (
        '"""A keeper."""\nx = 1  # it tells\nprint(f"who hears {x}")\nraise ValueError("Nobody")\ntold = 1\n'
    )
    assert banned(texts(source)) == ["hears", "keeper", "nobody", "tells"]  # names are not texts


def test_banned_words_are_whole_words():
    assert banned("bookkeeping, storytelling, equivalent, retold") == []
