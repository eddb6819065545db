"""The first 30 minutes on a GPU: three calls of at most 10 minutes, each a JSON file of verdicts.

    benchmarks/gpu.sh check     # kernels against float64, two steps CPU against CUDA, waits per token
    benchmarks/gpu.sh phases    # head, training phase, attention, decoding, memory, LoRA on a 7B shape
    benchmarks/gpu.sh steps     # whole steps beside TRL, alternating
    python benchmarks/gpu.py check --tiny    # tiny shapes on a CPU, as in the tests

Models have random weights of published shapes, so that nothing is downloaded. Parts run in one process, which
this one starts and never joins on the GPU: a part that ends it, or takes half of the time of the call, has
failed, and a new process runs the others. The file is written after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import RESULTS, describe_machine

CALLS = {"check": "gpu_check", "phases": "gpu_phases", "steps": "gpu_steps"}


@dataclass(frozen=True)
class Place:
    """Device of the parts, and whether shapes are tiny."""

    device: str = "cuda"
    tiny: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a part, which passes if no figure exceeds its limit.

    figures: numbers and texts by name.
    limits: largest allowed value of some of the figures.
    skipped: reason why a part of the comparison is missing.
    """

    figures: dict[str, Any]
    limits: dict[str, float] = field(default_factory=dict)
    skipped: str = ""


class Skipped(Exception):
    """A part that cannot run here; the message is the reason."""


#: A part, by its name in ``PARTS`` of the module of its call.
Part = Callable[[Place], Outcome]


def judge(name: str, part: Part, place: Place) -> tuple[dict[str, Any], bool]:
    """Run a part. Returns its verdict, and True if the process can run others."""
    verdict: dict[str, Any] = {"name": name, "verdict": "passed", "reason": "", "figures": {}, "limits": {}}
    start, usable = time.monotonic(), True
    try:
        with contextlib.redirect_stdout(sys.stderr):  # of trainers
            outcome = part(place)
        verdict |= {"figures": outcome.figures, "limits": outcome.limits}
        # NaN is no number that is at most the limit.
        over = [name for name, limit in outcome.limits.items() if not outcome.figures[name] <= limit]
        if outcome.skipped:
            verdict |= {"verdict": "skipped", "reason": outcome.skipped}
        if over:
            beyond = (
                f"{name} is {outcome.figures[name]:.4g}, allowed {outcome.limits[name]:.4g}" for name in over
            )
            verdict |= {"verdict": "failed", "reason": "; ".join(beyond)}
    except Skipped as skipped:
        verdict |= {"verdict": "skipped", "reason": str(skipped)}
    except Exception as error:
        usable = "CUDA error" not in str(error)  # after one, every call of this process fails
        where = "".join(traceback.format_exception(error)[-4:])
        verdict |= {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:2000], "where": where}
    verdict["seconds"] = round(time.monotonic() - start, 2)
    return verdict, usable


def free_memory(place: Place) -> None:
    """Free what earlier trainers used: parts of a trainer refer to each other."""
    import torch

    gc.collect()
    if place.device != "cpu":
        torch.cuda.empty_cache()


def work(connection: Connection, module: str, place: Place, done: list[str]) -> None:
    """Run the parts of ``module`` that are not ``done``, and send what begins and what ends."""
    parts: dict[str, Part] = importlib.import_module(module).PARTS
    import torch

    if place.device != "cpu" and not torch.cuda.is_available():
        version = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        connection.send(("exit", f"no GPU: {version} sees none; --tiny runs tiny shapes on a CPU"))
        return
    connection.send(("start", {**describe_machine(), "device": place.device}, list(parts)))
    for name in [name for name in parts if name not in done]:
        connection.send(("begin", name))
        verdict, usable = judge(name, parts[name], place)
        connection.send(("end", verdict))
        if not usable:
            return
        free_memory(place)


class Call:
    """One call: the verdicts so far, and the time that is left.

    Args:
        module: has the ``PARTS``.
        minutes: time of the call.
        keep: called with the record after every part.
    """

    def __init__(
        self, module: str, place: Place, minutes: float, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        self.module, self.place, self.keep = module, place, keep
        self.seconds, self.end = 60 * minutes, time.monotonic() + 60 * minutes
        self.record: dict[str, Any] = {"machine": {}, "verdicts": []}
        self.names: list[str] = []

    def run(self) -> list[dict[str, Any]]:
        """Run all parts, in as many processes as they need, and return the verdicts."""
        self._run_process()
        while missing := self._missing():
            if time.monotonic() >= self.end:
                for name in missing:
                    self._add(name, "skipped", f"the {self.seconds / 60:g} minutes of the call are over")
            else:
                self._run_process()
        return self.record["verdicts"]

    def _missing(self) -> list[str]:
        done = {verdict["name"] for verdict in self.record["verdicts"]}
        return [name for name in self.names if name not in done]

    def _run_process(self) -> None:
        # A fork of this process, which has not touched the GPU.
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        done = [verdict["name"] for verdict in self.record["verdicts"]]
        process = context.Process(target=work, args=(sender, self.module, self.place, done))
        process.start()
        sender.close()
        try:
            self._read(receiver, process)
        finally:
            process.kill()
            process.join()

    def _read(self, receiver: Connection, process: Any) -> None:
        """Read what the process sends until it ends, or a part takes too long."""
        running, limit = (self._missing() or ["start"])[0], self.end
        while True:
            if not receiver.poll(max(limit - time.monotonic(), 0.0)):
                taken = self.seconds / 2 if limit < self.end else self.seconds
                return self._add(running, "failed", f"stopped after {taken:.0f} s")
            try:
                kind, *content = receiver.recv()
            except EOFError:  # the process has ended
                process.join()
                if running:
                    self._add(running, "failed", f"the process ended with status {process.exitcode}")
                return
            if kind == "exit":
                raise SystemExit(content[0])
            if kind == "start":
                running = ""
                self.record["machine"], self.names = content
            elif kind == "begin":
                running, limit = content[0], min(self.end, time.monotonic() + self.seconds / 2)
                print(f"{running} …", flush=True)
            else:
                running, limit = "", self.end
                self._keep(content[0])

    def _add(self, name: str, verdict: str, reason: str) -> None:
        self._keep(
            {"name": name, "verdict": verdict, "reason": reason, "figures": {}, "limits": {}, "seconds": 0.0}
        )

    def _keep(self, verdict: dict[str, Any]) -> None:
        self.record["verdicts"].append(verdict)
        figures = ", ".join(f"{name} {_short(value)}" for name, value in verdict["figures"].items())
        print(
            f"  {verdict['verdict']} in {verdict['seconds']:.1f} s: {verdict['reason'] or figures}",
            flush=True,
        )
        self.keep(self.record)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--minutes", type=float, default=9.5, help="what has not begun then is left out")
    parser.add_argument("--output", help="file of the verdicts; default: benchmarks/results/gpu_CALL.json")
    options = parser.parse_args()
    output = Path(options.output or RESULTS / f"gpu_{options.call}.json")
    output.parent.mkdir(parents=True, exist_ok=True)

    def keep(record: dict[str, Any]) -> None:
        output.write_text(json.dumps(record, indent=2) + "\n")

    place = Place("cpu", tiny=True) if options.tiny else Place()
    verdicts = Call(CALLS[options.call], place, options.minutes, keep).run()
    counts = [sum(v["verdict"] == kind for v in verdicts) for kind in ("passed", "failed", "skipped")]
    print("{} passed, {} failed, {} skipped: {}".format(*counts, output))
    return int(counts[1] > 0)


if __name__ == "__main__":
    import gpu  # under the name by which the parts know it

    raise SystemExit(gpu.main())
