"""Model options with vision-language models, compared with a run without them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support import tiny_vlm as tiny

TWO_FAMILIES = pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])  # with tied weights, and without


def trained(directory: Any, family: str, **settings: Any) -> dict[str, torch.Tensor]:
    """The weights after one update from the same completions."""
    run = tiny.trainer(directory, family, max_steps=1, optim="sgd", learning_rate=0.1, **settings)
    run.train()
    return dict(run.model.named_parameters())


def gaps(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.slow
@TWO_FAMILIES
def test_cast_lm_head_to_fp32_computes_logits_in_float32(family, tmp_path):
    """On the hidden states of a bfloat16 model, the float32 head equals a float64 reference."""
    model, processor = tiny.build(family)
    run = tiny.trainer(
        tmp_path, family, model=model.bfloat16(), processing_class=processor, cast_lm_head_to_fp32=True
    )
    assert run.model.get_output_embeddings().weight.dtype == torch.float32
    seen = []
    run.model.get_output_embeddings().register_forward_hook(
        lambda m, given, out: seen.append((given[0], out))
    )
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": tiny.image("red")}]}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        run.model(**inputs)
    ((hidden, scores),) = seen
    head = run.model.get_output_embeddings().weight
    truth = hidden.double() @ head.double().T
    assert scores.dtype == torch.float32
    assert (scores - truth).abs().max() < 1e-5 * truth.abs().max()
    plain = hidden.bfloat16() @ head.bfloat16().T
    assert (plain - truth).abs().max() > 1e-4 * truth.abs().max()  # bfloat16 is not as precise
    run.train()
    assert all(torch.isfinite(weight).all() for weight in run.model.parameters())


@pytest.mark.slow
@TWO_FAMILIES
def test_disable_dropout_applies_to_the_whole_model(family, tmp_path):
    model, processor = tiny.build(family)
    for config in (model.config, model.config.get_text_config(), model.config.vision_config):
        config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    arguments = {"model": model, "processing_class": processor}
    off = trained(tmp_path / "off", family, disable_dropout=True, **arguments)
    assert gaps(off, trained(tmp_path / "none", family)) == 0.0


@pytest.mark.slow
@TWO_FAMILIES
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_the_liger_loss_makes_the_same_update(family, tmp_path):
    before = dict(tiny.build(family)[0].named_parameters())
    plain = trained(tmp_path / "plain", family)
    liger = trained(tmp_path / "liger", family, use_liger_kernel=True)
    moved = gaps(plain, before)
    assert moved > 1e-4 and gaps(liger, plain) < 1e-3 * moved
