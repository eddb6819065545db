"""Adapters, references and precision: PEFT end to end, what the KL is measured against, heads in float32.

Files: ``policy/introspection.py``.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.configs import config_of
from support.runs import experience, policy, tokenizer, trainer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from groupwise import ConfigError
from groupwise.errors import BackendError
from groupwise.generation import transformers_backend
from groupwise.policy.introspection import context_length
from groupwise.records import RolloutBatch, SamplingOptions

peft = pytest.importorskip("peft")

ROWS = [{"prompt": "w1 w2", "row": 0}] * 4


def lora(**changes):
    return peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    )


def adapter_weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 40),
        ({"rope_type": "linear", "factor": 4.0}, 160),
        ({"rope_type": "dynamic", "factor": 4.0}, 160),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}, 160),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}, 40),  # is scaled
    ],
)
def test_scaled_positions_are_the_context(rope, positions):
    config = LlamaConfig(max_position_embeddings=40, rope_parameters={"rope_theta": 1e4, **rope})
    assert context_length(SimpleNamespace(config=config), config_of()).tokens == positions


def test_scaled_positions_of_one_kind_of_layers_are_the_context():
    ropes = {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}
    of_text = SimpleNamespace(max_position_embeddings=40, rope_parameters=ropes)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda **_: of_text))
    assert context_length(model, config_of()).tokens == 80


def test_an_adapter_trains_saves_and_loads_while_the_base_stays(tmp_path):
    base = policy()
    before = copy.deepcopy(base.state_dict())
    run = trainer(
        tmp_path, model=base, peft_config=lora(), beta=0.04, max_steps=2, gradient_checkpointing=True
    )
    start = adapter_weights(run.model)
    run.train()
    trained = adapter_weights(run.model)
    assert all((trained[name] != start[name]).any() for name in trained if "lora_B" in name)
    for name, tensor in run.model.get_base_model().state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, before[name.replace(".base_layer", "")])
    run.save_model()
    loaded = peft.PeftModel.from_pretrained(policy(), tmp_path)
    for name, tensor in adapter_weights(loaded).items():
        assert torch.equal(tensor, trained[name])


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_an_adapter_of_virtual_tokens_trains_in_the_padded_layout(tmp_path, kind):
    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    checkpointing = kind != "PrefixTuningConfig"
    if not checkpointing:
        with pytest.raises(ConfigError, match=r"is a cache of keys and values.*gradient_checkpointing=False"):
            trainer(tmp_path, peft_config=adapter)
    run = trainer(tmp_path, peft_config=adapter, beta=0.04, max_steps=2, gradient_checkpointing=checkpointing)
    start = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    run.train()
    assert run.logprob_computer.layout == "padded"
    trained = dict(run.model.named_parameters())
    assert start and all((trained[name] != start[name]).any() for name in start)
    with pytest.raises(ConfigError, match="its adapter adds virtual tokens to every prompt"):
        trainer(tmp_path, peft_config=adapter, sequence_layout="packed", gradient_checkpointing=checkpointing)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
@torch.no_grad()
def test_samples_have_the_virtual_tokens_of_the_forward_once(tmp_path, kind):
    """Greedy tokens are the most probable ones of a forward over the whole sequence."""
    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = policy(initializer_range=0.5)
    run = trainer(tmp_path, model=model, peft_config=adapter, gradient_checkpointing=False)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.normal_(0.0, 2.0, generator=torch.Generator().manual_seed(1))
    ids = [4, 5, 6]
    greedy = SamplingOptions(generation_kwargs={"temperature": 0.0, "min_new_tokens": 6})
    (completion,) = run.backend.generate([ids], greedy)
    for token in completion.token_ids:
        inputs = torch.tensor([ids])
        logits = run.model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0, -1]
        logits[1] = -torch.inf if len(ids) < 3 + 6 else logits[1]  # no end among the first six
        assert token == logits.argmax()
        ids.append(token)
    assert len(completion.token_ids) >= 6 and "prepare_inputs_for_generation" not in vars(run.model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
@torch.no_grad()
def test_virtual_tokens_precede_a_prompt_as_if_it_were_alone(tmp_path, kind):
    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = policy(initializer_range=0.5)
    run = trainer(tmp_path, model=model, peft_config=adapter, top_k=4, pad_to_multiple_of=8)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.normal_(0.0, 2.0, generator=torch.Generator().manual_seed(1))
    prompts = [[4, 5], [9, 10, 11, 12, 13, 14], [6, 7, 8], [9]]
    greedy = SamplingOptions(generation_kwargs={"temperature": 0.0})
    alone = [run.backend.generate([prompt], greedy)[0] for prompt in prompts]
    assert run.backend.generate(prompts, greedy) == alone
    completions = run.backend.generate(prompts)

    def logps(rows, head):
        ids, chosen = [prompts[row] for row in rows], [completions[row] for row in rows]
        run.logprob_computer.head = replace(run.logprob_computer.head, name=head)
        none, texts = [{}] * len(rows), [""] * len(rows)
        return run.compute_logprobs(run.model, run.collate(RolloutBatch(none, texts, ids, chosen, texts)))

    for head in ("chunked", "dense"):
        together_BT = logps(range(4), head).logps_BT
        for row, completion in enumerate(completions):
            (one_T,) = logps([row], head).logps_BT
            count = len(completion.token_ids)
            torch.testing.assert_close(together_BT[row, :count], one_T[:count])


def test_virtual_tokens_with_sharded_parameters_are_refused_unless_the_weights_are_gathered(
    tmp_path, monkeypatch
):
    pytest.importorskip("deepspeed")  # gathers the weights
    run = trainer(tmp_path, peft_config=peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    monkeypatch.setattr(transformers_backend, "requires_lockstep_forwards", lambda model: True)
    with pytest.raises(BackendError, match=r"with sharded parameters \(FSDP, ZeRO-3\).*or use LoRA"):
        run.backend.generate([[4, 5]])
    run.backend.gather_weights = True
    assert run.backend.generate([[4, 5]])[0].token_ids


def test_a_fresh_adapter_is_measured_against_the_base(tmp_path):
    run = trainer(tmp_path, peft_config=lora(), beta=0.04)
    assert run.ref_model is None
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    (batch,) = experience(run, ROWS)
    with torch.no_grad():
        base = run.compute_logprobs(policy(), batch).logps_BT
        current = run.compute_logprobs(run.model, batch).logps_BT
    torch.testing.assert_close(batch.ref_logps_BT, base)
    assert (current - base).abs().max() > 1e-2


def experts(seed=0):
    """A mixture of experts over the words of the tiny policy."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=32, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    )


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize("coef", [None, 0.0])
@pytest.mark.parametrize("loop", ["auto", "dynamic"])
def test_router_logits_in_the_config_change_nothing(tmp_path, coef, loop):
    """``output_router_logits=True`` is common in checkpoints; the setting decides on the balancing loss."""
    trained = []
    for value in (False, True):
        model = experts()
        model.config.output_router_logits = value
        given = {"router_aux_loss_coef": coef, "cache_implementation": loop, "beta": 0.04}
        given["per_device_train_batch_size"] = 8  # prompts of two lengths, so that there is padding
        run = trainer(tmp_path / str(value), model=model, max_steps=2, **given)
        run.train()
        assert run.model.config.output_router_logits is value
        trained.append([parameter.detach() for parameter in model.parameters()])
        assert ("aux_loss" in run.state.log_history[0]) == (coef is None)
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


@pytest.mark.parametrize("by_trainer", [True, False], ids=["peft_config", "PeftModel"])
@pytest.mark.parametrize(
    ("make", "target"), [(policy, {}), (experts, EXPERTS)], ids=["dense", "mixture of experts"]
)
def test_a_fresh_adapter_needs_no_second_one_as_its_reference(tmp_path, make, target, by_trainer):
    given = {"model": make(), "peft_config": lora(**target)}
    if not by_trainer:
        given = {"model": peft.get_peft_model(make(), lora(**target))}
    run = trainer(tmp_path, **given, beta=0.04, max_steps=2)
    assert list(run.model.peft_config) == ["default"]
    adapters = [parameter for name, parameter in run.model.named_parameters() if "lora_" in name]
    assert adapters and all(parameter.requires_grad for parameter in adapters)
    start = adapter_weights(run.model)
    run.train()
    trained = adapter_weights(run.model)
    assert all((trained[name] != start[name]).any() for name in trained if "lora_B" in name)
    (batch,) = experience(run, ROWS)
    with torch.no_grad():
        base = run.compute_logprobs(make(), batch).logps_BT
        current = run.compute_logprobs(run.model, batch).logps_BT
    torch.testing.assert_close(batch.ref_logps_BT, base)
    assert (current - base).abs().max() > 1e-3


def adapter_of(kind, **settings):
    target = {} if "Prompt" in kind or "Prefix" in kind else {"target_modules": ["q_proj", "v_proj"]}
    return getattr(peft, kind)(task_type="CAUSAL_LM", **target, **settings)


@torch.no_grad()
def logps_of(run, model, batch):
    return run.compute_logprobs(model, batch).logps_BT * batch.loss_mask_BT


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoraConfig", {"init_lora_weights": "pissa"}),
        ("LoraConfig", {"init_lora_weights": "olora"}),
        ("LoraConfig", {"init_lora_weights": False}),
        ("LoHaConfig", {"init_weights": False}),
        ("LoKrConfig", {"init_weights": False}),
        ("IA3Config", {"feedforward_modules": [], "init_ia3_weights": False}),
        ("VeraConfig", {"r": 4, "init_weights": False}),
        ("BOFTConfig", {"boft_block_size": 4, "init_weights": False}),
        ("OFTConfig", {"oft_block_size": 4, "init_weights": False}),
        ("AdaLoraConfig", {"total_step": 10, "init_lora_weights": False}),
        ("FourierFTConfig", {"n_frequency": 10}),
        ("PromptTuningConfig", {"num_virtual_tokens": 2}),
        ("PromptEncoderConfig", {"num_virtual_tokens": 2}),
        ("PrefixTuningConfig", {"num_virtual_tokens": 2}),
    ],
    ids=str,
)
def test_the_reference_of_an_adapter_that_changes_the_policy_is_its_start(tmp_path, kind, settings):
    adapter, fixed = adapter_of(kind, **settings), {"max_steps": 2, "gradient_checkpointing": False}
    run = trainer(tmp_path, peft_config=adapter, beta=0.04, **fixed)
    (batch,) = experience(run, ROWS)
    mask = batch.loss_mask_BT
    start = logps_of(run, run.model, batch)
    torch.testing.assert_close(batch.ref_logps_BT * mask, start, atol=1e-6, rtol=1e-5)
    run.train()
    moved = (logps_of(run, run.model, batch) - start).abs().max()
    assert moved > (1e-5 if "IA3" in kind else 1e-4)
    with run.reference.scoring(run.model) as reference:
        torch.testing.assert_close(logps_of(run, reference, batch), start, atol=1e-6, rtol=1e-5)
    assert run.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


@torch.no_grad()
def pass_of_data(model):
    for seed in range(30):
        model(torch.randint(4, 20, (1, 16), generator=torch.Generator().manual_seed(seed)))


def quantized(weight, num_bits, reduced_rank, num_iter):
    """Return a coarse matrix and factors of its error, as PEFT's function does, which asks for a GPU."""
    coarse = (weight * 2**num_bits).round() / 2**num_bits
    u, s, v = torch.linalg.svd(weight - coarse)
    return coarse, v[:reduced_rank].contiguous(), (u * s)[:, :reduced_rank].contiguous()


def loftq(model, monkeypatch):
    """Return the configuration, which asks for SciPy; PEFT itself calls none of it."""
    find = importlib.util.find_spec
    monkeypatch.setattr("peft.tuners.lora.layer.loftq_init", quantized)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *given: name == "scipy" or find(name, *given))
        return lora(init_lora_weights="loftq", loftq_config=peft.LoftQConfig(loftq_bits=4))


def corda(model, monkeypatch):
    pytest.importorskip("attr")  # which PEFT's package does not require
    from peft.tuners.lora.corda import preprocess_corda

    config = lora(init_lora_weights="corda", corda_config=peft.tuners.lora.config.CordaConfig())
    preprocess_corda(model, config, run_model=lambda: pass_of_data(model))
    return config


def lora_ga(model, monkeypatch):
    from peft.tuners.lora.loraga import preprocess_loraga

    ids = torch.arange(4, 12)[None]
    config = lora(init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig())
    preprocess_loraga(model, config, lambda: model(ids, labels=ids).loss.backward())
    model.zero_grad()
    return config


def eva(model, monkeypatch):
    """Attach the adapter, since EVA reads activations of its layers."""
    adapted = peft.get_peft_model(model, lora(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0)))
    data = [{"input_ids": torch.arange(4, 12).repeat(4, 1) + i + torch.arange(4)[:, None]} for i in range(8)]
    peft.initialize_lora_eva_weights(adapted, data, show_progress_bar=False)
    return adapted


@pytest.mark.parametrize("prepare", [loftq, corda, lora_ga, eva])
def test_the_reference_of_an_adapter_initialised_from_data_is_its_start(
    tmp_path, caplog, monkeypatch, prepare
):
    """PEFT's own preparation, on tiny data; where it changes the base, a warning says what is saved."""
    model = policy()
    config = prepare(model, monkeypatch)
    given = {"model": model, "peft_config": config} if prepare is not eva else {"model": config}
    run = trainer(tmp_path, **given, beta=0.04, max_steps=2)
    (batch,) = experience(run, ROWS)
    start = logps_of(run, run.model, batch)
    torch.testing.assert_close(batch.ref_logps_BT * batch.loss_mask_BT, start, atol=1e-6, rtol=1e-5)
    weights = dict(run.model.get_base_model().named_parameters())
    changes = any(
        not torch.equal(weights[name.replace("weight", "base_layer.weight")], weight)
        for name, weight in policy().named_parameters()
        if "q_proj" in name
    )
    assert changes is (prepare is not eva)
    assert ("attaching the adapter changed the base weights" in caplog.text) is changes
    run.train()
    assert (logps_of(run, run.model, batch) - start).abs().max() > 1e-4
    with run.reference.scoring(run.model) as reference:
        torch.testing.assert_close(logps_of(run, reference, batch), start, atol=1e-6, rtol=1e-5)
    assert run.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_weights_that_are_sampled_in_every_pass_are_refused(tmp_path):
    if not hasattr(peft, "PveraConfig"):
        pytest.skip("PEFT has no PVeRA")
    with pytest.raises(ConfigError, match=r"PVeRA samples .* use VeRA"):
        trainer(tmp_path, peft_config=adapter_of("PveraConfig", r=4))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoraConfig", {"use_dora": True}),
        ("LoraConfig", {"init_lora_weights": "orthogonal"}),
        ("LoraConfig", {"bias": "all"}),
        ("LoraConfig", {"trainable_token_indices": [3, 4]}),
        ("IA3Config", {"feedforward_modules": []}),
        ("VeraConfig", {"r": 4}),
        ("AdaLoraConfig", {"total_step": 10}),
    ],
    ids=str,
)
def test_the_reference_of_an_adapter_that_begins_at_the_base_is_the_base(tmp_path, kind, settings):
    run = trainer(tmp_path, peft_config=adapter_of(kind, **settings), beta=0.04)
    assert list(run.model.peft_config) == ["default"]
    (batch,) = experience(run, ROWS)
    base = logps_of(run, policy(), batch)
    torch.testing.assert_close(batch.ref_logps_BT * batch.loss_mask_BT, base, atol=1e-5, rtol=1e-5)


def test_a_second_adapter_that_peft_refuses_is_named(tmp_path):
    model = peft.get_peft_model(policy(), lora(bias="all", init_lora_weights=False))
    with pytest.raises(ConfigError, match=r"copy of the adapter for beta > 0 raised ValueError"):
        trainer(tmp_path, model=model, beta=0.04)


@pytest.mark.parametrize("fresh", [True, False])
def test_weights_of_an_adapter_that_a_script_froze_stay_frozen(tmp_path, fresh):
    model = peft.get_peft_model(policy(), lora(init_lora_weights=fresh))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    run = trainer(tmp_path, model=model, beta=0.04, max_steps=2)
    assert ("reference" in run.model.peft_config) is not fresh
    start = adapter_weights(run.model)
    run.train()
    for name, tensor in adapter_weights(run.model).items():
        assert torch.equal(tensor, start[name]) is ("lora_A" in name or "reference" in name), name


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_saved_adapter_of_a_changed_base_is_restored_by_peft(tmp_path, caplog, init):
    run = trainer(tmp_path, peft_config=lora(init_lora_weights=init), beta=0.04)
    assert "attaching the adapter changed the base weights" in caplog.text
    run.train()
    run.save_model()
    loaded = peft.PeftModel.from_pretrained(policy(), tmp_path).eval()
    ids = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(loaded(ids).logits, run.model.eval()(ids).logits)


@pytest.mark.parametrize("by_trainer", [True, False], ids=["peft_config", "PeftModel"])
def test_an_adapter_whose_start_is_drawn_anew_by_its_reader_is_refused(tmp_path, by_trainer):
    """Loaded by PEFT onto the same base, the saved adapter gives another policy without any training."""
    config, ids = lora(init_lora_weights="pissa_niter_1"), torch.tensor([[4, 5, 6]])
    model = peft.get_peft_model(policy(), config)
    model.save_pretrained(tmp_path)
    base = policy()
    torch.manual_seed(7)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert not torch.allclose(loaded(ids).logits, model(ids).logits)
    given = {"peft_config": config} if by_trainer else {"model": model}
    with pytest.raises(ConfigError, match=r"'pissa_niter_1' takes random .*set init_lora_weights='pissa'"):
        trainer(tmp_path / "run", **given)


def test_an_adapter_that_was_trained_on_one_matrix_is_not_fresh(tmp_path):
    model = peft.get_peft_model(experts(), lora(**EXPERTS))
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "experts.lora_B" in name).fill_(0.1)
    run = trainer(tmp_path, model=model, beta=0.04)
    assert list(run.model.peft_config) == ["default", "reference"]


def test_a_continued_adapter_is_measured_against_a_frozen_copy_of_itself(tmp_path):
    model = peft.get_peft_model(policy(), lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    start = copy.deepcopy(model)
    run = trainer(tmp_path, model=model, beta=0.04, max_steps=3)
    run.train()
    (batch,) = experience(run, ROWS)
    with torch.no_grad():
        torch.testing.assert_close(batch.ref_logps_BT, run.compute_logprobs(start, batch).logps_BT)
    trainable = [name for name, p in run.model.named_parameters() if p.requires_grad]
    assert trainable and all(".default." in name for name in trainable)


def test_dora_on_the_head_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lm_head' has use_dora"):
        trainer(tmp_path, peft_config=lora(target_modules=["q_proj", "lm_head"], use_dora=True))


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize(
    "settings", [{"target_modules": ["q_proj", "lm_head"]}, {"trainable_token_indices": [3, 4]}]
)
def test_an_adapter_of_the_head_trains_in_every_layout(tmp_path, layout, settings):
    """Values and gradients equal those of the model's own logits; the reference is the start."""
    model = policy(tie_word_embeddings=True)
    config = lora(**settings)
    run = trainer(tmp_path, model=model, peft_config=config, beta=0.04, max_steps=2, sequence_layout=layout)
    (batch,) = experience(run, ROWS)
    run.train()
    assert run.logprob_computer.layout == layout
    (name,) = [n for n, _ in run.model.named_parameters() if "lm_head.lora_B" in n or "tokens_delta" in n]
    parameter = dict(run.model.named_parameters())[name]

    def with_gradient(head):
        run.logprob_computer.head = replace(run.logprob_computer.head, name=head)
        logps_BT = run.compute_logprobs(run.model, batch).logps_BT * batch.loss_mask_BT
        return logps_BT.detach(), torch.autograd.grad(logps_BT.sum(), parameter)[0]

    for ours, expected in zip(with_gradient("chunked"), with_gradient("dense"), strict=True):
        assert expected.abs().max() > 1e-2
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), run.reference.scoring(run.model) as reference:
        logps_BT = run.compute_logprobs(reference, batch).logps_BT
    torch.testing.assert_close(logps_BT * batch.loss_mask_BT, batch.ref_logps_BT * batch.loss_mask_BT)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_copy_of_the_head_trains_in_every_layout(tmp_path, layout, fresh):
    """Values and gradients equal those of the model's own logits; the reference is the start."""
    config = lora(modules_to_save=["lm_head"])
    model = policy() if fresh else peft.get_peft_model(policy(), config)
    run = trainer(
        tmp_path,
        model=model,
        peft_config=config if fresh else None,
        beta=0.04,
        max_steps=2,
        sequence_layout=layout,
    )
    (batch,) = experience(run, ROWS)
    start = run.compute_logprobs(run.model, batch).logps_BT.detach()
    torch.testing.assert_close(batch.ref_logps_BT * batch.loss_mask_BT, start * batch.loss_mask_BT)
    run.train()
    head = run.model.get_base_model().lm_head
    assert (head.modules_to_save["default"].weight != head.original_module.weight).any()
    assert torch.equal(head.original_module.weight, policy().lm_head.weight)
    assert run.logprob_computer.layout == layout

    def head_gradient(name):
        run.logprob_computer.head = replace(run.logprob_computer.head, name=name)
        logps_BT = run.compute_logprobs(run.model, batch).logps_BT * batch.loss_mask_BT
        (gradient,) = torch.autograd.grad(logps_BT.sum(), head.modules_to_save["default"].weight)
        return logps_BT.detach(), gradient

    for ours, expected in zip(head_gradient("chunked"), head_gradient("dense"), strict=True):
        assert expected.abs().max() > 1e-2
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), run.reference.scoring(run.model) as reference:
        logps_BT = run.compute_logprobs(reference, batch).logps_BT
    torch.testing.assert_close(logps_BT * batch.loss_mask_BT, start * batch.loss_mask_BT)


def test_contradicting_adapter_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="already has an adapter"):
        trainer(tmp_path, model=peft.get_peft_model(policy(), lora()), peft_config=lora())
    with pytest.raises(ConfigError, match="sync_ref_model"):
        trainer(tmp_path, peft_config=lora(), beta=0.1, sync_ref_model=True)


def test_adapters_of_transformers_are_refused_by_name(tmp_path):
    model = policy()
    try:
        model.add_adapter(lora(), "mine")
    except ValueError as error:  # transformers 5.24 asks for PEFT 0.22
        pytest.skip(str(error))
    for beta in (0.0, 0.1):
        with pytest.raises(ConfigError, match=r"has adapters \(mine\) and is no PeftModel.*Pass the base"):
            trainer(tmp_path, model=model, beta=beta)


def test_the_directory_of_an_adapter_is_no_model(tmp_path):
    policy().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, lora()).save_pretrained(tmp_path / "adapter")
    text = rf'is an adapter \(LORA\) of the model .*base.*from_pretrained\(.*"{tmp_path}/adapter", is_trai'
    with pytest.raises(ConfigError, match=text):
        trainer(tmp_path, model=str(tmp_path / "adapter"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")  # as adapter of transformers
    with pytest.raises(ConfigError, match="by loading an adapter as a model"):
        trainer(tmp_path, model=loaded)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_frozen_adapter_is_refused_when_the_trainer_is_built(tmp_path, beta):
    peft.get_peft_model(policy(), lora()).save_pretrained(tmp_path / "adapter")
    frozen = peft.PeftModel.from_pretrained(policy(), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"\(default\) are frozen.*is_trainable=True"):
        trainer(tmp_path, model=frozen, beta=beta)
    trainer(tmp_path, model=peft.PeftModel.from_pretrained(policy(), tmp_path / "adapter", is_trainable=True))


@pytest.mark.parametrize("by_name", [True, False])
def test_targets_that_match_nothing_are_refused_before_the_weights_are_loaded(tmp_path, monkeypatch, by_name):
    policy().save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model") if by_name else policy()
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", None)
    for target in (["c_attn", "query_key_value"], r".*\.c_attn"):
        with pytest.raises(
            ConfigError, match=r"c_attn.* match nothing in LlamaForCausalLM.*q_proj.*'all-linear'"
        ):
            trainer(tmp_path, model=model, peft_config=lora(target_modules=target))
    monkeypatch.undo()
    for target in (["q_proj", "mlp.up_proj"], r".*layers\.1\..*_proj", "all-linear"):
        trainer(tmp_path, model=model if by_name else policy(), peft_config=lora(target_modules=target))


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM"])
def test_an_adapter_of_another_task_is_refused(tmp_path, task):
    with pytest.raises(ConfigError, match=f"task_type='{task}'.*a causal language model"):
        trainer(tmp_path, peft_config=lora(task_type=task))
    with pytest.raises(ConfigError, match="a causal language model"):
        trainer(tmp_path, model=peft.get_peft_model(policy(), lora(task_type=task)))


def test_without_beta_there_is_no_reference(tmp_path):
    run = trainer(tmp_path)
    assert run.ref_model is None
    assert experience(run, ROWS)[0].ref_logps_BT is None


def test_the_reference_is_the_policy_as_given_and_stays(tmp_path):
    run = trainer(tmp_path, beta=0.04, max_steps=2)
    run.train()
    for name, parameter in policy().named_parameters():
        assert torch.equal(run.ref_model.get_parameter(name), parameter)
    assert not any(parameter.requires_grad for parameter in run.ref_model.parameters())


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_the_reference_moves_towards_the_policy(tmp_path, alpha):
    run = trainer(
        tmp_path,
        beta=0.04,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=alpha,
        max_steps=2,
    )
    run.train()
    start = policy()
    for name, parameter in run.model.named_parameters():
        # π_ref ← α π_θ + (1 − α) π_ref, once, after the second step
        mixed = alpha * parameter + (1 - alpha) * start.get_parameter(name)
        torch.testing.assert_close(run.ref_model.get_parameter(name), mixed, atol=1e-7, rtol=1e-6)
        assert (parameter != start.get_parameter(name)).any()


def test_kl_in_the_reward_lowers_it_by_beta_times_kl(tmp_path):
    run = trainer(
        tmp_path, lambda completions, **_: [0.0] * len(completions), beta=0.5, kl_in_reward=True,
        kl_estimator="k1", scale_rewards="none",
    )  # fmt: skip
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    (batch,) = experience(run, ROWS)
    kl_B = ((batch.old_logps_BT - batch.ref_logps_BT) * batch.loss_mask_BT).sum(-1)
    # rewards −β·KL, centred on their mean
    torch.testing.assert_close(batch.advantages_BX[:, 0], -0.5 * (kl_B - kl_B.mean()), atol=1e-6, rtol=1e-5)
    assert kl_B.abs().max() > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_can_work_in_float32_below_a_bfloat16_model(tmp_path, tied):
    model = policy(tie_word_embeddings=tied).to(torch.bfloat16)
    run = trainer(tmp_path, model=model, cast_lm_head_to_fp32=True, max_steps=1, beta=0.1)
    assert run.model.lm_head.weight.dtype == torch.float32
    assert run.model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert run.model(torch.tensor([[4, 5]])).logits.dtype == torch.float32
    run.train()
    (batch,) = experience(run, ROWS)
    with torch.no_grad():
        chunked = run.compute_logprobs(run.model, batch).logps_BT
        run.logprob_computer.head = replace(run.logprob_computer.head, name="dense")
        torch.testing.assert_close(
            chunked, run.compute_logprobs(run.model, batch).logps_BT, atol=1e-5, rtol=0
        )


def test_dropout_can_be_switched_off(tmp_path):
    model = policy()
    model.model.layers[0].mlp.add_module("drop", torch.nn.Dropout(0.5))
    trainer(tmp_path, model=model, disable_dropout=True)
    assert model.model.layers[0].mlp.drop.p == 0.0


def mixture():
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
            num_experts_per_tok=1,
            router_aux_loss_coef=0.3,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def test_experts_are_balanced_and_a_dense_model_has_none(tmp_path):
    run = trainer(tmp_path, model=mixture(), max_steps=1, loss_type="grpo")
    run.train()
    assert run.aux_loss_enabled and run.router_aux_loss_coef == 0.3
    log = run.state.log_history[0]
    # on-policy, the policy part of the loss is the mean advantage, zero: what is left is the balancing loss
    assert log["loss"] == pytest.approx(0.3 * log["aux_loss"], abs=1e-5)
    with pytest.raises(ConfigError, match="no expert router"):
        trainer(tmp_path, router_aux_loss_coef=0.1)


def test_a_model_by_name_is_loaded_in_float32_with_its_tokenizer(tmp_path):
    saved = tmp_path / "policy"
    policy().to(torch.bfloat16).save_pretrained(saved)
    tokenizer().save_pretrained(saved)
    run = trainer(tmp_path / "out", model=str(saved), max_steps=1)
    assert run.model.dtype == torch.float32
    half = trainer(tmp_path / "out", model=str(saved), model_init_kwargs={"dtype": "bfloat16"})
    assert half.model.dtype == torch.bfloat16
    run.train()
    run.save_model()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32
