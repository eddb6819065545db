"""One aligned line per log in the terminal, and the running phase on the progress bar."""

from __future__ import annotations

import io
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from groupwise.errors import log_boundary
from groupwise.random_state import preserved_state

logger = logging.getLogger(__name__)

Logs = Mapping[str, float]

#: Logs in a sparkline, and lines between two headers.
TREND, LINES_PER_HEADER = 20, 30
#: Logs without a difference of rewards in any group, in a row, after which a warning is due.
WITHOUT_GRADIENT = 3
#: Columns of a terminal whose width is unknown.
WIDTH = 120


@dataclass(frozen=True)
class Column:
    """Column of the table: title, width in characters, text of a log, and colour as rich names it."""

    title: str
    width: int
    text: Callable[[Logs], str]
    style: str = ""


def _number(name: str, form: str = "{:.3g}") -> Callable[[Logs], str]:
    return lambda logs: form.format(logs[name]) if name in logs else "-"


def _seconds(*names: str) -> Callable[[Logs], str]:
    def text(logs: Logs) -> str:
        found = [logs[name] for name in names if name in logs]
        return f"{sum(found):.1f}" if found else "-"

    return text


def _reward(logs: Logs) -> str:
    if "reward" not in logs:
        return "-"
    deviation = f" ±{logs['reward_std']:.2f}" if "reward_std" in logs else ""
    return f"{logs['reward']:.3f}{deviation}"


#: Columns between the sparkline and the metrics of the user. Times are seconds of one optimizer step.
COLUMNS = (
    Column("length", 7, _number("completions/mean_length", "{:.1f}")),
    Column("zero std", 8, _number("frac_reward_zero_std", "{:.0%}")),
    Column("entropy", 8, _number("entropy")),
    Column("grad", 8, _number("grad_norm")),
    Column("generate", 9, _seconds("time/generate", "time/sync")),
    Column("reward", 7, _seconds("time/reward")),
    Column("train", 7, _seconds("time/logprobs", "time/train")),
    Column("step s", 7, _number("step_time", "{:.1f}")),
)
#: Titles in the order in which a narrow terminal leaves the columns out: phases before the whole step.
LEFT_OUT = ("reward", "train", "generate", "entropy", "step s", "grad", "zero std", "length")


class LogTable:
    """Lines of the logs of a run, the latest under the earlier ones.

    ::

         step  reward       last 20 logs          length zero std  entropy    grad  step s     ETA
           12   0.531 ±0.21 ▁▂▃▅▆█                  43.2      25%     1.23    0.84    12.3   03:10

    "zero std" is the share of groups whose rewards are equal, which have no gradient.

    Args:
        extra: names of further metrics; "-" in logs without them.
        rewards: of earlier logs.
    """

    def __init__(self, extra: Sequence[str] = (), rewards: Sequence[float] = ()) -> None:
        self.extra = tuple(extra)
        self.rewards = list(rewards)
        self._printed = 0
        self._header = ""

    def lines(
        self, logs: Logs, step: int, eta: float | None, *, width: int | None = None
    ) -> list[tuple[str, str]]:
        """Return (text, style) of the parts of the next lines: a header where one is due, then the log.

        Args:
            eta: seconds until the end of training; None if unknown.
            width: characters of a line; columns that do not fit are left out. None: no limit.
        """
        if "reward" in logs:
            self.rewards = [*self.rewards, logs["reward"]][-TREND:]
        trend = sparkline(self.rewards)
        extra = [Column(name, max(len(name), 7), _number(name), "magenta") for name in self.extra]
        curve = Column(f"last {TREND} logs", -TREND, lambda _: trend, "cyan")
        end = Column("ETA", 8, lambda _: "-" if eta is None else tqdm.format_interval(eta), "dim")
        columns = [
            Column("step", 6, lambda _: str(step), "dim"),
            Column("reward", 13, _reward, "bold"),
            *(curve, *COLUMNS, *extra, end),
        ]
        by_title = {column.title: column for column in COLUMNS}
        for least in (*(by_title[title] for title in LEFT_OUT), end, curve, *reversed(extra)):
            if width is not None and sum(abs(column.width) + 1 for column in columns) > width:
                columns.remove(least)
        header = " ".join(_aligned(column.title, column.width) for column in columns)
        parts: list[tuple[str, str]] = []
        if header != self._header or self._printed % LINES_PER_HEADER == 0:
            self._header, self._printed = header, 0
            parts.append((header.rstrip() + "\n", "dim"))
        self._printed += 1
        for column in columns:
            parts.append((_aligned(column.text(logs), column.width) + " ", column.style))
        return parts


def _aligned(text: str, width: int) -> str:
    return text.rjust(width) if width > 0 else text.ljust(-width)


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value, from the lowest to the highest of them; all equal: a flat line."""
    flat, marks = "─", "▁▂▃▄▅▆▇█"
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low == high:
        return flat * len(finite)
    share = [(value - low) / (high - low) for value in finite]
    return "".join(marks[min(int(part * len(marks)), len(marks) - 1)] for part in share)


#: Metrics of an evaluation that its line shows, in this order; any number may follow an "@".
_EVALUATED = ("reward", "reward_std", "completions/mean_length", "pass@", "maj@", "avg@", "loss", "runtime")


def summary_line(logs: Logs, step: int, extra: Sequence[str] = ()) -> str:
    """Return the line of another log: of an evaluation, of the end of training, of ``trainer.log``."""
    prefix = next((name.removesuffix("_runtime") for name in logs if name.endswith("_runtime")), None)
    if prefix == "train":
        return f"{step} steps in {tqdm.format_interval(logs['train_runtime'])}"
    if prefix is None:
        return f"step {step}: " + ", ".join(
            f"{name} {value:.4g}" for name, value in logs.items() if _is_number(value)
        )
    own = {name.removeprefix(f"{prefix}_"): value for name, value in logs.items() if _is_number(value)}
    shown: dict[str, float] = {}
    for ending in (*_EVALUATED, *extra):
        shown.update(
            {
                name: value
                for name, value in own.items()
                if name == ending or (ending.endswith("@") and name.removeprefix(ending).isdigit())
            }
        )
    return f"{prefix} at step {step}: " + ", ".join(f"{name} {value:.3g}" for name, value in shown.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def print_rich(renderable: Any, **options: Any) -> None:
    """Print a log with rich on standard output, above the progress bars, coloured only in a terminal.

    No console ends the run: characters that its encoding lacks are escaped, and an error, such as that of a
    closed pipe, at which rich would end the process, is a warning.

    Args:
        options: of ``rich.console.Console``.
    """
    with log_boundary(logger, "the log on standard output"):
        from rich.console import Console

        encoding, is_terminal = getattr(sys.stdout, "encoding", None) or "utf-8", sys.stdout.isatty() or None
        text = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", newline="", write_through=True)
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        Console(file=text, force_terminal=is_terminal, **plain, **options).print(renderable)
        with tqdm.external_write_mode(file=sys.stdout):
            sys.stdout.write(text.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
            sys.stdout.flush()


class _LogLines(TrainerCallback):
    """Print every log as a line: on stdout, above the progress bars, coloured only in a terminal."""

    def __init__(self, extra: Sequence[str] = ()) -> None:
        super().__init__()
        self.extra = tuple(extra)
        self.table = LogTable(self.extra)
        self.without_gradient = 0  # logs in a row
        self.began: tuple[float, int] | None = None  # clock and step at the beginning of training

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.table = LogTable(self.extra)
        self.began = time.monotonic(), state.global_step

    def on_log(
        self, args: Args, state: State, control: Control, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            with log_boundary(logger, "the log on standard output"):
                self._print(logs, state, log_completions=getattr(args, "log_completions", False))

    def _print(self, logs: Logs, state: State, *, log_completions: bool) -> None:
        file, parts = sys.stdout, []
        if "reward" in logs:
            self._warn_of_no_gradient(logs)
            width = shutil.get_terminal_size((WIDTH, 24)).columns if file.isatty() else None
            parts = self.table.lines(logs, state.global_step, self._eta(state), width=width)
            parts.append(("\n", ""))
            if log_completions:
                self.table = LogTable(self.extra, self.table.rewards)  # a table below separates the lines
        if "reward" not in logs or "train_runtime" in logs:  # the last log may have both
            parts.append((summary_line(logs, state.global_step, self.extra), "bold"))
        with preserved_state():  # the first import of rich draws random numbers
            from rich.text import Text

            line = Text.assemble(*parts)
            line.rstrip()
            print_rich(line, soft_wrap=True)

    def _warn_of_no_gradient(self, logs: Logs) -> None:
        """Warn once when the rewards of every group were equal in so many logs in a row."""
        self.without_gradient = self.without_gradient + 1 if logs.get("frac_reward_zero_std") == 1 else 0
        if self.without_gradient == WITHOUT_GRADIENT:
            logger.warning(
                "the rewards of every group were equal in the last %d logs (zero std 100%%): nothing is "
                "trained. If the rewards are low, use easier prompts, partial credit or a larger "
                "num_generations; if they are high, harder prompts; if all are one value, check the reward",
                WITHOUT_GRADIENT,
            )

    def _eta(self, state: State) -> float | None:
        """Return the seconds that the remaining steps take at the mean speed so far."""
        if self.began is None or state.global_step <= self.began[1]:
            return None
        seconds_per_step = (time.monotonic() - self.began[0]) / (state.global_step - self.began[1])
        return seconds_per_step * (state.max_steps - state.global_step)


class LogLinesCallback(_LogLines, PrinterCallback):
    """Lines of the logs without progress bars (``disable_tqdm=True``)."""


class LogLinesProgressCallback(_LogLines, ProgressCallback):
    """Lines of the logs above the progress bars, the lowest of which names the running phase.

    A phase outside of training, such as the first batch of ``evaluate()``, gets a line of its own.
    """

    _line: tqdm | None = None

    def show_phase(self, phase: str) -> None:
        """Write a phase in front of the lowest bar; without a bar, on a line that the next call removes."""
        if self._line is not None:
            self._line.close()
            self._line = None
        bars: list[tqdm] = [bar for bar in (self.prediction_bar, self.training_bar) if bar is not None]
        if bars:
            bars[0].set_description_str(phase)
        elif phase:
            self._line = tqdm(desc=phase, bar_format="{desc}", leave=False)


def show_phase(trainer: Any, mode: str, phase: str) -> None:
    """Show the running phase ("generate", "sync", …; "" between them) in progress bars and to other ranks."""
    if phase and mode == "train":
        trainer.stages.enter(f"{phase} of step {trainer.state.global_step + 1}")
    for callback in trainer.callback_handler.callbacks if trainer.is_world_process_zero() else ():
        if isinstance(callback, LogLinesProgressCallback):
            callback.show_phase(phase)


def show_log_lines(trainer: Trainer, extra: Sequence[str]) -> None:
    """Replace the callback of ``Trainer`` that prints logs, if the trainer has one, by lines of a table.

    In a terminal the replacement is a subclass: ``trainer.remove_callback(ProgressCallback)`` removes it too.
    Without one there are no bars: in a file they would stand before the lines.

    Args:
        extra: names of further metrics in the lines.
    """
    with_bars = LogLinesProgressCallback if sys.stderr.isatty() else LogLinesCallback
    for stock, ours in ((ProgressCallback, with_bars), (PrinterCallback, LogLinesCallback)):
        if trainer.pop_callback(stock) is not None:
            trainer.add_callback(ours(extra))
