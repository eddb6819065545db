"""Copies of a base model share its weights, and a layer adds the adapter of each row's run.

Files: ``commands/sweeps/adapters.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from support import runs

from groupwise.commands.sweeps.adapters import RowAdapters, check_adapter, lora_layers, shared_copy
from groupwise.cpu import install_cpu_training
from groupwise.cpu.linear import prepacked_weights
from groupwise.errors import ConfigError


def pointers(model: Any) -> set[int]:
    return {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}


def adapted(base: Any, seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    policy = get_peft_model(shared_copy(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return policy.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_copies_have_the_memory_of_the_base_and_states_of_their_own(tied):
    base = runs.policy(hidden_size=128, intermediate_size=128, tie_word_embeddings=tied)
    other = adapted(base, 0)
    frozen = {p.data_ptr() for name, p in other.named_parameters() if "lora" not in name}
    assert frozen <= pointers(base)
    assert all(parameter.requires_grad for parameter in base.parameters())
    assert not any(p.requires_grad for name, p in other.named_parameters() if "lora" not in name)
    inner = other.get_base_model()
    assert (inner.lm_head.weight is inner.model.embed_tokens.weight) is tied
    inner.config.use_cache = False
    inner.set_attn_implementation("eager")
    assert base.config.use_cache and base.config._attn_implementation != "eager"


def test_faster_linear_layers_keep_the_memory_shared():
    base = runs.policy(hidden_size=128, intermediate_size=128)
    copies = [shared_copy(base) for _ in range(3)]
    install_cpu_training(copies)
    assert all(pointers(made) == pointers(base) for made in copies)
    with prepacked_weights(copies[0]):
        assert all(layer.packing is None for layer in copies[1].modules() if hasattr(layer, "packing"))
    assert type(base.lm_head) is torch.nn.Linear  # replaced in the copies alone


def test_each_row_has_the_adapter_of_its_run():
    base = runs.policy(hidden_size=128, intermediate_size=128)
    settings = [
        {"r": 2},
        {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        {"r": 4, "target_modules": "all-linear", "rank_pattern": {"k_proj": 1}, "lora_dropout": 0.5},
    ]
    policies = {str(index): adapted(base, index, **given) for index, given in enumerate(settings)}
    joint = RowAdapters(shared_copy(base).eval())
    joint.load(policies)
    tokens = torch.randint(32, (5, 7))
    joint.assign(torch.tensor([2, 0, 1, 1, 0]))
    found = joint.model(tokens).logits
    for row, run in enumerate("20110"):
        expected = policies[run](tokens[row : row + 1]).logits[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-6)
    joint.load({"1": policies["1"]})  # the others are stopped
    joint.assign(torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(joint.model(tokens).logits, policies["1"](tokens).logits, rtol=1e-5, atol=1e-6)
    joint.unload()
    torch.testing.assert_close(joint.model(tokens).logits, base(tokens).logits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
    ],
)
def test_options_of_lora_that_the_sampler_does_not_have(given, message):
    with pytest.raises(ConfigError, match=message):
        check_adapter("one", LoraConfig(**given))


def test_other_adapters_and_layers_are_refused():
    with pytest.raises(ConfigError, match="type IA3"):
        check_adapter("one", IA3Config())
    policy = adapted(runs.policy(), 0, target_modules=["embed_tokens"])
    with pytest.raises(ConfigError, match="Embedding"):
        lora_layers("one", policy)


def test_options_that_runs_choose_freely():
    check_adapter(
        "one", LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", init_lora_weights="gaussian")
    )
