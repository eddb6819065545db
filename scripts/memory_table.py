"""Table of the memory that weights, gradients and optimizer take, by size of the model: ``docs/lora.md``.

Computed from shapes on the meta device, which need no memory:
weights + gradients + two AdamW states of the trained parameters. Activations come on top.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

#: Shapes of the published models: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied.
SHAPES = {
    "SmolLM2-135M": (LlamaConfig, 576, 1536, 30, 9, 3, 49152, True),
    "Qwen2.5-0.5B": (Qwen2Config, 896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (Qwen2Config, 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-7B": (Qwen2Config, 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-32B": (Qwen2Config, 5120, 27648, 64, 40, 8, 152064, False),
}
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
#: Bytes per weight: 4 bits, and a float32 scale for every 64 weights.
NF4_BYTES = 0.5 + 4 / 64


def memory_section() -> str:
    """Return the section: how the table is computed, and the table."""
    lines = [
        "## Memory by model size",
        "",
        "Weights, gradients and the two states of AdamW, by arithmetic, not",
        "measured. Trained weights, their gradients and states are float32. The adapter has rank 16, on all",
        "linear layers. In 4 bits, each 64 weights have a float32 scale; embeddings and norms are bfloat16.",
        "SmolLM2-135M, loaded here, has these sizes.",
        "",
        "| model | parameters | all weights, float32 | LoRA, float32 base | bfloat16 base "
        "| QLoRA, 4-bit base | adapter |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, shape in SHAPES.items():
        total, quantizable, adapter = parameter_counts(make_config(*shape))
        trained = 4 * adapter * 4  # float32: weights, gradients and two AdamW states
        four_bits = NF4_BYTES * quantizable + 2 * (total - quantizable)
        sizes = (4 * total * 4, 4 * total + trained, 2 * total + trained, four_bits + trained)
        cells = [_gb(size) for size in sizes]
        lines.append(f"| {name} | {total / 1e9:.3g}e9 | {' | '.join(cells)} | {adapter / 1e6:.3g}e6 |")
    return "\n".join(lines)


def make_config(
    kind: type[PretrainedConfig],
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool,
) -> PretrainedConfig:
    """Return the configuration of a row of ``SHAPES``."""
    return kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def parameter_counts(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the numbers of all parameters, of those that 4 bits store, and of the adapter's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        total = sum(parameter.numel() for parameter in model.parameters())
        linear = [
            m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n
        ]
        quantizable = sum(module.weight.numel() for module in linear)
        adapted = get_peft_model(model, LORA, low_cpu_mem_usage=True)
    adapter = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    return total, quantizable, adapter


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
