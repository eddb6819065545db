"""The layout with a prompt's cache: log-probs, entropies and gradients equal those of each row alone.

Files: ``policy/layouts/forked.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from support.architectures import (
    IMAGE,
    JAMBA,
    RIGHT,
    STATES,
    VISION,
    alone,
    build,
    build_vision,
    completions,
    completions_of_images,
    prompt_with_images,
    values_and_gradients,
)
from support.runs import trainer

from groupwise import GRPOConfig
from groupwise.compat.transformers import supports_cache_in_checkpoints
from groupwise.data.rebalancing import layout_tokens
from groupwise.errors import ConfigError
from groupwise.generation.settings import decoding_path
from groupwise.policy import layout_choice
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layout_choice import choose_layout
from groupwise.policy.layouts import forked
from groupwise.policy.layouts.check import RowsAlone, probe_rows
from groupwise.policy.layouts.forked import (
    cannot_fork,
    compute_forked_logprobs,
    fork_sequences,
)
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer
from groupwise.policy.recomputation import SelectiveRecomputation
from groupwise.records import SamplerSettings
from groupwise.records.tensors import shape_of

pytestmark = pytest.mark.skipif(
    not supports_cache_in_checkpoints(), reason="caches of this version of transformers cannot be forked"
)
#: Prompts of 1, 3 and 9 tokens, two groups of one length; completions of 0 to 45 tokens, so that one fork has
#: two blocks.
LENGTHS = ((3, (4, 1, 7)), (9, (2, 0)), (1, (3, 1)), (3, (45, 2)))


def compute(model, batch, head, *, with_entropy):
    return compute_forked_logprobs(model, batch, fork_sequences(batch), head, with_entropy=with_entropy)


def assert_equal(given, expected, tolerance):
    torch.testing.assert_close(given[:2], expected[:2], atol=tolerance, rtol=0)
    scale = max(float(gradient.abs().max()) for gradient in expected[2])
    for ours, theirs in zip(given[2], expected[2], strict=True):
        assert (ours - theirs).abs().max() <= tolerance * scale


@pytest.mark.parametrize("name", [*STATES, "llama", "gemma3"])
def test_values_and_gradients_are_those_of_each_row_alone(name):
    model = build(*{**STATES, **RIGHT}[name])
    batch = completions(LENGTHS)
    assert cannot_fork(model) is None
    expected = values_and_gradients(model, batch, alone)
    # float32, states of 50 steps: 200 roundings of 6e-8
    assert_equal(values_and_gradients(model, batch, compute), expected, tolerance=1.2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
def test_an_image_is_computed_once_and_its_tower_trained_the_same(name):
    """One length of a prompt has one image, none and one; another has two images."""
    model, batch = build_vision(name), completions_of_images(name)
    assert cannot_fork(model) is None and len(fork_sequences(batch).forks) == 2
    patches = []
    model.register_forward_pre_hook(
        lambda *given: patches.append(len(given[-1].get("pixel_values", ()))), with_kwargs=True
    )
    given = values_and_gradients(model, batch, compute)
    once = {images.digest: images.arrays for images in batch.images if images.arrays}
    assert sum(patches) == sum(len(arrays["pixel_values"]) for arrays in once.values())
    expected = values_and_gradients(model, batch, alone)
    assert_equal(given, expected, tolerance=1.2e-5)
    for arrays in once.values():
        arrays["pixel_values"].copy_(arrays["pixel_values"].flip(-1))
    for changed, before in zip(values_and_gradients(model, batch, alone)[2], expected[2], strict=True):
        assert (changed - before).abs().max() > 1e-4 * before.abs().max() or not before.any()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5_vl", "gemma3_vl"])
def test_checkpoints_and_adapters_of_a_vision_model_train_the_same(name):
    targets = r".*(q_proj|v_proj|in_proj_qkv|qkv|linear_fc1)"
    adapter = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    # Float32 sums of the delta rule differ by 5e-5 on some processors, by 8e-7 in float64.
    tolerance = 1e-4 if name == "qwen3_5_vl" else 1.2e-5
    model, batch = get_peft_model(build_vision(name), adapter), completions_of_images(name)
    expected = values_and_gradients(model, batch, alone)
    assert_equal(values_and_gradients(model, batch, compute), expected, tolerance=tolerance)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(values_and_gradients(model, batch, compute), expected, tolerance=tolerance)


def test_prompts_of_one_text_with_other_images_are_other_prompts():
    model, batch = build_vision("llava"), completions_of_images("llava")
    first, last = batch.images[0], batch.images[-1]
    same_text = replace(batch, prompt_ids_BL=batch.prompt_ids_BL[:1].repeat(len(batch), 1))
    same_text = replace(same_text, prompt_mask_BL=batch.prompt_mask_BL[:1].repeat(len(batch), 1))
    # An equal image that is another object, as after an exchange between ranks, is the same prompt.
    copied = replace(last, arrays={name: array.clone() for name, array in last.arrays.items()})
    same_text = replace(same_text, images=(first,) * 3 + (last, copied) * 3)
    assert [prompts for prompts, _ in forked.plan_forks(shape_of(same_text), range(9))] == [
        [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    ]
    expected = values_and_gradients(model, same_text, alone)
    assert_equal(values_and_gradients(model, same_text, compute), expected, tolerance=1.2e-5)


def test_images_that_no_pass_has_whole_are_padded():
    """Images of a tool in a completion, and one at the end of a prompt."""
    model, batch = build_vision("llava"), completions_of_images("llava")
    ids, images = prompt_with_images("llava", 1, 1, torch.Generator().manual_seed(3))
    batch.completion_ids_BT[7, 4 : 4 + len(ids)] = torch.tensor(ids)
    of_tool = batch.images[7].followed_by(images, 7 + 4)
    batch.prompt_ids_BL[8, -7:] = batch.prompt_ids_BL[8, -7:].roll(3)  # 4 image tokens behind 3 of text
    at_end = replace(batch.images[8], end=7)
    batch = replace(batch, images=(*batch.images[:7], of_tool, at_end))
    forks = fork_sequences(batch)
    assert forks.padded_rows == [7, 8] and forks.num_tokens() == 2 * 6 + 5 * 7 + 10 + 2 * 2 + 2 * 47
    expected = values_and_gradients(model, batch, alone)
    assert_equal(values_and_gradients(model, batch, compute), expected, tolerance=1.2e-5)
    # The check of a run leaves them out.
    few = probe_rows(batch, IMAGE)
    assert [images.end for images in few.images] == [4, 4, 0] and not (few.completion_ids_BT == IMAGE).any()
    few = probe_rows(batch.select([7, 8]), IMAGE)
    assert few.images is None and IMAGE not in few.completion_ids_BT[1]


@pytest.mark.parametrize("name", ["glm4v", "gemma3_vl", "qwen3_vl"])
def test_towers_in_half_precision_pass_the_check(name):
    """Patches are convolved in two or three dimensions, and one tower ends with attention of torch."""
    model, batch = build_vision(name).to(torch.bfloat16), completions_of_images(name)
    computer = LogprobComputer("forked", LogprobHead("chunked"), other_layouts=())
    computer(model, batch, with_entropy=False)
    assert computer.layout == "forked"


def test_the_check_of_rows_with_images_keeps_the_activations_of_one_padded_row():
    """In evaluation mode no layer is recomputed, and prompts with images are not shortened."""
    model, batch = build_vision("qwen2_vl").eval(), completions_of_images("qwen2_vl")
    sizes, saved = [], []

    def begin(*_):
        sizes.append(0)

    def pack(tensor):
        sizes[-1] += tensor.nbytes
        return tensor

    def compute(model, rows):  # in the place of a layout: all rows padded at once
        saved.append(max(sizes))
        return compute_padded_logprobs(model, rows, LogprobHead("chunked"), with_entropy=False).logps_BT

    model.register_forward_pre_hook(begin)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        problem = RowsAlone(model, batch, dtype=torch.float32, sharded=False).problem(compute)
    # Two rows alone, one with another token in three passes, then pairs: sums of log-probs and gradients are
    # the same.
    assert not problem and len(sizes) == 7
    assert saved[0] < 0.6 * max(sizes)


def test_images_are_checked_where_they_come_after_text():
    """The first micro-batch has none: the check of a run sees no image."""
    model, batch = build_vision("qwen2_vl").eval(), completions_of_images("qwen2_vl")
    computer = LogprobComputer("forked", LogprobHead("chunked"))
    text = batch.select([5, 6])
    computer(model, text, with_entropy=False)
    asked = []
    computer.any_rank = lambda failed: asked.append(failed) or failed

    class Forgets(type(model.model)):
        """A model that does not keep the positions after an image."""

        rope_deltas = property(lambda self: torch.zeros(1, 1).long(), lambda self, value: None)

    model.model.__class__ = Forgets
    with pytest.raises(ConfigError, match=r"'forked' does not reproduce this .*; use 'padded'$"):
        computer(model, batch, with_entropy=False)
    assert asked == [] and computer.layout == "forked"
    computer = LogprobComputer("forked", LogprobHead("chunked"))
    computer(model, batch, with_entropy=False)
    assert computer.layout == "padded"


def test_gradient_checkpointing_recomputes_the_same():
    model, batch = build(*STATES["qwen3_5"]), completions(LENGTHS)
    expected = values_and_gradients(model, batch, compute)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_equal(values_and_gradients(model, batch, compute), expected, tolerance=0)
    # Three lengths of prompts: two first passes (a prompt of one token has none) and four others, each twice.
    assert len(calls) == 2 * (2 + 4)


def test_checkpoints_that_detach_the_cache_are_refused(tmp_path):
    """A reentrant checkpoint runs without gradients, and what it writes to a cache has none."""
    model, batch = build(*STATES["qwen3_5"]), completions(LENGTHS)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="use_reentrant"):
        compute(model, batch, LogprobHead("chunked"), with_entropy=False)
    with torch.no_grad():  # old and reference log-probs need none
        compute(model, batch, LogprobHead("chunked"), with_entropy=False)
    kwargs = {"use_reentrant": True}
    run = trainer(tmp_path, model=build(*STATES["qwen3_5"]), gradient_checkpointing_kwargs=kwargs)
    path = run.logprob_computer.paths[0]
    assert path.choice == "padded" and "use_reentrant" in path.reason


def test_a_compiled_model_is_padded_by_auto_and_refused_by_name(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    path = trainer(tmp_path, model=build(*STATES["qwen3_5"]), **compiled).logprob_computer.paths[0]
    assert path.choice == "padded" and "a compiled model takes no cache" in path.reason
    with pytest.raises(ConfigError, match="'forked': a compiled model takes no cache"):
        trainer(tmp_path, model=build(*STATES["qwen3_5"]), sequence_layout="forked", **compiled)


@pytest.mark.slow
def test_layers_that_fit_into_memory_are_kept_for_all_passes_together():
    model, batch = build(*STATES["qwen3_5"]), completions(LENGTHS)
    expected = values_and_gradients(model, batch, compute)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputation = SelectiveRecomputation(0.5)
    recomputation.install(model)
    values_and_gradients(model, batch, compute)
    # Room for all three layers of the largest pass, not of the whole micro-batch.
    recomputation.room = 3 * recomputation._bytes
    calls = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_equal(values_and_gradients(model, batch, compute), expected, tolerance=0)
    kept = recomputation.num_kept(fork_sequences(batch).num_tokens())
    assert kept < 2 and len(calls) == 2 * (2 + 4)


def test_an_adapter_on_linear_attention_is_trained_the_same():
    targets = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"]
    model = get_peft_model(
        build(*STATES["qwen3_5"]), LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    )
    expected = values_and_gradients(model, completions(LENGTHS), alone)
    assert_equal(values_and_gradients(model, completions(LENGTHS), compute), expected, tolerance=1.2e-5)


def test_bfloat16_stays_within_its_rounding():
    model, exact = build(*STATES["qwen3_5"]).to(torch.bfloat16), build(*STATES["qwen3_5"]).double()
    batch, head = completions(LENGTHS), LogprobHead("chunked")
    mask = batch.completion_mask_BT
    with torch.no_grad():
        truth, rows, given = (
            function(m, batch, head, with_entropy=False).logps_BT
            for function, m in ((alone, exact), (alone, model), (compute, model))
        )
    error, allowed = ((logps - truth).abs() * mask for logps in (given, rows))
    assert error.sum() <= (1.5 * allowed.sum() + 1e-3 * mask.sum())


def test_tokens_are_counted_as_they_are_computed():
    batch = completions(LENGTHS)
    # first passes: 2 prompts of 2 tokens, 1 of 8; further passes: blocks of (45), (7 4 2 1), (2 0), (3 1)
    expected = 2 * 2 + 8 + 45 + 4 * 7 + 2 * 2 + 2 * 3
    shape, rows = shape_of(batch), range(len(batch))
    padding = 45 + 4 * 7 + 2 * 2 + 2 * 3 - (4 + 1 + 7 + 2 + 0 + 3 + 1 + 45 + 2)
    assert fork_sequences(batch).num_tokens() == expected
    assert layout_tokens(shape, rows, "forked") == (expected, padding)
    some = [1, 2, 7]  # the rest of their groups are in other micro-batches
    count, _ = layout_tokens(shape, some, "forked")
    assert fork_sequences(batch.select(some)).num_tokens() == count == 4 + 45 + 14


def test_truncated_distributions_and_the_temperature_are_those_of_each_row():
    from policy.layouts.test_truncated_layouts import with_sampling_mask

    model = build(*RIGHT["llama"])
    batch = with_sampling_mask(model, completions(LENGTHS))
    batch = replace(batch, sampler=SamplerSettings(temperature=0.7))
    from groupwise.policy.layouts.padded import compute_padded_logprobs

    mask = batch.completion_mask_BT
    given, expected = (
        function(model, batch, LogprobHead("chunked"), with_entropy=False).logps_BT * mask
        for function in (compute, compute_padded_logprobs)
    )
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1"])
def test_added_passes_change_nothing_and_each_has_a_backward_of_every_module(name):
    """With sharded parameters ranks must gather equally often: in each forward and in its backward."""
    model, batch = build(*STATES[name]), completions(LENGTHS)
    num_passes = fork_sequences(batch).num_passes() + 2
    assert num_passes == 2 + 4 + 2  # prompts of 3 and 9 tokens, four blocks of completions, added ones

    def compute_more(model, batch, head, *, with_entropy):
        plan = fork_sequences(batch)
        return compute_forked_logprobs(
            model, batch, plan, head, with_entropy=with_entropy, num_passes=num_passes
        )

    expected = values_and_gradients(model, batch, compute)
    counts = Counter()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_, path=path: counts.update([path]))
            module.register_full_backward_hook(lambda *_, path=path: counts.update([path]))
    found = values_and_gradients(model, batch, compute_more)
    assert_equal(found, expected, tolerance=0)
    assert len(counts) > 15 and set(counts.values()) == {2 * num_passes}


def test_auto_takes_it_where_prompts_cannot_be_packed():
    model = build(*STATES["lfm2"])
    assert choose_layout("auto", model, group_size=4, with_aux_loss=False).choice == "forked"
    # Without groups no prompt would be computed twice.
    assert choose_layout("auto", model, group_size=1, with_aux_loss=False).choice == "padded"
    assert choose_layout("auto", build(*RIGHT["llama"]), group_size=4, with_aux_loss=False).choice == (
        "shared_prefix"
    )
    path = choose_layout(
        "auto", model, group_size=4, with_aux_loss=False, one_forward="parameters are sharded"
    )
    assert path.choice == "padded" and path.reason == (
        "it has layers of type conv; not forked: parameters are sharded"
    )


@pytest.mark.parametrize(
    ("engine", "is_fsdp2", "text", "images"),
    [
        ("NO", False, "", ""),
        ("FSDP", False, "FSDP version 1", "FSDP version 1"),
        ("FSDP", True, "", "images under DeepSpeed and FSDP"),
        ("DEEPSPEED", False, "", "images under DeepSpeed and FSDP"),
    ],
)
def test_engines_that_take_one_forward_pass_are_named(engine, is_fsdp2, text, images, tmp_path):
    accelerator = SimpleNamespace(distributed_type=DistributedType[engine], is_fsdp2=is_fsdp2)
    config = GRPOConfig(tmp_path, use_cpu=True, bf16=False, report_to="none")
    for model, begins in (build(*STATES["lfm2"]), text), (build_vision("qwen2_5_vl"), images):
        reason = layout_choice._reason_for_one_forward(model, config, accelerator)
        assert reason.startswith(begins) and bool(reason) is bool(begins)


def test_a_cache_that_cannot_be_continued_is_refused_by_name(monkeypatch):
    mamba = build(transformers.MambaConfig, {"state_size": 4})
    with pytest.raises(ConfigError, match="MambaForCausalLM does not support sequence_layout='forked'"):
        choose_layout("forked", mamba, group_size=4, with_aux_loss=False)
    assert choose_layout("auto", mamba, group_size=4, with_aux_loss=False).choice == "padded"
    model = build(*STATES["lfm2"])
    monkeypatch.setattr(forked, "supports_cache_in_checkpoints", lambda: False)
    with pytest.raises(ConfigError, match="'forked': this version of transformers takes the cache"):
        choose_layout("forked", model, group_size=4, with_aux_loss=False)


def test_images_that_are_no_tokens_are_refused_by_name():
    model = build_vision("llava")
    assert choose_layout("auto", model, group_size=4, with_aux_loss=False).choice == "forked"
    model.config.text_config.cross_attention_layers = [1]  # as in Llama 3.2 Vision
    reason = "it has a part whose inputs are not image tokens of the prompt"
    with pytest.raises(ConfigError, match=f"does not support sequence_layout='forked': {reason}"):
        choose_layout("forked", model, group_size=4, with_aux_loss=False)
    path = choose_layout("auto", model, group_size=4, with_aux_loss=False)
    assert path.choice == "padded" and path.reason.endswith(f"not forked: {reason}")
    assert decoding_path(model, transformers.GenerationConfig()).reason == reason


def test_a_model_that_ignores_the_cache_is_an_error():
    model, batch = build(*RIGHT["llama"]), completions(LENGTHS)
    inner = model.model.forward
    model.model.forward = lambda *args, past_key_values=None, cache=None, **kwargs: inner(*args, **kwargs)
    with pytest.raises(RuntimeError, match="did not use the cache"):
        compute(model, batch, LogprobHead("chunked"), with_entropy=False)


def test_the_first_use_check_finds_a_state_that_is_not_continued(caplog):
    batch = completions(LENGTHS)
    for kind, layout in ((STATES["qwen3_5"], "forked"), (JAMBA, "padded")):
        model = build(*kind)
        chosen = choose_layout("auto", model, group_size=4, with_aux_loss=False).choice
        assert chosen == "forked"
        computer = LogprobComputer(chosen, LogprobHead("chunked"))
        computer(model, batch, with_entropy=False)
        assert computer.layout == layout
    assert "sequence_layout='forked' does not reproduce" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "gpt_oss"])
def test_a_run_trains_as_the_padded_one(kind, tmp_path):
    def parameters(layout):
        model = build(*STATES[kind]).eval()
        run = trainer(
            tmp_path / layout, model=model, sequence_layout=layout, max_steps=2, beta=0.1,
            num_generations=4, per_device_train_batch_size=8, max_completion_length=6,
            learning_rate=0.1, optim="sgd", gradient_checkpointing=True,
        )  # fmt: skip
        run.train()
        assert run.logprob_computer.layout == layout.replace("auto", "forked")
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    given, expected = parameters("auto"), parameters("padded")
    start = torch.cat([p.detach().flatten() for p in build(*STATES[kind]).parameters()])
    assert (given - expected).abs().max() < 2e-5 < 5e-3 < (given - start).abs().max()
