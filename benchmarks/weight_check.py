"""Measure what the comparison of the weights (``vllm_weight_check``) adds to a step with a colocated engine.

SmolLM2-135M-Instruct in float32 on a CPU. The seconds are those within the three parts of the comparison:
digests of the tensors that are sent, digests of the matrices that vLLM repacks, and the report of the engine
with the comparison. The first sync, which reads all repacked matrices back, is apart.

    OMP_NUM_THREADS=2 python benchmarks/weight_check.py --steps 5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common import write_results

CASES = {"2x8x64": (2, 64), "4x8x128": (4, 128)}  # prompts and tokens of their 8 completions


class Clock:
    """Seconds within functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return call

    def read(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


def measure(path: str, prompts: int, limit: int, steps: int, clock: Clock) -> list[dict[str, Any]]:
    """Return the seconds of the comparison and of the whole step, for every step."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from groupwise import GRPOConfig, GRPOTrainer

    rows: list[dict[str, Any]] = []

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append({"comparison": clock.read()})

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
    run = GRPOTrainer(path, reward, config, data, callbacks=[Steps()])
    run.train()
    logs = [line for line in run.state.log_history if "loss" in line]
    for row, line in zip(rows, logs, strict=True):
        row["sync"], row["step"] = line["time/sync"], line["step_time"]
        row["share"] = sum(row["comparison"].values()) / row["step"]
    run.backend.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="of each case, the first of which is apart")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    given = parser.parse_args()

    from smollm2 import local_model

    from groupwise.generation.vllm import weight_check
    from groupwise.policy.digests import WeightDigests

    clock = Clock()
    WeightDigests._digests = clock.timed("sent", WeightDigests._digests)
    weight_check.row_digests = clock.timed("repacked", weight_check.row_digests)
    weight_check.WeightCheck.compare = clock.timed("report", weight_check.WeightCheck.compare)
    for name in given.cases:
        prompts, limit = CASES[name]
        steps = measure(str(local_model()), prompts, limit, given.steps, clock)
        later = steps[1:]
        share = statistics.median(step["share"] for step in later)
        results = {"case": name, "median_share": share, "first": steps[0], "later": later}
        first = sum(steps[0]["comparison"].values())
        print(f"{name}: {100 * share:.2f} % of a step (median); the first sync {first:.2f} s")
        write_results(f"weight_check_{name}_float32", results)


if __name__ == "__main__":
    main()
