"""Compare a sweep of four LoRA runs with the four runs alone, one after the other, alternating.

SmolLM2-135M-Instruct with adapters of rank 16 on all linear layers; the runs differ in learning rate, β and
temperature. Completions are forced to their full length, so that all process the same number of tokens. Each
round starts a fresh process for the sweep and one for each run alone, and the next round starts with the
other. Seconds are those of training, beside those of the processor, which other processes on the machine
disturb less; added memory is the peak of the process less what it had with all
imports, before the model was loaded.

    python benchmarks/sweep.py --case generation --rounds 2   # 1 prompt, 2 completions of 64 tokens
    python benchmarks/sweep.py --case balanced                # 1 prompt, 8 completions of 32 tokens
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import psutil
from common import add_precision, measure_in_process, print_result, ratio_of_sums, write_results
from step_time import SOURCES, binary_reward, make_dataset

_KEYS = ("seconds", "cpu_seconds", "added_mib")
CASES = {
    "generation": {"prompts": 1, "completions": 2, "new_tokens": 64},
    "balanced": {"prompts": 1, "completions": 8, "new_tokens": 32},
}
RUNS = {
    "base": {"learning_rate": 1e-5},
    "fast": {"learning_rate": 1e-4},
    "near": {"learning_rate": 1e-5, "beta": 0.05},
    "hot": {"learning_rate": 1e-5, "temperature": 1.2},
}


def run_worker(candidate: str, options: argparse.Namespace) -> None:
    """Train the sweep or one run in this process; print seconds, added peak memory and rewards as JSON."""
    from peft import LoraConfig
    from smollm2 import local_model
    from transformers import AutoTokenizer

    from groupwise import GRPOConfig, GRPOTrainer, Sweep
    from groupwise.generation import decoding  # noqa: F401 - imported before the memory is measured

    case = CASES[options.case]
    settings = {
        "per_device_train_batch_size": case["prompts"] * case["completions"],
        "num_generations": case["completions"],
        "max_completion_length": case["new_tokens"],
        "generation_kwargs": {"min_new_tokens": case["new_tokens"]},
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": options.precision == "bf16",
        "use_cpu": True,
        "max_steps": options.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    model, data = str(local_model()), make_dataset("short", 0)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    before_mib = psutil.Process().memory_info().rss / 2**20
    with tempfile.TemporaryDirectory() as folder:
        args = {
            name: GRPOConfig(str(Path(folder, name)), **settings, **changes)
            for name, changes in RUNS.items()
            if candidate in (name, "sweep")
        }
        if candidate == "sweep":
            sweep = Sweep(model, binary_reward, args, data, None, tokenizer, peft_config=adapter)
            start, cpu = time.perf_counter(), time.process_time()
            states = {name: run.state for name, run in sweep.run().items()}
        else:
            trainer = GRPOTrainer(
                model, binary_reward, args[candidate], data, processing_class=tokenizer, peft_config=adapter
            )
            start, cpu = time.perf_counter(), time.process_time()
            trainer.train()
            states = {candidate: trainer.state}
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    logs = {name: [log for log in state.log_history if "reward" in log] for name, state in states.items()}
    print_result(
        {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "added_mib": peak_mib - before_mib,
            "generate_share": sum(log["time/generate"] for log in logs[next(iter(logs))]) / seconds,
            "rewards": {name: [log["reward"] for log in found] for name, found in logs.items()},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=tuple(CASES), default="generation")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    add_precision(parser)
    parser.add_argument("--worker", choices=("sweep", *RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options)
        return

    values = {name: getattr(options, name) for name in ("case", "steps", "precision")}
    arguments = [f"--{name}={value}" for name, value in values.items()]
    measured: dict[str, list[dict]] = {name: [] for name in ("sweep", *RUNS)}
    for round_index in range(options.rounds):
        order = ["sweep", *RUNS] if round_index % 2 == 0 else [*RUNS, "sweep"]
        for name in order:
            environment = {"PYTHONPATH": str(SOURCES)}
            measured[name].append(measure_in_process(__file__, name, *arguments, env=environment))
            print(f"round {round_index + 1} {name}: {measured[name][-1]}", flush=True)
        alone = {key: [[found[name][key] for name in RUNS] for found in _rounds(measured)] for key in _KEYS}
        results = {
            "settings": {**values, **CASES[options.case], "rounds": round_index + 1, "runs": RUNS},
            **{key: {name: [found[key] for found in measured[name]] for name in measured} for key in _KEYS},
            "generate_share_alone": [found["generate_share"] for name in RUNS for found in measured[name]],
            "same_rewards": all(
                found["sweep"]["rewards"][name] == found[name]["rewards"][name]
                for found in _rounds(measured)
                for name in RUNS
            ),
            "sweep_over_alone": {
                key: ratio_of_sums([[found[key]] for found in measured["sweep"]], alone[key]) for key in _KEYS
            },
        }
        write_results(f"sweep_{options.case}_{options.precision}", results)
    print(results["sweep_over_alone"], results["same_rewards"])


def _rounds(measured: dict[str, list[dict]]) -> list[dict[str, dict]]:
    """Return the measurements of every round by candidate."""
    return [dict(zip(measured, found, strict=True)) for found in zip(*measured.values(), strict=True)]


if __name__ == "__main__":
    main()
