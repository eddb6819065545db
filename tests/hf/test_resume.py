"""A run resumed from any of its checkpoints continues bit for bit as if it had never stopped.

Files: ``data/buffer.py``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from support import resume_runs
from support.architectures import STATES, build
from support.resume_runs import (
    gpt2_with_dropout,
    llama,
    make_trainer,
    vowels,
    vowels_of_odd_prompts,
)
from support.saved_runs import files
from support.workers.launch import Script
from transformers import Trainer, TrainerCallback

from groupwise import GRPOConfig
from groupwise.compat.transformers import supports_cache_in_checkpoints
from groupwise.errors import ConfigError, RewardError
from groupwise.hf import checkpointing
from groupwise.hf.run_directory import RunDirectory
from groupwise.reporting.metrics_file import read_metrics

TIMEOUT = 180  # seconds

# Wall-clock time never repeats.
_TIMING = re.compile(r"(eval_)?(time|memory)/.*|step_time|.*_runtime|.*_per_second")
# Of the summary line only: Trainer counts it over the steps of the process at hand, by design.
_OF_THIS_PROCESS = {"train_loss"}


def _history(trainer: Any) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not _TIMING.fullmatch(k) and k not in _OF_THIS_PROCESS}
        for line in trainer.state.log_history
    ]


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def _assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def _assert_resumes(directory: Path, steps: list[int], make: Callable[..., Any], **settings: Any) -> Any:
    """Train through, then once more from each of the checkpoints; returns the uninterrupted trainer."""
    whole = make(directory / "whole", **settings)
    before = _weights(whole)
    whole.train()
    after = _weights(whole)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for step in steps:
        resumed = make(directory / f"from-{step}", **{**settings, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(directory / "whole" / f"checkpoint-{step}"))
        assert resumed.state.global_step == whole.state.global_step
        _assert_same_weights(_weights(resumed), after)
        assert _history(resumed) == _history(whole)
    return whole


def _often_constant(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """The same for all completions of two of five prompts, and never the same for those of the others."""
    numbers = [int(prompt.split("x")[-1].split()[-1]) for prompt in prompts]
    values = [place + sum(map(ord, text)) % 50 / 100 for place, text in enumerate(completions)]
    return [value * (number % 5 > 1) for value, number in zip(values, numbers, strict=True)]


#: Settings of a run and the checkpoints that it is resumed from: what a checkpoint holds differs.
RUNS: dict[str, tuple[dict[str, Any], list[int]]] = {
    # 4 micro-batches, each used twice: steps 1-8 share a generation, 9 and 10 are on the next one. Half of
    # the rows have no gradient, and no old log-probs in the buffer.
    "a generation that is used again": (
        {"num_iterations": 2, "steps_per_generation": 4, "reward_funcs": vowels_of_odd_prompts}
        | {"max_steps": 10, "lr_scheduler_type": "cosine"},
        [1, 4, 6, 8, 9],
    ),
    # 3 generation batches an epoch and windows of 2: the second step of an epoch has a single micro-batch.
    "several generations in a step, and a short window": (
        {"num_prompts": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
        | {"max_steps": -1, "num_train_epochs": 2},
        [1, 2],
    ),
    # 5 prompts, 2 per generation batch: 2 batches (one prompt sits out), each used twice: 4 steps an epoch.
    "within an epoch and at its end": (
        {"num_prompts": 5, "num_iterations": 2, "max_steps": -1, "num_train_epochs": 2},
        [3, 4],
    ),
    "read by a worker": ({"num_prompts": 4, "dataloader_num_workers": 1, "max_steps": 4}, [3]),
    "groups of several rounds, and reference log-probs": (
        {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 4, "reward_funcs": _often_constant}
        | {"per_device_train_batch_size": 6, "log_completions": True, "num_iterations": 2}
        | {"beta": 0.1, "kl_in_reward": True},
        [1, 2],
    ),
    # The reference moves after steps 2, 4 and 6; checkpoints right at a move and between two. The entropy
    # of a random model (log 40 = 3.7 nats) stays below 5: the coefficient grows by 0.25 a step to 1.
    "a reference and an entropy coefficient that move": (
        {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
        | {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.25}
        | {"entropy_coef": 0.0},
        [2, 3],
    ),
    # Logs after steps 3 and 6, evaluations after 2, 4 and 6: checkpoint 4 lies between two logs.
    "between two logs and two evaluations": (
        {"logging_steps": 3, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        | {"gradient_accumulation_steps": 2},
        [4],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_resume_repeats_the_run(tmp_path: Path, name: str) -> None:
    settings, steps = RUNS[name]
    whole = _assert_resumes(tmp_path, steps, make_trainer, **settings)
    lines = [line for line in whole.state.log_history if "loss" in line]
    if name == "between two logs and two evaluations":
        assert len(whole.state.log_history) == 2 + 3 + 1
    if name == "groups of several rounds, and reference log-probs":
        assert max(line.get("dynamic_sampling/rounds", 0) for line in lines) > 1
    if name == "a reference and an entropy coefficient that move":
        assert [line["entropy_coef"] for line in lines] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
        start, reference = llama().state_dict(), whole.ref_model.state_dict()
        assert any(not torch.equal(start[name], reference[name]) for name in start)


@pytest.mark.slow
@pytest.mark.skipif(not supports_cache_in_checkpoints(), reason="such models are padded")
def test_resume_of_a_model_with_a_recurrent_state(tmp_path: Path) -> None:
    # Layout `forked`, with gradient checkpointing; the steps of a reused generation read its old log-probs.
    def make(directory: Path, **given: Any) -> Any:
        return make_trainer(directory, model=build(*STATES["qwen3_5"]), **given)

    settings = {"num_iterations": 2, "beta": 0.1, "gradient_checkpointing": True, "num_generations": 4}
    whole = _assert_resumes(tmp_path, [1], make, **settings, max_steps=3)
    assert whole.logprob_computer.layout == "forked"


def test_resume_with_larger_micro_batches_inside_a_generation(tmp_path: Path) -> None:
    # 8 completions a step, two steps a generation, as 2 x 4 and then as 1 x 8
    small = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2}
    whole = make_trainer(tmp_path / "whole", **small)
    whole.train()
    large = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 2}
    resumed = make_trainer(tmp_path / "resumed", **large, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert resumed.buffer.is_empty
    for name, tensor in _weights(whole).items():  # another order of summation; a step moves weights by 1e-2
        torch.testing.assert_close(_weights(resumed)[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_resume_with_a_reference_inside_a_generation(tmp_path: Path) -> None:
    """The saved completions have no reference log-probs; two micro-batches mix them with new ones."""
    reuse = {"num_iterations": 1, "steps_per_generation": 3, "reward_funcs": vowels_of_odd_prompts}
    make_trainer(tmp_path / "whole", **reuse, max_steps=2).train()
    resumed = make_trainer(
        tmp_path / "resumed",
        **reuse,
        **{"beta": 0.5, "gradient_accumulation_steps": 2, "max_steps": 4, "save_strategy": "no"},
    )
    compute, seen = resumed.compute_policy_loss, []

    def recorded(batch: Any, logprobs: Any) -> Any:
        mask = batch.loss_mask_BT == 1
        with torch.no_grad():
            reference = resumed.compute_logprobs(resumed.ref_model, batch).logps_BT
        torch.testing.assert_close(batch.ref_logps_BT[mask], reference[mask], atol=1e-5, rtol=0)
        seen.append(len(batch))
        return compute(batch, logprobs)

    resumed.compute_policy_loss = recorded
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert sum(seen) == 4 * 2 * 2  # rows without advantage are computed too
    assert all(entry["kl"] > 0 for entry in resumed.state.log_history[-3:-1])


@pytest.mark.slow
def test_resume_with_another_sampler_inside_a_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 1 to 4 share a generation, which keeps the settings that it was sampled with."""
    reuse = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.1, "max_steps": 6}
    whole = make_trainer(tmp_path / "whole", **reuse)
    whole.train()

    def resumed_from(step: int) -> Any:
        caplog.clear()
        trainer = make_trainer(tmp_path / f"from-{step}", **reuse, top_k=3, save_strategy="no")
        trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        return trainer

    resumed = resumed_from(2)
    assert "resumed with top_k=3 (was 0), which acts from the next generation on" in caplog.text
    assert _history(resumed)[:4] == _history(whole)[:4]
    assert _history(resumed)[4] != _history(whole)[4]  # the next generation has the new setting
    assert _history(resumed_from(4))[4] == _history(resumed)[4]


@pytest.mark.slow
def test_resume_with_dropout(tmp_path: Path) -> None:
    def make(directory: Path, **settings: Any) -> Any:
        return make_trainer(directory, model=gpt2_with_dropout(), **settings)

    settings = {"num_iterations": 2, "steps_per_generation": 2, "gradient_checkpointing": True}
    _assert_resumes(tmp_path, [3], make, **settings, max_steps=5)


def test_dropout_is_active(tmp_path: Path) -> None:
    # Otherwise the test above says nothing about the generator that dropout draws from.
    runs = []
    for disable_dropout in (False, True):
        trainer = make_trainer(
            tmp_path / str(disable_dropout),
            model=gpt2_with_dropout(),
            disable_dropout=disable_dropout,
            max_steps=1,
        )
        trainer.train()
        runs.append(trainer.state.log_history[0]["grad_norm"])
    assert runs[0] != runs[1]


@pytest.mark.slow
def test_resume_with_a_fresh_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make(directory: Path, **settings: Any) -> Any:
        adapter = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        return make_trainer(directory, peft_config=adapter, beta=0.1, **settings)

    _assert_resumes(tmp_path, [3], make, num_iterations=2, steps_per_generation=2)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["default", "second"])
def test_resume_restores_every_adapter(tmp_path: Path, trained: str) -> None:
    """The adapter that is trained, below or beside another one; and the best one is loaded at the end."""
    peft = pytest.importorskip("peft")

    def make(directory: Path, **settings: Any) -> Any:
        torch.manual_seed(1)
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(llama(), adapter)
        model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
        model.set_adapter(trained)
        beta = 0.0 if trained == "default" else 0.1  # with a frozen copy as the reference
        return make_trainer(directory, model=model, beta=beta, max_steps=4, **settings)

    whole = _assert_resumes(tmp_path, [2], make)
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_step", "save_steps": 1}
    run = make(tmp_path / "best", **best, load_best_model_at_end=True, greater_is_better=False)
    run.evaluate = lambda *_, **__: {"eval_step": run.state.global_step}  # the first is best
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-1")
    first = make(tmp_path / "first")
    first._load_from_checkpoint(str(tmp_path / "whole" / "checkpoint-1"))
    _assert_same_weights(_weights(run), _weights(first))
    assert any(not torch.equal(value, _weights(first)[name]) for name, value in _weights(whole).items())


@pytest.mark.slow
def test_resume_with_an_encoder_of_virtual_tokens(tmp_path: Path) -> None:
    """PEFT saves the virtual tokens, from which the encoder cannot be restored."""
    peft = pytest.importorskip("peft")

    def make(directory: Path, **settings: Any) -> Any:
        adapter = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        return make_trainer(directory, peft_config=adapter, max_steps=3, **settings)

    _assert_resumes(tmp_path, [2], make)


def _lora_run(directory: Path, base: Any = None, **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    target = {"target_modules": ["q_proj", "v_proj"]}
    adapter = peft.LoraConfig(**{"r": 2, "lora_alpha": 8, **target, **changes})
    return make_trainer(directory, model=llama() if base is None else base, peft_config=adapter, max_steps=2)


@pytest.fixture(scope="module")
def lora_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("lora")
    _lora_run(directory).train()
    return str(directory / "checkpoint-1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": 64}, r"lora_alpha=64 \(was 8\) in adapter 'default'.*new run that continues it"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"target_modules": ["q_proj", "o_proj"]}, r"target_modules=\['o_proj', 'q_proj'\]"),
        ({"r": 4}, r"r=4 \(was 2\)"),
    ],
    ids=str,
)
def test_resume_with_other_settings_of_the_adapter_is_refused(
    tmp_path: Path, lora_checkpoint: str, changes: dict[str, Any], message: str
) -> None:
    run = _lora_run(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        run.train(resume_from_checkpoint=lora_checkpoint)


def test_resume_with_other_adapters_is_refused(tmp_path: Path, lora_checkpoint: str) -> None:
    peft = pytest.importorskip("peft")
    run = _lora_run(tmp_path)
    run.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="adapter 'second' added"):
        run.train(resume_from_checkpoint=lora_checkpoint)
    with pytest.raises(ConfigError, match="adapter 'default' removed"):
        make_trainer(tmp_path / "full").train(resume_from_checkpoint=lora_checkpoint)


def test_resume_on_another_base_model_is_refused(tmp_path: Path, lora_checkpoint: str) -> None:
    base = llama()
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3  # one value of one frozen matrix
    run = _lora_run(tmp_path, base)
    with pytest.raises(ConfigError, match=r"1 of \d+ weights .*layers\.1\.mlp\.up_proj.*resume with"):
        run.train(resume_from_checkpoint=lora_checkpoint)


@pytest.mark.slow
def test_resume_with_another_dropout_or_dtype_is_a_warning(
    tmp_path: Path, lora_checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    _lora_run(tmp_path / "dropout", lora_dropout=0.1).train(resume_from_checkpoint=lora_checkpoint)
    assert (
        "resumed with lora_dropout=0.1 (was 0.0) in adapter 'default', from the first step on" in caplog.text
    )
    assert "weights of the policy differ" not in caplog.text
    _lora_run(tmp_path / "bf16", llama().bfloat16()).train(resume_from_checkpoint=lora_checkpoint)
    assert "(bfloat16, was float32)" in caplog.text


@pytest.mark.slow
def test_a_base_that_the_adapter_computes_may_differ_in_its_last_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The decomposition of PiSSA depends on the number of threads."""
    _lora_run(tmp_path, init_lora_weights="pissa").train()
    run = _lora_run(tmp_path / "resumed", init_lora_weights="pissa")
    with torch.no_grad():
        run.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.mul_(1 + 2**-20)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "the run continues from these weights" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [True, False])
def test_weights_that_were_not_loaded_end_the_resumed_run(
    tmp_path: Path, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = _lora_run if adapter else make_trainer
    make(tmp_path).train()
    run = make(tmp_path / "resumed")
    monkeypatch.setattr(checkpointing, "load_adapters", lambda *_: None)
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda *_: None)
    with pytest.raises(ConfigError, match=r"\d+ of \d+ weights of the policy differ"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.slow
def test_resume_keeps_completions_that_wait_for_their_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    _assert_resumes(tmp_path, [1], make_trainer, log_completions=True, logging_steps=2, max_steps=2)
    tables = [
        parquet.read_table(tmp_path / run / "completions" / "completions_00002.parquet")
        for run in ("whole", "from-1")
    ]
    assert tables[0]["step"].to_pylist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert tables[0].equals(tables[1])


def test_resume_after_a_reward_changed_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, start = tmp_path / "elsewhere", tmp_path / "start"
    elsewhere.mkdir()
    start.mkdir()

    def leaving(completions: list[str], **given: Any) -> list[float]:
        os.chdir(elsewhere)
        return [float(len(text)) for text in completions]

    monkeypatch.chdir(start)
    settings = {"max_steps": 2, "save_steps": 2, "log_completions": True}
    run = make_trainer("out", reward_funcs=leaving, **settings)
    run.train()
    run.save_model()
    os.chdir(elsewhere)
    run.train(resume_from_checkpoint=True)
    assert not list(elsewhere.iterdir())
    names = {path.name for path in (start / "out").iterdir()}
    assert {"checkpoint-2", "completions", "model.safetensors"} <= names


BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "eval_reward",
    "load_best_model_at_end": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 3}, 3),
        ({"max_steps": -1, "num_train_epochs": 1.25, "num_prompts": 8}, 5),  # within the second epoch
        ({"max_steps": 3, **BEST, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, 3),
    ],
    ids=["steps", "epochs", "best adapter"],
)
def test_a_finished_run_is_not_trained_further(
    tmp_path: Path, caplog: Any, settings: dict[str, Any], steps: int
) -> None:
    """``Trainer`` trains another step unless the last one is that of an epoch."""
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    whole.save_model()
    assert not whole.run_directory.has_result()
    assert whole.state.global_step == steps
    before = files(tmp_path)
    resumed = make_trainer(tmp_path, **settings)
    output = resumed.train(resume_from_checkpoint=True)
    assert (output.global_step, output.metrics) == (steps, {})
    assert f"nothing is trained: step {steps} of {steps} is done; its model is" in caplog.text
    _assert_same_weights(_weights(resumed), _weights(whole))
    assert files(tmp_path) == before
    assert resumed.run_directory.has_result()
    (weights,) = tmp_path.glob("*.safetensors")
    weights.unlink()  # as of a run that was killed before it saved its model
    assert not resumed.run_directory.has_result()


def _start(output_dir: Path, weights: Path, *options: str) -> tuple[Script, Connection]:
    """A fresh process with the options "resume" and "stop"."""
    with Listener(family="AF_UNIX") as listener:
        child = Script(resume_runs.__file__, listener.address, output_dir, weights, *options)
        return child, listener.accept()


def _run_to_the_end(output_dir: Path, weights: Path, *options: str) -> dict[str, torch.Tensor]:
    child, _ = _start(output_dir, weights, *options)
    end = time.monotonic() + TIMEOUT
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    child.kill()
    assert child.poll() == 0, child.text(1)
    return torch.load(weights)


def _names(directory: Path) -> list[str]:
    """Without logged metrics, settings and the file of the lock, which every run writes."""
    names = [path.name for path in directory.iterdir() if path.suffix != ".jsonl"]
    return sorted(name for name in names if name not in ("settings.json", "_run.lock"))


def _contents(output_dir: Path) -> dict[str, set[str]]:
    """The files of every checkpoint that has its name."""
    return {
        directory.name: {str(file.relative_to(directory)) for file in directory.rglob("*")}
        for directory in output_dir.glob("checkpoint-*")
    }


def _run_until(moments: list[str], whole: set[str], output_dir: Path, *options: str) -> set[str]:
    """Let a run pass ``moments`` in this order and kill it at the last; returns the checkpoints then there.

    At every moment, all checkpoints that have their name are whole.
    """
    child, talk = _start(output_dir, output_dir / "never", "stop", *options)
    passed: list[str] = []
    try:
        for moment in moments:
            while not passed or passed[-1] != moment:
                if passed:
                    talk.send("go on")
                assert talk.poll(TIMEOUT), f"stuck after {passed}"
                passed.append(talk.recv())
                broken = {name: files for name, files in _contents(output_dir).items() if files != whole}
                assert broken == {}, f"incomplete at {passed}"
    finally:
        child.kill()  # SIGKILL: no handler, no flush, no cleanup
    return set(_contents(output_dir))


@pytest.mark.slow
def test_a_killed_run_is_resumed_from_its_last_whole_checkpoint(
    tmp_path: Path,
) -> None:
    expected = _run_to_the_end(tmp_path / "whole", tmp_path / "whole.pt")
    whole = _contents(tmp_path / "whole")["checkpoint-6"]
    output_dir = tmp_path / "killed"

    # In the middle of a file of the Trainer's, then of one of ours.
    moments = ["after rename to checkpoint-1", "half of optimizer.pt"]
    assert _run_until(moments, whole, output_dir) == {"checkpoint-1"}
    moments = ["after rename to checkpoint-2", "half of groupwise_state_0.pt"]
    assert _run_until(moments, whole, output_dir, "resume") == {"checkpoint-1", "checkpoint-2"}
    # Two are kept: while the first one is being removed, then just before the fourth gets its name.
    moments = ["after rename to checkpoint-3", "half of _incomplete removed"]
    assert _run_until(moments, whole, output_dir, "resume") == {"checkpoint-2", "checkpoint-3"}
    moments = ["before rename to checkpoint-4"]
    assert _run_until(moments, whole, output_dir, "resume") == {"checkpoint-2", "checkpoint-3"}

    _assert_same_weights(_run_to_the_end(output_dir, tmp_path / "killed.pt", "resume"), expected)
    assert _contents(output_dir) == {"checkpoint-5": whole, "checkpoint-6": whole}


@pytest.mark.slow
def test_a_second_run_in_the_directory_is_refused_until_the_first_one_ends(
    tmp_path: Path,
) -> None:
    output_dir, other = tmp_path / "run", tmp_path / "run" / "_incomplete_notes"
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("of the user")
    child, talk = _start(output_dir, tmp_path / "never", "stop")
    try:
        while (moment := talk.recv()) != "half of groupwise_state_0.pt":
            talk.send(f"go on after {moment}")
        staged = {path for path in tmp_path.rglob("*") if path.is_file()}
        for resume in (None, True):
            with pytest.raises(ConfigError, match="is used by another run"):
                make_trainer(output_dir, max_steps=1).train(resume_from_checkpoint=resume)
        assert {path for path in tmp_path.rglob("*") if path.is_file()} == staged
    finally:
        child.kill()
    make_trainer(
        output_dir, max_steps=1
    ).train()  # a killed run has no lock, and its staged files are deleted
    assert _names(output_dir) == ["_incomplete_notes", "checkpoint-1"]
    assert _names(tmp_path) == ["run"]
    assert (other / "notes.txt").read_text() == "of the user"


def test_runs_that_save_nothing_do_not_share_a_directory_either(tmp_path: Path) -> None:
    """Both would write metrics, settings and recordings."""
    inner = make_trainer(tmp_path, max_steps=1, save_strategy="no")

    class Inner(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with pytest.raises(ConfigError, match="is used by another run"):
                inner.train()

    (tmp_path / "checkpoint-7").mkdir()  # a run that saves nothing moves none
    outer = make_trainer(tmp_path, max_steps=1, save_strategy="no")
    outer.add_callback(Inner())
    outer.train()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 1]
    inner.train()  # after its end
    assert _names(tmp_path) == ["checkpoint-7"]


def test_an_evaluation_without_write_access_returns_its_metrics(tmp_path: Path, caplog: Any) -> None:
    """The directory is gone when it evaluates, as on a file system that became read-only."""
    expected = make_trainer(tmp_path / "elsewhere").evaluate()
    run = make_trainer(tmp_path / "out")
    (tmp_path / "out").rmdir()
    (tmp_path / "out").write_text("a file in its place")
    assert run.evaluate()["eval_reward"] == expected["eval_reward"]
    assert "metrics.jsonl: the metrics of step 0 was not written" in caplog.text


def _fail_at(step: int) -> Any:
    def reward(completions: list[str], trainer_state: Any, **given: Any) -> list[float]:
        if trainer_state.global_step == step:
            raise ValueError("stop")
        return vowels(completions, **given)

    return reward


def _weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.slow
def test_a_new_run_keeps_an_earlier_one_and_is_the_one_that_resumes(tmp_path: Path, caplog: Any) -> None:
    output_dir = tmp_path / "run"
    make_trainer(output_dir, max_steps=3).train()
    earlier = {step: _weights_of(output_dir / f"checkpoint-{step}") for step in (1, 2, 3)}
    caplog.clear()
    with pytest.raises(RewardError):  # before its first checkpoint
        make_trainer(output_dir, max_steps=3, seed=7, reward_funcs=_fail_at(0)).train()
    (aside,) = (output_dir / "_earlier_runs").iterdir()
    moved = [text for text in caplog.messages if "moved" in text]
    assert len(moved) == 1
    assert f"checkpoint-1, checkpoint-2, checkpoint-3 in {str(output_dir)!r} of earlier runs" in moved[0]
    assert repr(str(aside)) in moved[0]
    with pytest.raises(ConfigError, match=r"no checkpoint of the run that was started last.*_earlier_runs'"):
        make_trainer(output_dir, max_steps=3, seed=7).train(resume_from_checkpoint=True)

    settings = {"max_steps": 3, "seed": 7, "save_total_limit": 1}
    with pytest.raises(RewardError):
        make_trainer(output_dir, **settings, reward_funcs=_fail_at(2)).train()
    resumed = make_trainer(output_dir, **settings)
    resumed.train(resume_from_checkpoint=True)
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    _assert_same_weights(_weights(resumed), _weights(whole))
    assert _names(output_dir) == ["_earlier_runs", "checkpoint-3"]
    for step, saved in earlier.items():
        _assert_same_weights(_weights_of(aside / f"checkpoint-{step}"), saved)


@pytest.mark.slow
def test_a_run_resumed_from_an_older_checkpoint_keeps_the_later_ones(tmp_path: Path, caplog: Any) -> None:
    make_trainer(tmp_path, max_steps=4).train()
    run_id = json.loads((tmp_path / "checkpoint-4" / "groupwise_manifest.json").read_text())["run"]
    later = _weights_of(tmp_path / "checkpoint-4")
    make_trainer(tmp_path, max_steps=3, seed=5).train(str(tmp_path / "checkpoint-2"))
    assert "checkpoint-3, checkpoint-4 in" in caplog.text and "after step 2, moved to" in caplog.text
    assert _names(tmp_path) == ["_earlier_runs", "checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert run_id == json.loads((tmp_path / "checkpoint-3" / "groupwise_manifest.json").read_text())["run"]
    (aside,) = (tmp_path / "_earlier_runs").iterdir()
    _assert_same_weights(_weights_of(aside / "checkpoint-4"), later)


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("three")
    make_trainer(output_dir, max_steps=3).train()
    return output_dir


def _cut(path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return f"{path.name} has {len(content) // 2} bytes instead of {len(content)}"


def _remove(path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing"


def _change(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path.name} has other contents"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("groupwise_state_0.pt", _remove),
        ("model.safetensors", _cut),
        ("scheduler.pt", _change),
    ],
)
def test_a_damaged_checkpoint_is_refused_or_skipped(
    tmp_path: Path, run_of_three: Path, caplog: Any, file: str, spoil: Any
) -> None:
    output_dir = tmp_path / "copy"
    shutil.copytree(run_of_three, output_dir)
    said = spoil(output_dir / "checkpoint-3" / file)
    with pytest.raises(ConfigError) as refused:
        make_trainer(output_dir, max_steps=4).train(str(output_dir / "checkpoint-3"))
    assert f"checkpoint-3' is damaged: {said}" in str(refused.value)
    assert f"the newest sound checkpoint is {str(output_dir / 'checkpoint-2')!r}" in str(refused.value)
    caplog.clear()
    resumed = make_trainer(output_dir, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert [text for text in caplog.messages if text.startswith(f"checkpoint-3 skipped: {said}")]
    _assert_same_weights(_weights(resumed), _weights_of(run_of_three / "checkpoint-3"))


@pytest.mark.slow
def test_a_checkpoint_without_manifest_is_resumed_with_one_warning(
    tmp_path: Path, run_of_three: Path, caplog: Any
) -> None:
    output_dir = tmp_path / "copy"
    shutil.copytree(run_of_three, output_dir)
    for step in (1, 2):
        (output_dir / f"checkpoint-{step}" / "groupwise_manifest.json").unlink()
    shutil.rmtree(output_dir / "checkpoint-3")
    resumed = make_trainer(output_dir, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert len([text for text in caplog.messages if "has no groupwise_manifest.json" in text]) == 1
    _assert_same_weights(_weights(resumed), _weights_of(run_of_three / "checkpoint-3"))
    make_trainer(output_dir, max_steps=4).train(resume_from_checkpoint=True)
    assert _names(output_dir) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    assert "moved" not in caplog.text
    (output_dir / "checkpoint-4" / "groupwise_manifest.json").write_text('{"run": "')
    with pytest.raises(ConfigError, match=r"groupwise_manifest\.json is cut or overwritten"):
        make_trainer(output_dir).train(str(output_dir / "checkpoint-4"))


def test_a_save_of_a_run_without_save_strategy_replaces_nothing_either(tmp_path: Path, caplog: Any) -> None:
    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

    make_trainer(tmp_path, max_steps=1).train()
    earlier = _weights_of(tmp_path / "checkpoint-1")
    run = make_trainer(tmp_path, max_steps=2, save_strategy="no", seed=7)
    run.add_callback(Save())
    run.train()
    assert _names(tmp_path) == ["_earlier_runs", "checkpoint-1", "checkpoint-2"]
    (aside,) = (tmp_path / "_earlier_runs").iterdir()
    _assert_same_weights(_weights_of(aside / "checkpoint-1"), earlier)
    assert len([text for text in caplog.messages if "moved to" in text]) == 1


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    make_trainer(tmp_path, max_steps=1).train()
    assert "cannot be locked ([Errno 95] Operation not supported): start no other run there" in caplog.text
    assert "checkpoint-1" in _names(tmp_path)


def test_a_forked_process_releases_no_lock_of_its_parent(tmp_path: Path) -> None:
    run = RunDirectory(GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none"))
    block = run.open(None)
    block.__enter__()
    if (child := os.fork()) == 0:
        block.__exit__(None, None, None)  # as where a reward forks, and its process unwinds the stack
        os._exit(0)
    os.waitpid(child, 0)
    other = RunDirectory(run.args)
    with (
        pytest.raises(ConfigError, match="is used by another run"),
        other.open(None),
    ):
        pass
    block.__exit__(None, None, None)
    with other.open(None):
        pass
