"""Parts of ``gpu.sh phases``: time and memory of the parts of a step, each beside its alternatives.

Weights are float32, products bfloat16 under autocast, the optimizer fused AdamW: the defaults of a run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu import Outcome, Part, Place, Skipped, free_memory
from gpu_check import QWEN_1_5B, group_batch, relative_error
from head_memory import resident_bytes, scoring_function
from train_phase import TRAINERS, Meter, metered
from training_work import FIRST_WORD, Spec, make_trainer

QWEN_7B = "random:28,3584,28,4,18944,152064"
TINY = "random:2,64,4,2,128,256"
OPTIMIZER = {"optim": "adamw_torch_fused", "max_grad_norm": 1.0, "logging_steps": 1}


def shape(place: Place, model: str, **sizes: Any) -> Spec:
    """Return the work on a model of this shape; tiny on a CPU."""
    spec = Spec(model, device=place.device, **sizes)
    small = {"model": TINY, "prompt_tokens": 16, "completion_tokens": 16, "windows": 1}
    return replace(spec, **small) if place.tiny else spec


def now(place: Place) -> float:
    if place.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(place: Place, *, peak: bool = False) -> int:
    """Return the bytes in use, or the most since the last call; on a CPU, those of the process."""
    if place.device == "cpu":
        return resident_bytes("VmHWM" if peak else "VmRSS")
    used = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return used


def measured(place: Place, compute: Callable[[], Any], repeats: int = 3) -> dict[str, float]:
    """Return seconds of the fastest run after a warm-up, and the bytes that it takes beyond those before."""
    compute()
    before, seconds = memory(place), []
    for _ in range(repeats):
        start = now(place)
        compute()
        seconds.append(now(place) - start)
    return {"seconds": min(seconds), "bytes": memory(place, peak=True) - before}


def prefixed(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {key}": value for key, value in figures.items()}


def head(place: Place) -> Outcome:
    """Time forward and backward of the heads, log-probs and entropy; values against float64 on some rows."""
    tokens, hidden, vocabulary = (64, 32, 257) if place.tiny else (8192, 1536, 151936)
    torch.manual_seed(0)
    options = {"device": place.device, "dtype": torch.bfloat16}
    hidden_NH = torch.randn(tokens, hidden, **options).requires_grad_()  # type: ignore[arg-type]
    weight_VH = (torch.randn(vocabulary, hidden, **options) * hidden**-0.5).requires_grad_()  # type: ignore[arg-type]
    targets_N = torch.randint(FIRST_WORD, vocabulary, (tokens,), device=place.device)
    few = slice(0, 64)
    logits = hidden_NH[few].detach().double() @ weight_VH.detach().double().T
    exact = torch.log_softmax(logits, -1).gather(1, targets_N[few, None])[:, 0].cpu()
    figures: dict[str, Any] = {}
    for name in ("dense", "chunked", *(["trl"] if find_spec("trl") else [])):
        score = scoring_function(name)

        def both_passes(score: Any = score) -> torch.Tensor:
            hidden_NH.grad = weight_VH.grad = None
            logps_N, entropy_N = score(hidden_NH, weight_VH, targets_N)
            (-logps_N.mean() + 0.1 * entropy_N.mean()).backward()
            return logps_N.detach()

        figures |= prefixed(name, measured(place, both_passes))
        figures[f"{name} error"] = relative_error([both_passes()[few]], [exact])
    limits = {"chunked error": figures["dense error"] + 1e-5}
    if place.device != "cpu":  # the memory of a process does not shrink
        limits["chunked bytes"] = figures["dense bytes"]
    return Outcome(figures, limits, "" if find_spec("trl") else "trl is not installed: measured without it")


def training_phase(place: Place) -> Outcome:
    """Compare layouts and TRL on given completions of skewed lengths; their gradients have one norm."""
    spec = shape(
        place, QWEN_1_5B, tied=True, groups=2, accumulation=2, prompt_tokens=512, completion_tokens=512
    )
    methods = ["auto", "padded", *(["trl"] if find_spec("trl") else [])]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for order in [methods] if place.tiny else [methods, methods[::-1]]:
        for name in order:
            free_memory(place)
            runs[name].append(_window(name, spec))
    figures: dict[str, Any] = {}
    for name, of_method in runs.items():
        seconds = [second for run in of_method for second in run["seconds"]]
        figures |= {f"{name} seconds": min(seconds), f"{name} bytes": max(run["bytes"] for run in of_method)}
        figures[f"{name} gradient"] = of_method[0]["gradient"]
    for name in methods[1:]:
        ratio = figures["auto gradient"] / figures[f"{name} gradient"]
        figures |= {
            f"auto/{name} seconds": figures["auto seconds"] / figures[f"{name} seconds"],
            f"gradient beside {name}": abs(ratio - 1),
        }
    figures["fast paths"] = runs["auto"][0]["paths"]
    limits = {f"gradient beside {name}": 0.02 for name in methods[1:]}
    return Outcome(figures, limits, "" if find_spec("trl") else "trl is not installed: measured without it")


def _window(method: str, spec: Spec) -> dict[str, Any]:
    """Run windows of one method: seconds and bytes of each, and the norm of the first gradient."""
    library, settings = TRAINERS[method]
    meter = Meter(spec.device)
    with tempfile.TemporaryDirectory() as directory:
        wrap = partial(metered, meter=meter)
        trainer = make_trainer(library, spec, directory, wrap, **{**OPTIMIZER, **settings})
        trainer.train()
    paths = [str(path) for path in trainer.fast_paths()] if library == "groupwise" else []
    result = meter.result()
    gradient = trainer.state.log_history[0]["grad_norm"]
    return {"seconds": result["seconds"], "bytes": result["peak_bytes"], "gradient": gradient, "paths": paths}


def attention(place: Place) -> Outcome:
    """Time one layer's attention, forward and backward, of 8 completions of a prompt, 2k tokens each."""
    from groupwise.policy.layouts.packed import pack_sequences
    from groupwise.policy.layouts.varlen import reason_against_varlen

    heads, kv_heads, size = (4, 2, 16) if place.tiny else (12, 2, 128)
    prompt, length = (16, 16) if place.tiny else (2048, 2048)
    batch, positions = group_batch([(prompt, (length,) * 8)], place.device)
    reason = "varlen attention needs CUDA"
    if place.device != "cpu":
        reason = reason_against_varlen(torch.device(place.device), torch.bfloat16)

    def inputs(rows: int, tokens: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shapes = [(rows, count, tokens, size) for count in (heads, kv_heads, kv_heads)]
        return [torch.randn(s, device=place.device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]

    def padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As transformers computes it with a mask for padding: repeated keys, a boolean mask."""
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        mask = torch.ones(query.shape[2], query.shape[2], device=query.device, dtype=torch.bool).tril()
        mask = mask.expand(query.shape[0], 1, -1, -1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    packed = {"blocks": False} | ({} if reason else {"varlen": True})
    figures, outputs = {}, {}
    for name in ("padded", *packed):
        leaves = inputs(8, prompt + length) if name == "padded" else inputs(1, len(positions))
        compute = padded
        if name in packed:
            rows = pack_sequences(batch, shared=True, varlen=packed[name]).attention
            compute = partial(rows, scale=None, sliding_window=None)

        def both_passes(compute: Any = compute, leaves: Any = leaves) -> torch.Tensor:
            out = compute(*leaves)
            torch.autograd.grad(out.float().square().sum(), leaves)
            return out.detach()

        figures |= prefixed(name, measured(place, both_passes))
        outputs[name] = both_passes()
    limits = {}
    if not reason:
        figures["varlen beside blocks"] = relative_error(
            [outputs["varlen"]], [outputs["blocks"].double().cpu()]
        )
        limits["varlen beside blocks"] = 0.02
    return Outcome(figures, limits, reason)


def decoding(place: Place) -> Outcome:
    """Compare the own loop with ``generate``: tokens a second, and the most probable tokens in float32."""
    spec = shape(place, QWEN_1_5B, tied=True, groups=4, prompt_tokens=512, completion_tokens=256)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer("groupwise", spec, directory, sampled=True)
        for name in LOOPS:
            _sample(trainer, name, 4)  # loads kernels
            before, start = memory(place), now(place)
            made = _sample(trainer, name, spec.completion_tokens)
            seconds = now(place) - start
            most = memory(place, peak=True) - before
            rate = sum(map(len, made)) / seconds
            figures |= prefixed(name, {"tokens/s": rate, "seconds": seconds, "bytes": most})
            figures[f"{name}: paths"] = [str(p) for p in trainer.fast_paths() if "decoding" in p.name]
        del trainer
        free_memory(place)
        trainer = make_trainer("groupwise", replace(spec, precision="float32"), directory, sampled=True)
        greedy = [_sample(trainer, name, 8, temperature=0) for name in LOOPS]
    rows = [any(one != row for one in others) for *others, row in zip(*greedy, strict=True)]
    figures["share of other tokens"] = sum(rows) / len(rows)
    return Outcome(figures, {"share of other tokens": 0.1})  # near ties


#: The own loop with steps as CUDA graphs where there are any, and without; loop, cache and linear layers of
#: transformers and PyTorch.
LOOPS = ("own loop", "own loop, eager", "generate")


def _sample(trainer: Any, loop: str, tokens: int, **settings: Any) -> list[list[int]]:
    """Sample completions of the training prompts, in one of the loops."""
    from groupwise.records import SamplingOptions

    trainer.backend.stock_decoding = loop == "generate"
    graphs = trainer.backend.graphs
    if graphs is not None and loop == "own loop, eager" and not graphs.reason:
        graphs.reason = "eager steps are measured"
    words = (row["prompt"].split() for row in trainer.train_dataset)
    prompts = [
        [int(word[1:]) for word in text] for text in words for _ in range(trainer.args.num_generations)
    ]
    options = SamplingOptions(max_tokens=[tokens] * len(prompts), generation_kwargs=settings)
    return [completion.token_ids for completion in trainer.backend.generate(prompts, options)]


def memory_of_phases(place: Place) -> Outcome:
    """Record memory in use after each phase and step, which does not grow with the steps, and the peak."""
    spec = shape(place, QWEN_1_5B, tied=True, groups=2, prompt_tokens=512, completion_tokens=256)
    with tempfile.TemporaryDirectory() as directory:
        figures = run_steps(place, sampling_trainer(replace(spec, windows=2), directory, beta=0.1))
    limits = {} if place.device == "cpu" else {"GB after step 3": 1.01 * figures["GB after step 2"]}
    return Outcome(figures, limits)


def lora(place: Place) -> Outcome:
    """Train an adapter of rank 16 on a 7B shape: seconds and memory; the base weights stay as they are."""
    if find_spec("peft") is None:
        raise Skipped("peft is not installed")
    spec = shape(place, QWEN_7B, lora=True, groups=1, prompt_tokens=512, completion_tokens=128)
    with tempfile.TemporaryDirectory() as directory:
        trainer = sampling_trainer(replace(spec, windows=2), directory, learning_rate=1e-3)
        parameters = [*trainer.model.named_parameters()]
        frozen = [p for _, p in parameters if not p.requires_grad]
        before = [p.detach().clone() for p in frozen[:4]]
        figures = run_steps(place, trainer)
    zeros = [not p.any() for name, p in parameters if ".lora_B." in name]  # as at the start
    figures |= {
        "frozen GB": sum(p.nbytes for p in frozen) / 1e9,
        "changed base weights": sum(not torch.equal(*pair) for pair in zip(before, frozen, strict=False)),
        "untrained adapters": sum(map(bool, zeros)),
    }
    return Outcome(figures, {"changed base weights": 0, "untrained adapters": 0})


def sampling_trainer(spec: Spec, directory: str, library: str = "groupwise", **settings: Any) -> Any:
    """Create a trainer whose completions are sampled and have their full length."""
    full = {"min_new_tokens": spec.completion_tokens}
    settings = {"generation_kwargs": full, **OPTIMIZER, **settings}
    return make_trainer(library, spec, directory, sampled=True, **settings)


def run_steps(place: Place, trainer: Any) -> dict[str, Any]:
    """Train. Returns seconds and memory of the last step by phase, memory after each step, and gradients."""
    from transformers import TrainerCallback

    figures: dict[str, Any] = {"GB at the start": memory(place) / 1e9}

    class Memory(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            figures[f"GB after step {state.global_step}"] = memory(place) / 1e9

    trainer.add_callback(Memory())
    memory(place, peak=True)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    phases = {name: logs[-1][name] for name in logs[-1] if name.startswith(("time/", "memory/"))}
    figures |= {
        **phases,
        "peak GB": memory(place, peak=True) / 1e9,
        "seconds of a step": logs[-1]["step_time"],
    }
    figures["gradients"] = [log["grad_norm"] for log in logs]
    return {**figures, "fast paths": [str(path) for path in trainer.fast_paths()]}


PARTS: dict[str, Part] = {
    "head": head,
    "training phase": training_phase,
    "attention": attention,
    "decoding": decoding,
    "memory of phases": memory_of_phases,
    "LoRA, 7B": lora,
}
