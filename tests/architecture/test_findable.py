"""The tests of a source file are found by its name, or by a list of files in the docstring of a test."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "src" / "groupwise", ROOT / "tests"
SOURCES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if "__" not in path.name]
FILES = {path.relative_to(TESTS): path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
LISTED = {name for text in FILES.values() for name in (ast.get_docstring(ast.parse(text)) or "").split("``")}


def is_mirrored(source: Path) -> bool:
    """Return True if the room of the tests has ``test_<name>.py``; a mixin's is ``test_<name>_mixin.py``."""
    names = {f"test_{source.stem}", f"test_{source.stem}_mixin"}
    room = source.parts[:-1][:1]
    return any(test.stem in names and test.parts[:-1][:1] == room for test in FILES)


def test_a_reader_finds_the_tests_of_a_file() -> None:
    lacking = [str(source) for source in SOURCES if not is_mirrored(source) and str(source) not in LISTED]
    assert lacking == []


def test_listed_files_exist() -> None:
    listed = {name for name in LISTED if name.endswith(".py") and "/" in name and " " not in name}
    assert listed <= set(map(str, SOURCES))
