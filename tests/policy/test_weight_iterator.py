"""The stream of weights is what a checkpoint of the model holds, whatever wraps the model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.runs import policy
from support.workers.launch import run_ranks
from torch.nn import DataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from groupwise.errors import BackendError, ConfigError
from groupwise.generation.vllm.colocate import adapter_arguments
from groupwise.policy.introspection import unwrapped
from groupwise.policy.quantization import keep_4bit_weights_unpacked
from groupwise.policy.weight_iterator import base_weights, buckets, gatherable, rounded, weight_iterator

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


def test_unwrapping_looks_for_deepspeed_below_a_wrapper_alone(monkeypatch):
    """It is called dozens of times a step, and accelerate reads the metadata of the package in every call."""
    model, calls = policy(), []
    compiled = torch.compile(model)
    monkeypatch.setattr("accelerate.utils.other.is_deepspeed_available", lambda: calls.append(1))
    assert unwrapped(model) is model and gatherable(model) is model and not calls
    assert unwrapped(compiled) is unwrapped(DataParallel(model)) is model
    assert gatherable(compiled) is compiled and len(calls) == 3


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


def test_trained_rows_of_tied_weights_are_merged_once(tmp_path):
    model = with_adapter(policy(tie_word_embeddings=True), trainable_token_indices=[3, 4])
    expected = checkpoint(copy.deepcopy(model).merge_and_unload(), tmp_path)
    base = policy(tie_word_embeddings=True).get_input_embeddings().weight
    changed = (expected["model.embed_tokens.weight"] != base).any(1).nonzero().flatten()
    assert changed.tolist() == [3, 4] and "lm_head.weight" not in expected
    assert_same(weight_iterator(model), expected, rtol=1e-6, atol=1e-7)


def test_an_adapter_of_the_head_is_merged(tmp_path):
    adapted = get_peft_model(policy(), LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    expected = checkpoint(copy.deepcopy(adapted).merge_and_unload(), tmp_path)
    assert (expected["lm_head.weight"] != policy().lm_head.weight).any()
    assert_same(weight_iterator(adapted), expected, rtol=1e-6, atol=1e-7)


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


def test_matrices_are_rounded_to_the_widest_dtype_of_the_engines():
    given = {
        "matrix": torch.randn(8, 8),
        "vector": torch.randn(8),
        "half": torch.randn(8, 8).half(),
        "ids": torch.ones(2, 2, dtype=torch.int64),
    }
    sent = dict(rounded(given.items(), ["bfloat16", "float16"]))
    assert sent["matrix"].dtype == torch.bfloat16
    # The engine's own rounding of what it loads: a copy into a parameter of its dtype.
    assert torch.equal(sent["matrix"], torch.empty(8, 8, dtype=torch.bfloat16).copy_(given["matrix"]))
    assert all(sent[name] is given[name] for name in ("vector", "half", "ids"))
    wide = dict(rounded(given.items(), ["bfloat16", "float32"]))
    assert all(wide[name] is given[name] for name in given)


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_models_are_gathered(tmp_path):
    worker = Path(__file__).parents[1].joinpath("support", "workers", "sharded_worker.py")
    done = run_ranks(worker, tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    line = "gathered: plain lora policy-True policy-False tied-True tied-False lora-True lora-False"
    assert done.stdout.count(line) == 2


def test_the_weights_below_an_adapter_are_those_of_the_base(tmp_path):
    expected = checkpoint(policy(), tmp_path)
    assert_same(base_weights(with_adapter(policy())), expected, rtol=0, atol=0)


# With AVX512, bitsandbytes 0.50 dequantizes matrices that are narrower than its blocks of 64 wrongly.
WIDE = {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": True}


def four_bit_policy(directory, shape=WIDE, dtype=torch.float32, **adapter):
    """A 4-bit policy with an adapter, and the checkpoint that it was loaded from."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    original = checkpoint(policy(**shape), directory)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config, dtype=dtype)
    assert isinstance(model.model.layers[0].self_attn.q_proj, bitsandbytes.nn.Linear4bit)
    keep_4bit_weights_unpacked(model)  # as the trainer does
    return with_adapter(model, **adapter), original


UNTIED = {**WIDE, "tie_word_embeddings": False}
BIASED = {**WIDE, "attention_bias": True}


@pytest.mark.parametrize(
    ("shape", "adapter"),
    [
        (WIDE, {}),
        (WIDE, {"use_rslora": True, "lora_alpha": 3}),
        (WIDE, {"use_dora": True}),
        (UNTIED, {"modules_to_save": ["lm_head"]}),
        (BIASED, {"bias": "all"}),
    ],
    ids=["lora", "rslora", "dora", "saved_module", "bias"],
)
def test_adapters_are_merged_into_the_matrices_of_4_bit_weights(tmp_path, shape, adapter):
    model, original = four_bit_policy(tmp_path, shape, **adapter)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        logits = model(ids).logits
    before = {name: (parameter, parameter.data.clone()) for name, parameter in model.named_parameters()}
    got = dict(weight_iterator(model))
    assert got.keys() == original.keys()
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter.data, before[name][1]), name
    plain = policy(**shape)
    plain.load_state_dict(got, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, logits, rtol=0, atol=1e-5)
        with model.disable_adapter():
            assert (model(ids).logits - logits).abs().max() > 1e-3
        assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-22), (torch.bfloat16, 1.001 * 2**-8)])
def test_a_merged_4_bit_weight_is_rounded_once(tmp_path, dtype, rounding):
    """The sum of the dequantized matrix and the adapter's product is correct to the last bit of its dtype."""
    model, _ = four_bit_policy(tmp_path, dtype=dtype)
    got, base = dict(weight_iterator(model)), dict(base_weights(model))
    for path, layer in model.get_base_model().named_modules():
        if any(path.endswith(name) for name in LAYERS):
            left, right = layer.lora_B.default.weight.double(), layer.lora_A.default.weight.double()
            product = layer.scaling["default"] * left @ right
            expected = base[f"{path}.weight"].double() + product
            merged = got[f"{path}.weight"]
            assert merged.dtype == dtype and product.abs().max() > 0.01
            # float32: of the largest weight, because the product of matrices is rounded too
            scale = expected.abs() if dtype == torch.bfloat16 else expected.abs().max()
            assert ((merged.double() - expected).abs() <= rounding * scale + 1e-7).all(), path


def test_8_bit_and_sharded_weights_are_refused(tmp_path):
    model, _ = four_bit_policy(tmp_path)
    layer = model.get_base_model().model.layers[0].self_attn.k_proj
    # Sharding replaces a parameter by a tensor without the quantization state.
    layer.weight = torch.nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    layer.weight.full_tensor = lambda: pytest.fail("gathered")
    with pytest.raises(BackendError, match=r"k_proj\.weight is quantized .* without FSDP and ZeRO-3"):
        dict(weight_iterator(model))
    config = BitsAndBytesConfig(load_in_8bit=True)
    eight = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    with pytest.raises(BackendError, match="is quantized to 8 bits"):
        dict(weight_iterator(eight))


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
    plain = policy(**WIDE)
    plain.load_state_dict(got, strict=False)
    ids = torch.arange(2, 12)[None]
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_4_bit_weights_are_saved_as_a_checkpoint_that_loads_without_loss(tmp_path):
    model, _ = four_bit_policy(tmp_path / "original")
    saved = tmp_path / "saved"
    saved.mkdir()
    arguments = adapter_arguments(model, str(saved), quantized=True)
    assert arguments["load_format"] == "bitsandbytes" and arguments["enable_lora"]
    assert arguments["max_lora_rank"] == 8  # the least that vLLM has for a rank of 4
    model.get_base_model().config.save_pretrained(saved)
    loaded = AutoModelForCausalLM.from_pretrained(saved)  # its config has the quantization
    keep_4bit_weights_unpacked(loaded)
    ids = torch.arange(2, 12)[None]
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_weights_that_a_cpu_repacked_are_refused(tmp_path):
    """As of a model that generated before it was given to the trainer, on a CPU with AVX512_BF16."""
    model, _ = four_bit_policy(tmp_path)
    functional = pytest.importorskip("bitsandbytes.functional")
    layers = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
        layer.weight.data, _ = functional._convert_weight_packed_for_cpu(
            layer.weight.data, layer.weight.quant_state
        )
    with pytest.raises(ConfigError, match=r"14 4-bit layers were repacked .* load the model anew"):
        keep_4bit_weights_unpacked(model)
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
