"""Compare gradient checkpointing that keeps layers in free memory with all layers recomputed, and none.

Steps of ``step_time.py`` (SmolLM2-135M-Instruct, float32 weights). Every candidate runs in a fresh process,
alternating, whose first step does not count. Time is that of the training phase, memory the process's peak.

    python benchmarks/recomputation.py --case long --rounds 3
"""

from __future__ import annotations

import argparse
import resource
import tempfile

from common import add_precision, measure_in_process, print_result, ratio_of_sums, write_results
from step_time import binary_reward, make_dataset, trainer_settings

#: Settings of each candidate, and the room for activations in GB in place of the machine's; None: that one.
CANDIDATES: dict[str, tuple[dict, float | None]] = {
    "every layer recomputed": ({"activation_memory_fraction": 0.0}, None),
    "0.25 GB kept": ({}, 0.25),
    "0.5 GB kept": ({}, 0.5),
    "1 GB kept": ({}, 1.0),
    "the default": ({}, None),
    "no checkpointing": ({"gradient_checkpointing": False}, None),
}


def run_worker(name: str, options: argparse.Namespace) -> None:
    """Train in this process; print the seconds of the training phases, the peak, and the layers kept."""
    from smollm2 import local_model
    from transformers import AutoTokenizer, TrainerCallback

    from groupwise import GRPOConfig, GRPOTrainer

    settings, gigabytes = CANDIDATES[name]
    seconds: list[float] = []

    class Phases(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            if gigabytes is not None:  # added last: after the callback that measures what is free
                trainer.recomputation.room = gigabytes * 1e9

        def on_log(self, args, state, control, logs, **kwargs) -> None:
            if "time/train" in logs:
                seconds.append(logs["time/train"])

    model = str(local_model())
    with tempfile.TemporaryDirectory() as output_dir:
        given = trainer_settings(options.case, options.timed_steps, precision=options.precision) | settings
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=binary_reward,
            args=GRPOConfig(output_dir, **given),
            train_dataset=make_dataset(options.case, 0),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        )
        trainer.add_callback(Phases())
        trainer.train()
    chosen = trainer.recomputation
    kept = None if chosen is None else chosen.num_kept(chosen._tokens)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print_result({"train_seconds": seconds[1:], "peak_mib": peak_mib, "layers_kept": kept})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("short", "long"), default="short")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timed_steps", type=int, default=2)
    add_precision(parser)
    parser.add_argument("--worker", choices=CANDIDATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options)
        return
    arguments = [f"--{name}={getattr(options, name)}" for name in ("case", "timed_steps", "precision")]
    runs: dict[str, list[dict]] = {name: [] for name in CANDIDATES}
    for index in range(options.rounds):
        first = index % len(CANDIDATES)
        for name in [*CANDIDATES][first:] + [*CANDIDATES][:first]:
            runs[name].append(measure_in_process(__file__, name, *arguments))
            print(f"round {index + 1} {name}: {runs[name][-1]}", flush=True)
    base, *others = CANDIDATES
    ratios = {
        name: {
            "train_time": ratio_of_sums(
                *([run["train_seconds"] for run in runs[each]] for each in (name, base))
            ),
            "peak_memory": ratio_of_sums(
                *([[run["peak_mib"]] for run in runs[each]] for each in (name, base))
            ),
            "layers_kept": runs[name][-1]["layers_kept"],
        }
        for name in others
    }
    values = {name: getattr(options, name) for name in ("case", "precision", "timed_steps", "rounds")}
    results = {"settings": values, "runs": runs, "over_every_layer_recomputed": ratios}
    write_results(f"recomputation_{options.case}_{options.precision}", results)
    print(ratios)


if __name__ == "__main__":
    main()
