"""Train a tiny random model for one optimizer step on a CPU, then resume its checkpoint for a second step.

    PYTHONPATH=src:tests python tests/compat/smoke.py

The gradient norm must not depend on how the rows are divided into micro-batches: versions of transformers and
accelerate scale the loss in different places, and the logged loss does not show a wrong factor.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import accelerate
import torch
import transformers
from support.runs import trainer


def train(directory: str, micro_batches: int, **settings: Any) -> Any:
    given = {"per_device_train_batch_size": 8 // micro_batches, "gradient_accumulation_steps": micro_batches}
    run = trainer(directory, save_strategy="steps", save_steps=1, beta=0.1, **given, **settings)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.train(resume_from_checkpoint=True if settings["max_steps"] > 1 else None)
    assert any((old != new).any() for old, new in zip(before, run.model.parameters(), strict=True))
    return run


def main() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole, divided = train(one, 1, max_steps=1), train(two, 2, max_steps=1)
        resumed = train(two, 2, max_steps=2)
    logs = [run.state.log_history[0] for run in (whole, divided)]
    # The first step is on policy: the loss is 0 but for rounding, which differs by processor.
    assert math.isclose(logs[0]["loss"], logs[1]["loss"], rel_tol=1e-4, abs_tol=1e-6), logs
    assert math.isclose(logs[0]["grad_norm"], logs[1]["grad_norm"], rel_tol=1e-4), logs
    assert resumed.state.global_step == 2 and math.isfinite(resumed.state.log_history[1]["loss"])
    versions = (f"{module.__name__} {module.__version__}" for module in (torch, transformers, accelerate))
    print("two optimizer steps with", ", ".join(versions))


if __name__ == "__main__":
    main()
