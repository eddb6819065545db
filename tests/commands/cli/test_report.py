from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.saved_runs import save_run

from groupwise.commands.cli import main, report

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


def test_a_directory_that_is_no_run_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the output directory of a run" in capsys.readouterr().err


def test_an_output_that_is_a_directory_is_an_error(tmp_path, capsys):
    save_run(tmp_path / "run", LOGS)
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path)]) == 2
    assert "is a directory; write" in capsys.readouterr().err


def reloads(page: Path) -> int:
    return json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])["reload"]


def test_a_watched_page_follows_the_run_and_stops_loading_itself_when_the_run_ends(tmp_path, monkeypatch):
    """A process is named in the directory until the third log; the page has each log soon after it."""
    monkeypatch.setattr(report, "LOOK", 0.02)
    monkeypatch.setattr(report, "REST", 0.1)
    run = save_run(tmp_path / "run", LOGS)
    (run / "_run.json").write_text(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
    seen = []

    def train():
        for log in range(2, 4):
            while (
                not page.exists() or f'"reward":{[0.5] * (log - 1)}'.replace(" ", "") not in page.read_text()
            ):
                time.sleep(0.02)
            seen.append(reloads(page))
            time.sleep(0.3)  # longer than REST: a run that is slow has not ended
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": log, "time": 1e9 + log, "reward": 0.5}) + "\n")
        (run / "_run.json").unlink()

    page, thread = run / "report.html", threading.Thread(target=train)
    thread.start()
    assert main(["report", "--watch", str(run)]) == 0
    thread.join()
    assert seen == [10, 10] and reloads(page) == 0 and '"reward":[0.5,0.5,0.5]' in page.read_text()


def test_ctrl_c_ends_watching_and_the_page_stops_loading_itself(tmp_path):
    """Watching may begin before the run's first log; invalid arguments are errors at once."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.json").write_text("{}")
    assert main(["report", "--watch", str(run), "--max_completions", "0"]) == 2
    # Tests that a shell runs in the background ignore the signal, and so would what they start.
    heed = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}; from groupwise.commands.cli import main; sys.exit(main())"]
    watching = subprocess.Popen([*command, "report", "--watch", str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith(f"{run / 'report.html'} follows {run}") for line in watching.stdout)
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(1)
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1e9, "reward": 0.5}) + "\n")
        while not (run / "report.html").exists():
            assert watching.poll() is None
            time.sleep(0.1)
        assert reloads(run / "report.html") == 10
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0 and reloads(run / "report.html") == 0
    finally:
        watching.kill()
        watching.wait()
