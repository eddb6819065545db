"""Frozen weights held in autocast's dtype: the bits of the run with float32 weights, in half of the memory.

Files: ``policy/frozen_weights.py``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.runs import policy, trainer

from groupwise.commands.sweeps.adapters import shared_copy
from groupwise.cpu.linear import OneDNNLinear
from groupwise.policy import frozen_weights
from groupwise.policy.frozen_weights import FrozenLinear
from groupwise.policy.weight_iterator import base_weights, weight_iterator
from groupwise.records.fast_paths import FastPath

peft = pytest.importorskip("peft")

ROWS = [{"prompt": "w1 w2", "row": 0}] * 4
#: Projections of queries are computed by oneDNN, those of keys and values by PyTorch; the MLP has no adapter.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 1, "attention_bias": True}


def published(**changes):
    """A policy whose float32 weights are exact in bfloat16, as after loading a published checkpoint."""
    return policy(**{**SIZES, **changes}).bfloat16().float()


def make(directory, model=None, **given):
    kind = given.pop("kind", peft.LoraConfig)
    adapter = kind(
        **{"r": 4, "target_modules": ["q_proj", "k_proj", "o_proj"], "task_type": "CAUSAL_LM"}
        | given.pop("lora", {})
    )
    model = published() if model is None else model
    return trainer(directory, model=model, peft_config=adapter, **{"bf16": True, "beta": 0.04, **given})


@pytest.fixture
def in_float32(monkeypatch):
    """Keep the frozen weights of a trainer as they are."""

    def build(*arguments, **given):
        with monkeypatch.context() as patch:
            patch.setattr(frozen_weights, "hold_frozen_weights", lambda *_: FastPath("frozen weights", "off"))
            return make(*arguments, **given)

    return build


def parameters(run):
    return {name: p.detach() for name, p in run.model.named_parameters()}


@pytest.mark.slow
def test_two_steps_give_the_bits_of_float32_weights_in_half_of_the_memory(tmp_path, in_float32):
    runs = [build(tmp_path, lora={"lora_dropout": 0.0}) for build in (make, in_float32)]
    for run in runs:
        run.train()
    held, wide = map(parameters, runs)
    assert any(p.any() for name, p in held.items() if "lora_B" in name)
    half = [name for name in held if held[name].dtype == torch.bfloat16]
    # q, k, v, o, gate, up and down of two layers; biases, norms, embeddings and the output layer are float32.
    assert len(half) == 14 and all(name.endswith("weight") and "_proj" in name for name in half)
    assert sum(held[name].nbytes for name in half) * 2 == sum(wide[name].nbytes for name in half)
    assert {type(module) for module in runs[0].model.modules()} >= {OneDNNLinear, FrozenLinear}
    for name in held:
        assert torch.equal(held[name].float(), wide[name]), name
    tokens = [
        [c.token_ids for c in run.generate_rollouts(run.make_request(ROWS)).completions] for run in runs
    ]
    assert tokens[0] == tokens[1]
    assert "frozen weights: bfloat16" in map(str, runs[0].fast_paths())


@pytest.mark.slow
@pytest.mark.parametrize("merged", [True, False])
def test_engines_and_merged_models_get_the_sums_of_float32(merged, tmp_path, in_float32):
    runs = [build(tmp_path, max_steps=1) for build in (make, in_float32)]
    for run in runs:
        run.train()
    iterate = weight_iterator if merged else base_weights
    sent, expected = (dict(iterate(run.model)) for run in runs)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name].float(), expected[name]) for name in expected)
    assert all(p.dtype == torch.bfloat16 for n, p in parameters(runs[0]).items() if "base_layer.weight" in n)
    if merged:
        sums = [run.model.merge_and_unload().state_dict() for run in runs]
        assert all(torch.equal(sums[0][name].float(), sums[1][name]) for name in sums[1])


@pytest.mark.slow
def test_a_resumed_run_and_a_loaded_adapter_are_those_of_one_run(tmp_path):
    run = make(tmp_path, save_strategy="steps", save_steps=1)
    run.train()
    again = make(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected, resumed = parameters(run), parameters(again)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    saved = (tmp_path / "checkpoint-2" / "adapter_model.safetensors").stat().st_size
    assert saved < sum(p.nbytes for name, p in expected.items() if "lora_" in name) + 20_000
    loaded = dict(peft.PeftModel.from_pretrained(published(), tmp_path / "checkpoint-2").named_parameters())
    assert all(torch.equal(loaded[name], expected[name].float()) for name in expected)


def test_a_policy_computes_outside_autocast_as_before(tmp_path):
    """As user code does that samples with the model after training."""
    model = published()
    before = copy.deepcopy(model)
    run = make(tmp_path, model)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad(), run.model.disable_adapter():
        given = run.model.get_base_model()(ids).logits  # below accelerate's autocast
    torch.testing.assert_close(given, before(ids).logits, atol=1e-6, rtol=1e-6)
    assert given.dtype == torch.float32
    assert run.model.generate(input_ids=ids, max_new_tokens=3).shape == (1, 13)


def test_weights_that_the_dtype_would_round_stay_as_they_are(tmp_path):
    model = published()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1 + 2**-10
    run = make(tmp_path, model)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert model.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16
    assert str(run.frozen_weights[0]) == ("frozen weights: bfloat16 (1 of 14 matrices are not exact in it)")
    layer = torch.nn.Linear(2, 2)
    layer.weight.data = torch.tensor([[2.0**-14, 2.0**-24], [1.5, 60000.0]])
    assert frozen_weights._hold(layer, torch.float16) and type(layer) is FrozenLinear
    layer.weight.data = torch.tensor([[1e-8]])
    assert not frozen_weights._hold(layer, torch.float16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bf16": False}, "nothing is cast"),
        ({"kind": peft.LoHaConfig}, "adapters other than plain LoRA compute with the weights"),
        ({"lora": {"use_dora": True}}, "adapters other than plain LoRA compute with the weights"),
    ],
)
def test_other_runs_are_left_alone(changes, reason, tmp_path):
    run = make(tmp_path, **changes)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert run.frozen_weights == [FastPath("frozen weights", "as loaded", reason)]


def test_weights_that_a_user_loaded_in_half_precision_are_merged_there(tmp_path):
    run = make(tmp_path, published().bfloat16())
    assert run.frozen_weights == [FastPath("frozen weights", "as loaded")]
    assert not any("merge" in vars(module) for module in run.model.modules())


def test_trained_copies_and_their_originals_are_left_alone(tmp_path):
    run = make(tmp_path, lora={"modules_to_save": ["up_proj"]}, max_steps=1)
    run.train()
    copies = {name: p.dtype for name, p in parameters(run).items() if "up_proj" in name}
    assert len(copies) == 4 and {*copies.values()} == {torch.float32}
    assert not trainer(tmp_path / "full", bf16=True).frozen_weights


def test_runs_of_a_sweep_share_their_weights(tmp_path):
    base = published()
    run = make(tmp_path, shared_copy(base))
    assert run.frozen_weights == [FastPath("frozen weights", "as loaded", "runs of a sweep share them")]
    ours, theirs = run.model.get_base_model().model.layers[0].mlp, base.model.layers[0].mlp
    assert ours.up_proj.weight.data_ptr() == theirs.up_proj.weight.data_ptr()


@pytest.mark.parametrize("merged", [True, False])
def test_another_run_on_the_same_base_begins_with_float32(merged, tmp_path):
    first = make(tmp_path, max_steps=1)
    first.train()
    if merged:
        full = trainer(tmp_path / "full", model=first.model.merge_and_unload(), bf16=True)
        assert {p.dtype for p in full.model.parameters()} == {torch.float32}
        assert not any(isinstance(module, FrozenLinear) for module in full.model.modules())
    else:
        second, fresh = (make(tmp_path / "2", model) for model in (first.model.unload(), published()))
        assert "frozen weights: bfloat16" in map(str, second.fast_paths())
        expected = parameters(fresh)
        assert all(torch.equal(value, expected[name]) for name, value in parameters(second).items())
