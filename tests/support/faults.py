"""A run that is killed at random moments and goes on with another number of processes: one history.

    python -m support.faults [--kills 50] [--seed 0] [--engine zero2]
    python -m support.faults --grid [--seeds 0 1 2]: faults × stages instead, see fault_grid.py

SIGKILL ends one rank or all of them: at the start, while they sample, reward and train, and while they write
or delete a checkpoint. The others must end by themselves. Printed are every kill, and the comparison with a
run of one process that was not killed: prompts of every generation, steps of the log, weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from support.workers import elastic_worker
from support.workers.launch import run_ranks, start_ranks

#: Numbers of processes; FSDP shards over two or more.
NUMBERS, OF_FSDP = (1, 2, 4), (2, 4)
#: Seconds for the ranks beside a killed one to end, and for an attempt to reach the moment of its kill.
GRACE, PATIENCE = 60.0, 200.0
CASE = "faults"


@dataclass
class Outcome:
    """What a run with kills has led to.

    lines: a line per kill, then the summary.
    hangs: ranks that did not end beside a killed one.
    lost, doubled: prompts of a generation that the run without kills has or lacks.
    """

    lines: list[str] = field(default_factory=list)
    hangs: int = 0
    lost: int = 0
    doubled: int = 0
    steps: list[int] = field(default_factory=list)
    difference: float = 0.0


def progress(directory: Path) -> str:
    """Return what the first process was doing last."""
    with contextlib.suppress(FileNotFoundError):
        return ((directory / CASE / "progress.txt").read_text().splitlines() or [""])[-1]
    return ""


def kill_once(
    directory: Path, engine: str, processes: int, attempt: int, draw: random.Random, outcome: Outcome
) -> str:
    """Start the run and kill it at a random moment; returns a description of the moment."""
    began, target = progress(directory), draw.choice((0, 1, 1, 2))  # saves that are seen before the kill
    environment = {"ATTEMPT": str(attempt)}
    command = elastic_worker.__file__, directory, 10_000, engine, CASE
    scripts = start_ranks(*command, world_size=processes, environment=environment)
    started, seen, last = time.monotonic(), 0, began
    while seen < target and time.monotonic() < started + PATIENCE:
        now = progress(directory)
        seen, last = seen + (now != last and now.startswith("save")), now
        if any(script.poll() for script in scripts):
            raise RuntimeError(f"attempt {attempt} failed:\n" + "".join(s.text(1)[-3000:] for s in scripts))
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.6) if target else draw.uniform(0, 6))
    alone = draw.random() < 0.5
    victims = [draw.choice(scripts)] if alone else scripts
    for script in victims:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    moment = progress(directory)
    end = time.monotonic() + GRACE
    while any(script.poll() is None for script in scripts) and time.monotonic() < end:
        time.sleep(0.02)
    outcome.hangs += sum(script.poll() is None for script in scripts)
    for script in scripts:
        script.kill()
    return f"{'one of ' if alone else ''}{processes} at {moment if moment != began else 'the start'!r}"


def rewarded(directory: Path) -> dict[int, Counter[str]]:
    """Return the prompts of each generation by its step: those of the last attempt that made it."""
    found: dict[int, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for line in (directory / CASE / "rows.txt").read_text().splitlines():
        attempt, step, prompt = line.split(" ", 2)
        found[int(step)][int(attempt)][prompt] += 1
    return {step: attempts[max(attempts)] for step, attempts in found.items()}


def run(directory: Path, kills: int, seed: int, engine: str = "ddp") -> Outcome:
    """Kill a run ``kills`` times, let it go on for two steps more, and compare it.

    Args:
        engine: sharding of the killed run, as in ``sharding_worker``; the other one has none.
    """
    numbers = OF_FSDP if engine == "fsdp2" else NUMBERS
    draw, outcome = random.Random(seed), Outcome()
    killed, whole = directory / "killed", directory / "whole"
    killed.mkdir(parents=True)
    whole.mkdir()
    processes = draw.choice(numbers)
    for attempt in range(kills):
        moment = kill_once(killed, engine, processes, attempt, draw, outcome)
        after = draw.choice([number for number in numbers if number != processes])
        outcome.lines.append(f"kill {attempt + 1}: {moment}, goes on with {after}")
        print(outcome.lines[-1], flush=True)
        processes = after
    last = max((int(path.name.split("-")[1]) for path in (killed / CASE).glob("checkpoint-*")), default=0) + 2
    for place, number, sharding in ((killed, processes, engine), (whole, 1, "ddp")):
        environment = {"ATTEMPT": str(kills)}
        command = elastic_worker.__file__, place, last, sharding, CASE
        done = run_ranks(*command, world_size=number, environment=environment, timeout=600)
        assert done.returncode == 0, done.stderr[-6000:]
    ours, theirs = rewarded(killed), rewarded(whole)
    for step in ours.keys() | theirs.keys():
        outcome.lost += (theirs.get(step, Counter()) - ours.get(step, Counter())).total()
        outcome.doubled += (ours.get(step, Counter()) - theirs.get(step, Counter())).total()
    log = json.loads((killed / CASE / f"log-{last}.json").read_text())
    outcome.steps = [line["step"] for line in log if "loss" in line]
    weights, expected = (torch.load(place / CASE / f"weights-{last}.pt") for place in (killed, whole))
    outcome.difference = max((weights[n] - expected[n]).abs().max().item() for n in expected)
    completions = sum(map(Counter.total, theirs.values()))
    outcome.lines.append(
        f"{engine}, seed {seed}: {kills} kills, {last} steps, {completions} completions; "
        f"{outcome.lost} lost, {outcome.doubled} doubled, {outcome.hangs} ranks hung, weights differ by "
        f"{outcome.difference:.1e} from those of a run of one process without kills"
    )
    print(outcome.lines[-1], flush=True)
    return outcome


def is_one_history(outcome: Outcome) -> bool:
    """Return True if nothing shows that the run was killed."""
    in_order = outcome.steps == list(range(1, len(outcome.steps) + 1))
    return in_order and outcome.lost == outcome.doubled == outcome.hangs == 0 and outcome.difference <= 2e-5


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="ddp", help="zero1, zero2, zero3 or fsdp2, of the killed run")
    parser.add_argument("--grid", action="store_true", help="faults × stages instead of kills")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the grid")
    parser.add_argument(
        "--only", nargs="+", default=(), help='cells of the grid, such as "hang/reward" or "SIGKILL"'
    )
    parser.add_argument("--without_server", action="store_true", help="the grid without vLLM")
    options = parser.parse_args()
    if options.grid:
        from support import fault_grid

        sys.exit(not fault_grid.main(options.seeds, options.only, without_server=options.without_server))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not is_one_history(run(Path(folder, "runs"), options.kills, options.seed, options.engine)))
