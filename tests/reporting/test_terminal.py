from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
from pathlib import Path

import pytest
from support.workers.launch import Script, run
from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from groupwise.reporting.completions import print_table
from groupwise.reporting.terminal import (
    LINES_PER_HEADER,
    LogLinesCallback,
    LogLinesProgressCallback,
    LogTable,
    show_log_lines,
    sparkline,
    summary_line,
)
from groupwise.reporting.timing import StepTimer

LOGS = {
    "reward": 0.53125,
    "reward_std": 0.2134,
    "completions/mean_length": 43.21,
    "frac_reward_zero_std": 0.25,
    "entropy": 1.2345,
    "grad_norm": 0.843,
    "time/generate": 7.0,
    "time/sync": 0.1,
    "time/reward": 0.04,
    "time/logprobs": 1.0,
    "time/train": 4.2,
    "step_time": 12.34,
    "loss": 0.01,
}


def text(parts):
    return "".join(part for part, _ in parts)


def test_a_line_has_the_values_under_their_titles():
    header, line = text(
        LogTable(["custom/words"]).lines({**LOGS, "custom/words": 7.0}, 12, 190.4)
    ).splitlines()
    for title, value in {
        "step": "12",
        "length": "43.2",
        "zero std": "25%",
        "entropy": "1.23",
        "grad": "0.843",
        "generate": "7.1",  # weight sync included
        "train": "5.2",  # log-probs included
        "step s": "12.3",
        "custom/words": "7",
        "ETA": "03:10",
    }.items():
        end = re.search(rf"(?<!\S){re.escape(title)}(?!\S)", header).end()
        assert line[:end].split(" ")[-1] == value, title
    assert "0.531 ±0.21" in line and "█" not in line and "─" in line  # one value


def test_missing_values_are_dashes():
    _, line = text(LogTable().lines({"reward": 1.0}, 1, None)).splitlines()
    assert line.split() == ["1", "1.000", "─", *["-"] * 9]


def test_the_header_is_repeated():
    table = LogTable()
    heads = [
        "last 20 logs" in text(table.lines(LOGS, step, None)) for step in range(2 * LINES_PER_HEADER + 1)
    ]
    assert [step for step, head in enumerate(heads) if head] == [0, LINES_PER_HEADER, 2 * LINES_PER_HEADER]


@pytest.mark.parametrize("width", [200, 100, 80, 40, 20])
def test_a_line_fits_the_terminal_and_keeps_step_and_reward(width):
    lines = text(LogTable(["custom/words"]).lines(LOGS, 12, 10.0, width=width)).splitlines()
    assert all(len(line.rstrip()) <= max(width, 21) for line in lines)
    assert all("12" in line and "0.531" in line for line in lines[1:])
    assert ("generate" in lines[0]) is (width >= 200)


def test_the_sparkline_follows_the_last_rewards():
    table = LogTable()
    for step in range(30):
        line = text(table.lines({"reward": float(step)}, step, None)).splitlines()[-1]
    assert re.search(r"▁\S*█", line).group() == sparkline(range(10, 30))
    assert len(sparkline(range(10, 30))) == 20
    assert sparkline([0, 1, float("nan"), 0.5]) == "▁█▅"
    assert sparkline([2, 2]) == "──" and sparkline([]) == ""


def test_lines_of_other_logs():
    evaluated = {
        "eval_math_loss": 0.2,
        "eval_math_reward": 0.75,
        "eval_math_pass@4": 0.875,
        "eval_math_pass@4_ci95": 0.1,
        "eval_math_kl": 0.5,
        "eval_math_runtime": 12.3,
    }
    line = summary_line(evaluated, 20, ["kl"])
    assert line == "eval_math at step 20: reward 0.75, pass@4 0.875, loss 0.2, runtime 12.3, kl 0.5"
    assert summary_line({"train_runtime": 3725.0, "train_loss": 0.1}, 40) == "40 steps in 1:02:05"
    assert summary_line({"mine": 1.23456, "text": "a"}, 3) == "step 3: mine 1.235"


def test_the_last_log_of_training_has_a_line_and_the_time(make_args, capsys):
    state = TrainerState(max_steps=4, global_step=4, is_world_process_zero=True)
    LogLinesCallback().on_log(make_args(), state, TrainerControl(), {**LOGS, "train_runtime": 61.0})
    _, line, end = capsys.readouterr().out.splitlines()
    assert "0.531" in line and end == "4 steps in 01:01"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("callback", [LogLinesCallback, LogLinesProgressCallback])
@pytest.mark.parametrize("first", [True, False])
def test_one_process_prints_the_line_and_changes_no_log(callback, first, make_args, monkeypatch):
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    handler = CallbackHandler([callback], None, None, None, None)
    state = TrainerState(max_steps=4, is_world_process_zero=first, is_local_process_zero=True)
    handler.on_train_begin(make_args(), state, TrainerControl())
    state.global_step, logs = 2, dict(LOGS)
    handler.on_log(make_args(), state, TrainerControl(), logs)
    handler.on_train_end(make_args(), state, TrainerControl())
    assert logs == LOGS
    assert ("0.531 ±0.21" in stdout.getvalue()) is first
    assert "\x1b" not in stdout.getvalue()


def test_a_terminal_gets_colours(make_args, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stdout = Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    state = TrainerState(max_steps=4, global_step=2, is_world_process_zero=True)
    LogLinesCallback().on_log(make_args(), state, TrainerControl(), dict(LOGS))
    assert "\x1b[1m" in stdout.getvalue()


def test_the_running_phase_is_the_innermost():
    shown = []
    timer = StepTimer(shown.append)
    with timer.measure("generate"), timer.measure("sync"):
        pass
    with pytest.raises(KeyError), timer.measure("reward"):
        raise KeyError
    assert shown == ["generate", "sync", "generate", "", "reward", ""]


def test_a_run_without_differences_of_rewards_is_warned_about_once(make_args, caplog):
    """Twelve logs: the third in a row with zero std everywhere warns, the later ones do not."""
    callback, state = LogLinesCallback(), TrainerState(max_steps=20, is_world_process_zero=True)
    warned = []
    for step, share in enumerate((1.0, 1.0, 0.5, *[1.0] * 9), start=1):
        state.global_step = step
        callback.on_log(make_args(), state, TrainerControl(), {**LOGS, "frac_reward_zero_std": share})
        warned.append(len(caplog.records))
    assert warned == [0, 0, 0, 0, 0, *[1] * 7] and "use easier prompts, partial credit" in caplog.text


class WithCallbacks:
    def __init__(self, *callbacks):
        self.callbacks = list(callbacks)
        self.is_world_process_zero = lambda: True

    def pop_callback(self, kind):
        found = next((one for one in self.callbacks if isinstance(one, kind)), None)
        if found is not None:
            self.callbacks.remove(found)
        return found

    def add_callback(self, callback):
        self.callbacks.append(callback)


@pytest.mark.parametrize("stock", [ProgressCallback, PrinterCallback])
def test_a_file_gets_no_bars(stock, monkeypatch):
    for stderr, kind in ((Terminal(), stock), (io.StringIO(), PrinterCallback)):
        monkeypatch.setattr(sys, "stderr", stderr)
        trainer = WithCallbacks(stock())
        show_log_lines(trainer, ())
        assert len(trainer.callbacks) == 1 and isinstance(trainer.callbacks[0], kind)

    quiet = WithCallbacks()
    show_log_lines(quiet, ())
    assert quiet.callbacks == []


#: The first batch of an evaluation has no bar; one step of training has.
PROGRAM = """
import sys
from support.runs import prompts, trainer

made = trainer(sys.argv[1], disable_tqdm=False, eval_dataset=prompts(2), max_steps=1, logging_steps=1)
made.evaluate()
print("training begins")
made.train()
"""


IN_A_TERMINAL = """
import os, sys
terminal = os.open(sys.argv.pop(1), os.O_RDWR | os.O_NOCTTY)
os.dup2(terminal, 1), os.dup2(terminal, 2)
"""


def shown_by(program: Path, *arguments: object) -> str:
    """Run a program, which takes a terminal as its first argument; returns what it wrote there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # rows and columns
    script = Script(program, os.ttyname(slave), *arguments, environment={"TERM": "xterm"})
    output, has_ended = b"", False
    while not has_ended:
        has_ended = script.poll() is not None  # then what is left is read
        while select.select([master], [], [], 0.1)[0]:
            output += os.read(master, 4096)
    os.close(slave)
    os.close(master)
    assert script.poll() == 0, script.text(1)
    return output.decode()


@pytest.mark.slow
def test_a_real_terminal_shows_the_running_phase(tmp_path: Path):
    (tmp_path / "program.py").write_text(IN_A_TERMINAL + PROGRAM)
    evaluation, _, training = shown_by(tmp_path / "program.py", tmp_path).partition("training begins")
    assert re.search(r"\rgenerate *\r", evaluation) and "reward" in evaluation
    for phase in ("generate", "reward", "train"):
        assert re.search(rf"\r{phase}: +0%", training)
    assert not re.search(r"(generate|reward|train): +\d+%", training.rpartition("\r")[2])  # the last state


@pytest.mark.slow
def test_a_file_gets_neither_colours_nor_phases(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path / "program.py", tmp_path)  # its output goes to files
    assert done.returncode == 0
    written = done.stdout + done.stderr
    assert "\x1b[1m" not in written and "generate" not in written.splitlines() and "last 20 logs" in written
    assert not re.search(r"(generate|reward|train): +\d+%", written)


class Console(io.TextIOWrapper):
    """Standard output of one encoding; a closed pipe if it has none."""

    def __init__(self, encoding: str | None) -> None:
        super().__init__(io.BytesIO(), encoding=encoding or "utf-8")
        self.is_closed = encoding is None

    def flush(self) -> None:
        if getattr(self, "is_closed", False):
            raise BrokenPipeError(32, "Broken pipe")
        super().flush()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252", "latin-1", None])
def test_no_console_ends_the_run_from_a_log(encoding, make_args, monkeypatch, caplog):
    stdout = Console(encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    state = TrainerState(max_steps=4, global_step=2, is_world_process_zero=True)
    for callback in (LogLinesCallback(["größe→"]), LogLinesProgressCallback()):
        callback.on_log(make_args(), state, TrainerControl(), {**LOGS, "größe→": 1.0})
        callback.on_log(make_args(), state, TrainerControl(), {"größe→": 1.0})
    print_table({"step": [1], "completion": ["→ \ud83d 日本 \U0001f600"], "größe→": [1.0]}, "t")
    if encoding is None:
        assert "the log on standard output was not written: BrokenPipeError" in caplog.text
        return
    printed = stdout.buffer.getvalue().decode(encoding)
    title = "größe→".encode(encoding, "backslashreplace").decode(encoding)
    assert f"{title} 1" in printed and "0.531" in printed
    assert ("日本" if encoding == "utf-8" else "\\u65e5") in "".join(printed.split())


@pytest.mark.parametrize("stdout", [None, "closed"])
def test_a_run_without_a_console_goes_on(stdout, make_args, monkeypatch):
    file = stdout and Console("utf-8")
    if file:
        file.close()
    monkeypatch.setattr(sys, "stdout", file)
    state = TrainerState(max_steps=4, global_step=2, is_world_process_zero=True)
    LogLinesCallback().on_log(make_args(), state, TrainerControl(), dict(LOGS))
    print_table({"step": [1], "completion": ["a"]}, "t")
