"""Checkpoints with other weights than the model in memory: experts saved one by one, heads of MTP."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import runs
from support.architectures import STATES, build
from transformers import MixtralConfig, MixtralForCausalLM

from groupwise.errors import ConfigError
from groupwise.hf.checkpointing import has_converted_names


def experts() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=32, num_key_value_heads=1, num_local_experts=2, **sizes, **ends)
    )


def test_a_mixture_of_experts_resumes_with_its_weights(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = runs.trainer(tmp_path / "whole", model=experts(), **settings)
    assert whole.logprob_computer.layout == "shared_prefix"
    whole.train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    assert has_converted_names(checkpoint, whole.model)
    resumed = runs.trainer(tmp_path / "resumed", model=experts(), **settings)
    resumed.train(resume_from_checkpoint=checkpoint)
    for (name, one), two in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    runs.policy().save_pretrained(tmp_path / "checkpoint-1")
    trainer = runs.trainer(tmp_path, model=experts())
    with pytest.raises(ConfigError, match=r"lacks \d+ weights of a MixtralForCausalLM"):
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))


def test_heads_of_multi_token_prediction_are_neither_trained_nor_saved(tmp_path):
    """transformers does not load them."""
    base = tmp_path / "base"
    build(*STATES["qwen3_5"]).save_pretrained(base)
    file = base / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.ones(4, 4)}, file, metadata={"format": "pt"})
    run = runs.trainer(tmp_path / "run", model=str(base), max_steps=1, model_init_kwargs={"dtype": "float32"})
    assert not any("mtp" in name for name, _ in run.model.named_parameters())
    run.train()
    run.save_model()
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == load_file(file).keys() - {"mtp.fc.weight"}
