"""The stream of weights is what a checkpoint of the model holds, whatever wraps the model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.launch import run_ranks
from support.runs import policy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from groupwise.errors import BackendError
from groupwise.generation.vllm.weight_sync import adapter_arguments
from groupwise.generation.weight_iterator import base_weights, buckets, weight_iterator

LAYERS = ["q_proj", "v_proj", "down_proj"]


def checkpoint(model, directory):
    model.save_pretrained(directory)
    return load_file(Path(directory) / "model.safetensors")


def assert_same(stream, expected, **tolerance):
    got = dict(stream)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, **tolerance, msg=name)


def with_adapter(model, **settings):
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=LAYERS, task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    with torch.no_grad():  # a fresh adapter changes nothing
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_model_streams_its_checkpoint(tmp_path, tied):
    model = policy(tie_word_embeddings=tied)
    expected = checkpoint(model, tmp_path)
    assert ("lm_head.weight" in expected) is not tied
    assert_same(weight_iterator(model), expected, rtol=0, atol=0)


def test_a_compiled_layer_and_wrapped_modules_keep_their_names(tmp_path):
    model = policy()
    expected = checkpoint(model, tmp_path)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert_same(weight_iterator(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 4]}],
    ids=["lora", "dora", "saved_module", "trainable_tokens"],
)
def test_adapters_are_merged_and_the_policy_stays_as_it_is(tmp_path, settings):
    model = with_adapter(policy(), **settings)
    merged = copy.deepcopy(model).merge_and_unload()
    expected = checkpoint(merged, tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    ids = torch.arange(2, 12)[None]
    logits = model(ids).logits
    assert_same(weight_iterator(model), expected, rtol=1e-6, atol=1e-7)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert torch.equal(model(ids).logits, logits)


def test_disabled_adapters_are_not_merged(tmp_path):
    base = policy()
    expected = checkpoint(base, tmp_path)
    model = with_adapter(base)
    with model.disable_adapter():
        assert_same(weight_iterator(model), expected, rtol=0, atol=0)


def test_an_adapter_on_one_of_two_tied_layers_is_refused():
    model = policy(tie_word_embeddings=True)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(BackendError, match=r"lm_head.*tied"):
        list(weight_iterator(adapted))


def test_names_and_shapes_are_those_of_checkpoints_where_the_model_has_others_in_memory(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**shape, **heads))
    expected = checkpoint(model, tmp_path)
    assert any(".experts.3." in name for name in expected)  # in memory all experts are one tensor
    assert_same(weight_iterator(model), expected, rtol=0, atol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(weight_iterator(loaded), expected, rtol=0, atol=0)


def test_buckets_hold_consecutive_weights_up_to_their_limit():
    pairs = [("a", torch.zeros(10)), ("b", torch.zeros(10)), ("c", torch.zeros(100)), ("d", torch.zeros(1))]
    got = [[name for name, _ in bucket] for bucket in buckets(iter(pairs), limit=80)]
    assert got == [["a", "b"], ["c"], ["d"]]  # 40 bytes each fit twice; 400 bytes do not fit at all


@pytest.mark.distributed
def test_sharded_models_are_gathered(tmp_path):
    worker = Path(__file__).parents[1].joinpath("support", "sharded_worker.py")
    done = run_ranks(worker, tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    line = "gathered: plain lora policy-True policy-False tied-True tied-False lora-True lora-False"
    assert done.stdout.count(line) == 2


def test_the_weights_below_an_adapter_are_those_of_the_base(tmp_path):
    expected = checkpoint(policy(), tmp_path)
    assert_same(base_weights(with_adapter(policy())), expected, rtol=0, atol=0)


def four_bit_policy(directory):
    """A 4-bit policy with an adapter, and the checkpoint that it was loaded from."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    original = checkpoint(policy(tie_word_embeddings=True, hidden_size=64), directory)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
    assert isinstance(model.model.layers[0].self_attn.q_proj, bitsandbytes.nn.Linear4bit)
    return with_adapter(model), original


def test_the_4_bit_weights_below_an_adapter_are_those_that_its_layers_compute_with(tmp_path):
    model, original = four_bit_policy(tmp_path)
    got = dict(base_weights(model))
    assert got.keys() == original.keys()
    quantized = 0
    for name, tensor in original.items():
        exact = torch.equal(got[name], tensor)
        quantized += not exact
        # 16 levels of nf4, at most 0.15 of a block's largest weight from the next one
        assert exact or (got[name] - tensor).abs().max() < 0.16 * tensor.abs().max()
    assert quantized == 14  # seven layers in each of two blocks
    plain = policy(tie_word_embeddings=True, hidden_size=64)
    plain.load_state_dict(got, strict=False)
    ids = torch.arange(2, 12)[None]
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    with pytest.raises(BackendError, match="is quantized and cannot be sent"):
        dict(weight_iterator(model))


def test_4_bit_weights_are_saved_as_a_checkpoint_that_loads_without_loss(tmp_path):
    model, _ = four_bit_policy(tmp_path / "original")
    saved = tmp_path / "saved"
    saved.mkdir()
    arguments = adapter_arguments(model, str(saved), quantized=True)
    assert arguments["load_format"] == "bitsandbytes" and arguments["enable_lora"]
    assert arguments["max_lora_rank"] == 8  # the least that vLLM has for a rank of 4
    model.get_base_model().config.save_pretrained(saved)
    loaded = AutoModelForCausalLM.from_pretrained(saved)  # its config has the quantization
    ids = torch.arange(2, 12)[None]
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
