"""The documentation says what the code does: tables match the code, examples run, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise.core.objectives import OBJECTIVES
from groupwise.core.weights import NORMALIZERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for pattern in ("*.md", "docs/*.md", "benchmarks/*.md") for page in sorted(ROOT.glob(pattern))]
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
]


def test_the_table_of_objectives_is_the_code_s():
    text = (ROOT / "docs" / "objectives.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| `(\w+)` \|", text, flags=re.MULTILINE)
    built_in = {name for name in OBJECTIVES if not name.startswith("test_") and name != "unclipped"}
    assert {row[0] for row in rows} == built_in
    for name, surrogate, normalizer in rows:
        assert OBJECTIVES[name].surrogate.__name__ == surrogate
        assert OBJECTIVES[name].normalizer == normalizer
    assert all(f"| `{name}` |" in text for name in NORMALIZERS)


IDS = [f"{page.stem}-{number}" for number, (page, _) in enumerate(BLOCKS)]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=IDS)
def test_code_in_the_documentation_runs(page, block, tmp_path, monkeypatch):
    if 'GRPOTrainer("path/or/hub-id"' in block:
        monkeypatch.chdir(tmp_path)
        block = runnable_readme_example(block, tmp_path)
    exec(compile(block, str(page), "exec"), {"__name__": "documentation"})


def runnable_readme_example(block: str, directory: Path) -> str:
    """The README's example on a tiny policy, for one step on a CPU."""
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "trainer"))
    from runs import policy, tokenizer

    policy().save_pretrained(directory / "policy")
    tokenizer().save_pretrained(directory / "policy")
    small = '"out", max_steps=1, use_cpu=True, bf16=False, report_to="none", max_completion_length=4, '
    return block.replace("path/or/hub-id", str(directory / "policy")).replace('"out", ', small)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target
