"""Adapters on a quantised base, on bitsandbytes' own layers for CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs
from support.architectures import STATES, build
from transformers import BitsAndBytesConfig

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
EIGHT = BitsAndBytesConfig(load_in_8bit=True)
FOUR = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)


def quantised_run(directory: Path, config: BitsAndBytesConfig, **settings: Any) -> Any:
    runs.policy(**SHAPE).save_pretrained(directory / "base")
    return runs.trainer(
        directory / "run",
        model=str(directory / "base"),
        model_init_kwargs={"quantization_config": config, "dtype": "float32"},
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
        **{"max_steps": 2, "beta": 0.1, **settings},
    )


def dense(module: Any) -> torch.Tensor:
    """The weight that a quantised layer stands for."""
    weight = module.weight
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.data.float() * (weight.SCB[:, None] / 127)


# 8-bit layers round their inputs to one of 255 steps as well.
@pytest.mark.slow
@pytest.mark.parametrize(("config", "tolerance"), [(EIGHT, 5e-2), (FOUR, 1e-4)], ids=["8-bit", "4-bit"])
def test_adapters_train_on_a_quantised_base(config, tolerance, tmp_path):
    run = quantised_run(tmp_path, config)
    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    layers = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): module
        for name, module in run.model.named_modules()
        if isinstance(module, kinds) and not name.endswith("v_proj") and not name.endswith("q_proj")
    }
    assert len(layers) == 14  # seven in each of two blocks
    truth = runs.policy(**SHAPE)
    stored = {name: module.weight.data.clone() for name, module in layers.items()}
    for name, module in layers.items():
        own, weight = truth.get_submodule(name).weight, dense(module)
        assert not torch.equal(own, weight)
        own.data.copy_(weight)
    tokens = torch.tensor([[5, 9, 12, 7, 1]])
    run.model.eval()  # as while sampling
    with torch.no_grad():
        mine, theirs = (m(input_ids=tokens).logits.log_softmax(-1) for m in (run.model, truth))
    assert (mine - theirs).abs().max() < tolerance
    run.train()
    logs = [line for line in run.state.log_history if "grad_norm" in line]
    assert len(logs) == 2 and all(line["grad_norm"] > 0 for line in logs)
    assert logs[1]["kl"] > 0  # the adapters have moved away from the base
    assert all(torch.equal(module.weight.data, stored[name]) for name, module in layers.items())


@pytest.mark.slow
def test_layouts_agree_and_a_resumed_run_repeats_the_run(tmp_path):
    """Log-probs of the policy, and of the reference without the adapter, go through the 4-bit layers."""
    trained = {}
    for layout in ("padded", "packed", "shared_prefix"):
        settings = {"sequence_layout": layout, "save_strategy": "steps", "save_steps": 1}
        run = quantised_run(tmp_path / layout, FOUR, **settings)
        assert type(run.reference).__name__ == "DisabledAdapter"
        run.train()
        assert run.logprob_computer.layout == layout and run.logprob_computer.head.name == "chunked"
        trained[layout] = adapter(run)
    for layout in ("packed", "shared_prefix"):
        for name, weight in trained[layout].items():
            torch.testing.assert_close(weight, trained["padded"][name], rtol=0, atol=1e-5)
    resumed = quantised_run(tmp_path / "packed", FOUR, sequence_layout="packed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "packed" / "run" / "checkpoint-1"))
    assert all(torch.equal(weight, trained["packed"][name]) for name, weight in adapter(resumed).items())
    saved = {path.name for path in (tmp_path / "packed" / "run" / "checkpoint-2").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved


def adapter(run: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in run.model.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_a_hybrid_model_in_4_bits_computes_each_prompt_once(tmp_path):
    """Adapters on projections of linear attention, two steps in both layouts."""
    build(*STATES["qwen3_5"]).save_pretrained(tmp_path / "base")
    adapters = {}
    for layout in ("forked", "padded"):
        run = runs.trainer(
            tmp_path / layout,
            model=str(tmp_path / "base"),
            model_init_kwargs={"quantization_config": FOUR, "dtype": "float32"},
            peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["in_proj_qkv", "q_proj"]),
            **{"max_steps": 2, "sequence_layout": layout, "learning_rate": 1e-3},
        )
        assert any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in run.model.modules())
        run.train()
        assert run.logprob_computer.layout == layout
        adapters[layout] = {name: p.detach() for name, p in run.model.named_parameters() if p.requires_grad}
    assert any("in_proj_qkv" in name for name in adapters["forked"])
    moved = 0.0
    for name, weight in adapters["forked"].items():
        torch.testing.assert_close(weight, adapters["padded"][name], atol=1e-5, rtol=0, msg=name)
        moved = max(moved, weight.abs().max().item() if "lora_B" in name else 0.0)
    assert moved > 1e-4  # B begins at zero
