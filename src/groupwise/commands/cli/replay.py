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
    from groupwise.commands.replay.replay import Replay


def run(arguments: Sequence[str]) -> int:
    """Replay a step, or write a bundle; exit code 1 if the step diverges from the record or has none."""
    options = _parser().parse_args(list(arguments))
    from groupwise.commands.replay import replay
    from groupwise.commands.replay.bundle import open_recording, write_bundle

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
        return int(not (result.equals_record and result.is_compared))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="groupwise replay", description=__doc__)
    parser.add_argument("run", help="output_dir of a run with save_rollouts=True, or a bundle")
    parser.add_argument("--step", type=int, help="optimizer step, counted from 1; default: the last one")
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
