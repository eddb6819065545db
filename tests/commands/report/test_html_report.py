"""The report of runs: its data, its escaping, and the page in a headless browser where one is installed."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from support.browser import PHONE, ROUNDING, browse, with_browser
from support.saved_runs import HOSTILE, save_run

from groupwise import write_report
from groupwise.commands.report.html_report import (
    group_spread,
    groups_without_gradient,
    most_changed,
    report_data,
)
from groupwise.commands.report.run_files import SavedCompletion, read_run
from groupwise.errors import ConfigError

#: Opens a report in a frame as wide as a phone, opens every <details>, and posts measurements.
HARNESS = """<!doctype html><meta charset="utf-8"><body><script>
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
(async () => {
  const frame = document.createElement("iframe");
  frame.style = "width: %(width)dpx; height: 800px; border: 0";
  const loaded = new Promise((resolve) => (frame.onload = resolve));
  frame.src = "/report.html";
  document.body.append(frame);
  await loaded;
  const page = frame.contentDocument, all = (selector) => [...page.querySelectorAll(selector)];
  const articles = all("article").length;
  all("details").forEach((details) => (details.open = true));
  await pause(500);
  const shown = (selector) => all(selector).map((node) => node.textContent);
  const result = {
    articles, width: page.documentElement.scrollWidth, hacked: frame.contentWindow.hacked ?? null,
    headings: shown("h2"), titles: shown(".chart h3"), paragraphs: shown("p"), texts: shown("article pre"),
    terms: shown("dt"), values: shown("dd"), marks: shown("mark"), legends: shown(".u-label"),
    charts: all("canvas").length, tags: [...new Set(all("*").map((node) => node.localName))],
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    colour: frame.contentWindow.getComputedStyle(page.body).color,
  };
  const search = page.querySelector("input[type=search]");
  if (search) {
    search.value = "needle";
    search.dispatchEvent(new Event("change"));
    result.found = shown("article pre");
  }
  await fetch("/results", {method: "POST", body: JSON.stringify(result)});
})();
</script>"""


def opened(page, tmp_path, dark=False):
    """Return the measurements of a report, what the browser requested, and its console."""
    return browse(HARNESS % {"width": PHONE}, page.parent, tmp_path / "profile", dark)


def embedded(text: str) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(data)


def completion(step, prompt, text="a", total=None, advantage=0.0, mode="train"):
    return SavedCompletion(mode, step, prompt, text, {"correct": total}, advantage, {})


LOGS = [
    {
        "reward": 0.1 * at, "reward_std": 0.3, "frac_reward_zero_std": 0.9, "loss": 0.0, "kl": 0.01,
        "rewards/correct/mean": 0.1 * at, "rewards/correct/std": 0.3, "time/generate": 2.0, "time/train": 1.0,
        "time/idle": 0.5, "step_time": 3.5, "memory/train": 1.5,
        "completions/clipped_ratio": 0.05, "custom/words": 3.0 * at,
    }
    for at in range(1, 6)
]  # fmt: skip
#: Group "p" is equal at step 0 and learned at 4; "q" is always right.
ROWS = [
    (0, "p", "no idea", 0.0, 0.0),
    (0, "p", "no clue", 0.0, 0.0),
    (0, "q", "yes", 1.0, 0.0),
    (0, "q", "yes", 1.0, 0.0),
    (4, "p", "the needle", 1.0, 1.0),
    (4, "p", "no needle", 0.0, -1.0),
    (4, "q", "yes", 1.0, 0.0),
    (4, "q", "yes", 1.0, 0.0),
]


# Data


def test_groups_without_an_advantage_are_counted_by_their_reward():
    rows = [completion(*row) for row in ROWS] + [completion(4, "alone", "x", 1.0)]
    found = groups_without_gradient(rows, [row.rewards["correct"] for row in rows])
    # p at 0 has the lowest reward, q at 0 and 4 the highest; p at 4 has advantages; one row is no group
    assert found == {
        "groups": 4, "equal": 3, "best": 2, "worst": 1, "prompts": [("q", 2, 2, 1.0), ("p", 1, 2, 0.0)],
    }  # fmt: skip


def test_the_spread_is_that_of_group_means():
    means = [0.0, 0.25, 0.5, 0.75, 1.0]
    rows = [completion(3, f"p{i}", total=mean) for i, mean in enumerate(means) for _ in range(2)]
    rows += [completion(9, "only", total=1.0)] * 2  # one group has no spread
    spread = group_spread(rows, [row.rewards["correct"] for row in rows])
    # five evenly spaced means: the quantile q is at position 4q of 0 to 1, so 10 % is 0.1, 90 % is 0.9
    assert spread == {"step": [3], "low": [0.1], "median": [0.5], "high": [0.9]}


def test_prompts_that_changed_most_come_first():
    rows = [
        (0, completion(0, "same", "a b", 1.0)),
        (0, completion(8, "same", "a b", 1.0)),
        (0, completion(0, "words", "a b", 1.0)),
        (0, completion(8, "words", "a c", 1.0)),
        (0, completion(0, "both", "a b", 0.0)),
        (0, completion(4, "both", "-", 0.5)),
        (0, completion(8, "both", "c d", 1.0)),
        (0, completion(0, "once", "a", 0.0)),
        (1, completion(8, "once", "b", 1.0)),  # another run
        (0, completion(0, "mode", "a", 0.0)),
        (0, completion(8, "mode", "b", 1.0, mode="eval")),
    ]
    found = most_changed(rows, [row.rewards["correct"] for _, row in rows])
    # both: change 1 of the range 1, plus all words; words: a of {a, b, c} is shared
    assert found == [(4, 6, 1.0), (2, 3, 0.0)]


def test_completions_are_thinned_evenly_and_compared_ones_stay(tmp_path):
    rows = [(at, f"p{at}", f"text {at}", 0.0, 0.0) for at in range(20)]
    rows += [(0, "p", "before", 0.0, 0.0), (1, "p", "after", 1.0, 0.0)]
    data = report_data({"run": read_run(save_run(tmp_path / "run", LOGS, {}, rows))}, 4)
    texts = data["completions"]["text"]
    # 0 * 22 // 4, 1 * 22 // 4, ... = 0, 5, 11, 16, and the two of the comparison
    assert texts == ["text 0", "text 5", "text 11", "text 16", "before", "after"]
    assert (
        data["omitted"] == 16
        and len({len(column) for column in data["completions"].values() if isinstance(column, list)}) == 1
    )
    (pair,) = data["changed"]
    assert (texts[pair["first"]], texts[pair["last"]], pair["change"]) == ("before", "after", 1.0)
    assert data["prompts"][data["completions"]["prompt"][-1]] == "p"


def test_rewards_are_weighted_as_in_the_run(tmp_path):
    run = read_run(save_run(tmp_path / "run", LOGS, {"reward_weights": [0.25]}, ROWS))
    assert set(report_data({"run": run}, 100)["completions"]["total"]) == {0.0, 0.25}


def test_settings_that_differ_are_apart(tmp_path):
    for name, beta in (("a", 0.0), ("b", 0.1)):
        save_run(
            tmp_path / name,
            LOGS,
            {"beta": beta, "seed": 1, "output_dir": name, "generation_kwargs": {"x": [1]}},
        )
    data = embedded(write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "r.html").read_text())
    assert data["differing"] == [["beta", ["0.0", "0.1"]]]
    assert ["seed", ["1"]] in data["common"] and ["generation_kwargs", ['{"x": [1]}']] in data["common"]


def test_logs_are_columns_of_finite_numbers(tmp_path):
    logs = [{"reward": 1 / 3, "note": "text"}, {"eval_reward": 1.0}, {"reward": None}]
    (run,) = report_data({"run": read_run(save_run(tmp_path / "run", logs))}, 100)["runs"]
    assert run["step"] == [1, 2, 3] and run["minutes"] == [0.0, 0.5, 1.0]
    assert run["logs"] == {"reward": [0.333333, None, None], "eval_reward": [None, 1.0, None]}


def test_a_report_stands_beside_its_run_and_names_distinguish_runs(tmp_path):
    for place in ("a/out", "b/out"):
        save_run(tmp_path / place, LOGS)
    assert write_report([tmp_path / "a/out"]) == tmp_path / "a/out" / "report.html"
    data = embedded(write_report([tmp_path / "a/out", tmp_path / "b/out"], tmp_path / "r.html").read_text())
    assert [run["name"] for run in data["runs"]] == ["a/out", "b/out"]
    with pytest.raises(ConfigError, match="are the same"):
        write_report([tmp_path / "a/out", tmp_path / "a/out"])


def test_documentation_is_shown_without_marks_of_markdown(tmp_path):
    metrics = report_data({"run": read_run(save_run(tmp_path / "run", LOGS))}, 100)["metrics"]
    remedy = "near 1: easier or harder prompts, partial credit, dynamic_sampling"
    assert metrics["frac_reward_zero_std"]["otherwise"] == remedy
    assert metrics["completions/clipped_ratio"]["otherwise"].endswith("end tokens: Completions never end")
    assert "custom/words" not in metrics


def test_a_local_model_is_named_without_its_path(tmp_path):
    run = save_run(tmp_path / "run", LOGS, {})
    saved = json.loads((run / "settings.json").read_text()) | {"model": "/home/someone/models/tiny"}
    (run / "settings.json").write_text(json.dumps(saved))
    assert report_data({"run": read_run(run)}, 100)["runs"][0]["model"] == "tiny"


# Escaping


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A report of a run whose prompts, completions, settings, metrics and name are hostile."""
    rows = [(at, text, text + " needle", float(at % 2), 0.0) for text in HOSTILE for at in (0, 4)]
    logs = [log | {f"custom/{text}": 1.0 for text in HOSTILE} for log in LOGS]
    folder = tmp_path_factory.mktemp("hostile")
    run = save_run(
        folder / "<img src=x onerror=hacked=1>", logs, {text: text for text in HOSTILE}, rows, rows
    )
    return write_report([run], folder / "report.html")


def test_texts_cannot_leave_their_element(hostile):
    """An HTML parser ends a script at "</script" and hides one after "<!--": only our own tags may occur."""
    text = hostile.read_text()
    assert text.count("<script") == text.count("</script") == 2 and "<!--" not in text and "<img" not in text
    assert "\u2028" not in text and "\u2029" not in text
    data = embedded(text)
    assert {one + " needle" for one in HOSTILE} == set(data["completions"]["text"])
    assert set(HOSTILE) <= set(data["prompts"])


def test_the_policy_allows_our_scripts_alone(hostile):
    text = hostile.read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    for kind, pattern in (("style", r"<style>(.*?)</style>"), ("script", r"<script>(.*?)</script>")):
        (content,) = re.findall(pattern, text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert re.findall(r"(?:src|href)\s*=\s*[\"']?https?:", text) == []


# In a browser


@with_browser
def test_a_hostile_run_is_shown_as_text(hostile, tmp_path):
    page, requested, console = opened(hostile, tmp_path)
    assert (page["hacked"], console) == (None, "")
    assert not {"img", "svg", "base", "iframe"} & set(page["tags"])
    assert [path for path in requested if "hacked" in path] == []
    shown = {text.replace("\x00", "") for text in page["texts"]}
    assert {(text + " needle").replace("\x00", "") for text in HOSTILE} <= shown
    assert set(HOSTILE) <= set(page["terms"])
    assert page["width"] <= PHONE + ROUNDING


@with_browser
def test_a_run_is_shown_with_its_parts(tmp_path):
    run = save_run(
        tmp_path / "run", LOGS, {"beta": 0.04}, ROWS, [(0, "e", "no", 0.0, 0.0), (5, "e", "yes", 1.0, 0.0)]
    )
    page, requested, console = opened(write_report([run], tmp_path / "report.html"), tmp_path)
    assert console == "" and set(requested) <= {"/harness", "/report.html", "/favicon.ico"}
    for heading in (
        "Beside the healthy range",
        "Curves",
        "Reward components",
        "Mismatch, truncation and clipping",
        "Time by phase",
        "Memory by phase",
        "Completions that changed most",
        "Groups without a gradient",
        "Settings",
        "Metrics of the run's own",
        "Completions",
    ):
        assert heading in page["headings"]
    assert page["charts"] >= len(page["titles"]) > 8 and "custom/words" in page["titles"]
    assert (
        "generate" in page["legends"] and page["legends"].count("reward") == 3
    )  # the line and the edges of its band
    said = "\n".join(page["paragraphs"])
    assert "5 steps in 2 minutes: reward 0.1 in the first log, 0.5 in the last" in said
    assert "healthy: 0.1 to 0.7; outside in 5 of 5 logs" in said
    assert "3 of 4 logged groups: 2 with the highest reward of the run (too easy), 1 with the lowest" in said
    assert "mean reward +1" in said and "mean reward +0.5" in said
    assert "needle" in page["marks"]
    assert page["articles"] == len(ROWS) + 2
    assert sum("needle" in text for text in page["found"]) == len(page["found"]) / 2 == 2  # prompt and text
    assert page["width"] <= PHONE + ROUNDING


@with_browser
def test_runs_are_compared(tmp_path):
    runs = [
        save_run(tmp_path / name, LOGS, {"beta": beta}, ROWS) for name, beta in (("one", 0.0), ("two", 0.1))
    ]
    page, _, console = opened(write_report(runs, tmp_path / "report.html"), tmp_path)
    assert console == "" and "Settings that differ" in page["headings"]
    assert page["terms"][0] == "beta" and page["values"][:2] == ["0.0", "0.1"]
    assert {"one", "two"} <= set(page["legends"])
    assert page["width"] <= PHONE + ROUNDING


@with_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_many_completions_are_added_as_they_are_read(tmp_path, dark):
    """Of 20,000 completions, 20 are elements of the page; search finds the others."""
    rows = [(at // 64, f"p{at % 8}", "word " * 40 + str(at), float(at % 2), 0.5) for at in range(20_000)]
    rows[-1] = (*rows[-1][:2], "a needle", *rows[-1][3:])
    page, _, console = opened(
        write_report([save_run(tmp_path / "run", LOGS, {}, rows)], tmp_path / "report.html"), tmp_path, dark
    )
    assert (page["articles"], console) == (20, "")
    assert "a needle" in page["found"]
    assert page["width"] <= PHONE + ROUNDING
    text, ground = (sum(map(int, re.findall(r"\d+", page[name])[:3])) for name in ("colour", "background"))
    assert (text > ground) == dark, page
