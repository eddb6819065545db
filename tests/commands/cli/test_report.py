from __future__ import annotations

import re
from pathlib import Path

from support.saved_runs import save_run

from groupwise.commands.cli import main

LOGS = [{"reward": 0.5, "reward_std": 0.1}]


def test_a_report_is_written_and_its_path_printed(tmp_path, capsys):
    run = save_run(tmp_path / "run", LOGS)
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(rf"{re.escape(str(run / 'report.html'))} \(\d+\.\d MB\)\n", printed)
    assert "<title>Report: run</title>" in (run / "report.html").read_text()


def test_the_report_of_several_runs_is_in_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        save_run(tmp_path / name, LOGS)
    assert main(["report", "a", "b"]) == 0
    assert "<title>Report: a, b</title>" in Path("report.html").read_text()
    assert main(["report", "a", "b", "--output", "new/page.html", "--max_completions", "5"]) == 0
    assert Path("new/page.html").is_file()


def test_an_output_that_is_a_link_stays_one(tmp_path):
    save_run(tmp_path / "run", LOGS)
    page = tmp_path / "page.html"
    page.symlink_to("elsewhere.html")
    for _ in range(2):  # the target is missing, and then there
        assert main(["report", str(tmp_path / "run"), "--output", str(page)]) == 0
    assert page.is_symlink() and "<html" in (tmp_path / "elsewhere.html").read_text()


def test_a_directory_that_is_no_run_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the output directory of a run" in capsys.readouterr().err


def test_an_output_that_is_a_directory_is_an_error(tmp_path, capsys):
    save_run(tmp_path / "run", LOGS)
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path)]) == 2
    assert "is a directory; write" in capsys.readouterr().err
