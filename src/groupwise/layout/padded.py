"""The rectangular layout: prompts padded on the left, completions on the right, one row per sequence."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from groupwise.heads import HEADS, head_weights, logps_from_logits
from groupwise.heads.capture import Head, score_at_head
from groupwise.stages import TokenScores, TrainBatch


def score_padded(
    model: torch.nn.Module,
    batch: TrainBatch,
    head: str | Head,
    temperature: float,
    *,
    with_entropy: bool,
    fp32_head: bool = False,
    with_aux_loss: bool = False,
) -> TokenScores:
    """Log-probs (and entropies) of the completion tokens under ``model`` at ``temperature``.

    The model is called, not its parts, so that wrappers (DDP, accelerate, DeepSpeed) see every forward pass.
    Positions restart at each row's first real token: the amount of padding cannot change the result.

    Args:
        model: the causal LM, wrapped or not.
        head: "dense" takes the model's own logits; every other name in ``HEADS``, or a function like those
            there, replaces the output layer.

    Returns:
        log-probs and entropies of shape (B, C), float32.
    """
    input_ids = torch.cat([batch.prompt_ids_BP, batch.completion_ids_BC], dim=1)
    attention_mask = torch.cat([batch.prompt_mask_BP, batch.completion_mask_BC], dim=1)
    width = batch.completion_ids_BC.shape[1]
    inner = _unwrapped(model)
    accepted = _accepted_arguments(inner)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if "position_ids" in accepted:
        inputs["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    # The token at position j is predicted at j - 1: the last position predicts nothing and gets a dummy
    # target.
    targets = torch.nn.functional.pad(input_ids[:, 1:], (0, 1))
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = width + 1
        targets = targets[:, -(width + 1) :]
    if with_aux_loss:
        inputs["output_router_logits"] = True
    if head == "dense":
        output = model(**inputs)
        logps, entropy = logps_from_logits(output.logits, targets, temperature, with_entropy)
    else:
        weights = head_weights(inner, fp32=fp32_head)
        head_fn = HEADS[head] if isinstance(head, str) else head
        with score_at_head(inner, head_fn, weights, targets, temperature, with_entropy) as captured:
            output = model(**inputs)
        logps, entropy = captured.read(output.logits)
    span = slice(-(width + 1), -1)
    return TokenScores(
        logps_BC=logps[:, span],
        entropy_BC=None if entropy is None else entropy[:, span],
        aux_loss=output.aux_loss if with_aux_loss else None,
    )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model)


def _accepted_arguments(model: Any) -> set[str]:
    """Parameter names of the causal LM's own forward, below adapters and mixed-precision wrappers."""
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(type(causal_lm).forward).parameters)
