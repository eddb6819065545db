"""The check of a layout: rounding of half precision passes, planted faults do not.

Files: ``policy/attention.py``, ``policy/layouts/padded.py``.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from support.architectures import RIGHT, build, completions, values_and_gradients
from support.batches import packed, token_batch
from support.runs import policy, trainer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise import GRPOTrainer
from groupwise.compat.transformers import supports_cache_in_checkpoints
from groupwise.errors import ConfigError
from groupwise.policy.attention import install_attention_hook
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.layouts.check import RowsAlone, float32_computation, probe_rows
from groupwise.policy.layouts.packed import Block, PackedAttention, compute_packed_logprobs, pack_sequences
from groupwise.policy.layouts.padded import compute_padded_logprobs
from groupwise.policy.logprobs import LogprobComputer

HEAD = LogprobHead("chunked")
ANSWERS = (
    " The answer is five, because three and two make five. Counting on from three: four, five.",
    " I would first write both numbers below each other and add the ones, then the tens.",
    "5",
    " Let me see. It depends on which of them you count first, but the sum is always the same!",
)


def as_bfloat16(model):
    return model.to(torch.bfloat16)


def under_autocast(model, dtype=torch.bfloat16):
    """As accelerate prepares a model for mixed precision: autocast inside the forward."""
    model.forward = torch.autocast("cpu", dtype=dtype)(model.forward)
    return model


def in_float32(model, batch, head, *, with_entropy):
    with float32_computation("cpu"):
        head = replace(head, fp32=True)
        return compute_padded_logprobs(model, batch, head, with_entropy=with_entropy)


@pytest.mark.parametrize("lower", [as_bfloat16, under_autocast])
@pytest.mark.parametrize(
    "name", sorted({"llama", "gpt2", "gemma2", "phi3", "mixtral", "qwen3_moe"} & RIGHT.keys())
)
def test_a_model_of_half_precision_computes_in_float32(name, lower):
    model = build(*RIGHT[name]).eval()
    if lower is as_bfloat16:  # the same rounded weights on both sides
        model = model.to(torch.bfloat16).float()
    batch = completions()
    expected = values_and_gradients(model, batch, compute_padded_logprobs)
    lower(model)
    rounded = values_and_gradients(model, batch, compute_padded_logprobs)
    given = values_and_gradients(model, batch, in_float32)
    rounding = (rounded[0] - expected[0]).abs().max()
    assert rounding > 1e-3
    # Experts cast their input to the dtype of their weights; nothing else is rounded.
    tolerance = rounding / 4 if "num_experts_per_tok" in RIGHT[name][1] and lower is as_bfloat16 else 2e-5
    assert (given[0] - expected[0]).abs().max() <= tolerance
    assert (given[1] - expected[1]).abs().max() <= tolerance
    assert not torch.is_autocast_enabled("cpu")
    for ours, theirs in zip(given[2], expected[2], strict=True):
        # Gradients of bfloat16 weights are rounded; those of an embedding are summed up in bfloat16.
        # With experts the rounding of their input adds to it.
        budget = 2**-6 if lower is as_bfloat16 else 1e-5
        assert (ours.float() - theirs).norm() <= budget * theirs.norm() + 1e-5


def test_an_adapter_of_half_precision_computes_in_float32():
    def adapted():
        base = build(*RIGHT["llama"]).to(torch.bfloat16)
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        return get_peft_model(base, config).eval()

    expected = values_and_gradients(adapted().float(), completions(), compute_padded_logprobs)
    given = values_and_gradients(adapted(), completions(), in_float32)
    torch.testing.assert_close(given[:2], expected[:2], atol=2e-5, rtol=0)
    torch.testing.assert_close(given[2], expected[2], atol=2e-5, rtol=1e-4)


def test_the_float32_computation_keeps_no_copy_of_a_weight():
    weight = torch.nn.Parameter(torch.randn(4, 3).to(torch.bfloat16))
    hidden = torch.randn(5, 3, requires_grad=True)
    with float32_computation("cpu"):
        out = F.linear(hidden, weight)
    assert out.dtype == torch.float32
    with torch.no_grad():
        weight.mul_(2)  # read again by the backward pass
    (gradient,) = torch.autograd.grad(out.sum(), hidden)
    torch.testing.assert_close(gradient, weight.detach().float().sum(0).expand(5, 3), atol=0, rtol=0)


def test_views_and_writes_reach_the_tensors_of_the_model():
    buffer = torch.zeros(4, dtype=torch.bfloat16)
    with float32_computation("cpu"):
        buffer.view(2, 2)[0].add_(1)
        buffer[3] = 2
    assert buffer.tolist() == [1, 1, 0, 2] and buffer.dtype == torch.bfloat16


@pytest.mark.parametrize("length", [0, 1, 40])
def test_the_checked_rows_have_enough_tokens(length):
    ids = torch.arange(3, 3 + 6 * max(length, 1)).view(6, -1)
    batch = token_batch(
        torch.tensor([[0, 50, 51]] * 6), torch.tensor([[0, 1, 1]] * 6), ids, (ids * length > 0).long()
    )
    rows = probe_rows(batch)
    assert rows.completion_mask_BT.sum(-1).tolist() == [32, 29, 26]
    kept = min(length, 26)
    assert torch.equal(rows.completion_ids_BT[:, :kept], ids[[0, 1, 5], :kept])
    used = rows.completion_ids_BT[rows.completion_mask_BT.bool()]
    assert set(used.tolist()) <= {50, 51, *ids.flatten().tolist()}
    assert len({tuple(row) for row in rows.completion_ids_BT.tolist()}) == (3 if length else 2)


def test_one_row_is_enough():
    batch = completions(((3, (2,)),))
    rows = probe_rows(batch)  # two completions of its prompt, and one of a shorter prompt
    assert rows.completion_mask_BT.sum(-1).tolist() == [32, 29, 26]
    assert rows.group_ids_B[0] == rows.group_ids_B[1] != rows.group_ids_B[2]


def test_the_checked_rows_are_padded_on_the_left_and_reach_the_length_that_matters():
    batch = completions(((8, (4, 4, 4)),))  # one prompt: nothing is padded
    batch = replace(batch, group_ids_B=torch.zeros_like(batch.group_ids_B))
    lengths = [probe_rows(batch, None, longer).prompt_mask_BL.sum(-1).tolist() for longer in (0, 100)]
    assert lengths == [[8, 8, 6], [92, 92, 6]]
    rows = probe_rows(batch, None, 100)
    assert torch.equal(rows.prompt_ids_BL[0], rows.prompt_ids_BL[1])
    assert torch.equal(rows.prompt_ids_BL[2, -6:], batch.prompt_ids_BL[0, -6:])


# Planted faults: each changes what pack_sequences returns.


def late_positions(sequences, prompt):
    """Completions begin one position too late."""
    positions = sequences.position_ids_1S
    return replace(sequences, position_ids_1S=positions + (positions >= prompt))


def restarted_positions(sequences, prompt):
    """Positions of completions begin at zero."""
    positions = sequences.position_ids_1S
    return replace(sequences, position_ids_1S=positions - prompt * (positions >= prompt))


def leak(sequences, prompt):
    """Every token attends to all sequences before it."""
    index_1S = torch.arange(sequences.token_ids_1S.shape[1]).unsqueeze(0)
    block = Block(index_1S, index_1S, index_1S, index_1S, same=True)
    return replace(sequences, attention=PackedAttention([block], index_1S[0]))


def without_prefix(sequences, prompt):
    """Completions do not attend to their prompt."""
    blocks = [
        block
        if block.same
        else replace(
            block,
            key_position_RK=block.key_position_RK.masked_fill(
                block.key_position_RK < block.query_position_RQ[:, :1], torch.iinfo(torch.long).max
            ),
        )
        for block in sequences.attention.blocks
    ]
    return replace(sequences, attention=PackedAttention(blocks, sequences.attention.order_S))


def next_logits(sequences, prompt):
    """The logits after a token predict the token itself."""
    last = sequences.token_ids_1S.shape[1] - 1
    return replace(sequences, logit_index_N=(sequences.logit_index_N + 1).clamp(max=last))


def first_token_elsewhere(sequences, prompt):
    """The logits of the first token of all predict the first token of every completion."""
    index = sequences.logit_index_N
    starts = sequences.position_ids_1S[0, index] == prompt - 1
    return replace(sequences, logit_index_N=index.masked_fill(starts, 0))


FAULTS = (late_positions, first_token_elsewhere, restarted_positions, leak, without_prefix, next_logits)


def passes(model, batch, fault=None, *, dtype, shared=True):
    """Return True if the layout, with a planted fault, passes the check."""
    prompt = int(batch.prompt_mask_BL.sum(-1).max())

    def compute(model, rows):
        sequences = pack_sequences(rows, shared=shared)
        if fault is not None:
            sequences = fault(sequences, prompt)
        return compute_packed_logprobs(model, rows, sequences, HEAD, with_entropy=False).logps_BT

    return RowsAlone(model, batch, dtype=dtype, sharded=False).problem(compute) == ""


def compute_shared(model, rows):
    return packed(shared=True)(model, rows, HEAD, with_entropy=False).logps_BT


@cache
def used_tokens(path):
    """The first 4096 token ids and those of the texts, ascending: a vocabulary of a twelfth of the size."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = [*ANSWERS, "What is 0123456789+? Answer:"]
    return torch.tensor(sorted({*range(4096)}.union(*tokenizer(texts)["input_ids"])))


def arithmetic(path, length, seed, whole=False):
    """Two questions with four answers of up to ``length`` tokens each; all prompts have the same length.

    Ids are indices of ``sampling_mask`` unless the vocabulary is the ``whole`` one.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    questions = [f"What is {(3 + seed + i) % 10}+{(2 + 3 * seed + i) % 10}? Answer:" for i in range(2)]
    prompts = torch.tensor(tokenizer(questions)["input_ids"]).repeat_interleave(4, 0)
    texts = [ANSWERS[(row + seed) % 4] * 4 for row in range(8)]
    answers = [tokenizer(text)["input_ids"][: max(length - row % 3, 1)] for row, text in enumerate(texts)]
    ids = torch.tensor([answer + [0] * (length - len(answer)) for answer in answers])
    mask = torch.tensor([[1] * len(answer) + [0] * (length - len(answer)) for answer in answers])
    if not whole:
        kept = used_tokens(path)
        assert torch.isin(prompts, kept).all() and torch.isin(ids, kept).all()
        prompts, ids = torch.searchsorted(kept, prompts), torch.searchsorted(kept, ids)
    return token_batch(prompts, torch.ones_like(prompts), ids, mask)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    """The first four layers of the real model with the rows of its head for the mask, or all of it."""

    def load(whole=False):
        given = {} if whole else {"num_hidden_layers": 4}
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32, **given)
        if not whole:
            rows = model.get_input_embeddings().weight.detach()[used_tokens(smollm2_path)]
            model.set_input_embeddings(torch.nn.Embedding.from_pretrained(rows, freeze=False))
            model.lm_head.weight = model.get_input_embeddings().weight  # tied
        assert install_attention_hook(model)
        return model

    return load


class EmulatedProducts(TorchFunctionMode):
    """Linear layers of half precision as processors with half-precision products compute them.

    Operands and results are rounded, sums are in float32. Others take minutes for the same.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        if dtype == torch.float32:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            rounded = (None if value is None else value.to(dtype).float() for value in args)
            return func(*rounded).to(dtype)


PRECISIONS = {
    "bfloat16 autocast": (under_autocast, torch.bfloat16),
    "bfloat16 weights": (as_bfloat16, torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_of_a_real_model_passes_and_planted_faults_do_not(smollm2, smollm2_path, precision):
    prepare, dtype = PRECISIONS[precision]
    model = prepare(smollm2())
    with EmulatedProducts():
        for seed, length in enumerate((1, 64)):
            batch = arithmetic(smollm2_path, length, seed)
            assert passes(model, batch, dtype=dtype), (seed, length)
        assert passes(model, batch, dtype=dtype, shared=False)
        # the faults of the smallest effect in every precision
        for fault in FAULTS if precision == "bfloat16 autocast" else FAULTS[:2]:
            assert not passes(model, batch, fault, dtype=dtype), fault.__name__


@pytest.mark.slow
def test_planted_faults_are_found_in_float32(smollm2, smollm2_path):
    model, batch = smollm2(), arithmetic(smollm2_path, 1, 0)
    assert passes(model, batch, dtype=torch.float32)
    for fault in FAULTS:
        assert not passes(model, batch, fault, dtype=torch.float32), fault.__name__


@pytest.mark.slow
def test_bfloat16_keeps_the_layout_of_the_whole_real_model(smollm2, smollm2_path):
    model = under_autocast(smollm2(whole=True))
    with EmulatedProducts():
        assert passes(model, arithmetic(smollm2_path, 8, 0, whole=True), dtype=torch.bfloat16)


@pytest.mark.parametrize(("dtype", "forwards"), [(torch.bfloat16, 8), (torch.float32, 6)])
def test_a_sharded_model_is_called_equally_often_whatever_the_rows(dtype, forwards):
    model, calls = build(*RIGHT["llama"]).to(dtype), []
    assert install_attention_hook(model)
    model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    for batch in (completions(), completions(((3, (2,)),))):
        calls.clear()
        rows = RowsAlone(model, batch, dtype=dtype, sharded=True)
        assert not rows.problem(compute_shared) and rows.alone[1] == 0
        assert calls == [False] * forwards  # no gradients: their exchange would be a collective


def test_a_model_that_does_not_run_in_float32_is_padded(caplog):
    class OnlyHalf(torch.nn.Module):
        def forward(self, hidden):
            assert_half = torch.zeros(hidden.shape[-1], dtype=torch.bfloat16)
            return hidden + torch.dot(assert_half, hidden[0, 0]) * 0

    model = build(*RIGHT["llama"]).to(torch.bfloat16)
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, OnlyHalf())
    assert install_attention_hook(model)
    computer = LogprobComputer("shared_prefix", HEAD)
    scores = computer(model, completions(), with_entropy=False)
    assert computer.layout == "padded" and "cannot be checked: " in caplog.text
    padded = compute_padded_logprobs(model, completions(), HEAD, with_entropy=False)
    assert torch.equal(scores.logps_BT, padded.logps_BT)


@pytest.mark.parametrize("tied", [True, False])
def test_the_check_keeps_no_gradient_of_an_embedding(tied):
    """One tensor of its size at a time: the head's gradient, which nobody reads."""
    model = build(transformers.LlamaConfig, {"tie_word_embeddings": tied, "hidden_size": 256})
    model.resize_token_embeddings(40990, mean_resizing=False)
    assert install_attention_hook(model)
    size = model.get_input_embeddings().weight.nbytes
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive, most = [], 0.0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal alive, most
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.untyped_storage().nbytes() >= size:
                alive = [ref for ref in (*alive, weakref.ref(made)) if ref() is not None]
                storages = [ref().untyped_storage() for ref in alive]
                sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
                most = max(most, sum(nbytes for key, nbytes in sizes.items() if key not in own) / size)
            return made

    with Sizes():
        RowsAlone(model, completions(), dtype=torch.float32, sharded=False).problem(compute_shared)
    assert most <= 1


def broken_kernel(self, *_):
    raise RuntimeError("no kernel image is available for execution on the device")


def test_a_layout_of_the_user_that_fails_its_check_is_an_error(monkeypatch):
    monkeypatch.setattr(PackedAttention, "__call__", broken_kernel)
    model = build(*RIGHT["llama"])
    assert install_attention_hook(model)
    computer = LogprobComputer("packed", HEAD, other_layouts=())
    with pytest.raises(ConfigError, match=r"'packed' cannot be checked: .*no kernel image.*'auto'") as raised:
        computer(model, completions(), with_entropy=False)
    assert isinstance(raised.value.__cause__, RuntimeError) and not computer.checked
    monkeypatch.undo()  # an error on every rank, also where the check passes
    computer = LogprobComputer("packed", HEAD, any_rank=lambda _: True, other_layouts=())
    with pytest.raises(ConfigError, match="'packed' fails its check on another rank"):
        computer(model, completions(), with_entropy=False)


def test_a_run_names_the_layout_by_its_setting_and_auto_falls_back_in_sight(tmp_path, monkeypatch):
    monkeypatch.setattr(PackedAttention, "__call__", broken_kernel)
    for layout in ("packed", "shared_prefix"):
        with pytest.raises(ConfigError, match=f"sequence_layout='{layout}' cannot be checked"):
            trainer(tmp_path, sequence_layout=layout, max_steps=1).train()
    run = trainer(tmp_path, max_steps=2, logging_steps=1, beta=0.0, learning_rate=1e-3)
    computer, prepared = run.logprob_computer, []
    own = computer.prepare
    computer.prepare = lambda batch: prepared.append(computer.layout) or own(batch)
    run.train()
    assert run.state.log_history[0]["layout_fell_back"] == run.state.log_history[1]["layout_fell_back"] == 1
    saved = json.loads((tmp_path / "settings.json").read_text())
    other = "forked" if supports_cache_in_checkpoints() else "padded"
    assert set(prepared) == {other}  # nothing is packed before the check
    assert saved["settings"]["learning_rate"] == 1e-3
    state = saved["fast_paths"]["layout"]
    assert state.startswith(f"{other} (") and "no kernel image" in state


def test_a_run_with_a_reference_compares_the_gradient_of_the_policy(tmp_path):
    """The log-probs of the reference come first, and it has no gradient."""

    class Detached(torch.nn.Module):
        """Correct values without a gradient for a long row, as a packed one."""

        def forward(self, hidden):
            return hidden.detach() if hidden.shape[1] > 64 else hidden

    model = policy()
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, Detached())
    run = trainer(tmp_path, model=model, beta=0.1, max_steps=1)
    assert run.logprob_computer.layout == "shared_prefix"
    run.train()
    other = "forked" if supports_cache_in_checkpoints() else "padded"
    assert run.logprob_computer.layout == other


class OwnLogprobs(GRPOTrainer):
    def compute_logprobs(self, model, batch, *, with_entropy=False):
        return compute_padded_logprobs(model, batch, self.logprob_computer.head, with_entropy=with_entropy)


class CallingLogprobs(GRPOTrainer):
    def compute_logprobs(self, model, batch, *, with_entropy=False):
        return super().compute_logprobs(model, batch, with_entropy=with_entropy)


@pytest.mark.slow
def test_log_probs_of_a_subclass_need_no_layout_unless_it_calls_those_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(PackedAttention, "__call__", broken_kernel)
    settings = {"sequence_layout": "packed", "max_steps": 1}
    with pytest.raises(ConfigError, match="sequence_layout='packed' cannot be checked"):
        trainer(tmp_path, kind=CallingLogprobs, **settings).train()
    own = trainer(tmp_path, kind=OwnLogprobs, **settings)
    own.train()  # the layout of the settings is not used: it is no error
    assert own.state.global_step == 1 and not own.logprob_computer.checked
    runs = [trainer(tmp_path / kind.__name__, kind=kind) for kind in (GRPOTrainer, CallingLogprobs)]
    for run in runs:
        run.train()
    # The first window of the second run was rebalanced, but not packed, for the layout that failed.
    assert runs[0].logprob_computer.layout == runs[1].logprob_computer.layout != "shared_prefix"
    for one, other in zip(*(run.model.state_dict().values() for run in runs), strict=True):
        torch.testing.assert_close(one, other)
