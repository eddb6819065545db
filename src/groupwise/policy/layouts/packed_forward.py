"""The layouts without padding, `packed` and `shared_prefix`: for which models, and the scores they give."""

from __future__ import annotations

from typing import Any

import torch

from groupwise.policy.attention import has_varlen_attention, install_attention_hook
from groupwise.policy.layouts.forward import (
    HeadSettings,
    accepted_arguments,
    base_model,
    forward_logprobs,
    is_text_only,
)
from groupwise.policy.layouts.packed import Stream, build_stream, shape_of
from groupwise.records import LogprobOutput, TokenBatch

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def unsupported(model: Any, *, shared: bool = True) -> str | None:
    """Why the streamed layouts would not be right for this model; None where they are, and are made possible.

    They need attention to be the only thing in the model that looks at other tokens, and need it to be plain:
    queries and keys by position, softmax over the keys.

    Args:
        shared: it has to serve prompts that are computed once, too.
    """
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    other_layers = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    missing = {"position_ids", "logits_to_keep"} - accepted_arguments(model)
    if not is_text_only(model):
        return "it reads more than text"
    if getattr(config, "is_encoder_decoder", False) or getattr(base, "_is_stateful", False):
        return "it is not made of attention layers alone"
    if other_layers:
        return f"it has layers of type {', '.join(sorted(other_layers))}"
    if missing:
        return f"its forward takes no {' and no '.join(sorted(missing))}"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in base.named_parameters()):
        return "its attention has sinks"
    if any(_attention_dropout(module) for module in base.modules()):
        return "its attention has dropout"
    if not supports_packing(base, shared=shared):
        return f"its attention implementation is {base.config._attn_implementation!r} and not 'sdpa'"
    return None


def supports_packing(model: Any, *, shared: bool) -> bool:
    """Whether the model's attention keeps the sequences of a stream apart, and is made to where it can be."""
    return install_attention_hook(model) or (not shared and has_varlen_attention(model))


def _attention_dropout(module: torch.nn.Module) -> float:
    """Where architectures keep it: as a number, or as a module that only holds the number."""
    kept = getattr(module, "attention_dropout", None) or getattr(module, "attn_dropout", None)
    return getattr(kept, "p", kept) or 0.0


def pack_sequences(batch: TokenBatch, *, shared: bool) -> Stream:
    """Pack the sequences of a batch; computing their log-probs then needs nothing from the device."""
    return build_stream(batch, shape_of(batch), shared=shared)


def compute_packed_logprobs(
    model: torch.nn.Module, batch: TokenBatch, stream: Stream, head: HeadSettings, *, with_entropy: bool
) -> LogprobOutput:
    """Log-probs (and entropies) of the completion tokens under ``model``: (B, C), float32, zero on padding.

    Args:
        stream: from :func:`pack_sequences`.
    """
    inputs: dict[str, Any] = {
        "input_ids": stream.token_ids_1S,
        "position_ids": stream.position_ids_1S,
        "logits_to_keep": stream.logit_index_N,
    }
    if install_attention_hook(base_model(model)):
        # Nothing reads it: of four axes, so that the model takes it as it is and builds no T x T mask.
        inputs["attention_mask"] = stream.token_ids_1S.new_zeros((1, 1, 1, 1), dtype=torch.bool)
        inputs["attend"] = stream.attention
    else:
        inputs |= stream.bounds()
    targets_1N = stream.target_N.unsqueeze(0)
    logps_1N, entropy_1N, _ = forward_logprobs(model, inputs, targets_1N, head, with_entropy=with_entropy)
    shape = batch.completion_ids_BT.shape

    def spread(values_1N: torch.Tensor) -> torch.Tensor:
        zeros = values_1N.new_zeros(shape.numel())
        return zeros.scatter(0, stream.output_index_N, values_1N[0]).view(shape)

    return LogprobOutput(spread(logps_1N), None if entropy_1N is None else spread(entropy_1N))
