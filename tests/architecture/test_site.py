"""The site of the documentation: built without warnings, legible on a phone and in dark mode.

Widths are measured in a headless browser, where one is installed; markup and styles are checked everywhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.browser import PHONE, ROUNDING, browse, with_browser

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: Opens every page in a frame and posts its measurements. `split` are words of names in definition lists and
#: tables that continue on a second line; `cut` blocks of code, and tables of texts, wider than their frame;
#: what a terminal prints scrolls, and on a phone all code.
HARNESS = """<!doctype html><meta charset="utf-8"><body><script>
async function measure(path) {
  const frame = document.createElement("iframe");
  frame.style = "width: %(width)dpx; height: 800px; border: 0";
  const loaded = new Promise((resolve) => (frame.onload = resolve));
  frame.src = path;
  document.body.append(frame);
  await loaded;
  await new Promise((resolve) => setTimeout(resolve, 150));
  const page = frame.contentDocument, split = [], short = [];
  for (const code of page.querySelectorAll("dt code, td code, th code, li code, p code")) {
    for (const text of [...code.childNodes].filter((node) => node.nodeType === 3)) {
      for (const word of text.data.matchAll(/[\\w]+/g)) {
        const range = page.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (tops.size > 1) split.push(word[0]);
      }
    }
  }
  // A fence is about as high as the row that it encloses; fonts have some heights only.
  for (const fence of page.querySelectorAll('math mo[fence="true"]')) {
    const row = fence.parentElement.getBoundingClientRect().height;
    const height = fence.getBoundingClientRect().height;
    if (height < 0.66 * row) short.push([fence.parentElement.textContent, height, row]);
  }
  const cut = [...page.querySelectorAll("pre > code, table[data-stacked]")].filter(
    (block) => frame.contentWindow.getComputedStyle(block).whiteSpace !== "pre"
      && Math.max(block.scrollWidth, block.offsetWidth) > block.parentElement.clientWidth + 1
  );
  const style = frame.contentWindow.getComputedStyle(page.body);
  const result = {
    path, split, short, cut: cut.map((block) => block.textContent.slice(0, 60)),
    width: page.documentElement.scrollWidth, colour: style.color,
    background: style.backgroundColor, scheme: page.body.dataset.mdColorScheme,
    formulas: page.querySelectorAll("math").length,
  };
  frame.remove();
  return result;
}
(async () => {
  const results = [];
  for (const path of %(paths)s) results.push(await measure(path));
  await fetch("/results", {method: "POST", body: JSON.stringify(results)});
})();
</script>"""


def build_site(tmp_path: Path, docs: Path) -> subprocess.CompletedProcess[str]:
    """Build the site from a directory of pages; warnings are errors."""
    settings = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {docs}")
    path = ROOT / "mkdocs.yml"
    if docs != ROOT / "docs":
        path = tmp_path / "mkdocs.yml"
        path.write_text(settings.replace("scripts/", f"{ROOT}/scripts/").replace("[src]", f"[{ROOT}/src]"))
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(path), "-d", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once."""
    pytest.importorskip("mkdocs")
    directory = tmp_path_factory.mktemp("site")
    done = build_site(directory, ROOT / "docs")
    assert done.returncode == 0, done.stderr
    return directory / "site"


def test_the_site_builds_without_warnings(site):
    api = (site / "api" / "index.html").read_text()
    assert "compute_advantages" in api and "per-token loss" in api  # signatures and docstrings
    objectives = (site / "objectives" / "index.html").read_text()
    assert objectives.count("<math") >= 5 and "arithmatex" not in objectives
    assert 'src="http' not in objectives  # nothing is loaded from other servers


@pytest.mark.slow
def test_a_dead_link_breaks_the_site(tmp_path):
    pytest.importorskip("mkdocs")
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    for page in docs.glob("*.md"):  # no other link
        page.write_text(f"# {page.stem}\n")
    (docs / "index.md").write_text("# Start\n\n[nowhere](nowhere.md)\n")
    done = build_site(tmp_path, docs)
    assert done.returncode != 0 and "nowhere.md" in done.stderr


def test_links_to_files_of_the_repository_are_alive(site):
    page = (site / "examples" / "index.html").read_text()
    assert 'href="../source/examples/lora.py.txt"' in page
    assert (site / "source/examples/lora.py.txt").read_text() == (ROOT / "examples/lora.py").read_text()
    benchmarks = (site / "source" / "benchmarks" / "index.html").read_text()
    assert 'href="../../vllm_weights/"' in benchmarks  # a page, with links of its own


def test_settings_have_no_escapes_and_terminals_have_a_class(site):
    assert re.findall(r"\\&[lg]t;", (site / "configuration" / "index.html").read_text()) == []
    assert "blockquote" not in (site / "configuration" / "index.html").read_text()
    page = (site / "getting_started" / "index.html").read_text()
    assert page.count('class="language-text highlight"') >= 1
    assert ".language-text" in (site / "stylesheets" / "site.css").read_text()


def test_settings_are_terms_of_definition_lists(site):
    from groupwise import GRPOConfig

    page = (site / "configuration" / "index.html").read_text()
    terms = re.findall(r"<dt><code>(\w+)</code></dt>", page)
    described = [name for name, setting in GRPOConfig.SETTINGS.items() if setting.description]
    assert "beta" in terms and set(described) <= set(terms)
    assert "<table" not in page


def test_formulas_have_fences_that_stretch(site):
    """LaTeX's \\big is a fixed size, MathML's fences are as high as what they enclose."""
    for name in ("objectives", "paper", "papers"):
        page = (site / name / "index.html").read_text()
        assert page.count('stretchy="true" fence="true"') >= 4
        # 2.047em is the height that the converter gives binomial coefficients.
        assert re.findall(r'minsize="(?!2\.047em)[^"]*"', page) == []
        assert "\\lvert" not in page and "\\big" not in page
        assert page.count('<div class="formula">') == page.count('display="block"')


def test_every_page_has_the_style_sheet_and_both_colour_schemes(site):
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        assert "stylesheets/site.css" in text
        assert 'data-md-color-scheme="slate"' in text and 'data-md-color-scheme="default"' in text
    style = (site / "stylesheets" / "site.css").read_text()
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    rules = dict(re.findall(r"^([.\w][^{}]*?) \{([^{}]*)\}", style, flags=re.MULTILINE))
    assert "overflow-x: auto" in rules[".formula"]
    assert "word-break: normal" in rules[".md-typeset code"]


def own_pages(site: Path) -> list[str]:
    """Return the addresses of the pages of ``docs/``, without copies of other files."""
    paths = [f"/{page.parent.relative_to(site)}/".replace("/./", "/") for page in site.rglob("index.html")]
    return [path for path in paths if not path.startswith("/source/")]


def measure(
    paths: Sequence[str], site: Path, profile: Path, dark: bool = False, width: int = PHONE
) -> list[dict]:
    """Return the measurements of these pages of the site, in a frame of this width."""
    harness = HARNESS % {"width": width, "paths": json.dumps(sorted(paths))}
    return browse(harness, site, profile, dark)[0]


@pytest.mark.slow
@with_browser
def test_pages_fit_a_phone(site, tmp_path):
    paths = own_pages(site)
    results = measure(paths, site, tmp_path / "profile")
    assert len(results) == len(paths) > 20 and sum(page["formulas"] for page in results) > 50
    assert {page["path"]: page["width"] for page in results if page["width"] > PHONE + ROUNDING} == {}
    assert {page["path"]: page["split"] for page in results if page["split"]} == {}
    assert {page["path"]: page["short"] for page in results if page["short"]} == {}
    assert {page["path"]: page["cut"] for page in results if page["cut"]} == {}


@pytest.mark.slow
@with_browser
def test_no_code_is_cut_on_a_laptop(site, tmp_path):
    paths = own_pages(site)
    results = measure(paths, site, tmp_path / "profile", width=1440)
    assert {page["path"]: page["cut"] for page in results if page["cut"]} == {}


def test_breaks_are_in_running_text_alone(site):
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("index.html")}
    assert any("<wbr>" in page for page in pages.values())
    blocks = [
        (name, block) for name, page in pages.items() for block in re.findall(r"<pre.*?</pre>", page, re.S)
    ]
    assert len(blocks) > 100 and [name for name, block in blocks if "<wbr>" in block] == []


def test_a_table_of_texts_has_labels_for_a_phone(site):
    page = (site / "metrics" / "index.html").read_text()
    assert '<td data-label="healthy">rises</td>' in page and "<table>" not in page
    numbers = (site / "learning" / "index.html").read_text()
    assert "<table>" in numbers  # numbers stay beside each other and scroll


@pytest.mark.slow
@with_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_follow_the_scheme_of_the_browser(site, tmp_path, dark):
    (page,) = measure(["/objectives/"], site, tmp_path / "profile", dark)
    assert page["scheme"] == ("slate" if dark else "default")
    text, ground = (sum(map(int, re.findall(r"\d+", page[name])[:3])) for name in ("colour", "background"))
    assert (text > ground) == dark, page
