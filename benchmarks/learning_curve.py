"""Record reward over time of the quickstart's task with groupwise and TRL: the same data, seed and settings.

Each run is a process of its own; the libraries take turns. On a processor that emulates bf16 two steps take
five minutes: measure float32 there. Completions end where the model ends them. The
clock starts with training, after the model is loaded. Run it on an otherwise idle machine:

    OMP_NUM_THREADS=2 python benchmarks/learning_curve.py --seeds 0 --precision float32
    python scripts/draw_images.py   # draws docs/images/learning_curve.svg from the result
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from common import add_precision, measure_in_process, print_result, write_results

LIBRARIES = ("groupwise", "trl")


def settings(max_steps: int, seed: int, precision: str) -> dict[str, Any]:
    """Return the settings of both libraries: those of ``examples/quickstart.py``."""
    return {
        "max_steps": max_steps,
        "seed": seed,
        "learning_rate": 1e-5,
        "num_generations": 8,
        "per_device_train_batch_size": 64,
        "max_completion_length": 8,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": precision == "bf16",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def run_worker(library: str, max_steps: int, seed: int, precision: str) -> None:
    """Train in this process and print one line of JSON: seconds, processor seconds and reward by step."""
    from quickstart import correct, reviews
    from smollm2 import local_model
    from transformers import AutoTokenizer, TrainerCallback

    if library == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from groupwise import GRPOConfig, GRPOTrainer

    class Curve(TrainerCallback):
        """Times since the start of training, and mean rewards."""

        def __init__(self) -> None:
            self.start = (0.0, 0.0)
            self.points: dict[str, list[float]] = {"seconds": [], "processor_seconds": [], "reward": []}

        def on_train_begin(self, args, state, control, **kwargs) -> None:
            self.start = time.perf_counter(), time.process_time()

        def on_log(self, args, state, control, logs, **kwargs) -> None:
            if "reward" in logs and len(self.points["reward"]) < state.global_step:
                self.points["seconds"].append(round(time.perf_counter() - self.start[0], 2))
                self.points["processor_seconds"].append(round(time.process_time() - self.start[1], 2))
                self.points["reward"].append(logs["reward"])

    model, curve = str(local_model()), Curve()
    with tempfile.TemporaryDirectory() as output_dir:
        GRPOTrainer(
            model=model,
            reward_funcs=correct,
            args=GRPOConfig(output_dir, **settings(max_steps, seed, precision)),
            train_dataset=reviews(8 * max_steps, seed, words=slice(12)),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[curve],
        ).train()
    print_result(curve.points)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", default=None, help="name in results/; none: not written")
    add_precision(parser)
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options.max_steps, options.seeds[0], options.precision)
        return

    curves: dict[str, list[dict[str, list[float]]]] = {library: [] for library in LIBRARIES}
    for seed in options.seeds:
        for library in LIBRARIES:
            arguments = ("--max_steps", str(options.max_steps), "--seeds", str(seed))
            arguments += ("--precision", options.precision)
            curves[library].append(measure_in_process(__file__, library, *arguments))
            last = {name: values[-1] for name, values in curves[library][-1].items()}
            print(f"seed {seed} {library}: {last}", flush=True)
        output = options.output or f"learning_curve_{options.precision}"
        if output != "none":  # after each seed, so that a later failure loses nothing
            results = {
                "settings": settings(options.max_steps, seed, options.precision),
                "seeds": options.seeds,
                "curves": curves,
            }
            write_results(output, results)


if __name__ == "__main__":
    main()
