"""Measure what the comparison of the weights (``vllm_weight_check``) adds to a step with a colocated engine.

SmolLM2-135M-Instruct in float32 on a CPU. After a few steps, weights are sent again and again, and compared
in every other sync: the cost is the median difference of two consecutive syncs, the share that of the median
step. The first sync, which reads all repacked matrices back, is apart.

    OMP_NUM_THREADS=1 python benchmarks/weight_check.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from common import write_results

#: Prompts, and tokens of their 8 completions; 256 is the default of ``max_completion_length``.
CASES = {"2x8x64": (2, 64), "2x8x128": (2, 128), "2x8x256": (2, 256)}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

compared = True  # in the present sync


def measure(path: str, prompts: int, limit: int, steps: int, pairs: int) -> dict[str, Any]:
    """Return the seconds of steps, of their syncs, and of pairs of syncs with and without a comparison."""
    global compared
    from datasets import Dataset

    from groupwise import GRPOConfig, GRPOTrainer
    from groupwise.policy.weight_iterator import PolicyWeights

    config = GRPOConfig(
        tempfile.mkdtemp(),
        use_vllm=True,
        vllm_max_model_length=limit + 128,
        vllm_engine_kwargs={"kv_cache_memory_bytes": 2**29},
        generation_kwargs={"ignore_eos": True, "min_tokens": limit},
        per_device_train_batch_size=8,
        gradient_accumulation_steps=prompts,
        num_generations=8,
        max_completion_length=limit,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-6,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_list(
        [{"prompt": f"Question {i}: what is {i} + {i}?"} for i in range(prompts * steps)]
    )
    reward = lambda completions, **_: [float(len(set(text))) for text in completions]  # noqa: E731
    run = GRPOTrainer(path, reward, config, data)
    run.train()
    logs = [line for line in run.state.log_history if "loss" in line]
    found: list[list[dict[str, float]]] = []
    for _ in range(pairs):
        found.append([])
        for compared in (True, False):
            run.backend.weight_check.mode = "every_sync" if compared else "off"
            run.backend.version = None
            start = {clock: read() for clock, read in CLOCKS.items()}
            run.backend.sync_weights(PolicyWeights(run.model), step=steps)
            found[-1].append({clock: read() - start[clock] for clock, read in CLOCKS.items()})
    compared = True
    run.backend.close()
    syncs, step_times = ([line[name] for line in logs] for name in ("time/sync", "step_time"))
    return {"syncs": syncs, "steps": step_times, "pairs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=15, help="of syncs with and without a comparison")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    given = parser.parse_args()

    import torch
    from smollm2 import local_model

    from groupwise.generation.vllm import plugin

    of_repacked = plugin.row_digests  # vLLM calls it in syncs without a comparison, too
    plugin.row_digests = lambda matrix: of_repacked(matrix) if compared else torch.empty(0)
    for name in given.cases:
        prompts, limit = CASES[name]
        found = measure(str(local_model()), prompts, limit, given.steps, given.pairs)
        cost = {
            clock: statistics.median(with_it[clock] - without[clock] for with_it, without in found["pairs"])
            for clock in CLOCKS
        }
        step = statistics.median(found["steps"][1:])
        results = {"case": name, "cost": cost, "step": step, "share": cost["wall"] / step, **found}
        print(
            f"{name}: {cost['wall']:.2f} s ({cost['cpu']:.2f} s of CPU time) of a step of {step:.1f} s, "
            f"{100 * results['share']:.2f} %; the first sync {found['syncs'][0]:.2f} s"
        )
        write_results(f"weight_check_{name}_float32", results)


if __name__ == "__main__":
    main()
