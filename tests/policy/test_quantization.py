"""Quantized policies that cannot be trained, or sampled from, are refused before their weights are loaded.

Files: ``compat/bitsandbytes.py``.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import policy, trainer
from transformers import BitsAndBytesConfig

from groupwise import ConfigError, GRPOConfig
from groupwise.generation.vllm import colocate
from groupwise.generation.vllm.colocate import adapter_arguments
from groupwise.policy import loading
from groupwise.policy.quantization import check_quantized, quantization_of

peft = pytest.importorskip("peft")

LORA = peft.LoraConfig(r=2, target_modules=["q_proj"])
FOUR, EIGHT = {"load_in_4bit": True}, {"load_in_8bit": True}
GPTQ = {"quant_method": "gptq", "bits": 4}


def config(**given: Any) -> GRPOConfig:
    return GRPOConfig("unused", use_cpu=True, bf16=False, **given)


def check(quantization: Any, adapter: Any, **given: Any) -> None:
    settings = config(model_init_kwargs={"quantization_config": quantization}, **given)
    adapters = [] if adapter is None else [adapter]
    check_quantized(quantization_of("no/such/model", settings), adapters, use_vllm=settings.use_vllm)


def refused(*arguments: Any, **given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check(*arguments, **given)
    return str(error.value)


@pytest.mark.parametrize("quantization", [FOUR, EIGHT], ids=["4", "8"])
@pytest.mark.parametrize("use_vllm", [False, True])
def test_without_an_adapter_the_error_names_it(quantization, use_vllm):
    message = refused(quantization, None, use_vllm=use_vllm)
    bits = 4 if quantization is FOUR else 8
    assert f"quantized by bitsandbytes to {bits} bits and has no adapter" in message
    assert "pass peft_config=LoraConfig(...)" in message


@pytest.mark.parametrize(
    ("quantization", "adapter", "message"),
    [
        (EIGHT, LORA, "by bitsandbytes to 8 bits, and vLLM samples only from policies that bitsandbytes"),
        (GPTQ, LORA, "quantized by gptq, and vLLM samples only"),
        (FOUR, peft.IA3Config(), "to 4 bits and has an adapter of type IA3, but only LoRA can be sent"),
    ],
)
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_what_vllm_cannot_sample_from_is_refused(quantization, adapter, message, mode):
    assert message in refused(quantization, adapter, use_vllm=True, vllm_mode=mode)


def test_adapters_on_quantized_weights_are_accepted():
    for mode in ("colocate", "server"):
        check(FOUR, LORA, use_vllm=True, vllm_mode=mode)
    for quantization in (FOUR, EIGHT, GPTQ):
        check(quantization, LORA)
    check(GPTQ, None)  # transformers knows which methods train without an adapter


def test_the_trainer_refuses_before_the_weights_are_loaded(tmp_path, monkeypatch):
    policy().save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "load_policy", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="has no adapter"):
        trainer(tmp_path, model=str(tmp_path), model_init_kwargs={"quantization_config": FOUR})


def test_the_quantization_of_a_checkpoint_is_found_in_its_config(tmp_path):
    policy().save_pretrained(tmp_path)
    assert quantization_of(str(tmp_path), config()) is None
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "bitsandbytes", **FOUR}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert quantization_of(str(tmp_path), config()).load_in_4bit
    given = BitsAndBytesConfig(load_in_8bit=True)
    assert quantization_of(str(tmp_path), config(), given) is given


def test_a_loaded_model_has_its_own():
    model = policy()
    assert quantization_of(model, config(model_init_kwargs={"quantization_config": FOUR})) is None
    adapted = peft.get_peft_model(policy(), LORA)
    for each in (model, adapted.get_base_model()):
        each.is_quantized, each.config.quantization_config = True, BitsAndBytesConfig(**FOUR)
    with pytest.raises(ConfigError, match="has no adapter"):
        colocate.check_policy(model)
    colocate.check_policy(adapted)


def test_by_default_only_the_adapter_of_a_quantized_policy_is_sent_to_a_colocated_engine():
    whole, quantized = SimpleNamespace(), SimpleNamespace(is_quantized=True)
    assert not colocate.sends_only_adapter(whole, {}) and colocate.sends_only_adapter(quantized, {})
    assert colocate.sends_only_adapter(whole, {"enable_lora": True})
    assert not colocate.sends_only_adapter(quantized, {"enable_lora": False})


def test_an_adapter_that_vllm_does_not_support_is_refused_with_advice_to_merge(tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model = peft.get_peft_model(policy(), lora)
    with pytest.raises(ConfigError, match=r"has use_dora.*\['enable_lora'\] to False to send merged weights"):
        adapter_arguments(model, str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "plugin", "expected"),
    [
        ({"dtype": "bfloat16"}, True, True),
        ({"dtype": "float16", "quantization": "bitsandbytes"}, True, True),
        ({"dtype": "bfloat16"}, False, False),
        ({"dtype": "float32"}, True, False),
        ({"dtype": "bfloat16", "quantization": "fp8"}, True, False),
    ],
)
def test_the_engine_has_4_bits_with_the_plugin_in_16_bits(monkeypatch, caplog, arguments, plugin, expected):
    monkeypatch.setattr(colocate.compat, "has_bitsandbytes", lambda: plugin)
    model = SimpleNamespace(is_quantized=True, num_parameters=lambda: 3_000_000_000)
    with caplog.at_level(logging.WARNING):
        assert colocate.loads_quantized(model, arguments) is expected
    assert not colocate.loads_quantized(SimpleNamespace(), arguments)
    size = 12 if arguments["dtype"] == "float32" else 6
    warned = not expected and "quantization" not in arguments
    assert (f"{size}.0 GB" in caplog.text and "vllm-bnb-plugin" in caplog.text) is warned
