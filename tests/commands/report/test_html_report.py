"""The report of runs: its data, its escaping, and the page in a headless browser where one is installed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest
from support.browser import PHONE, ROUNDING, browse, with_browser
from support.saved_runs import HOSTILE, save_run

from groupwise import write_report
from groupwise.commands.report.html_report import most_changed, report_data, right_or_wrong, solve_rates
from groupwise.commands.report.run_files import SavedCompletion, read_run
from groupwise.errors import ConfigError

#: Opens a report in a frame as large as a phone's screen, acts as a reader would, and posts measurements.
HARNESS = """<!doctype html><meta charset="utf-8"><body style="margin: 0"><script>
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const loaded = (frame) => new Promise((resolve) => (frame.onload = resolve));
(async () => {
  const frame = document.createElement("iframe");
  frame.style = "width: %(width)dpx; height: 844px; border: 0";
  const ready = loaded(frame);
  frame.src = "/report.html";
  document.body.append(frame);
  await ready;
  const page = frame.contentDocument, view = frame.contentWindow;
  const all = (selector, within = page) => [...within.querySelectorAll(selector)];
  const shown = (selector) => all(selector).map((node) => node.textContent);
  const mouse = (node, kind, clientX, clientY) =>
    node.dispatchEvent(new view.MouseEvent(kind, {clientX, clientY, bubbles: true}));
  const control = (text) => all("select").find((one) => one.textContent.includes(text));
  const result = {articles: all("article").length, legends: shown(".u-label")};
  result.first_completion = all("article .completion")[0]?.getBoundingClientRect().bottom;
  result.groups = all("article").map((one) => all("strong, .completion", one).map((it) => it.textContent));
  all("details").forEach((details) => (details.open = true));
  await pause(300);
  Object.assign(result, {
    width: page.documentElement.scrollWidth, hacked: view.hacked ?? null,
    headings: shown("h2"), titles: shown(".chart h3"), paragraphs: shown("p"), texts: shown("article pre"),
    terms: shown("dt"), values: shown("dd"), marks: shown("mark"),
    charts: all("canvas").length, tags: [...new Set(all("*").map((node) => node.localName))],
    background: view.getComputedStyle(page.body).backgroundColor,
    colour: view.getComputedStyle(page.body).color,
  });
  %(more)s
  await fetch("/results", {method: "POST", body: JSON.stringify(result)});
})();
</script>"""

SEARCH = """
  const search = page.querySelector("input[type=search]");
  search.value = "needle";
  search.dispatchEvent(new Event("change"));
  result.found = shown("article pre");
"""
#: The cursor at a step of the map of solve rates, then a click there; labels of axes beyond their canvas.
POINT = """
  const over = page.querySelector(".rates .u-over");
  over.scrollIntoView({block: "center"});
  await pause(50);
  const place = over.getBoundingClientRect(), at = [place.left + 3, place.top + place.height - 3];
  mouse(over, "mouseenter", ...at);
  mouse(over, "mousemove", ...at);
  await pause(50);
  result.pointed = shown(".u-legend tr:first-child .u-value");
  result.status = page.querySelector(".rates > p").textContent;
  mouse(over, "mousedown", ...at);
  mouse(over, "mouseup", ...at);
  mouse(over, "click", ...at);
  result.opened = all("article").map((one) => one.querySelector("strong").textContent);
  result.sizes = all("article").map((one) => one.querySelectorAll(".completion").length);
  const text = view.CanvasRenderingContext2D.prototype, write = text.fillText;
  result.labels = [];
  text.fillText = function (label, x, y) {
    const width = this.measureText(label).width;
    const left = x - {right: width, center: width / 2, left: 0, start: 0}[this.textAlign];
    result.labels.push([label, left, left + width - this.canvas.width]);
    return write.apply(this, arguments);
  };
  const axis = page.querySelector(".chart select");
  axis.value = "minutes";
  axis.dispatchEvent(new Event("change"));
  await pause(100);
"""
#: All groups of all steps.
EVERY_STEP = """
  control("all steps").value = "";
  control("all steps").onchange();
  all("button").forEach((one) => one.click());
  result.texts = shown("article pre");
"""


def opened(page, tmp_path, more="", dark=False):
    """Return the measurements of a report, what the browser requested, and its console."""
    return browse(HARNESS % {"width": PHONE, "more": more}, page.parent, tmp_path / "profile", dark)


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
        "completions/clipped_ratio": 0.05, "custom/words": 3.0 * at, "entropy": 2 - 0.1 * at,
    }
    for at in range(1, 6)
]  # fmt: skip
#: Group "p" is equal at step 0 and learned at 4; "q" is always right.
ROWS = [
    (0, "p", "no idea", 0.0, 0.0),
    (0, "p", "no clue", 0.0, 0.0),
    (0, "q", "yes", 1.0, 0.0),
    (0, "q", "yes", 1.0, 0.0),
    (4, "p", "no needle", 0.0, -1.0),
    (4, "p", "the needle", 1.0, 1.0),
    (4, "q", "yes", 1.0, 0.0),
    (4, "q", "yes", 1.0, 0.0),
]


# Data


def test_groups_are_counted_by_their_right_completions():
    rows = [(0, completion(*row)) for row in ROWS]
    rows += [(0, completion(4, "p", "x", 1.0, mode="eval")), (0, completion(5, "alone", "x", 1.0))]
    right, shares = right_or_wrong(rows, [row.rewards["correct"] for _, row in rows])
    assert right == {"name": "", "low": 0.0, "high": 1.0, "binary": True}
    # step 0: p has 0 of 2 right, q 2 of 2; step 4: p 1 of 2, q 2 of 2; one completion is no group
    expected = {"size": 2, "step": [0, 4], "counts": [[1, 0, 1], [0, 1, 1]]}
    assert solve_rates([row for _, row in rows], shares) == expected


def test_the_hardest_reward_of_two_values_tells_right_from_wrong():
    rewards = [(1.0, 0.0, 0.2), (1.0, 1.0, 0.7), (0.0, 0.0, 0.4), (1.0, float("inf"), 0.2)]
    rows = [
        (0, SavedCompletion("train", 0, "p", "a", dict(zip("abc", r, strict=True)), 0.0, {})) for r in rewards
    ]
    # a and b have two values, b has the lower mean, c has three; the total has four
    right, shares = right_or_wrong(rows, [1.2, 2.7, 0.4, 1.3])
    assert (right["name"], shares) == ("b", [0.0, 1.0, 0.0, None])
    # only c: the total from lowest to highest, without infinities
    for _, row in rows:
        del row.rewards["a"], row.rewards["b"]
    right, shares = right_or_wrong(rows, [1.0, 2.0, 3.0, float("inf")])
    assert right == {"name": "", "low": 1.0, "high": 3.0, "binary": False}
    assert shares == [0.0, 0.5, 1.0, None]


def test_equal_rewards_are_right_above_zero():
    row = (0, completion(0, "p"))
    assert [right_or_wrong([row], [total])[1] for total in (1.0, 0.0, -1.0)] == [[1.0], [0.0], [0.0]]


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
    # groups of one: 0 * 22 // 4, 1 * 22 // 4, ... = 0, 5, 11, 16, and the two of the comparison
    assert texts == ["text 0", "text 5", "text 11", "text 16", "before", "after"]
    assert (
        data["omitted"] == 16
        and len({len(column) for column in data["completions"].values() if isinstance(column, list)}) == 1
    )
    (pair,) = data["changed"]
    assert (texts[pair["first"]], texts[pair["last"]], pair["change"]) == ("before", "after", 1.0)
    assert data["prompts"][data["completions"]["prompt"][-1]] == "p"


def test_groups_are_thinned_as_a_whole(tmp_path):
    rows = [(at, "p", f"text {at}.{i}", 0.0, 0.0) for at in range(6) for i in range(4)]
    texts = report_data({"run": read_run(save_run(tmp_path / "run", LOGS, {}, rows))}, 8)["completions"][
        "text"
    ]
    # groups 0 and 3 of 6; the prompt's first and last completions, of steps 0 and 5, do not differ in reward
    assert [f"text {at}.{i}" for at in (0, 3) for i in range(4)] == [text for text in texts if text[5] != "5"]


def test_rewards_are_weighted_as_in_the_run(tmp_path):
    run = read_run(save_run(tmp_path / "run", LOGS, {"reward_weights": [0.25]}, ROWS))
    assert set(report_data({"run": run}, 100)["completions"]["total"]) == {0.0, 0.25}
    # 0.25 * 1 + 1 * 3: an environment's reward, which has no weight in the settings, follows the functions'
    both = SavedCompletion("train", 0, "p", "a", {"correct": 1.0, "environment": 3.0}, 0.0, {})
    data = report_data({"run": replace(run, completions=[both])}, 100)
    assert data["completions"]["total"] == [3.25]


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


@pytest.mark.slow
@with_browser
def test_a_hostile_run_is_shown_as_text(hostile, tmp_path):
    page, requested, console = opened(hostile, tmp_path, EVERY_STEP)
    assert (page["hacked"], console) == (None, "")
    assert not {"img", "svg", "base", "iframe"} & set(page["tags"])
    assert [path for path in requested if "hacked" in path] == []
    shown = {text.replace("\x00", "") for text in page["texts"]}
    assert {(text + " needle").replace("\x00", "") for text in HOSTILE} <= shown
    assert set(HOSTILE) <= set(page["terms"])
    assert page["width"] <= PHONE + ROUNDING


@pytest.mark.slow
@with_browser
def test_a_run_is_shown_with_its_parts(tmp_path):
    run = save_run(
        tmp_path / "run", LOGS, {"beta": 0.04}, ROWS, [(0, "e", "no", 0.0, 0.0), (5, "e", "yes", 1.0, 0.0)]
    )
    page, requested, console = opened(write_report([run], tmp_path / "report.html"), tmp_path, SEARCH)
    assert console == "" and set(requested) <= {"/harness", "/report.html", "/favicon.ico"}
    assert page["headings"] == [
        "Completions",
        "Healthy ranges",
        "Curves",
        "Completions that changed most",
        "Prompts without a gradient",
        "Time by phase",
        "Memory by phase",
        "Settings",
        "Metrics of the run's own",
        "All other metrics",
    ]
    said = "\n".join(page["paragraphs"])
    assert (
        "Training reward rose from 0.1 to 0.5 in 5 steps (2 minutes); "
        "look first at the group of step 4 with 1 of 2 right." in said
    )
    assert "healthy: 0.1 to 0.7; outside in 5 of 5 logs" in said and "3 of 4 groups" in said
    assert "mean reward +1" in said and "mean reward +0.5" in said
    # Groups of the last step, lowest reward first, their completions from the best to the worst.
    assert page["groups"] == [
        [
            "step 4",
            "correct 1advantage +1the needleparsed: the needle",
            "correct 0advantage -1no needleparsed: no needle",
        ],
        ["step 4", *["correct 1advantage 0yesparsed: yes"] * 2],
    ]
    assert "needle" in page["marks"]
    assert [text for text in page["found"] if text != "p"] == ["the needle", "no needle"]
    assert page["width"] <= PHONE + ROUNDING and page["first_completion"] < 844


@pytest.mark.slow
@with_browser
def test_a_curve_is_drawn_once_and_constants_are_listed(tmp_path):
    page, _, console = opened(
        write_report([save_run(tmp_path / "run", LOGS, {}, ROWS)], tmp_path / "report.html"), tmp_path
    )
    drawn = ["Reward", "Solve rates: right of 2", "entropy", "seconds of a step, phases on top of each other"]
    drawn += ["Memory by phase", "custom/words"]
    assert [title.split("by step")[0].strip() for title in page["titles"]] == drawn
    assert page["charts"] == len(drawn) and console == ""
    listed = dict(zip(page["terms"], page["values"], strict=True))
    assert (listed["rewards/correct/mean"], listed["frac_reward_zero_std"]) == ("as reward", "0.9")
    assert not {"reward", "custom/words", "entropy"} & set(listed)


@pytest.mark.slow
@with_browser
def test_the_sources_of_a_mixture_are_lines_of_one_chart(tmp_path):
    by_source = [
        {
            **log,
            "reward/maths": log["reward"],
            "reward/code": 1 - log["reward"],
            "entropy/maths": log["reward"],
            "eval_pass@1/maths": log["reward"] / 2,
        }
        for log in LOGS
    ]
    report = write_report([save_run(tmp_path / "run", by_source, {}, ROWS)], tmp_path / "report.html")
    page, _, console = opened(report, tmp_path)
    titles = [title.split("by step")[0].strip() for title in page["titles"]]
    drawn = [f"{name} by source" for name in ("entropy", "eval_pass@1", "reward")]
    assert [title for title in titles if "source" in title] == drawn
    assert "By source" in page["headings"] and console == "" and page["charts"] == len(titles)
    assert not {"reward/maths", "reward/code", "entropy/maths"} & {*titles, *page["terms"]}


@pytest.mark.slow
@with_browser
def test_a_click_on_a_step_opens_its_groups_and_cursors_move_together(tmp_path):
    logs = [log | {"entropy": 1e-7 * log["reward"], "custom/words": -54321.5 * log["reward"]} for log in LOGS]
    page, _, console = opened(
        write_report([save_run(tmp_path / "run", logs, {}, ROWS)], tmp_path / "report.html"), tmp_path, POINT
    )
    # At the first column's lower end p has 0 of 2 right; the cursors of all charts are at that step.
    assert page["status"] == "step 0: 1 of 2 groups with 0 of 2 right" and console == ""
    assert page["pointed"] == ["0"] * page["charts"] and page["charts"] > 4
    assert page["opened"] == ["step 0", "step 0"] and page["sizes"] == [2, 2]
    labels = {label for label, *_ in page["labels"]}
    assert "-20000" in labels and "2e-8" in labels and "0.5" in labels
    assert [label for label in page["labels"] if label[1] < 0 or label[2] > 0] == []


def logs_of(rewards, more=lambda share: {}, evaluated=None):
    """Return logs with these rewards, and metrics by the share of the run that is over."""
    shares = [at / max(len(rewards) - 1, 1) for at in range(len(rewards))]
    logs = [
        {"step": at, "reward": rewards[at - 1], **more(shares[at - 1])} for at in range(1, len(rewards) + 1)
    ]
    for at, value in (evaluated or {}).items():
        logs.insert(min(at, len(logs)), {"step": at, "eval_reward": value})
    return logs


@pytest.mark.slow
@with_browser
def test_the_first_sentence_is_about_the_rewards_and_about_what_to_read_first(tmp_path):
    rising, noisy = [0.1 * at for at in range(1, 11)], [0.4, 0.6] * 4 + [0.5, 0.62]

    def clipped(share):
        return {"completions/clipped_ratio": 0.9}

    def leaving(share):
        return clipped(share) | {"frac_reward_zero_std": 0.3 + 0.6 * share}

    def answers(*right):
        steps = zip((0, 10), right, strict=True)
        return [(at, f"p{i}", "a", float(i < n), 0.0) for at, n in steps for i in range(20)]

    runs = {
        # 4 of 20 and 16 of 20 right: a standard error of 0.13, and 4 of 20 and 5 of 20
        "learns": (logs_of(rising, clipped, {0: 0.2, 10: 0.8}), ROWS, answers(4, 16)),
        "holds": (logs_of(rising, evaluated={0: 0.2, 10: 0.25}), (), answers(4, 5)),
        "unknown": (logs_of(rising, evaluated={0: 0.2, 10: 0.25}), (), ()),
        "noise": (logs_of(noisy, clipped), ROWS, ()),
        "overfits": (logs_of(rising, leaving, {0: 0.6, 3: 0.5, 6: 0.4, 9: 0.3, 10: 0.2}), ROWS, ()),
        "leaves": (logs_of(rising, leaving), ROWS, ()),
        "short": (logs_of(rising[:1]), (), ()),
    }
    paths = [
        save_run(tmp_path / name, logs, {}, rows, evaluated) for name, (logs, rows, evaluated) in runs.items()
    ]
    page, _, console = opened(write_report(paths, tmp_path / "report.html"), tmp_path)
    assert console == "" and page["paragraphs"][0] == "learns ends with the highest training reward, 1."
    said = [text for text in page["paragraphs"] if re.search(r"in \d+ step", text)]
    hardest = "look first at the group of step 4 with 1 of 2 right"
    rose = "raining reward rose from 0.15 to 0.95 in 10 steps"
    expected = (
        f"Held-out reward rose from 0.2 to 0.8 and t{rose}; {hardest}.",
        f"Held-out reward stayed within its noise, from 0.2 to 0.25 and t{rose}.",
        f"Held-out reward went from 0.2 to 0.25 and t{rose}.",
        "Training reward stayed within its noise, from 0.5 to 0.56 in 10 steps; "
        "look first at completions/clipped_ratio, which is outside its healthy range (0.9).",
        f"Held-out reward fell from 0.6 to 0.2 and t{rose}; look first at the held-out reward.",
        f"T{rose}; look first at frac_reward_zero_std, which is outside its healthy range (0.9).",
        "No reward was logged twice in 1 step.",
    )
    assert [re.sub(r" \([\d.]+ minutes\)", "", text) for text in said] == list(expected)


@pytest.mark.slow
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


@pytest.mark.slow
@with_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_many_completions_are_added_as_they_are_read(tmp_path, dark):
    """Of 20,000 completions, groups with 20 are elements of the page; search finds the others."""
    rows = [(at // 64, f"p{at % 8}", "word " * 40 + str(at), float(at % 2), 0.5) for at in range(20_000)]
    rows[0] = (*rows[0][:2], "a needle", *rows[0][3:])
    page, _, console = opened(
        write_report([save_run(tmp_path / "run", LOGS, {}, rows)], tmp_path / "report.html"),
        tmp_path,
        SEARCH,
        dark,
    )
    assert (page["articles"], console) == (5, "")  # step 312 has groups of 4
    assert page["found"] == ["p0", "a needle"]
    assert page["width"] <= PHONE + ROUNDING
    text, ground = (sum(map(int, re.findall(r"\d+", page[name])[:3])) for name in ("colour", "background"))
    assert (text > ground) == dark, page
