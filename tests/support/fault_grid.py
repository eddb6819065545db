"""Faults × stages on real processes: the same history, or all processes down, a message, and a resumed run.

    python -m support.faults --grid [--seeds 0 1 2] [--only hang/reward SIGKILL …] [--without_server]

A cell trains on two gloo processes; its fault hits one of them at a stage. The seed chooses the rank, the
step and the method of the stage. Generation, sync and evaluation use one vLLM server, behind a proxy. On a
busy machine set TIME_LIMIT_SCALE, which multiplies all time limits (4 where eight programs share a core).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from support.fakes.faulty_proxy import FaultyProxy
from support.workers import fault_worker
from support.workers.launch import start_ranks

#: Seconds in which the other ranks end by themselves after the first one, and in which a first one ends.
GRACE, BOUND = fault_worker.DDP_TIMEOUT + 15.0 * fault_worker.SCALE, 80.0 * fault_worker.SCALE
SAME, DOWN, SAVED = "same history", "down, resumed", "saved, resumed"
NO_REQUEST, NO_SERVER = "no HTTP request in this stage", "not run without a server"
#: Faults whose victim never ends; the launcher kills it when another rank has failed.
ENDLESS = ("SIGSTOP", "hang")
_CLOSED = "Connection (closed|reset)|Broken pipe|[Ss]ocket|endpoint|[Tt]imed out"
#: The cause in the message, by fault; the others end no run.
CAUSES = {
    **dict.fromkeys(("SIGKILL", "lost connection"), _CLOSED),
    **dict.fromkeys(ENDLESS, "[Tt]imed out|reward_timeout"),
    "exception": "planted",
    "out of memory": "Unable to allocate|Tried to allocate",
    "full disk": "[Nn]o space left",
    "dropped request": "vllm_server_timeout",
    "SIGTERM": "SIGTERM",
}
#: Stages in the message, by that of the grid.
LABELS = {"update": "logprobs|train", "evaluate": "evaluation"}
#: Metrics that equal runs differ in; ``logprob_mismatch`` is checked in the first steps after a start.
_OF_A_START = re.compile(
    r"(eval_)?(time|memory)/.*|step_time|.*_runtime|.*_per_second|eval_model_preparation_time|train_loss"
    "|sampling/logprob_mismatch.*"
)


@dataclass(frozen=True)
class Cell:
    """A fault at a stage.

    expected: the allowed outcomes.
    """

    fault: str
    stage: str
    expected: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.fault}/{self.stage}"

    @property
    def is_run(self) -> bool:
        return self.expected[0] in (SAME, DOWN, SAVED)


@dataclass
class Result:
    """Outcome of a cell: SAME, DOWN or SAVED; why it was not run; or what is wrong.

    message: that of the library.
    """

    cell: Cell
    outcome: str
    seconds: float = 0.0
    message: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.outcome not in self.cell.expected

    def __str__(self) -> str:
        mark = "WRONG " if self.is_wrong else ""
        text = f"{mark}{self.cell.name:27} {self.outcome:14} {self.seconds:5.1f} s  {self.message[:600]}"
        return text.rstrip()


def grid(*, with_server: bool = True) -> list[Cell]:
    """Return the cells of all faults and stages."""
    expected = {
        **dict.fromkeys(
            ("SIGKILL", "SIGSTOP", "exception", "hang", "out of memory", "lost connection"), DOWN
        ),
        **{"SIGTERM": SAVED, **dict.fromkeys(("slow", "full disk", "clock jump"), SAME)},
        **dict.fromkeys(("HTTP 500", "dropped request", "repeated request"), NO_REQUEST),
    }
    cells = {
        (fault, stage): (of_fault,) for fault, of_fault in expected.items() for stage in fault_worker.PLACES
    }
    cells["full disk", "save"] = (DOWN,)
    cells["out of memory", "update"] = (SAME, DOWN)  # a micro-batch is split; elsewhere the run ends
    for stage in fault_worker.AT_SERVER:
        requests = {"HTTP 500": SAME, "repeated request": SAME, "dropped request": DOWN}
        for fault, of_fault in requests.items():
            cells[fault, stage] = (of_fault if with_server else NO_SERVER,)
        if with_server:  # to the server; without one, to the other rank
            cells["lost connection", stage] = (SAME,)
            cells["full disk", stage] = (SAME, DOWN)  # weights are files on their way to a server
    return [Cell(fault, stage, outcomes) for (fault, stage), outcomes in cells.items()]


class Grid:
    """Runs cells in directories below ``directory``.

    Args:
        server: address of a vLLM server for generation, sync and evaluation; None: sample in the trainer.
    """

    def __init__(self, directory: Path, server: str | None = None) -> None:
        self.directory = directory
        self.proxy = None if server is None else FaultyProxy(server)
        self.cells = grid(with_server=server is not None)
        self._whole: dict[bool, dict[str, Any]] = {}

    def run(self, cell: Cell, seed: int) -> Result:
        """Run a cell; resume it if it ended, and compare it with the undisturbed run."""
        if not cell.is_run:
            return Result(cell, cell.expected[0])
        with_server = self.proxy is not None and cell.stage in fault_worker.AT_SERVER
        whole, begun = self._undisturbed(with_server), time.monotonic()
        victim = 0 if with_server and cell.stage == "sync" else (seed + len(cell.fault)) % 2  # rank 0 sends
        # The evaluation after step 2 has sent the weights of step 3.
        step = 2 if cell.stage in ("evaluate", "sync") else 2 + (seed + len(cell.stage)) % 2
        where = {"FAULT": cell.fault, "STAGE": cell.stage, "VICTIM": victim, "STEP": step, "PLACE": seed}
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        if self.proxy is not None:
            self.proxy.directory, self.proxy.place = directory, seed
        codes, text, wrong = self._launch(directory, with_server, victim, cell.fault, **where)
        outcome, message = SAME, ""
        planted = (directory / "planted.json").exists()  # no request has met the fault
        if planted or f"rank {victim}: {cell.fault} in " not in text:
            wrong = wrong or "the fault did not act"
        elif any(codes) or cell.fault == "SIGTERM":
            outcome, message = DOWN if any(codes) else SAVED, find_message(text, cell, victim)
            if not message or not any(directory.glob("checkpoint-*")):
                wrong = wrong or "no message of rank, stage and cause, or no checkpoint"
            for of_rank in directory.glob("[01].pt"):
                of_rank.unlink()
            resumed_codes, resumed_text, resumed_wrong = self._launch(directory, with_server)
            text, wrong = text + resumed_text, wrong or resumed_wrong
            if any(resumed_codes):
                wrong = wrong or "resuming failed"
        wrong = wrong or difference(directory, whole)
        if wrong:
            directory.with_suffix(".txt").write_text(text)
            outcome = f"{wrong}; exit codes {codes}; {directory}.txt has the output;"
        return Result(cell, outcome, time.monotonic() - begun, message)

    def _undisturbed(self, with_server: bool) -> dict[str, Any]:
        if with_server not in self._whole:
            directory = Path(tempfile.mkdtemp(dir=self.directory))
            codes, text, wrong = self._launch(directory, with_server)
            assert not any(codes) and not wrong, text[-6000:]
            self._whole[with_server] = torch.load(directory / "0.pt", weights_only=False)
        return self._whole[with_server]

    def _launch(
        self, directory: Path, with_server: bool, victim: int = -1, fault: str = "", **where: Any
    ) -> tuple[list[int], str, str]:
        """Run two ranks as torchrun does: it holds their store, and kills an endless rank after a failure.

        Returns:
            exit codes, stderr, and the ranks that did not end by themselves; "" without.
        """
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {name: str(value) for name, value in where.items()}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        if with_server and self.proxy is not None:
            environment["SERVER"] = self.proxy.url
        script = fault_worker.__file__
        scripts = start_ranks(script, directory, environment=environment, master_port=store.port)
        endless = {victim} if fault in ENDLESS else set()
        end, failed = time.monotonic() + BOUND, False
        try:
            while left := {rank for rank, script in enumerate(scripts) if script.poll() is None}:
                if not failed and any(script.poll() for script in scripts):
                    failed, end = True, time.monotonic() + GRACE
                if time.monotonic() > end or (failed and left == endless):
                    break
                time.sleep(0.02)
        finally:
            for script in scripts:
                script.kill()
        wrong = f"HANG of ranks {sorted(left)}" if left and not (failed and left == endless) else ""
        del store
        text = "".join(script.text(1) for script in scripts)
        return [script.poll() or 0 for script in scripts], text, wrong


def find_message(text: str, cell: Cell, victim: int) -> str:
    """Return the line of the library that names the rank, the stage and the cause; "" without one."""
    lasts = cell.fault in ("SIGTERM", "full disk")  # to the end of the step, or to a later stage
    stage = r"\w+" if lasts else LABELS.get(cell.stage, cell.stage)
    for line in text.splitlines():
        named = re.search(rf"rank {victim}\b[^;]* ({stage})\b", line)
        if named and re.search(CAUSES[cell.fault], line) and f"{cell.fault} in " not in line:
            return line.strip()
    return ""


def difference(directory: Path, whole: dict[str, Any]) -> str:
    """Return what differs from the undisturbed run: weights of a rank, or a metric; "" without."""
    for rank in (0, 1):
        if not (directory / f"{rank}.pt").exists():
            return f"rank {rank} did not reach the last step"
        found = torch.load(directory / f"{rank}.pt", weights_only=False)
        weights = found["weights"]
        off = max((weights[name] - weight).abs().max().item() for name, weight in whole["weights"].items())
        if off > 2e-5 or found["step"] != whole["step"]:
            return f"CHANGED: weights of rank {rank} differ by {off:.1e} at step {found['step']}"
        if rank == 0 and (changed := first_difference(found["log"], whole["log"])):
            return f"CHANGED: {changed}"
    return ""


def first_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        return f"logged steps {[line['step'] for line in ours]}"
    for one, other in zip(ours, theirs, strict=True):
        for name in one.keys() | other.keys():
            values = one.get(name, math.nan), other.get(name, math.nan)
            if not (_OF_A_START.fullmatch(name) or math.isclose(*values, rel_tol=1e-3, abs_tol=1e-5)):
                return f"{name} of step {one['step']} is {values[0]}, not {values[1]}"
    return ""


@contextlib.contextmanager
def vllm_server(directory: Path) -> Iterator[str | None]:
    """Start vLLM's CPU server; None where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        yield None
        return
    from support.workers.vllm_process import ServerProcess

    process = ServerProcess(directory).start()
    try:
        yield process.wait().url
    finally:
        process.kill()


def main(seeds: Sequence[int], only: Sequence[str] = (), *, without_server: bool = False) -> bool:
    """Run the cells with each seed and print a line for each; return True if all outcomes are expected."""
    results = []
    folder = Path(tempfile.mkdtemp(prefix="faults-"))  # stays: outputs of wrong cells are in it
    with contextlib.nullcontext(None) if without_server else vllm_server(folder) as server:
        runner = Grid(folder, server)
        for seed in seeds:
            print(f"seed {seed}", flush=True)
            for cell in runner.cells:
                if not only or any(part in cell.name for part in only):
                    results.append(runner.run(cell, seed))
                    print(results[-1], flush=True)
    counts = Counter("wrong" if result.is_wrong else result.outcome for result in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return "wrong" not in counts
