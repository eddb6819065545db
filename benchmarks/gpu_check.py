"""Parts of ``gpu.sh check``: is it correct, and does the host wait for the device?

Axes: N tokens, V vocabulary, H hidden size; S tokens of a packed row.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu import Outcome, Part, Place, Skipped
from training_work import Spec, make_trainer

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def require_cuda(place: Place, what: str) -> None:
    if place.device == "cpu":
        raise Skipped(f"{what} needs CUDA")


def relative_error(given: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Return the largest error of a tensor relative to its norm."""
    pairs = zip(given, truth, strict=True)
    return max(((x.double().cpu() - y).norm() / y.norm().clamp(min=1e-12)).item() for x, y in pairs)


# Kernels.


def head_kernels(place: Place, *, triton: bool, dtype_name: str) -> Outcome:
    """Compare the chunked head, its log-probs, entropies and gradients, with float64.

    Limits are twice the error of the dense head in the same dtype: both have the same rounded inputs.
    """
    from groupwise.policy.heads import chunked
    from groupwise.policy.heads.tiles import Tiles

    dtype, device = DTYPES[dtype_name], torch.device(place.device)
    if triton and chunked._tile_operations(device, dtype) is Tiles:
        raise Skipped("there is no Triton, or no device for it")
    used = chunked._tile_operations
    chunked._tile_operations = used if triton else lambda *_: Tiles
    try:
        figures, limits = {}, {}
        for case, settings in HEADS.items():
            errors = _head_errors(place, dtype, **settings)
            figures |= {f"{case} error": errors[0], f"{case} error of the dense head": errors[1]}
            limits[f"{case} error"] = 2 * errors[1] + 1e-5
    finally:
        chunked._tile_operations = used
    return Outcome(figures, limits)


#: A plain head; one with a softcap, as Gemma's; a truncated distribution.
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 20.0, "scale": 3.0},
    "truncated": {"truncated": True},
}


def _head_errors(
    place: Place, dtype: torch.dtype, truncated: bool = False, **transform: float
) -> tuple[float, float]:
    """Return the errors of the chunked and of the dense head."""
    from groupwise.policy.heads.chunked import chunked_head
    from groupwise.policy.heads.dense import logps_from_logits
    from groupwise.policy.heads.weights import HeadWeights
    from groupwise.records.sampling_mask import SamplingMask

    tokens, vocabulary, hidden = (37, 131, 64) if place.tiny else (1111, 50257, 1024)
    torch.manual_seed(0)
    inputs = [
        torch.randn(tokens, hidden),
        torch.randn(vocabulary, hidden) / hidden**0.5,
        torch.randn(vocabulary),
    ]
    targets = torch.randint(vocabulary, (tokens,))
    kept = None
    if truncated:
        lists = [sorted({target, (7 * target) % vocabulary, vocabulary - 1}) for target in targets.tolist()]
        kept = SamplingMask.from_lists(lists)

    def outcome(device: str, wide: torch.dtype, dense: bool) -> list[torch.Tensor]:
        leaves = [x.to(dtype).to(device, wide).requires_grad_() for x in inputs]
        weights = HeadWeights(leaves[1], leaves[2], **transform)  # type: ignore[arg-type]
        if dense:
            logits = weights.shape_logits(torch.nn.functional.linear(*leaves))
            values = logps_from_logits(logits, targets.to(device), 0.9, kept=kept)
        else:
            values = chunked_head(leaves[0], weights, targets.to(device), 0.9, kept=kept)
        slopes = torch.linspace(0.5, 2.0, tokens, device=device)
        loss = sum((slopes * value).sum() for value in values if value is not None)
        return [x.detach() for x in (*values, *torch.autograd.grad(loss, leaves)) if x is not None]

    truth = outcome("cpu", torch.float64, dense=True)
    errors = [relative_error(outcome(place.device, dtype, dense), truth) for dense in (False, True)]
    return errors[0], errors[1]


def attention_rows(place: Place, *, kernel: str, dtype_name: str) -> Outcome:
    """Compare attention of packed groups with float64, whose mask is made one pair of tokens at a time."""
    from groupwise.policy.layouts.varlen import reason_against_varlen

    dtype, device = DTYPES[dtype_name], torch.device(place.device)
    if kernel == "varlen" and (place.device == "cpu" or (reason := reason_against_varlen(device, dtype))):
        raise Skipped("varlen attention needs CUDA" if place.device == "cpu" else reason)
    groups = [(5, (1, 4, 7)), (9, (3, 3)), (2, (6,))]
    groups = groups if place.tiny else [(p * 16, tuple(c * 13 for c in rows)) for p, rows in groups]
    heads, kv_heads, size = (4, 2, 16) if place.tiny else (12, 2, 128)
    figures, limits = {}, {}
    for window in (None, 4):
        error = _attention_error(place, dtype, groups, (heads, kv_heads, size), window, kernel == "varlen")
        name = f"error, window {window}"
        figures[name], limits[name] = error, {"float32": 1e-5}.get(dtype_name, 2e-2)
    return Outcome(figures, limits)


def _attention_error(
    place: Place,
    dtype: torch.dtype,
    groups: Any,
    heads: tuple[int, int, int],
    window: int | None,
    varlen: bool,
) -> float:
    """Return the largest relative error of the output and of the gradients of queries, keys and values."""
    from groupwise.policy.layouts.packed import pack_sequences

    batch, positions = group_batch(groups, place.device)
    attention = pack_sequences(batch, shared=True, varlen=varlen).attention
    query_heads, kv_heads, size = heads
    length = len(positions)
    torch.manual_seed(1)
    inputs = [torch.randn(1, count, length, size).to(dtype) for count in (query_heads, kv_heads, kv_heads)]
    slopes = torch.randn(1, length, query_heads, size).to(dtype)
    visible_SS = torch.tensor([[sees(i, j, window) for j in positions] for i in positions])

    def exact(query, key, value):
        key, value = (x.repeat_interleave(query_heads // kv_heads, 1) for x in (key, value))
        scores = (query @ key.transpose(2, 3)) * size**-0.5
        return (scores.masked_fill(~visible_SS, -torch.inf).softmax(-1) @ value).transpose(1, 2)

    def outcome(leaves: list[torch.Tensor], compute: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        out = compute(*leaves)
        return [out.detach(), *torch.autograd.grad((out * slopes.to(out)).sum(), leaves)]

    truth = outcome([x.double().requires_grad_() for x in inputs], exact)
    leaves = [x.to(place.device).requires_grad_() for x in inputs]
    return relative_error(outcome(leaves, lambda q, k, v: attention(q, k, v, None, window)), truth)


def group_batch(groups: Any, device: str) -> tuple[Any, list[tuple[int, int, int]]]:
    """Make rows of random tokens.

    Args:
        groups: length of a prompt and those of its completions, for each group.

    Returns:
        the batch, and (group, completion or -1, position) of every token of the packed sequence.
    """
    from groupwise.core.padding import length_mask
    from groupwise.records import TokenBatch

    positions, rows = [], []
    for group, (prompt, completions) in enumerate(groups):
        rows += [(group, prompt, length) for length in completions]
        alone = len(completions) == 1  # an ordinary sequence
        positions += [(group, 0 if alone else -1, p) for p in range(prompt)]
        for index, length in enumerate(completions):
            positions += [(group, index, prompt + p) for p in range(length)]
    prompt_mask = length_mask([p for _, p, _ in rows], max(p for _, p, _ in rows), left=True)
    mask = length_mask([c for _, _, c in rows], max(c for _, _, c in rows))
    # The same tokens for all rows of a group: rows that differ are groups of their own.
    ids = torch.stack([torch.full((prompt_mask.shape[1],), 2 + group) for group, _, _ in rows]) * prompt_mask
    batch = TokenBatch(
        prompt_ids_BL=ids.to(device),
        prompt_mask_BL=prompt_mask.to(device),
        completion_ids_BT=torch.ones_like(mask).to(device),
        completion_mask_BT=mask.to(device),
        loss_mask_BT=mask.to(device),
        group_ids_B=torch.tensor([group for group, _, _ in rows], device=device),
        old_logps_BT=torch.zeros(mask.shape, device=device),
    )
    return batch, positions


def sees(query: tuple[int, int, int], key: tuple[int, int, int], window: int | None) -> bool:
    """Return True if a token attends to another, each (group, completion or -1 for the prompt, position)."""
    same = query[0] == key[0] and key[1] in (-1, query[1])
    return same and key[2] <= query[2] and (window is None or key[2] > query[2] - window)


# Two optimizer steps.


@dataclass(frozen=True)
class SetUp:
    """Settings of two steps. The padded layout with the dense head is the CPU's reference in its precision.

    Those of ``loss`` change the result; those of ``path`` choose how it is computed.
    """

    family: str = "llama"
    precision: str = "bf16"
    lora: bool = False
    loss: tuple[tuple[str, Any], ...] = ()
    path: tuple[tuple[str, Any], ...] = ()


def _path(layout: str, **others: Any) -> tuple[tuple[str, Any], ...]:
    return (("sequence_layout", layout), *others.items())


_KL = (("beta", 0.2),)
_SHARED = _path("shared_prefix")
SET_UPS = {
    "float32, padded, dense head": SetUp(precision="float32", path=_path("padded", logprob_head="dense")),
    "float32, shared prompts": SetUp(precision="float32", path=_SHARED),
    "float32, hybrid model, forked": SetUp("qwen3_5", "float32", path=_path("forked")),
    "bf16, shared prompts": SetUp(path=_SHARED),
    "bf16, every layer recomputed": SetUp(path=_path("shared_prefix", activation_memory_fraction=0.0)),
    "bf16, packed, norms of queries and keys": SetUp("qwen3", path=_path("packed")),
    "bf16, sliding windows": SetUp("gemma3", path=_SHARED),
    "bf16, KL": SetUp(loss=_KL, path=_SHARED),
    "bf16, entropy bonus": SetUp(loss=(("entropy_coef", 0.05),), path=_SHARED),
    "bf16, two updates of a generation": SetUp(loss=(("num_iterations", 2),), path=_SHARED),
    "bf16, LoRA with KL": SetUp(lora=True, loss=_KL, path=_SHARED),
    "bf16, fused AdamW": SetUp(loss=(("optim", "adamw_torch_fused"), ("learning_rate", 1e-3)), path=_SHARED),
}


def two_steps(place: Place, set_up: SetUp) -> Outcome:
    """Compare the change of all parameters over two optimizer steps with the CPU's in a higher precision.

    Completions are given. The limit is twice the error of the CPU in the same precision, in the padded layout
    with the dense head.
    """
    if set_up.lora and find_spec("peft") is None:
        raise Skipped("peft is not installed")
    plain = replace(set_up, path=_path("padded", logprob_head="dense"))
    higher = "float64" if set_up.precision == "float32" else "float32"
    truth, _ = _change(replace(plain, precision=higher), "cpu")
    error_of_cpu = relative_error([_change(plain, "cpu")[0]], [truth])
    change, paths = _change(set_up, place.device)
    error = relative_error([change], [truth])
    figures = {
        "error": error,
        "error of the CPU": error_of_cpu,
        "norm": truth.norm().item(),
        "fast paths": paths,
    }
    return Outcome(figures, {"error": 2 * error_of_cpu + (1e-4 if set_up.precision == "float32" else 1e-2)})


@cache
def _change(set_up: SetUp, device: str) -> tuple[torch.Tensor, list[str]]:
    """Return the change of the trained parameters, flat in float64, and the fast paths of the run."""
    precision = "bf16" if set_up.precision == "bf16" else "float32"
    spec = Spec(
        "random", device=device, precision=precision, lora=set_up.lora, groups=2, group_size=4,
        accumulation=1, prompt_tokens=12, completion_tokens=12, windows=1,
    )  # fmt: skip
    model = family_model(set_up.family).to(device)
    if set_up.precision == "float64":
        model.double()
    settings = {
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        **dict(set_up.loss),
        **dict(set_up.path),
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer("groupwise", spec, directory, model=model, **settings)
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        before = [p.detach().double().cpu().clone() for p in trained]
        trainer.train()
    after = [p.detach().double().cpu() for p in trained]
    change = torch.cat([(new - old).flatten() for old, new in zip(before, after, strict=True)])
    return change, [str(path) for path in trainer.fast_paths()]


def family_model(family: str) -> Any:
    """Return a small model of random weights; every architecture has layers of its kind."""
    import transformers

    sizes = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "layer_types": kinds,
    }  # fmt: skip
    config, others = {
        "llama": (transformers.LlamaConfig, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 8}),
        "qwen3_5": (transformers.Qwen3_5TextConfig, {"head_dim": 16, **linear}),
    }[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes, **others))
    with torch.no_grad():
        for parameter in model.parameters():  # attention far from uniform, so that a wrong key shows
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


# Waits of the host.

QWEN_1_5B = "random:28,1536,12,2,8960,151936"


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Context manager that collects a line of Python for every wait for the device that torch sees."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = ((str(w.message), f"{w.filename.rpartition('/')[2]}:{w.lineno}") for w in caught)
    waits += [line for message, line in lines if "synchronizing CUDA operation" in message]


def waits_per_token(place: Place, **sampling: Any) -> Outcome:
    """Count waits of the own decoding loop per token: those of 48 tokens less those of 16."""
    from groupwise.records import SamplingOptions

    require_cuda(place, "torch.cuda.set_sync_debug_mode")
    spec = Spec(QWEN_1_5B, tied=True, device=place.device, groups=1, prompt_tokens=64, completion_tokens=64)
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer("groupwise", spec, directory, sampled=True)
        prompts, counts = [list(range(2, 66))] * spec.rows, {}
        for tokens in (4, 16, 48):  # the first loads kernels
            with counted_waits() as waits:
                options = SamplingOptions(max_tokens=[tokens] * len(prompts), generation_kwargs=sampling)
                longest = max(len(c.token_ids) for c in trainer.backend.generate(prompts, options))
            counts[tokens] = (len(waits), longest)
    (few, short), (many, long) = counts[16], counts[48]
    figures = {
        "waits per token": (many - few) / (long - short),
        "waits of a call": few,
        "of": sorted(set(waits)),
    }
    return Outcome(figures, {"waits per token": 1.0})


def waits_of_a_micro_batch(place: Place) -> Outcome:
    """Count waits inside forward and backward of micro-batches that are neither first nor last of a step."""
    require_cuda(place, "torch.cuda.set_sync_debug_mode")
    spec = Spec(
        QWEN_1_5B, tied=True, device=place.device, groups=1, accumulation=4, windows=1,
        prompt_tokens=64, completion_tokens=64,
    )  # fmt: skip
    seen: list[list[str]] = []

    def counting(base: Any) -> Any:
        class Counting(base):
            def training_step(self, *arguments: Any, **named: Any) -> Any:
                inner = self.window.is_made and not self.accelerator.sync_gradients
                with counted_waits() as waits:
                    loss = super().training_step(*arguments, **named)
                if inner and self.state.global_step > 0:
                    seen.append(waits)
                return loss

        return Counting

    with tempfile.TemporaryDirectory() as directory:
        make_trainer("groupwise", spec, directory, counting).train()
    of = sorted({line for waits in seen for line in waits})
    figures = {"waits of a micro-batch": max(map(len, seen)), "micro-batches": len(seen), "of": of}
    return Outcome(figures, {"waits of a micro-batch": 0.0})


PARTS: dict[str, Part] = {
    **{
        f"head, {kind}, {dtype}": partial(head_kernels, triton=kind == "Triton", dtype_name=dtype)
        for kind in ("Triton", "torch")
        for dtype in DTYPES
    },
    **{
        f"attention, {kernel}, {dtype}": partial(attention_rows, kernel=kernel, dtype_name=dtype)
        for kernel, dtype in (
            ("blocks", "float32"),
            ("blocks", "bf16"),
            ("varlen", "bf16"),
            ("varlen", "fp16"),
        )
    },
    **{f"two steps, {name}": partial(two_steps, set_up=set_up) for name, set_up in SET_UPS.items()},
    "waits per token": waits_per_token,
    "waits per token with top_p": partial(waits_per_token, top_p=0.9),
    "waits of a micro-batch": waits_of_a_micro_batch,
}
