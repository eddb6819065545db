"""Log-probs that tokens are sampled with against the model's own plain forward of one row without padding.

Files: ``policy/logprob_mismatch.py``, ``generation/transformers_backend.py``, ``generation/decoding.py``.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from support.architectures import IMAGE, VISION, build, build_vision, completions_of_images

from groupwise import GRPOConfig
from groupwise.compat.transformers import supports_cache_in_checkpoints
from groupwise.errors import BackendError
from groupwise.generation import decoding
from groupwise.generation.base import RUN_SETTINGS
from groupwise.generation.settings import decoding_path
from groupwise.generation.transformers_backend import TransformersBackend
from groupwise.policy.logprob_mismatch import LogpRecorder, PlainForwardCheck
from groupwise.records import SamplingOptions
from groupwise.records.fast_paths import FastPath

#: Before transformers 5.19, whose caches several tokens continue, models take other ways.
pytestmark = pytest.mark.skipif(not supports_cache_in_checkpoints(), reason="transformers before 5.19")

#: Rotary frequencies change where the longest row of a forward pass has more than 48 tokens.
LONGROPE = (
    transformers.Phi3Config,
    {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0},
            **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
            "original_max_position_embeddings": 48,
        },
        **{"original_max_position_embeddings": 48, "max_position_embeddings": 192, "sliding_window": None},
    },
)
#: Its recurrent state passes through padding.
RECURRENT = (
    transformers.RecurrentGemmaConfig,
    {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "recurrent", "attention"]},
)


def backend_of(model, tmp_path, new_tokens=8, **given):
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=True, use_cache=True, pad_token_id=0, eos_token_id=999
    )
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **given)
    backend = TransformersBackend(lambda: model, settings, config)
    backend.generator = torch.Generator().manual_seed(3)
    return backend


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


def differences(model, prompts, monkeypatch, backend):
    """Completions, and the mean |difference| from a plain forward of every row, each computed here."""
    recorded = []

    class Recorder(LogpRecorder):
        def __init__(self):
            super().__init__()
            recorded.append(self)

    monkeypatch.setattr("groupwise.generation.transformers_backend.LogpRecorder", Recorder)
    if backend.plain_check is not None:
        backend.plain_check.forget()  # so that it records
    completions = backend.generate(prompts)
    assert len(recorded) == 1
    gaps = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        expected = logps.gather(1, ids[0, len(prompt) :, None])[:, 0]
        given = recorded[0].of_completion(row, len(completion.token_ids))
        gaps.append(float((given - expected[: len(given)]).abs().mean()))
    return completions, gaps


@pytest.mark.parametrize("stock", [False, True])
def test_recorded_logps_are_those_of_a_plain_forward(stock, tmp_path, monkeypatch):
    model = build(transformers.LlamaConfig, {}).eval()
    backend = backend_of(model, tmp_path, temperature=0.6, top_k=5)  # which do not change them
    backend.stock_decoding = stock
    _, gaps = differences(model, prompts_of(3, 3, 9), monkeypatch, backend)
    assert max(gaps) < 1e-5 and not backend.found


def test_rows_whose_positions_depend_on_the_longest_row_are_decoded_by_length(tmp_path, caplog):
    model = build(*LONGROPE).eval()
    prompts = prompts_of(24, 24, 60)
    backend = backend_of(model, tmp_path)
    given = backend.generate(prompts)
    [path] = backend.fast_paths(model)
    assert path.choice == "own loop, rows of equal length" and path.warns
    assert "differ by" in path.reason and path.reason in caplog.text
    # As if the run had begun that way, to the random stream.
    alike = backend_of(model, tmp_path)
    alike.by_length = True
    assert given == alike.generate(prompts)
    assert torch.equal(backend.generator.get_state(), alike.generator.get_state())
    wrong = backend_of(model, tmp_path, logprob_mismatch_check="off")
    assert given != wrong.generate(prompts)


def test_a_row_that_reaches_other_positions_is_refused(tmp_path):
    model = build(*LONGROPE).eval()
    backend = backend_of(model, tmp_path, new_tokens=12)
    backend.generate(prompts_of(20, 20))
    assert not backend.found and backend.plain_check.seen
    backend.generate(prompts_of(60, 60))
    with pytest.raises(BackendError, match="Phi3ForCausalLM samples tokens with other log-probs"):
        backend.generate(prompts_of(40, 40))


def test_a_model_whose_cache_is_dropped_is_not_decoded_without_it(tmp_path):
    backend = backend_of(build(*LONGROPE).eval(), tmp_path, new_tokens=12, logprob_mismatch_check="off")
    with pytest.raises(decoding.WrongLogpsError, match="drops its cache at 49 tokens"):
        backend._generate(prompts_of(40), RUN_SETTINGS)


def test_states_that_pass_through_padding_are_decoded_by_length(tmp_path, monkeypatch):
    model = build(*RECURRENT).eval()
    backend = backend_of(model, tmp_path)
    backend.generate(prompts_of(4, 17))
    assert backend._way(model) == "transformers, rows of equal length"
    backend.found = ""
    _, gaps = differences(model, prompts_of(9, 9), monkeypatch, backend)
    assert max(gaps) < 1e-5


def test_an_error_of_the_own_loop_is_found(tmp_path, monkeypatch):
    model, prompts = build(transformers.LlamaConfig, {}).eval(), prompts_of(5, 9)
    right = decoding.OneQueryAttention.__call__

    def without_the_first_key(self, query, key, value, scale, window):
        return right(self, query, key, value, scale, key.shape[2] - 1)

    monkeypatch.setattr(decoding.OneQueryAttention, "__call__", without_the_first_key)
    backend = backend_of(model, tmp_path)
    given = backend.generate(prompts)
    stock = backend_of(model, tmp_path)
    stock.stock_decoding = True
    assert backend._way(model) == "transformers" and given == stock.generate(prompts)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3_vl", "llava"])
def test_rows_with_images_are_compared(name, tmp_path):
    model, batch = build_vision(name).eval(), completions_of_images(name)
    pairs = zip(batch.prompt_ids_BL, batch.prompt_mask_BL.bool(), strict=True)
    prompts = [ids[mask].tolist() for ids, mask in pairs]
    backend = backend_of(model, tmp_path)
    backend.generation_config.suppress_tokens = [IMAGE]
    backend.generate(prompts, SamplingOptions(images=list(batch.images)))
    assert name in VISION and backend.plain_check.seen and not backend.found


def test_the_comparison_is_due_again_where_the_config_names_a_length():
    sizes = {"sliding_window": 40, "max_position_embeddings": 90}
    check = PlainForwardCheck(build(transformers.MistralConfig, sizes))
    assert check.due_rows([(34, 3), (34, 6)], False) == [1] and check.may_be_due([34], 4, False)
    check.passed([(34, 6)], False)
    assert check.due_rows([(35, 5)], False) == [] and not check.may_be_due([33], 7, False)
    # Beside padding, beyond the window, and beyond it from the first token on.
    assert check.due_rows([(35, 4), (33, 3), (33, 5)], True) == [2] and check.may_be_due([34], 4, True)
    assert check.due_rows([(33, 4), (35, 6)], False) == [1] and check.may_be_due([34], 7, False)
    check.passed([(35, 6)], True)
    assert check.due_rows([(36, 5), (41, 6), (34, 2)], True) == [1]
    check.forget()
    assert check.due_rows([(36, 5), (36, 5), (33, 5)], True) == [2, 0]


def test_a_setting_of_encoders_does_not_keep_a_decoder_from_the_own_loop():
    small = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
    model = build(transformers.XGLMConfig, small)
    assert model.generation_config.decoder_start_token_id is not None
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=True, use_cache=True)
    assert decoding_path(model, config).choice == "own loop"


def test_a_model_that_fails_in_the_own_loop_is_decoded_by_generate(tmp_path, monkeypatch):
    model, prompts = build(transformers.LlamaConfig, {}).eval(), prompts_of(5, 9)

    def fails(*_, **__):
        raise KeyError("cache")

    monkeypatch.setattr("groupwise.generation.transformers_backend.decode_groups", fails)
    backend, stock = backend_of(model, tmp_path), backend_of(model, tmp_path)
    given, stock.stock_decoding = backend.generate(prompts), True
    [path] = backend.fast_paths(model)
    assert path.choice == "transformers" and "fails with" in path.reason and given == stock.generate(prompts)
    with pytest.raises(KeyError):  # an error in rows that have been compared before is another one
        backend.stock_decoding = False
        backend.generate(prompts)


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("decode_groups", None, "TypeError"),
        ("requires_lockstep_forwards", lambda _: True, "sharded"),
        ("decoding_path", lambda *_: FastPath("decoding", "transformers", "generate was patched"), "patched"),
    ],
)
def test_a_run_that_replays_the_routing_of_its_samples_needs_the_own_loop(
    name, value, reason, tmp_path, monkeypatch
):
    """In the loop of transformers nothing is recorded, and the loss would replay nothing."""
    model = build(transformers.Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}).eval()
    backend = backend_of(model, tmp_path, router_replay="R3")
    monkeypatch.setattr(f"groupwise.generation.transformers_backend.{name}", value)
    with pytest.raises(BackendError, match=f"router_replay='R3' records experts.*{reason}.*use 'R2'"):
        backend.generate(prompts_of(5, 9))


def test_a_model_that_generate_cannot_sample_is_refused(tmp_path):
    model = build(transformers.LlamaConfig, {}).eval()

    def fail_with_a_cache(module, args, kwargs):
        if kwargs.get("cache", kwargs.get("past_key_values")) is not None:  # cache: since transformers 5.24
            raise IndexError("no such state")

    model.register_forward_pre_hook(fail_with_a_cache, with_kwargs=True)
    backend = backend_of(model, tmp_path)
    with pytest.raises(BackendError, match=r"LlamaForCausalLM.*no such state.*sample with vLLM") as raised:
        backend.generate(prompts_of(6, 9))
    assert isinstance(raised.value.__cause__, IndexError) and backend.by_length  # every way was tried


def test_layers_that_share_keys_are_decoded_in_the_own_loop(tmp_path, monkeypatch):
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build(
        transformers.Gemma3nTextConfig,
        {"layer_types": kinds, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 4}
        | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 6}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 67},
    ).eval()
    backend = backend_of(model, tmp_path)
    assert backend.fast_paths(model)[0].choice == "own loop"
    _, gaps = differences(model, prompts_of(4, 4, 9), monkeypatch, backend)
    assert max(gaps) < 1e-4 and not backend.found
