"""Scores taken inside a model's forward equal those of the model's own logits, in value and in gradient.

Files: ``policy/heads/chunked.py``, ``policy/heads/weights.py``.
"""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers

from groupwise.errors import ConfigError
from groupwise.policy.heads.capture import LogprobHead, forward_at_head, forward_logprobs
from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.weights import HeadWeights, check_head, head_weights

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "gemma2_softcap": (transformers.Gemma2Config, {"final_logit_softcapping": 2.0}),
    "cohere_scale": (transformers.CohereConfig, {"logit_scale": 0.25}),
    "granite_divisor": (transformers.GraniteConfig, {"logits_scaling": 3.0}),
    "qwen3": (transformers.Qwen3Config, {}),
    "phi_bias": (transformers.PhiConfig, {"partial_rotary_factor": 0.5}),
}
KEPT = 5


def build_model(name: str):
    config_class, extra = CONFIGS[name]
    sizes = {
        key: value for key, value in SIZES.items() if key != "head_dim" or "head_dim" in vars(config_class())
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes, **extra))
    with torch.no_grad():
        for parameter in model.parameters():  # wide logits, so that a softcap bends them
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 67, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    # The last column has no next token: any valid id stands in, and its score is dropped.
    targets = torch.cat([ids[:, -KEPT + 1 :], torch.zeros(3, 1, dtype=torch.long)], dim=1)
    return {"input_ids": ids, "attention_mask": mask, "logits_to_keep": KEPT, "use_cache": False}, targets


def loss_of(logps, entropy):
    """A different upstream gradient for every position and for both outputs."""
    steps = torch.arange(1.0, KEPT)
    return (logps[:, :-1] * steps).sum() + 0.3 * (entropy[:, :-1] * steps.flip(0)).square().sum()


def scores_of_logits(logits, targets, temperature):
    """Brute force in float64: explicit exponentials, no log_softmax."""
    weights = (logits.double() / temperature).exp()
    p = weights / weights.sum(-1, keepdim=True)
    return p.gather(-1, targets.unsqueeze(-1)).squeeze(-1).log(), -(p * p.log()).sum(-1)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def scores_at_head(model, temperature, at_head=None, with_entropy=True):
    """Log-probs and entropies of a batch; ``at_head`` gets those that do not pass the model's output."""
    inputs, targets = batch()

    def compute(hidden, weights):
        rows = hidden.flatten(0, 1), weights, targets.flatten(), temperature, with_entropy
        scores = [score if score is None else score.view_as(targets) for score in chunked_head(*rows)]
        if at_head is not None:
            at_head.extend(scores)
        return tuple(scores)

    return forward_at_head(model, inputs, LogprobHead(), compute)[0]


def assert_same_gradients(given, expected):
    assert given.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            given[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item() + 1e-7
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_are_those_of_the_models_logits(name):
    model = build_model(name)
    inputs, targets = batch()
    expected_logps, expected_entropy = scores_of_logits(model(**inputs).logits, targets, 0.8)
    expected = gradients(model, loss_of(expected_logps, expected_entropy))

    logps, entropy = scores_at_head(model, 0.8)
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps.double(), expected_logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, loss_of(logps, entropy)), expected)


@pytest.mark.parametrize("name", ["gemma2_softcap", "cohere_scale"])
def test_captured_and_routed_log_probs_have_the_same_values_and_gradients(name):
    model = build_model(name)
    at_head = []
    scores_at_head(model, 1.3, at_head=at_head)
    direct = gradients(model, loss_of(*at_head))
    logps, entropy = scores_at_head(model, 1.3)
    assert torch.equal(logps, at_head[0]) and torch.equal(entropy, at_head[1])
    assert_same_gradients(gradients(model, loss_of(logps, entropy)), direct)


def test_gradient_checkpointing_changes_nothing():
    model = build_model("qwen3")
    plain = gradients(model, loss_of(*scores_at_head(model, 1.0)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_gradients(gradients(model, loss_of(*scores_at_head(model, 1.0))), plain)


def test_peft_model_trains_its_adapters_and_only_them():
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(build_model("llama"), config)
    assert head_weights(model).weight_VH is model.get_base_model().lm_head.weight
    inputs, targets = batch()
    expected = gradients(model, loss_of(*scores_of_logits(model(**inputs).logits, targets, 1.0)))
    scores = scores_at_head(model, 1.0)
    given = gradients(model, loss_of(*scores))
    assert given and all("lora_" in name for name in given)
    assert_same_gradients(given, expected)
    with model.disable_adapter(), torch.no_grad():
        reference = scores_at_head(model, 1.0)
        expected_logps, _ = scores_of_logits(model(**inputs).logits, targets, 1.0)
    torch.testing.assert_close(reference[0].double(), expected_logps, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(reference[0], scores[0], atol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_copy_of_the_head(tied):
    base = build_model("llama")
    if tied:
        base.lm_head.weight = base.model.embed_tokens.weight
        base.config.tie_word_embeddings = True
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["lm_head"])
    model = peft.get_peft_model(base, config)
    check_head(model)
    head = model.get_base_model().lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.add_(torch.randn_like(head.original_module.weight) / 10)
    assert head_weights(model).weight_VH is head.modules_to_save["default"].weight
    inputs, targets = batch()
    expected = gradients(model, loss_of(*scores_of_logits(model(**inputs).logits, targets, 0.8)))
    scores = scores_at_head(model, 0.8)
    given = gradients(model, loss_of(*scores))
    assert any("modules_to_save" in name for name in given)
    assert_same_gradients(given, expected)
    with model.disable_adapter(), torch.no_grad():
        assert head_weights(model).weight_VH is head.original_module.weight
        reference = scores_at_head(model, 0.8)
        expected_logps, _ = scores_of_logits(model(**inputs).logits, targets, 0.8)
    torch.testing.assert_close(reference[0].double(), expected_logps, rtol=1e-5, atol=1e-5)
    assert (reference[0] - scores[0]).abs().max() > 1e-2


@pytest.mark.parametrize("use", ["read", "stash"])
def test_every_parameter_is_reachable_from_the_models_output(use):
    """DDP walks the autograd graph from the outputs to find the parameters that will get a gradient."""
    model = build_model("llama")
    at_head, outputs = [], []
    model.register_forward_hook(lambda module, args, output: outputs.append(output.logits))
    scores_at_head(model, 1.0, at_head=at_head)
    root = outputs[0] if use == "read" else at_head[0]
    seen, found, pending = set(), set(), [root.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        pending += [parent for parent, _ in node.next_functions]
    assert found == {id(parameter) for parameter in model.parameters()}


def test_loss_on_read_log_probs_runs_backward_hooks_of_the_models_output():
    """FSDP starts its backward from hooks on the tensors a model returns."""
    model = build_model("gemma2_softcap")
    calls = []

    def watch(module, arguments, output):
        output.logits.register_hook(lambda gradient: calls.append(gradient.shape))

    handle = model.register_forward_hook(watch)
    scores = scores_at_head(model, 1.0)
    handle.remove()
    loss_of(*scores).backward()
    assert [shape[:2] for shape in calls] == [(3, KEPT)]


def test_hooks_of_the_head_run_and_swapped_weights_are_used():
    """A sharding framework gathers the weight in a pre-forward hook: it puts another tensor in the module."""
    model = build_model("llama")
    inputs, targets = batch()
    doubled = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    expected, _ = scores_of_logits(2 * model(**inputs).logits, targets, 1.0)
    handle = model.lm_head.register_forward_pre_hook(lambda module, _: setattr(module, "weight", doubled))
    with torch.no_grad():
        logps, _ = scores_at_head(model, 1.0)
    handle.remove()
    torch.testing.assert_close(logps.double(), expected, rtol=1e-5, atol=1e-5)


def test_accelerate_device_hooks_still_wrap_the_head():
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Recorder(ModelHook):
        shapes: tuple = ()

        def post_forward(self, module, output):
            self.shapes = (*self.shapes, tuple(output.shape))
            return output

    model = build_model("llama")
    recorder = Recorder()
    add_hook_to_module(model.lm_head, recorder)
    scores_at_head(model, 1.0)
    assert recorder.shapes == ((3, KEPT, 3),)
    inputs, _ = batch()
    assert model(**inputs).logits.shape == (3, KEPT, 67)


def test_no_entropy_when_not_asked_for():
    model = build_model("llama")
    logps, entropy = scores_at_head(model, 1.0, with_entropy=False)
    assert entropy is None
    logps.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_the_head_is_restored_also_after_an_exception():
    model = build_model("llama")
    inputs, _ = batch()
    before = model(**inputs).logits
    attributes = set(vars(model.lm_head))
    with pytest.raises(KeyError):
        forward_at_head(model, inputs, LogprobHead(), lambda *_: {}["missing"])
    assert set(vars(model.lm_head)) == attributes
    assert torch.equal(model(**inputs).logits, before)


def test_a_wrong_number_of_positions_is_an_internal_error():
    model = build_model("llama")
    inputs, targets = batch()
    with pytest.raises(AssertionError, match=r"\(3, 5\) for targets \(3, 4\)"):
        forward_logprobs(model, inputs, targets[:, 1:], LogprobHead(), with_entropy=False)


@pytest.mark.parametrize("wrong", [{"softcap": None}, {"scale": 0.5}])
def test_an_unknown_logit_transform_is_refused(wrong, monkeypatch):
    model = build_model("gemma2_softcap")
    described = {"softcap": 2.0, "scale": 1.0, **wrong}
    weights = HeadWeights(model.lm_head.weight, **described)
    monkeypatch.setattr("groupwise.policy.heads.capture.head_weights", lambda *_: weights)
    with pytest.raises(ConfigError, match=f"scale={described['scale']}, softcap={described['softcap']}"):
        scores_at_head(model, 1.0)


def test_only_the_first_reading_of_a_model_waits_for_the_device(monkeypatch):
    def refuse(*_):
        raise AssertionError("a value was read")

    def read_without_values(model):
        with monkeypatch.context() as patches:

            def forbid(*_):
                for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__"):
                    patches.setattr(torch.Tensor, name, refuse)

            handle = model.register_forward_hook(forbid)  # after the model's own forward
            try:
                scores_at_head(model, 1.0)
            finally:
                handle.remove()

    model = build_model("gemma2_softcap")
    with pytest.raises(AssertionError, match="a value was read"):
        read_without_values(model)
    scores_at_head(model, 1.0)
    read_without_values(model)
    with pytest.raises(AssertionError, match="a value was read"):
        read_without_values(copy.deepcopy(model))


def test_a_changed_head_description_is_checked_again(monkeypatch):
    model = build_model("gemma2_softcap")
    scores_at_head(model, 1.0)
    model.config.final_logit_softcapping = 3.0
    scores_at_head(model, 1.0)  # the model reads the same field
    weights = HeadWeights(model.lm_head.weight, softcap=4.0)
    monkeypatch.setattr("groupwise.policy.heads.capture.head_weights", lambda *_: weights)
    with pytest.raises(ConfigError, match=r"softcap=4\.0"):
        scores_at_head(model, 1.0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"target_modules": ["lm_head"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["lm_head"], "lora_dropout": 0.1}, "lora_dropout"),
        ({"target_modules": ["lm_head"], "lora_bias": True}, "lora_bias"),
    ],
)
def test_an_adapter_that_is_no_sum_of_matrices_is_refused_on_the_head(settings, problem):
    base = build_model("llama")
    base.lm_head.bias = torch.nn.Parameter(torch.zeros(base.config.vocab_size))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, **settings))
    with pytest.raises(ConfigError, match=f"'.*lm_head' has {problem}.*drop 'lm_head' from target_modules"):
        check_head(model)
    ia3 = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
    with pytest.raises(ConfigError, match=r"an? ia3 layer \(Linear\)"):
        check_head(peft.get_peft_model(build_model("llama"), ia3))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["lora", "tokens", "tokens_of_head", "saved"])
def test_an_adapter_of_the_head_computes_as_the_models_own_logits(tied, kind):
    base = build_model("llama")
    if tied:
        base.lm_head.weight = base.model.embed_tokens.weight
        base.config.tie_word_embeddings = True
    settings = {
        "lora": {"target_modules": ["q_proj", "lm_head"], "use_rslora": True, "lora_alpha": 3},
        "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
        "tokens_of_head": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [1, 5]}},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    }[kind]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    inputs, targets = batch()
    expected_scores = scores_of_logits(model(**inputs).logits, targets, 0.8)
    expected = gradients(model, loss_of(*expected_scores))
    scores = scores_at_head(model, 0.8)
    for ours, theirs in zip(scores, expected_scores, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    given = gradients(model, loss_of(*scores))
    assert any("q_proj" not in name for name in given) or kind == "tokens"
    assert_same_gradients(given, expected)
    hidden = torch.randn(3, base.config.hidden_size)
    logits = model.get_output_embeddings()(hidden)
    torch.testing.assert_close(hidden @ head_weights(model).weight_VH.t(), logits, rtol=1e-5, atol=1e-5)
    with model.disable_adapter(), torch.no_grad():
        reference = scores_at_head(model, 0.8)
        expected_logps, _ = scores_of_logits(model(**inputs).logits, targets, 0.8)
    torch.testing.assert_close(reference[0].double(), expected_logps, rtol=1e-5, atol=1e-5)
    assert (reference[0] - scores[0]).abs().max() > 1e-2


def test_all_linear_adapters_leave_the_head_alone():
    model = peft.get_peft_model(build_model("llama"), peft.LoraConfig(r=2, target_modules="all-linear"))
    check_head(model)


def test_a_model_without_a_head_is_refused():
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match="LlamaModel has no language-model head"):
        head_weights(model)


def test_weights_are_the_live_parameters():
    model = build_model("phi_bias")
    weights = head_weights(model, fp32=True)
    assert weights.weight_VH is model.lm_head.weight and weights.bias_V is model.lm_head.bias
    assert weights.fp32 and not head_weights(model).fp32


def test_scales_follow_the_architecture():
    """Granite divides by logits_scaling, HyperCLOVA X multiplies; MiniCPM3 and MPT do neither to logits."""

    class Config:
        final_logit_softcapping = None

        def __init__(self, **fields):
            vars(self).update(fields)

        def get_text_config(self, decoder):
            return self

    def scale(**fields):
        model = build_model("llama")
        model.config = Config(**fields)
        return head_weights(model).scale

    assert scale(model_type="granite", logits_scaling=4.0) == 0.25
    assert scale(model_type="hyperclovax", logits_scaling=4.0) == 4.0
    assert scale(model_type="minicpm3", logits_scaling=4.0) == 1.0
    assert scale(model_type="mpt", logit_scale=4.0) == 1.0
    assert scale(model_type="falcon_h1", lm_head_multiplier=0.5) == 0.5
    assert scale(model_type="cohere", logit_scale=None) == 1.0
