"""Mixtures of experts: the balancing loss of every layout is that of the padded model, value and gradient.

Files: ``policy/experts.py``.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.architectures import EXPERTS, SHARED_EXPERT, STATES, UNUSUAL, build, completions
from support.batches import token_batch
from support.runs import trainer

from groupwise import GRPOConfig
from groupwise.compat.transformers import cast_experts
from groupwise.errors import ConfigError
from groupwise.generation.transformers_backend import TransformersBackend
from groupwise.policy.experts import RouterReplay, _Routers, balancing_loss
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.introspection import flops_per_token, router_aux_loss_coef
from groupwise.policy.layout_choice import choose_layout
from groupwise.policy.layouts.check import float32_computation
from groupwise.policy.layouts.contexts import pack_tree
from groupwise.policy.layouts.packed import compute_packed_logprobs
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer

HEAD = LogprobHead("chunked")
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
PACKED, FORKED = ("packed", "shared_prefix"), ("forked",)
LAYOUTS = (*PACKED, "padded", "equal_length")
FAMILIES = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, EXPERTS, PACKED),
    "mixtral": (transformers.MixtralConfig, LOCAL, PACKED),
    "olmoe": (transformers.OlmoeConfig, EXPERTS, PACKED),
    "granitemoe": (transformers.GraniteMoeConfig, LOCAL, PACKED),
    "qwen2_moe": (transformers.Qwen2MoeConfig, SHARED_EXPERT, PACKED),
    "minimax_m2": (transformers.MiniMaxM2Config, {**LOCAL, "rotary_dim": 8}, PACKED),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
        PACKED,
    ),
    "jetmoe": (transformers.JetMoeConfig, {**LOCAL, "kv_channels": 8}, PACKED),
    **{name: (*STATES[name], FORKED) for name in ("gpt_oss", "qwen3_next", "qwen3_5_moe")},
}
GROUPS = ((5, (4, 1, 7, 0)), (9, (2, 6)), (1, (3,)), (5, (12,)))  # rows of four prompts, one without tokens


def mixture(name="qwen3_moe"):
    """A model of the family with routers that prefer some experts."""
    model = build(*FAMILIES[name][:2])
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2 and ("gate.weight" in key or "router" in key):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return model.train()


def runs_mixture():
    """A mixture over the words of the tiny policy."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {
        "num_key_value_heads": 1,
        "vocab_size": 32,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **LOCAL))


#: Sampler settings of a run.
SAMPLED = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "logprob_mismatch_check": "off",
}


def loss_of(output, batch):
    """A loss of log-probs and balancing, as a step has it."""
    return (output.logps_BT * batch.completion_mask_BT).mean() + 0.1 * output.aux_loss


def gradient(loss, model):
    trained = [each for each in model.parameters() if each.requires_grad]
    given = torch.autograd.grad(loss, trained, materialize_grads=True)
    return torch.cat([each.flatten() for each in given])


def assert_equal(model, batch, output, tolerance=5e-6):
    """Compare value and gradient with the padded model, whose balancing loss is transformers' own."""
    own = compute_padded_logprobs(model, batch, HEAD, with_entropy=False, with_aux_loss=True)
    assert output.aux_loss.item() == pytest.approx(own.aux_loss.item(), rel=1e-6)
    expected, found = (gradient(loss_of(each, batch), model) for each in (own, output))
    assert (found - expected).norm() <= tolerance * expected.norm()


def computer(layout):
    made = LogprobComputer(layout, HEAD)
    made.checked = made.with_aux_loss = True
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_the_balancing_loss_of_every_layout_is_that_of_the_padded_model(name):
    model, batch = mixture(name), completions(GROUPS)
    path = choose_layout("auto", model, group_size=4, with_aux_loss=True)
    assert path.choice == FAMILIES[name][2][-1]
    for layout in (*FAMILIES[name][2], "equal_length"):
        output = computer(layout)(model, batch, with_entropy=False, with_aux_loss=True)
        assert_equal(model, batch, output)


def test_rows_that_begin_alike_count_their_common_tokens_once_per_row():
    from groupwise.policy.experts import balancing_loss

    model, batch = mixture(), completions(((5, (4, 6, 7)),))
    ids = batch.completion_ids_BT.clone()
    ids[1:, :3] = ids[0, :3]  # three rows share 3 tokens, two of them 5
    ids[2, 3:5] = ids[1, 3:5]
    batch = replace(batch, completion_ids_BT=ids * batch.completion_mask_BT)
    choose_layout("auto", model, group_size=4, with_aux_loss=True)
    tree = pack_tree(batch)
    assert tree.num_tokens() < int(tree.rows_S.sum()) == int(batch.sequences()[1].sum())
    output = compute_packed_logprobs(model, batch, tree, HEAD, with_entropy=False, with_aux_loss=True)
    assert_equal(model, batch, replace(output, aux_loss=balancing_loss(output.aux_loss)))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_recomputed_layers_keep_the_gradient_of_the_balancing_loss(name):
    model, batch = mixture(name), completions(GROUPS)
    layout = choose_layout("auto", model, group_size=4, with_aux_loss=True).choice
    plain = gradient(computer(layout)(model, batch, with_entropy=False, with_aux_loss=True).aux_loss, model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    output = computer(layout)(model, batch, with_entropy=False, with_aux_loss=True)
    assert (gradient(output.aux_loss, model) - plain).norm() <= 3e-6 * plain.norm()


@pytest.mark.parametrize("name, layout", [("qwen3_moe", each) for each in LAYOUTS] + [("gpt_oss", "forked")])
def test_losses_of_parts_with_the_counts_of_all_add_up_to_the_loss_of_all(name, layout):
    model, batch, made = mixture(name), completions(GROUPS), computer(layout)
    parts = [batch.select(rows) for rows in ([0], [1, 2, 5], [3, 4, 6], [7])]

    def sums(part):
        made.balance = lambda each: each
        return made(model, part, with_entropy=False, with_aux_loss=True).aux_loss

    with torch.no_grad():
        total = sum(map(sums, parts))
    made.balance = partial(balancing_loss, total=total)
    found = sum(made(model, part, with_entropy=False, with_aux_loss=True).aux_loss for part in parts)
    own = compute_padded_logprobs(model, batch, HEAD, with_entropy=False, with_aux_loss=True).aux_loss
    assert found.item() == pytest.approx(own.item(), rel=1e-6)
    expected, of_parts = gradient(own, model), gradient(found, model)
    assert (of_parts - expected).norm() <= 3e-6 * expected.norm()


def updates(tmp_path, scope, micro_batches):
    """Weights after an update of 8 rows in so many micro-batches, and the logged balancing losses."""
    run = trainer(
        tmp_path / f"{scope}-{micro_batches}",
        model=runs_mixture(),
        per_device_train_batch_size=8 // micro_batches,
        gradient_accumulation_steps=micro_batches,
        **{"max_steps": 1, "optim": "sgd", "learning_rate": 0.5, "logging_steps": 1, "save_strategy": "no"},
        **{"router_aux_loss_coef": 1.0, "router_aux_loss_scope": scope},
    )
    run.train()
    weights = torch.cat([each.detach().flatten() for each in run.model.parameters()])
    return weights, [line["aux_loss"] for line in run.state.log_history if "aux_loss" in line]


def test_an_update_that_balances_all_its_tokens_does_not_depend_on_its_micro_batches(tmp_path):
    start = torch.cat([each.detach().flatten() for each in runs_mixture().parameters()])
    one, other = (updates(tmp_path, "global_batch", count) for count in (1, 4))
    assert (one[0] - start).abs().max() > 1e-3 and len(one[1]) == 1
    assert (one[0] - other[0]).abs().max() < 2e-6 and other[1] == pytest.approx(one[1], rel=1e-5)
    apart = updates(tmp_path, "micro_batch", 4)
    assert (apart[0] - one[0]).abs().max() > 1e-5  # the mean of the losses of micro-batches is another one


def test_a_balancing_loss_over_the_update_needs_its_sums(tmp_path):
    given = {"model": runs_mixture(), "router_aux_loss_scope": "global_batch", "router_aux_loss_coef": 0.0}
    with pytest.raises(ConfigError, match="has no balancing loss; allowed: 'micro_batch'"):
        trainer(tmp_path, **given)


def test_a_config_with_a_weight_whose_forward_computes_no_loss_has_none(tmp_path):
    text = build(
        transformers.Llama4TextConfig, {**LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 16}
    )
    dense = build(transformers.DogeConfig, {})
    for model in (text, dense):
        assert model.config.router_aux_loss_coef and not router_aux_loss_coef(
            model, SimpleNamespace(router_aux_loss_coef=None)
        )
        with pytest.raises(ConfigError, match="computes no balancing loss"):
            router_aux_loss_coef(model, SimpleNamespace(router_aux_loss_coef=0.1))


def test_a_balancing_loss_of_another_signature_is_computed_padded():
    model = build(transformers.DogeConfig, {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2})
    assert router_aux_loss_coef(model, SimpleNamespace(router_aux_loss_coef=None))
    path = choose_layout("auto", model, group_size=4, with_aux_loss=True)
    assert path.choice == "padded" and "load_balancing_loss_func" in path.reason
    with pytest.raises(ConfigError, match="counts padded sequences"):
        choose_layout("packed", model, group_size=4, with_aux_loss=True)


def test_reentrant_checkpoints_detach_the_balancing_loss_and_are_refused(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ConfigError, match="detaches the router logits"):
        trainer(tmp_path, model=mixture("mixtral"), **settings)


def test_the_first_use_check_compares_the_balancing_loss(caplog, monkeypatch):
    model, batch = mixture(), completions(GROUPS)
    layout = choose_layout("auto", model, group_size=4, with_aux_loss=True).choice
    right, wrong = computer(layout), computer(layout)
    right.checked = wrong.checked = False
    right(model, batch, with_entropy=False, with_aux_loss=True)
    assert right.layout == "shared_prefix" and not caplog.records
    monkeypatch.setattr("groupwise.policy.experts.balancing_loss", lambda sums: sums[0] / sums[-1])
    with caplog.at_level(logging.WARNING):
        wrong(model, batch, with_entropy=False, with_aux_loss=True)
    assert wrong.layout == "padded" and "this model's balancing loss: its error" in caplog.text


@pytest.mark.parametrize(
    ("name", "counted"),
    # Weights of a matmul per token, of 3 layers and the head 32 x 67: attention 32 (32 + 2 · 16) + 32 · 32,
    # router 32 · 4, and of 4 experts the 2 that a token uses.
    [
        ("qwen3_moe", 2144 + 3 * (3072 + 128 + 2 * 3 * 32 * 16)),
        ("mixtral", 2144 + 3 * (3072 + 128 + 2 * 3 * 32 * 48)),
    ],
)
def test_operations_are_those_of_the_weights_that_a_token_uses_and_of_their_gradients(name, counted):
    model = build(*FAMILIES[name][:2])
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)  # of norms
    assert flops_per_token(model) == 6 * (counted + vectors)
    for key, parameter in model.named_parameters():
        parameter.requires_grad = "q_proj" in key
    assert flops_per_token(model) == 4 * (counted + vectors) + 2 * 3 * 32 * 32


def test_operations_of_adapters_count_without_the_gradients_of_their_base():
    peft = pytest.importorskip("peft")
    model = build(*FAMILIES["mixtral"][:2])
    total = flops_per_token(model) / 6
    target = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=target))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # Adapters of experts, of which a token uses 2 of 4.
    assert flops_per_token(model) == 4 * total + 6 * trained / 2


def test_autocast_reaches_the_products_of_experts(monkeypatch):
    from transformers.integrations import moe

    model, seen = mixture(), []
    kernel = torch.nn.functional.grouped_mm
    monkeypatch.setattr(moe, "_grouped_mm", moe._grouped_mm)
    cast_experts.__wrapped__("cpu")  # as on a GPU
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *given, **more: seen.append(given) or kernel(*given, **more)
    )
    rows = {"input_ids": torch.arange(8).view(1, 8)}
    with torch.autocast("cpu", torch.bfloat16):
        model(**rows).logits.float().sum().backward()
        assert {each.dtype for given in seen for each in given} == {torch.bfloat16}
        assert all(layer.mlp.experts.down_proj.grad.dtype == torch.float32 for layer in model.model.layers)
        seen.clear()
        with float32_computation("cpu"):
            model(**rows)
    model(**rows)
    assert {each.dtype for given in seen for each in given} == {torch.float32}


@pytest.mark.parametrize(("copies", "switched"), [(2, 1), (3, 0)])
def test_decoding_copies_weights_of_experts_only_for_few_rows(copies, switched, monkeypatch):
    """``copies`` rows of K = 2 experts are more than E = 4 of them from three rows on."""
    switches = []

    def optimize(model):
        switches.append(model)
        return nullcontext()

    monkeypatch.setattr("groupwise.generation.decoding.optimize_for_decode", optimize)
    model = mixture()
    settings = transformers.GenerationConfig(max_new_tokens=2, do_sample=True, eos_token_id=2, pad_token_id=0)
    backend = TransformersBackend(lambda: model, settings)
    assert len(backend.generate([[5, 6, 7]] * copies)) == copies and len(switches) == switched


# Replay of routing.

ROUTED = {
    **FAMILIES,
    "deepseek_v3": (*UNUSUAL["deepseek_v3"], PACKED),  # sigmoid, a bias, and groups of experts
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        }
        | {"n_group": 1, "topk_group": 1},
        PACKED,
    ),
}


def random_routing(batch, num_routers, num_experts=4, top_k=2):
    """Experts that no router chose, the same prompt for the rows of a group; the last tokens have none."""
    generator = torch.Generator().manual_seed(3)

    def experts(length):
        scores = torch.rand(length, num_routers, num_experts, generator=generator)
        return scores.topk(top_k, -1).indices.to(torch.uint8)

    routed, prompts = [], {}
    lengths = zip(
        batch.prompt_mask_BL.sum(-1).tolist(), batch.completion_mask_BT.sum(-1).tolist(), strict=True
    )
    for group, (prompt, completion) in zip(map(str, batch.prompt_ids_BL.tolist()), lengths, strict=True):
        if group not in prompts:
            prompts[group] = experts(prompt)
        routed.append((prompts[group], experts(max(completion - 1, 0))))
    return replace(batch, routed_experts=tuple(routed))


def replaying(layout, model, mode="R3"):
    made = computer(layout)
    made.replay = RouterReplay(model, mode)
    return made


def num_routers(model, batch):
    """Return the number of routers, from a pass that records."""
    probe = replaying("padded", model)
    probe.replay.recorded = []
    with torch.no_grad():
        return probe(model, batch, with_entropy=False).routing.table.shape[1]


@pytest.mark.parametrize("name", ROUTED)
def test_replayed_routing_gives_the_gradient_of_the_padded_layout_in_every_layout(name, monkeypatch):
    monkeypatch.setitem(FAMILIES, name, ROUTED[name])
    model, batch = mixture(name), completions(GROUPS)
    batch = random_routing(batch, num_routers(model, batch))
    choose_layout("auto", model, group_size=4, with_aux_loss=False)
    mask = batch.completion_mask_BT

    def run(layout):
        output = replaying(layout, model)(model, batch, with_entropy=False)
        shares = {name: value.total / value.count for name, value in output.routing.metrics().items()}
        assert shares["routing/differing_share"] > 0.3 and shares["routing/replayed_share"] > 0.5
        return gradient((output.logps_BT * mask).sum(), model)

    expected = run("padded")
    own = computer("padded")(model, batch, with_entropy=False).logps_BT
    assert (gradient((own * mask).sum(), model) - expected).norm() > 0.01 * expected.norm()
    for layout in (*ROUTED[name][2], "equal_length", "checkpointed"):
        if name == "jetmoe" and layout == "checkpointed":  # it has no checkpoints
            continue
        if layout == "checkpointed":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found = run(ROUTED[name][2][-1] if layout == "checkpointed" else layout)
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_replayed_experts_have_the_scores_of_the_present_router(monkeypatch):
    """Against the formula: softmax over all experts, those recorded, divided by their sum."""
    model = mixture()
    batch = completions(((4, (5,)),))  # one row, so that tokens have one order
    routed = random_routing(batch, 3)
    (prompt, completion) = routed.routed_experts[0]
    wanted_SMK, start = torch.cat([prompt, completion]).long(), int(batch.prompt_mask_BL.argmax())
    found = replaying("padded", model)(model, routed, with_entropy=False).logps_BT
    for number, layer in enumerate(model.model.layers):

        def forward(hidden, router=layer.mlp.gate, number=number):
            logits_SE = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight)
            chosen = logits_SE.topk(2, -1).indices
            chosen[start : start + len(wanted_SMK)] = wanted_SMK[:, number]  # the last token has its own
            scores = logits_SE.softmax(-1).gather(1, chosen)
            scores = scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores
            return logits_SE, scores, chosen

        monkeypatch.setattr(layer.mlp.gate, "forward", forward)
    expected = compute_padded_logprobs(model, batch, HEAD, with_entropy=False).logps_BT
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_recorded_routing_is_replayed_to_the_same_log_probs(name):
    model, batch = mixture(name), completions(GROUPS)
    layout = choose_layout("auto", model, group_size=4, with_aux_loss=False).choice
    made = replaying(layout, model, "R2")
    made.replay.recorded = rows = []
    with torch.no_grad():
        made(model, batch, with_entropy=False)
    assert rows[0][0] is rows[1][0] and rows[0][0].dtype == torch.uint8  # the prompt once per group
    assert [len(part) for part in rows[2]] == [5, 6]  # 5 prompt tokens, 7 of a completion without the last
    given = replace(batch, routed_experts=tuple(rows)).select([2, 3, 4])
    with torch.no_grad():
        for parameter in (
            p for key, p in model.named_parameters() if "gate.weight" in key or "router.w" in key
        ):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        found = [replaying(each, model)(model, given, with_entropy=False) for each in ("padded", layout)]
    (own, packed) = (output.routing.metrics() for output in found)
    assert own["routing/differing_share"].total > 0
    torch.testing.assert_close(
        own["routing/differing_tokens"].total, packed["routing/differing_tokens"].total, rtol=0.5, atol=2
    )
    torch.testing.assert_close(
        found[0].logps_BT * given.completion_mask_BT,
        found[1].logps_BT * given.completion_mask_BT,
        atol=2e-5,
        rtol=0,
    )


def test_the_own_loop_records_the_routing_of_a_plain_forward():
    model = mixture()
    settings = transformers.GenerationConfig(max_new_tokens=7, do_sample=True, eos_token_id=2, pad_token_id=0)
    backend = TransformersBackend(lambda: model, settings, SimpleNamespace(**SAMPLED, router_replay="R3"))
    prompts = [[5, 6, 7]] * 3 + [[8, 9]] * 2
    torch.manual_seed(0)
    done = backend.generate(prompts)
    assert done[0].routed_experts[0] is not None and {len(each.token_ids) for each in done} != {7}
    for prompt, completion in zip(prompts, done, strict=True):
        with torch.no_grad(), _Routers((4, 2)) as mode:
            model.eval()(input_ids=torch.tensor([prompt + completion.token_ids]))
        expected = mode.take_SMK().long()
        found = torch.cat(completion.routed_experts)
        assert len(found) >= len(expected) - 1 and found.dtype == torch.uint8
        assert torch.equal(found.long().sort(-1).values, expected[: len(found)].sort(-1).values)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "iterations"), [("R2", 2), ("R3", 1)])
def test_a_run_replays_what_it_has_recorded(mode, iterations, tmp_path):
    def train(**changes):
        settings = {
            "num_iterations": iterations,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "gradient_checkpointing": True,
        }
        run = trainer(tmp_path / str(changes), model=runs_mixture(), **settings, **changes)
        run.train()
        return run

    run, plain = train(router_replay=mode), train()
    logs = run.state.log_history
    assert logs[0]["routing/replayed_share"] > 0.8 and logs[0]["routing/differing_share"] == 0.0
    if iterations == 2:  # the second step of a generation has other weights
        assert logs[1]["routing/replayed_share"] > 0.8
    # In float32 the present router chooses what was recorded.
    assert logs[0]["grad_norm"] == pytest.approx(plain.state.log_history[0]["grad_norm"], rel=1e-4)


def test_rollouts_of_several_rows_have_no_recorded_routing(tmp_path):
    run = trainer(tmp_path, model=runs_mixture(), router_replay="R2", num_iterations=2)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    batch = token_batch(ids, torch.ones_like(ids), ids + 9, torch.ones_like(ids))
    for recorded in run.old_and_ref_logps(batch).routed_experts:
        assert [len(part) for part in recorded] == [3, 2]  # the last token is no input
    several = replace(batch, contexts=(None, ((1, [9, 10]),)))  # two of its tokens follow other ids
    assert run.old_and_ref_logps(several).routed_experts == (None, None)


def test_the_experts_of_the_sampler_are_those_of_the_own_loop(tmp_path):
    trainer(tmp_path, model=runs_mixture(), router_replay="R3", cache_implementation="auto")  # the own loop
    with pytest.raises(ConfigError, match="which is not used: cache_implementation='dynamic'; use 'R2'"):
        trainer(tmp_path, model=runs_mixture(), router_replay="R3", cache_implementation="dynamic")


def test_what_cannot_replay_routing_refuses_it(tmp_path):
    with pytest.raises(ConfigError, match="has no experts"):
        RouterReplay(build(transformers.LlamaConfig, {}), "R2")
    for given, message in (
        ({"router_replay": "R3", "use_vllm": True}, "model runner V2"),
        ({"router_replay": "R2", "use_liger_kernel": True}, "use_liger_kernel=False"),
        ({"router_replay": "R1"}, "R2"),
    ):
        with pytest.raises(ConfigError, match=message):
            GRPOConfig(str(tmp_path), report_to="none", **given)
