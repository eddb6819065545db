"""Completions in dashboards, and the default tracker."""

from __future__ import annotations

import io
import json
import logging
import sqlite3
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.runs import trainer

from groupwise import GRPOConfig
from groupwise.reporting.completions import report_completions
from groupwise.reporting.dashboards import tool_spans

COLUMNS = ["step", "prompt", "completion", "accuracy", "form", "advantage", "length"]
VALUES = [[3, "What is 2+2?", "4", 1.0, None, 0.5, 1], [3, "What is 2+2?", "5", None, 0.25, 0.5, "one"]]
RECORDS = [dict(zip(COLUMNS, values, strict=True)) for values in VALUES]


@pytest.fixture
def rows(make_row):
    other = make_row(completion="5", rewards={"accuracy": None, "form": 0.25}, columns={"length": "one"})
    return [make_row(), other]


def recorder(active=True):
    """The interface that both dashboards share, as far as it is used."""
    logged = []
    module = SimpleNamespace(
        __spec__=ModuleSpec("dashboard", None),  # transformers looks for it
        logged=logged,
        run=object() if active else None,
        context_vars=SimpleNamespace(current_run=SimpleNamespace(get=lambda: module.run)),
        log=logged.append,
        Table=lambda **kwargs: kwargs,
        Trace=lambda messages, **kwargs: {"messages": messages, **kwargs},
    )
    return module


@pytest.fixture
def wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="groupwise-test", mode="offline", dir=str(tmp_path))
    yield run
    run.finish()


@pytest.mark.slow
def test_wandb_keeps_the_table(wandb_run, tmp_path, make_args, rows):
    args = make_args(report_to=["wandb"], num_completions_to_print=0)
    report_completions(rows, 3, args, str(tmp_path))
    wandb_run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/completions_*.table.json")
    assert json.loads(path.read_text()) == {"columns": COLUMNS, "data": VALUES}


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """trackio with its database in a directory of the test."""
    module = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    yield module
    if module.context_vars.current_run.get() is not None:
        module.finish()


def stored(tmp_path, query):
    (path,) = (tmp_path / "trackio").glob("*.db")
    return sqlite3.connect(path).execute(query).fetchall()


def test_trackio_keeps_traces(trackio, tmp_path, make_args, rows):
    trackio.init(project="groupwise-test", name="run", auto_log_cpu=False)
    args = make_args(report_to=["trackio"], num_completions_to_print=0)
    report_completions(rows, 3, args, str(tmp_path))
    trackio.finish()
    ((metrics,),) = stored(tmp_path, "select metrics from metrics")
    assert json.loads(metrics)["train/global_step"] == 3
    traces = stored(tmp_path, "select key, messages, metadata from traces order by trace_index")
    for (key, messages, metadata), record in zip(traces, RECORDS, strict=True):
        assert key == "completions"
        assert json.loads(messages) == [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["completion"]},
        ]
        scores = {name: value for name, value in record.items() if name not in ("prompt", "completion")}
        assert json.loads(metadata) == scores | {"weight_version": 3}


def test_calls_of_tools_are_spans():
    def asking(*names):
        calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    turns = [asking("add", "look"), {"role": "tool", "content": "4"}, {"role": "tool", "content": "no"}]
    turns += [asking("add"), {"role": "assistant", "content": "Four."}]
    spans = tool_spans(turns)
    assert [(span["name"], span.get("output")) for span in spans] == [
        ("add", "4"),
        ("look", "no"),
        ("add", None),
    ]
    assert {(span["kind"], span["input"]) for span in spans} == {("tool", "{}")}
    assert len({span["id"] for span in spans}) == 3


@pytest.mark.parametrize(
    ("ci", "installed", "given", "expected"),
    [
        ("", True, None, ["trackio"]),
        ("false", True, None, ["trackio"]),
        ("true", True, None, []),
        ("1", True, None, []),
        ("", False, None, []),
        ("", True, "none", []),
        ("", True, "tensorboard", ["tensorboard"]),
    ],
)
def test_trackio_is_the_default_tracker(monkeypatch, tmp_path, ci, installed, given, expected):
    if installed:
        pytest.importorskip("trackio")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("CI", ci)
    config = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, **({} if given is None else {"report_to": given})
    )
    assert config.report_to == expected
    # A default run uploads nothing, with push_to_hub neither.
    assert config.trackio_static_space_id is (False if expected == ["trackio"] else None)


def test_a_run_with_the_default_tracker_stays_on_this_machine(trackio, monkeypatch, tmp_path):
    """Metrics and completions of a run without a setting are in trackio's database."""
    monkeypatch.setenv("CI", "")
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    settings = {"max_steps": 2, "logging_steps": 1, "log_completions": True, "num_completions_to_print": 0}
    run = trainer(tmp_path / "out", report_to=None, **settings)
    assert run.args.report_to == ["trackio"]
    run.train()
    logged = [json.loads(metrics) for (metrics,) in stored(tmp_path, "select metrics from metrics")]
    assert sum("train/reward" in log for log in logged) >= 2
    versions = [
        json.loads(metadata)["weight_version"]
        for (metadata,) in stored(tmp_path, "select metadata from traces")
    ]
    assert set(versions) == {0, 1} and len(versions) == 2 * run.args.generation_batch_size


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_completions_go_to_an_active_run(name, tmp_path, monkeypatch, make_args, rows):
    module = recorder()
    monkeypatch.setitem(sys.modules, name, module)
    args = make_args(num_completions_to_print=0)
    args.report_to = [name]
    report_completions(rows, 3, args, str(tmp_path), mode="eval")
    (logged,) = module.logged
    assert logged["train/global_step"] == 3
    shown = logged["completions_eval"]
    if name == "wandb":
        assert (shown["columns"], shown["data"]) == (COLUMNS, VALUES)
    else:
        assert [trace["metadata"]["form"] for trace in shown] == [None, 0.25]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize(("active", "asked"), [(False, True), (True, False)])
def test_nothing_without_an_active_run_or_report_to(
    name, active, asked, tmp_path, monkeypatch, make_args, rows
):
    module = recorder(active)
    monkeypatch.setitem(sys.modules, name, module)
    args = make_args(num_completions_to_print=0)
    args.report_to = [name] if asked else ["tensorboard"]
    report_completions(rows, 3, args, str(tmp_path))
    assert module.logged == []


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_images_are_in_dashboards_alone(name, tmp_path, monkeypatch, make_args, rows):
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (9, 8, 7)).save(file, "PNG")
    rows[0]["images"] = [file.getvalue()] * 2
    module = recorder()
    module.Image = lambda picture: (picture.size, picture.getpixel((0, 0)))
    monkeypatch.setitem(sys.modules, name, module)
    args = make_args(num_completions_to_print=0)
    args.report_to = [name]
    report_completions(rows, 3, args, str(tmp_path))
    shown = module.logged[0]["completions"]
    pictures = [[((3, 2), (9, 8, 7))] * 2, []]
    if name == "wandb":
        assert shown["columns"] == [*COLUMNS, "images"] and [row[-1] for row in shown["data"]] == pictures
    else:
        assert [trace["metadata"].get("images", []) for trace in shown] == pictures
    (file,) = (tmp_path / "completions").glob("*.parquet")
    assert "images" not in pq.read_schema(file).names


def test_a_failing_dashboard_is_a_warning(tmp_path, monkeypatch, caplog, make_args, rows):
    module = recorder()
    module.Table = None  # calling it raises
    monkeypatch.setitem(sys.modules, "wandb", module)
    args = make_args(num_completions_to_print=0)
    args.report_to = ["wandb"]
    with caplog.at_level(logging.WARNING, "groupwise.reporting.dashboards"):
        report_completions(rows, 3, args, str(tmp_path))
    assert "in wandb was not written" in caplog.text
