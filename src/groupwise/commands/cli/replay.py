"""``groupwise replay``: repeat a recorded optimizer step and compare it with the record."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.commands.replay.objective_table import ObjectiveRow
    from groupwise.commands.replay.replay import Replay


def run(arguments: Sequence[str]) -> int:
    """Replay a step, or write a bundle; exit code 1 if the step diverges from the record or has none."""
    options = _parser().parse_args(list(arguments))
    from groupwise.commands.replay import replay
    from groupwise.commands.replay.bundle import open_recording, write_bundle
    from groupwise.commands.replay.objective_table import objective_table
    from groupwise.core.objectives import OBJECTIVES

    if options.objective not in (None, "all"):
        OBJECTIVES[options.objective]  # an unknown name fails here, before the model is loaded
    with open_recording(options.run) as recording, ExitStack() as stack:
        if options.bundle is not None:
            if options.step is None:
                raise ConfigError("--bundle needs --step, the optimizer step to report")
            size = write_bundle(recording, options.step, Path(options.bundle))
            print(
                f"{options.bundle}: step {options.step} in {size / 1000:.0f} kB, without weights and secrets"
            )
            return 0
        for library in map(logging.getLogger, ("groupwise", "transformers")):
            stack.callback(library.setLevel, library.level)
            library.setLevel(logging.ERROR)  # warnings are those of the recorded run
        if options.from_record:
            step = recording.last_step if options.step is None else options.step
            recording.check_step(step)
            records = [recording.step(step, rank) for rank in range(recording.header["world_size"])]
            names = None if options.objective in (None, "all") else [options.objective]
            config = replay.replay_config(recording.header, ".", trust_remote_code=False)
            print(table(objective_table(records, config, names)))
            return 0
        result = replay.replay(
            recording,
            options.step,
            model=options.model,
            tolerance=options.tolerance,
            trust_remote_code=options.trust_remote_code,
        )
        if not result.trainer.is_world_process_zero():
            return 0
        kind = recording.header["trainer"][0]
        if kind != "groupwise.trainer.GRPOTrainer":
            print(f"trained by {kind}, replayed without its overrides: replay(…, trainer_class=) has them")
        print(report(result))
        if options.objective is not None:
            names = None if options.objective == "all" else [options.objective]
            print(table(objective_table(result.records, result.trainer.args, names)))
        return int(not (result.equals_record and result.is_compared))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="groupwise replay", description=__doc__)
    parser.add_argument("run", help="output_dir of a run with save_rollouts=True, or a bundle")
    parser.add_argument("--step", type=int, help="optimizer step, counted from 1; default: the last one")
    parser.add_argument(
        "--objective",
        nargs="?",
        const="all",
        metavar="NAME",
        help="also show value, gradient and cosine of this objective, or of all registered ones",
    )
    parser.add_argument(
        "--from_record",
        action="store_true",
        help="show the objectives on the recorded log-probs, without a model and without a replay",
    )
    parser.add_argument("--bundle", metavar="FILE", help="write the step as a bug report instead")
    parser.add_argument("--model", help="initial model; for a bundle, the weights before its step")
    parser.add_argument("--tolerance", type=float, help="largest difference from the record")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code shipped with the model")
    return parser


def report(result: Replay) -> str:
    """Return one line per replayed step, and one about the weights."""
    lines = [f"from {result.start}"]
    lines += [str(step) for step in result.steps]
    if not result.is_compared:
        lines.append(
            f"step {result.last_step} has no record to compare with: the run ended before its update, or the "
            "file is missing"
        )
    if result.weights is not None:
        lines.append(f"weights after step {result.last_step}, beside the checkpoint: {result.weights}")
    return "\n".join(lines)


def table(rows: Sequence[ObjectiveRow]) -> str:
    """Return a table of objectives; the first row is that of the run."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'objective':<{max(width, 9)}}  {'value':>12}  {'grad norm':>12}  {'cosine':>9}"]
    for number, row in enumerate(rows):
        cosine = f"{row.cosine:>9.6f}" if row.cosine == row.cosine else f"{'-':>9}"  # NaN: a gradient is zero
        mark = "  (the run's)" if number == 0 else ""
        lines.append(
            f"{row.name:<{max(width, 9)}}  {row.value:>12.5g}  {row.gradient_norm:>12.5g}  {cosine}{mark}"
        )
    return "\n".join(lines)
