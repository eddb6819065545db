"""Measure how many weights change per step in bfloat16, and the bytes of a sync of the changes alone.

Full fine-tune of SmolLM2-135M-Instruct: GRPO on the questions of `step_time.py --case short`, AdamW, weights
in float32. After every step they are rounded as for a bfloat16 server (matrices; vectors stay in float32) and
compared bit by bit with those of the step before. vLLM's ``sparse_nccl`` sends 4 bytes of index and the value
of each that changed.

    OMP_NUM_THREADS=2 python benchmarks/weight_changes.py --steps 5
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from common import write_results

INDEX_BYTES = 4


def count_changes(changes: Any, model: Any) -> dict[str, float]:
    """Return the share of values that changed since the last call, and the bytes of both kinds of sync."""
    from groupwise.policy.weight_iterator import rounded, weight_iterator

    changed = total = sparse = dense = 0
    for name, tensor in rounded(weight_iterator(model), ["bfloat16"]):
        indices = changes.update(name, tensor)
        changed, total = changed + len(indices), total + tensor.numel()
        sparse += len(indices) * (INDEX_BYTES + tensor.element_size())
        dense += tensor.nbytes
    return {"share": changed / total, "values": total, "sparse_bytes": sparse, "dense_bytes": dense}


def measure(model: str, learning_rate: float, steps: int) -> list[dict[str, float]]:
    """Return the changes of each step."""
    from step_time import binary_reward, make_dataset, trainer_settings
    from transformers import TrainerCallback

    from groupwise import GRPOConfig, GRPOTrainer
    from groupwise.generation.vllm.weight_source import ChangedValues

    changes, found = ChangedValues(), []

    class Count(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            count_changes(changes, model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            found.append(count_changes(changes, model))
            print(f"learning rate {learning_rate:g}, step {state.global_step}: {found[-1]}", flush=True)

    with tempfile.TemporaryDirectory() as directory:
        settings = trainer_settings("short", steps - 1, "natural", "float32")
        settings |= {"learning_rate": learning_rate, "lr_scheduler_type": "constant", "warmup_steps": 0}
        # Adam's updates have the size of the learning rate for any batch; a small one is enough.
        settings |= {"per_device_train_batch_size": 8, "max_completion_length": 32}
        trainer = GRPOTrainer(
            model,
            binary_reward,
            GRPOConfig(directory, **settings),
            make_dataset("short", 0, "natural"),
            callbacks=[Count()],
        )
        trainer.train()
    return found


def main() -> None:
    from smollm2 import local_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[1e-6, 1e-5])
    options = parser.parse_args()
    model = str(local_model())
    results = {f"{rate:g}": measure(model, rate, options.steps) for rate in options.learning_rates}
    print(write_results("weight_changes", {"model": "SmolLM2-135M-Instruct", "by_learning_rate": results}))


if __name__ == "__main__":
    main()
