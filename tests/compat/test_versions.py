"""Fast paths and completions that must be the same with every supported version of transformers.

File: ``records/fast_paths.py``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from functools import partial

import peft
import pytest
import torch
import transformers
from support import architectures
from support.runs import trainer

from groupwise import ConfigError
from groupwise.compat import transformers as compat
from groupwise.cpu import linears_path
from groupwise.generation import settings
from groupwise.generation.decoding import sample_tokens
from groupwise.generation.settings import decoding_path
from groupwise.generation.transformers_backend import TransformersBackend

SIZES = {**architectures.SIZES, "vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
ARCHITECTURES = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
    "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig),
}
#: Digest of the sampled completions of each architecture, the same with transformers 5.3, 5.19 and 5.24.
SAMPLED = {
    "llama": "e52c968d28440e85",
    "qwen2": "ed79d0814187838f",
    "qwen3": "1963542e3ac7af0b",
    "gemma3": "7c331a26fd3f2aef",
}
PROMPTS = [[5, 6, 7]] * 3 + [[11, 12, 13, 14, 15]] + [[20]] * 2
LENGTH, SUPPRESSED = 12, 63


def build(name: str, **changes):
    """A model whose weights are drawn here: initial weights differ between versions."""
    kind, config = ARCHITECTURES[name]
    model = kind(config(**{**SIZES, **changes})).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.3 if parameter.dim() > 1 else 1 + 0.1 * drawn)
    return model


def without_cache(model, generator):
    """Completions by whole forwards of whole rows, drawn as the loop draws them: (R, LENGTH)."""
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(LENGTH):
        logits = torch.stack([model(torch.tensor([row])).logits[0, -1] for row in rows])
        logits[:, SUPPRESSED] = -torch.inf
        for row, token in zip(rows, sample_tokens(logits, generator is not None, generator), strict=True):
            row.append(int(token))
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_completions_of_a_seed_are_those_of_every_version(name):
    model = build(name)
    digests = []
    for do_sample in (False, True):
        config = transformers.GenerationConfig(
            max_new_tokens=LENGTH, do_sample=do_sample, top_k=0, pad_token_id=0, eos_token_id=SUPPRESSED,
            suppress_tokens=[SUPPRESSED], use_cache=True,
        )  # fmt: skip
        backend = TransformersBackend(lambda: model, config)
        assert not decoding_path(model, config).reason
        backend.generator = torch.Generator().manual_seed(3)
        given = [completion.token_ids for completion in backend.generate(PROMPTS)]
        assert given == without_cache(model, torch.Generator().manual_seed(3) if do_sample else None)
        digests.append(hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16])
    assert digests[1] == SAMPLED[name] and digests[0] != digests[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_fast_path_is_used_by_default(name, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="groupwise")
    run = trainer(tmp_path, model=build(name, hidden_size=256, intermediate_size=256), max_steps=1)
    run.train()
    (record,) = [one for one in caplog.records if "decoding: " in one.getMessage()]
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "decoding: own loop · layout: shared_prefix · head: chunked · old log-probs: not needed · "
        "rows without gradient: skipped · recomputation: as memory demands · "
        "linear layers: oneDNN, packed for sampling"
    )
    assert run.logprob_computer.layout == "shared_prefix"  # its check has passed
    saved = json.loads((tmp_path / "settings.json").read_text())["fast_paths"]
    assert saved["layout"] == "shared_prefix"


def line(run, caplog):
    """Return the line at the beginning of a run, and its level."""
    caplog.clear()
    caplog.set_level(logging.INFO, logger="groupwise")
    callback = next(
        one for one in run.callback_handler.callbacks if type(one).__name__ == "MetricsFileCallback"
    )
    callback.on_train_begin(run.args, run.state, run.control, model=run.model)
    (record,) = [one for one in caplog.records if "decoding: " in one.getMessage()]
    return record.getMessage(), record.levelname


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cache_implementation": "static"}, "decoding: transformers (cache_implementation='static')"),
        (
            {"generation_kwargs": {"num_beams": 2}},
            "decoding: transformers (num_beams may act on several rows)",
        ),
        ({"sequence_layout": "padded"}, "layout: padded (sequence_layout='padded')"),
        ({"neftune_noise_alpha": 1.0}, "layout: padded (neftune_noise_alpha)"),
        ({"logprob_head": "dense"}, "head: dense (logprob_head='dense')"),
        ({"num_iterations": 2}, "old log-probs: computed (a generation is used in 2 optimizer steps)"),
        ({"skip_zero_advantage": False}, "rows without gradient: computed (skip_zero_advantage=False)"),
        ({"beta": 0.1}, "computed (the KL to the reference has a gradient there)"),
        ({"entropy_coef": 0.1}, "computed (the entropy bonus has a gradient there)"),
        ({"activation_memory_fraction": 0.0}, "recomputation: every layer (activation_memory_fraction=0)"),
        ({"gradient_checkpointing": False}, "recomputation: none"),
    ],
)
def test_a_choice_of_the_user_is_named(settings, text, tmp_path, caplog):
    message, level = line(trainer(tmp_path, **settings), caplog)
    assert text in message and level == "INFO"


def test_a_name_that_is_not_found_is_a_warning(tmp_path, caplog, monkeypatch):
    run = trainer(tmp_path)
    monkeypatch.setattr(settings, "cache_argument", lambda _: None)
    message, level = line(run, caplog)
    assert "has no argument of a known name for the cache)" in message and level == "WARNING"
    monkeypatch.setattr(settings, "cache_without_rows", lambda _: ("its cache has DynamicLayer", True))
    monkeypatch.setattr(settings, "cache_argument", lambda _: "cache")
    message, level = line(run, caplog)
    assert "decoding: transformers (its cache has DynamicLayer)" in message and level == "WARNING"
    run.model.generate = partial(run.model.generate)
    message, level = line(run, caplog)
    assert "has a generate or _sample of its own)" in message and level == "WARNING"


class OldNames(transformers.LlamaForCausalLM):
    """A model written before transformers 5.24, which renamed the cache."""

    def forward(self, input_ids, past_key_values=None, **given):
        given[compat.cache_argument(super()) or "past_key_values"] = past_key_values
        return super().forward(input_ids, **given)


@pytest.fixture
def new_names(monkeypatch):
    """``generate`` of 5.24 as far as its names show."""
    stock = transformers.GenerationMixin.prepare_inputs_for_generation
    if "cache" not in inspect.signature(stock).parameters:

        def prepare(self, input_ids, cache=None, attention_mask=None, **given):
            return stock(self, input_ids, past_key_values=cache, attention_mask=attention_mask, **given)

        monkeypatch.setattr(transformers.GenerationMixin, "prepare_inputs_for_generation", prepare)


def test_a_model_with_the_old_name_of_the_cache_is_refused_with_the_remedies(tmp_path, new_names):
    model = OldNames(transformers.LlamaConfig(**SIZES))
    remedies = r"rename it in the model's arguments .* transformers<5\.24, .*\{'use_cache': False\}"
    with pytest.raises(ConfigError, match=rf"forward of OldNames has .* past_key_values, .*; {remedies}"):
        trainer(tmp_path, model=model)
    run = trainer(tmp_path, model=model, generation_kwargs={"use_cache": False}, max_steps=1)
    run.train()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="forward of OldNames"):
        trainer(tmp_path, model=adapted)


def test_a_model_that_renames_the_cache_itself_uses_the_loop_of_generate(tmp_path, new_names):
    class Renaming(OldNames):
        def prepare_inputs_for_generation(self, input_ids, **given):
            inputs = super().prepare_inputs_for_generation(input_ids, **given)
            return {"past_key_values" if n == "cache" else n: value for n, value in inputs.items()}

    run = trainer(tmp_path, model=Renaming(transformers.LlamaConfig(**SIZES)))
    (path, *_) = run.fast_paths()
    assert path.choice == "transformers" and "no argument of a known name for the cache" in path.reason


def test_linear_layers_without_onednn(tmp_path, monkeypatch):
    model = trainer(tmp_path).model
    assert linears_path(model, onednn_linears=True).reason == "none is large enough"
    assert "torch_compile" in linears_path(model, onednn_linears=False).reason
    monkeypatch.setattr("groupwise.cpu.has_onednn_linear", lambda: False)
    path = linears_path(model, onednn_linears=True)
    assert path.warns and path.reason == "this PyTorch has no oneDNN"


def test_an_adapter_that_adds_virtual_tokens(tmp_path, caplog):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    message, level = line(trainer(tmp_path, peft_config=config), caplog)
    assert "decoding: transformers (the adapter adds virtual tokens)" in message and level == "INFO"
    assert "layout: padded (its adapter adds virtual tokens to every prompt)" in message
