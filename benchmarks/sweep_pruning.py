"""Count the optimizer steps that pruning saves in a sweep of four learning rates, of which one is too high.

The task is that of examples/quickstart.py: reviews are positive or negative. One sweep prunes, the other,
with the same seeds, does not; both write the shares of held-out completions that pass.

    python benchmarks/sweep_pruning.py --steps 24
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import add_precision, write_results

RUNS = {"1e-4": 1e-4, "2e-4": 2e-4, "4e-4": 4e-4, "1e-2": 1e-2}


def train(options: argparse.Namespace, *, prune: bool) -> dict:
    """Train the sweep; return steps, status and held-out shares of every run."""
    from peft import LoraConfig
    from quickstart import correct, reviews
    from smollm2 import local_model

    from groupwise import GRPOConfig, Sweep

    settings = {
        "per_device_train_batch_size": 32,
        "max_completion_length": 8,
        "max_steps": options.steps,
        "eval_strategy": "steps",
        "eval_steps": options.eval_steps,
        "per_device_eval_batch_size": 200,
        "num_generations_eval": 2,
        "gradient_checkpointing": False,
        "bf16": options.precision == "bf16",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(
            str(local_model()),
            correct,
            {
                name: GRPOConfig(str(Path(folder, name)), learning_rate=rate, **settings)
                for name, rate in RUNS.items()
            },
            reviews(4 * options.steps, 0, slice(12)),
            reviews(100, -1, slice(12, None)),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            prune=prune,
        )
        runs = sweep.run()
    return {
        name: {
            "steps": run.state.global_step,
            "status": run.status,
            "held_out": {step: score_P.mean().item() for step, score_P in run.scores.items()},
        }
        for name, run in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--eval_steps", type=int, default=4)
    add_precision(parser)
    options = parser.parse_args()
    found = {name: train(options, prune=prune) for name, prune in (("pruned", True), ("whole", False))}
    steps = {name: sum(run["steps"] for run in runs.values()) for name, runs in found.items()}
    results = {"settings": vars(options), "learning_rates": RUNS, "optimizer_steps": steps, **found}
    write_results(f"sweep_pruning_{options.precision}", results)
    print(steps, {name: run["status"] for name, run in found["pruned"].items()})


if __name__ == "__main__":
    main()
