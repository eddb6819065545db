"""Measure the time of an optimizer step outside of the model: the work of `step_time.py` by part.

Model is every forward (the output layer included) and every backward, update is the optimizer with gradient
clipping, drawing turns logits into tokens. Overhead is everything else between the ends of two steps: data,
templates, padding, cutting, rewards, advantages, metrics, logging, and Python in the decoding loop.

    OMP_NUM_THREADS=2 python benchmarks/overhead.py --case short --timed_steps 5
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common import add_precision, write_results


class Clock:
    """Seconds by part. Time inside a nested part counts for the outer part only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.depth, self.start = 0, 0.0

    def enter(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.start = time.perf_counter()

    def leave(self, part: str) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.seconds[part] += time.perf_counter() - self.start

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(part)

        return wrapper


def take_apart(trainer: Any, clock: Clock) -> None:
    """Wrap model, optimizer and token sampling of the trainer with the clock."""
    from transformers import LogitsProcessorList

    from groupwise.generation import decoding

    trainer.model.register_forward_pre_hook(lambda *_: clock.enter())
    trainer.model.register_forward_hook(lambda *_: clock.leave("model"), always_call=True)
    accelerator = trainer.accelerator
    accelerator.backward = clock.timed("model", accelerator.backward)
    accelerator.clip_grad_norm_ = clock.timed("update", accelerator.clip_grad_norm_)
    decoding.sample_tokens = clock.timed("drawing", decoding.sample_tokens)
    LogitsProcessorList.__call__ = clock.timed("drawing", LogitsProcessorList.__call__)
    create = trainer.create_optimizer

    def create_timed(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        optimizer.step = clock.timed("update", optimizer.step)
        return optimizer

    trainer.create_optimizer = create_timed


def shares(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return median and range of each part's share of a step."""
    by_part = {part: [step.get(part, 0.0) / step["step"] for step in steps] for part in steps[0]}
    by_part["overhead"] = [1 - sum(values) for values in zip(*_parts(by_part), strict=True)]
    return {
        part: {"median": statistics.median(values), "low": min(values), "high": max(values)}
        for part, values in by_part.items()
        if part != "step"
    }


def _parts(by_part: dict[str, list[float]]) -> list[list[float]]:
    return [values for part, values in by_part.items() if part != "step"]


def main() -> None:
    from smollm2 import local_model
    from step_time import binary_reward, make_dataset, trainer_settings
    from transformers import AutoTokenizer, TrainerCallback

    from groupwise import GRPOConfig, GRPOTrainer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("short", "long"), default="short")
    parser.add_argument("--timed_steps", type=int, default=5)
    parser.add_argument("--output", default=None, help="name of the results file, or none")
    add_precision(parser)
    options = parser.parse_args()
    clock, steps = Clock(), []

    class StepClock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            steps.append({"end": now, **clock.seconds})
            clock.seconds.clear()

    model = str(local_model())
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=binary_reward,
            args=GRPOConfig(
                output_dir,
                **trainer_settings(options.case, options.timed_steps, precision=options.precision),
            ),
            train_dataset=make_dataset(options.case, 0),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[StepClock()],
        )
        take_apart(trainer, clock)
        trainer.train()
    timed = [
        {"step": step.pop("end") - before, **step}
        for before, step in zip([step["end"] for step in steps], steps[1:], strict=False)
    ]
    summary = shares(timed)
    for part, share in summary.items():
        print(f"{part:9} {share['median']:.1%} of a step ({share['low']:.1%} to {share['high']:.1%})")
    output = options.output or f"overhead_{options.case}_{options.precision}"
    if output != "none":
        write_results(output, {"case": options.case, "steps": timed, "shares": summary})


if __name__ == "__main__":
    main()
