"""Parts of ``gpu.sh steps``: whole optimizer steps beside TRL, alternating, sampling included.

Every completion has its full length, so that both libraries compute the same tokens.
"""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from gpu import Outcome, Part, Place, free_memory
from gpu_check import QWEN_1_5B
from gpu_phases import memory, now, sampling_trainer, shape

QWEN_0_5B = "random:24,896,14,2,4864,151936"


def whole_steps(place: Place, *, model: str, **sizes: int) -> Outcome:
    """Compare seconds and peak memory of steps; the first of each trainer is a warm-up."""
    spec = shape(place, model, tied=True, windows=2, **sizes)
    libraries = ["groupwise", *(["trl"] if find_spec("trl") else [])]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in libraries}
    for order in [libraries] if place.tiny else [libraries, libraries[::-1]]:
        for name in order:
            free_memory(place)
            runs[name].append(_run(place, name, spec))
    figures: dict[str, Any] = {}
    for name, of_library in runs.items():
        figures[f"{name} seconds"] = sum(s for run in of_library for s in run["seconds"]) / len(of_library)
        figures[f"{name} seconds"] /= len(of_library[0]["seconds"])
        figures[f"{name} bytes"] = max(run["bytes"] for run in of_library)
        figures[f"{name} missing tokens"] = spec.completion_tokens - of_library[0]["length"]
    figures["fast paths"] = runs["groupwise"][0]["paths"]
    limits = {f"{name} missing tokens": 0.0 for name in runs}  # else the seconds are of other work
    if "trl" not in runs:
        return Outcome(figures, limits, "trl is not installed: groupwise was measured alone")
    figures["trl/groupwise seconds"] = figures["trl seconds"] / figures["groupwise seconds"]
    return Outcome(figures, limits)


def _run(place: Place, library: str, spec: Any) -> dict[str, Any]:
    """Train. Returns seconds between ends of steps, memory beyond that before, and lengths of completions."""
    from transformers import TrainerCallback

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.append(now(place))

    memory(place, peak=True)
    before = memory(place)
    with tempfile.TemporaryDirectory() as directory:
        trainer = sampling_trainer(spec, directory, library)
        trainer.add_callback(Clock())
        trainer.train()
    paths = [str(path) for path in trainer.fast_paths()] if library == "groupwise" else []
    length = trainer.state.log_history[-2]["completions/mean_length"]
    seconds = [after - before for before, after in pairwise(marks)]
    return {"seconds": seconds, "bytes": memory(place, peak=True) - before, "length": length, "paths": paths}


PARTS: dict[str, Part] = {
    # 8 prompts x 8 completions of 512 tokens, in micro-batches of 16 rows.
    "1.5B, 512 tokens": partial(
        whole_steps, model=QWEN_1_5B, groups=2, accumulation=4, prompt_tokens=256, completion_tokens=512
    ),
    "0.5B, long prompts": partial(
        whole_steps, model=QWEN_0_5B, groups=2, accumulation=4, prompt_tokens=2048, completion_tokens=256
    ),
}
