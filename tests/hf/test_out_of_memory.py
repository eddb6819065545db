"""A micro-batch that does not fit in memory is split: the same update and log, smaller ones from then on."""

from __future__ import annotations

import logging

import pytest
import torch
from accelerate.state import GradientState
from support.runs import policy, prompts, trainer

from groupwise.errors import BackendError

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Full:
    """Raises as an accelerator does when a forward or a backward has more than ``tokens`` tokens."""

    def __init__(self, model, tokens, where):
        self.tokens, self.where, self.raised = tokens, where, 0
        self.model = model
        # The first layer's backward comes last, when the gradients of the layers behind it are added up.
        model.model.layers[0].register_forward_hook(self.after_layer)

    def after_layer(self, module, inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if self.model.training and torch.is_grad_enabled() and hidden.shape[:-1].numel() > self.tokens:
            if self.where == "forward":
                self.fail()
            hidden.register_hook(self.fail)

    def fail(self, *_):
        self.raised += 1
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def run(tmp_path, name, tokens=None, where="forward", **settings):
    model = policy()
    full = None if tokens is None else Full(model, tokens, where)
    defaults = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 8,
        "max_steps": 3,
        "gradient_checkpointing": False,
        "train_dataset": prompts(24),
        "optim": "sgd",
    }
    trained = trainer(tmp_path / name, model=model, **{**defaults, **settings})
    trained.logprob_computer.checked = True  # its rows have more tokens than these micro-batches
    trained.train()
    return trained, full


@pytest.mark.representative("an out-of-memory error changes no update")
@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_the_update_and_the_log_are_those_of_a_run_with_more_memory(tmp_path, layout, where, caplog):
    # 16 rows of up to 10 tokens in the window: with 15 every micro-batch has to be split more than once
    ample, _ = run(tmp_path, "ample", sequence_layout=layout)
    with caplog.at_level(logging.WARNING):
        scarce, full = run(tmp_path, "scarce", 15, where, sequence_layout=layout)
    assert full.raised >= 2 and "did not fit in memory" in caplog.text
    assert scarce.splitter.max_tokens <= 15 and ample.splitter.max_tokens is None
    for ours, theirs in zip(scarce.model.parameters(), ample.model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-6
    for ours, theirs in zip(scarce.state.log_history[:-1], ample.state.log_history[:-1], strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward", "skipped_share", "completions/mean_length"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name


class FullAtTheEnd(Full):
    """Raises once, in the last micro-batch of a window: memory was enough for the ones before."""

    window, ends = 1, 0

    def after_layer(self, module, inputs, output):
        if self.model.training and torch.is_grad_enabled() and GradientState().sync_gradients:
            self.ends += 1
            if self.ends == self.window:
                self.fail()


@pytest.mark.representative("an out-of-memory error in a later micro-batch")
@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
def test_micro_batches_of_the_window_before_the_failure_are_repeated(tmp_path, monkeypatch, window):
    ample, _ = run(tmp_path, "ample")
    monkeypatch.setattr(FullAtTheEnd, "window", window)
    monkeypatch.setattr(f"{__name__}.Full", FullAtTheEnd)
    scarce, full = run(tmp_path, "scarce", 0)
    assert full.raised == 1 and scarce.splitter.max_tokens is not None
    for ours, theirs in zip(scarce.model.parameters(), ample.model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.representative("windows after an out-of-memory error")
@pytest.mark.slow
def test_later_windows_start_with_the_smaller_size(tmp_path):
    _, full = run(tmp_path, "short", 30, max_steps=1)
    once = full.raised
    _, full = run(tmp_path, "long", 30, max_steps=3)
    assert full.raised == once


def test_a_single_sequence_that_does_not_fit_ends_the_run_with_advice(tmp_path):
    with pytest.raises(BackendError, match="cannot be split; lower max_completion_length"):
        run(tmp_path, "run", 3)


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(Full, "fail", lambda self, *_: (_ for _ in ()).throw(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(tmp_path, "run", 30)
