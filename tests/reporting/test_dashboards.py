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

from groupwise.reporting import report_completions

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
    )
    return module


@pytest.fixture
def wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="groupwise-test", mode="offline", dir=str(tmp_path))
    yield run
    run.finish()


def test_wandb_keeps_the_table(wandb_run, tmp_path, make_args, rows):
    args = make_args(report_to=["wandb"], num_completions_to_print=0)
    report_completions(rows, 3, args, str(tmp_path))
    wandb_run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/completions_*.table.json")
    assert json.loads(path.read_text()) == {"columns": COLUMNS, "data": VALUES}


def test_trackio_keeps_the_table(tmp_path, monkeypatch, make_args, rows):
    trackio = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    trackio.init(project="groupwise-test", name="run")
    args = make_args(report_to=["trackio"], num_completions_to_print=0)
    report_completions(rows, 3, args, str(tmp_path))
    trackio.finish()
    (path,) = (tmp_path / "trackio").glob("*.db")
    ((metrics,),) = sqlite3.connect(path).execute("select metrics from metrics").fetchall()
    logged = json.loads(metrics)
    assert logged["train/global_step"] == 3
    assert logged["completions"]["_value"] == RECORDS


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_table_goes_to_an_active_run(name, tmp_path, monkeypatch, make_args, rows):
    module = recorder()
    monkeypatch.setitem(sys.modules, name, module)
    args = make_args(num_completions_to_print=0)
    args.report_to = [name]
    report_completions(rows, 3, args, str(tmp_path), mode="eval")
    (logged,) = module.logged
    assert logged["train/global_step"] == 3
    table = logged["completions_eval"]
    if name == "wandb":
        assert (table["columns"], table["data"]) == (COLUMNS, VALUES)
    else:
        assert table["dataframe"].to_dict(orient="records") == RECORDS


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize(("active", "asked"), [(False, True), (True, False)])
def test_no_table_without_an_active_run_or_report_to(
    name, active, asked, tmp_path, monkeypatch, make_args, rows
):
    module = recorder(active)
    monkeypatch.setitem(sys.modules, name, module)
    args = make_args(num_completions_to_print=0)
    args.report_to = [name] if asked else ["tensorboard"]
    report_completions(rows, 3, args, str(tmp_path))
    assert module.logged == []


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_images_are_a_column_of_dashboards_alone(name, tmp_path, monkeypatch, make_args, rows):
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (9, 8, 7)).save(file, "PNG")
    rows[0]["images"] = [file.getvalue()] * 2
    module = recorder()
    module.Image = lambda picture: (picture.size, picture.getpixel((0, 0)))
    monkeypatch.setitem(sys.modules, name, module)
    args = make_args(num_completions_to_print=0)
    args.report_to = [name]
    report_completions(rows, 3, args, str(tmp_path))
    table = module.logged[0]["completions"]
    columns = table["columns"] if name == "wandb" else list(table["dataframe"].columns)
    cells = [row[-1] for row in table["data"]] if name == "wandb" else list(table["dataframe"]["images"])
    assert columns == [*COLUMNS, "images"]
    assert cells == [[((3, 2), (9, 8, 7))] * 2, []]
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
    assert "were not logged to wandb" in caplog.text
