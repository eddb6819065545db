"""``cache_implementation``: another cache, the same tokens."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from support import runs
from torch import nn

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.generation.transformers_backend import make_backend
from groupwise.policy.introspection import base_model

PROMPTS = [[4, 5, 6], [9], [7, 8, 9, 10, 11]]


def greedy(tmp_path, **given):
    fixed = {"bf16": False, "use_cpu": True, "report_to": "none", "max_completion_length": 6}
    config = GRPOConfig(str(tmp_path), generation_kwargs={"do_sample": False}, **fixed, **given)
    model = runs.policy()
    return make_backend(lambda: model, config, runs.tokenizer()).generate(PROMPTS)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_every_cache_gives_the_same_completions(name, tmp_path):
    assert greedy(tmp_path, cache_implementation=name) == greedy(tmp_path)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["auto", "dynamic", "static"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_sampling_computes_in_the_dtype_of_training(name, adapter, weights, tmp_path):
    """Under bf16 the linear layers of the policy give bfloat16 in both phases, below an adapter too."""
    given = {"peft_config": LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")} if adapter else {}
    given |= {"model": runs.policy().to(getattr(torch, weights)), "bf16": True, "cache_implementation": name}
    if (name, weights) == ("static", "float32"):
        with pytest.raises(ConfigError, match="keys in float32 and values in bfloat16; set bf16=False"):
            runs.trainer(tmp_path, **given)
        return
    trainer, seen = runs.trainer(tmp_path, max_steps=1, **given), set()
    for layer in trainer.model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.dtype == getattr(torch, weights):
            layer.register_forward_hook(lambda layer, _, out: seen.add((generating, out.dtype)))
    generating, generate = False, trainer.backend.generate

    def sample(*arguments):
        nonlocal generating
        generating = True
        try:
            return generate(*arguments)
        finally:
            generating = False

    trainer.backend.generate = sample
    trainer.train()
    assert seen >= {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert {dtype for sampled, dtype in seen if sampled} == {torch.bfloat16}
    assert not adapter or "forward" not in vars(base_model(trainer.model))  # that of the class again
