"""Log-probs in the layouts without padding (`packed`, `shared_prefix`), and the models that support them."""

from __future__ import annotations

import torch
from torch import nn

from groupwise.compat.transformers import attention_implementation, is_stateful
from groupwise.policy.attention import has_varlen_attention, install_attention_hook
from groupwise.policy.introspection import accepted_arguments, base_model, has_prompt_learning, is_text_only
from groupwise.policy.layouts.forward import HeadSettings, ModelInputs, forward_logprobs
from groupwise.policy.layouts.packed import PackedSequences
from groupwise.records import LogprobOutput, TokenBatch

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def unsupported(model: nn.Module, *, shared: bool = True) -> str | None:
    """Return the reason why ``model`` cannot use a layout without padding; None if it can.

    Installs the attention hook if the model supports it. Packing requires that attention is the only
    computation across tokens and that it is a softmax over keys selected by position.

    Args:
        model: causal LM, wrapped or not.
        shared: also require support for prompts that are computed once per group.
    """
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    other_layers = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    missing = {"position_ids", "logits_to_keep"} - accepted_arguments(model)
    if has_prompt_learning(model):
        return "its adapter adds virtual tokens to every prompt"
    if not is_text_only(model):
        return "it has a vision or audio part"
    if getattr(config, "is_encoder_decoder", False) or is_stateful(base):
        return "it does not consist of attention layers alone"
    if other_layers:
        return f"it has layers of type {', '.join(sorted(other_layers))}"
    if missing:
        return f"its forward does not accept {' and '.join(sorted(missing))}"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in base.named_parameters()):
        return "its attention has sinks"
    if any(_attention_dropout(module) for module in base.modules()):
        return "its attention has dropout"
    if not supports_packing(base, shared=shared):
        return f"its attention implementation is {attention_implementation(base)!r} and not 'sdpa'"
    return None


def supports_packing(model: nn.Module, *, shared: bool) -> bool:
    """Return True if the model's attention can separate packed sequences; installs the hook if possible."""
    return install_attention_hook(model) or (not shared and has_varlen_attention(model))


def _attention_dropout(module: nn.Module) -> float:
    """Return the dropout probability, a number or an attribute of a ``Dropout`` module."""
    dropout = getattr(module, "attention_dropout", None) or getattr(module, "attn_dropout", None)
    return getattr(dropout, "p", dropout) or 0.0


def compute_packed_logprobs(
    model: nn.Module, batch: TokenBatch, packed: PackedSequences, head: HeadSettings, *, with_entropy: bool
) -> LogprobOutput:
    """Compute log-probs (and entropies) of the completion tokens under ``model``.

    Args:
        model: causal LM, wrapped or not; :func:`unsupported` returned None for it.
        packed: the same sequences from :func:`pack_sequences`.

    Returns:
        log-probs and entropies (B, T), float32, zero on padding.
    """
    inputs: ModelInputs = {
        "input_ids": packed.token_ids_1S,
        "position_ids": packed.position_ids_1S,
        "logits_to_keep": packed.logit_index_N,
    }
    if install_attention_hook(base_model(model)):
        # A placeholder: given a mask of four axes, the model builds no S x S mask of its own.
        inputs["attention_mask"] = packed.token_ids_1S.new_zeros((1, 1, 1, 1), dtype=torch.bool)
        inputs["attention_function"] = packed.attention
    else:
        inputs.update(packed.varlen_kwargs())
    targets_1N = packed.target_N.unsqueeze(0)
    logps_1N, entropy_1N, _ = forward_logprobs(
        model, inputs, targets_1N, head, with_entropy=with_entropy, kept=packed.kept
    )
    shape = batch.completion_ids_BT.shape

    def unpack(values_1N: torch.Tensor) -> torch.Tensor:
        zeros = values_1N.new_zeros(shape.numel())
        return zeros.scatter(0, packed.output_index_N, values_1N[0]).view(shape)

    return LogprobOutput(unpack(logps_1N), None if entropy_1N is None else unpack(entropy_1N))
