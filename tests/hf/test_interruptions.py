"""Interrupts, failures and second runs: data, weights and metrics continue from the last completed step."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import runs
from support.fakes.fake_vllm import GENERATE, FakeVLLM, with_tokenizer
from support.resume_runs import make_trainer
from transformers import TrainerCallback

from groupwise import RewardError
from groupwise.generation.vllm import transfer
from groupwise.generation.vllm.client import HttpClient

_TIMING = re.compile(
    r"(eval_)?(time|memory)/.*|step_time|.*_runtime|.*_per_second|.*preparation_time|train_loss"
)


def history(run: Any, *without: str) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not _TIMING.fullmatch(k) and k not in without}
        for line in run.state.log_history
    ]


def assert_same_weights(one: Any, other: Any) -> None:
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


class Once(TrainerCallback):
    """Calls a function at one event, once."""

    def __init__(self, event: str, step: int, function: Any) -> None:
        def call(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step and not self.called:
                self.called = True
                function()

        self.called = False
        setattr(self, event, call)


# Windows of two micro-batches, two windows per generation: step 4 is the second of its generation.
WINDOWS = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_prompts": 24}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = make_trainer(tmp_path_factory.mktemp("whole"), **WINDOWS)
    run.train()
    return run


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_substep_end", "on_step_end"])
def test_an_interrupted_trainer_resumes_by_itself(tmp_path: Path, whole: Any, event: str) -> None:
    run = make_trainer(tmp_path, **WINDOWS)
    run.add_callback(Once(event, 3, interrupt))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not run.is_in_train
    run.train(resume_from_checkpoint=True)
    assert_same_weights(run, whole)
    assert history(run) == history(whole)


@pytest.mark.slow
def test_an_interrupt_of_the_rewards_and_a_resume_of_the_same_trainer(tmp_path: Path) -> None:
    calls = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [float(len(set(text))) for text in completions]

    run = make_trainer(tmp_path / "interrupted", reward_funcs=reward)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train(resume_from_checkpoint=True)
    expected = make_trainer(tmp_path / "whole", reward_funcs=reward)
    expected.train()
    assert_same_weights(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_on_sigterm_loses_no_window(tmp_path: Path, whole: Any, event: str) -> None:
    run = make_trainer(tmp_path, **WINDOWS, save_strategy="no", enable_jit_checkpoint=True)
    callbacks = run.callback_handler.callbacks
    (manager,) = (callback.jit_manager for callback in callbacks if hasattr(callback, "jit_manager"))
    # A signal sets this mark some seconds later; the callback saves at the next event that it handles.
    request = Once(event, 3, lambda: setattr(manager, "is_checkpoint_requested", True))
    callbacks.insert(0, request)
    run.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    # The step is completed if it had come to its update.
    assert run.state.global_step == (4 if event in ("on_substep_end", "on_pre_optimizer_step") else 3)
    resumed = make_trainer(tmp_path, **WINDOWS, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed, whole)
    if event != "on_step_end":  # there the checkpoint is saved before the step is logged
        # Trainer counts the operations of the micro-batches that were interrupted.
        assert history(resumed, "total_flos") == history(whole, "total_flos")


@pytest.mark.slow
def test_a_checkpoint_on_sigterm_has_the_reference_of_its_step(tmp_path: Path) -> None:
    """The step at whose end the reference becomes the policy; no later step would repeat that."""
    refresh = {"beta": 0.5, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 2}
    run = make_trainer(tmp_path, **refresh, max_steps=3, save_strategy="no", enable_jit_checkpoint=True)
    callbacks = run.callback_handler.callbacks
    (manager,) = (callback.jit_manager for callback in callbacks if hasattr(callback, "jit_manager"))
    request = Once("on_step_end", 2, lambda: setattr(manager, "is_checkpoint_requested", True))
    callbacks.insert(0, request)
    run.train()
    reference = torch.load(tmp_path / "checkpoint-2" / "groupwise_reference.pt")
    policy = type(run.model).from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert all(torch.equal(reference[name], value) for name, value in policy.items())


@pytest.mark.slow
def test_a_checkpoint_on_sigterm_that_was_killed_is_not_resumed(tmp_path: Path, whole: Any) -> None:
    run = make_trainer(tmp_path, **WINDOWS)
    run.add_callback(Once("on_step_begin", 2, interrupt))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    (tmp_path / "checkpoint-3").mkdir()  # as enable_jit_checkpoint leaves it when it is killed
    (tmp_path / "checkpoint-3" / "checkpoint-is-incomplete.txt").write_text("in progress")
    resumed = make_trainer(tmp_path, **WINDOWS)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed, whole)


def test_a_run_that_fails_leaves_no_hook_and_no_handler(tmp_path: Path) -> None:
    """NEFTune's noise in training mode, the handler of ``enable_jit_checkpoint``."""
    before = signal.getsignal(signal.SIGTERM)
    settings = {"neftune_noise_alpha": 5.0, "enable_jit_checkpoint": True, "save_strategy": "no"}
    run = make_trainer(tmp_path, **settings)
    seen: list[Any] = []
    embedding = run.model.get_input_embeddings()

    def fail() -> None:
        seen.append(signal.getsignal(signal.SIGTERM) != before)
        seen.append(torch.equal(embedding.train()(torch.tensor([[3]])), embedding.weight[3].view(1, 1, -1)))
        raise RuntimeError("this run fails")

    run.add_callback(Once("on_step_begin", 1, fail))
    with pytest.raises(RuntimeError, match="this run fails"):
        run.train()
    assert seen == [True, False]
    assert torch.equal(embedding.train()(torch.tensor([[3]])), embedding.weight[3].view(1, 1, -1))
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_evaluation_after_one_that_failed_counts_nothing_of_it(tmp_path: Path) -> None:
    failing = [False]
    calls = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(1)
        if failing[0] and len(calls) == 2:  # the second batch of the evaluation
            raise ValueError("no judge")
        return runs.count_reward(completion_ids)

    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "eval_pass_at_k": [1, 2]}

    def make(name: str) -> Any:
        calls.clear()
        return runs.trainer(tmp_path / name, reward, eval_dataset=runs.prompts(4), **settings)

    expected = make("undisturbed").evaluate()
    failing[0] = True
    run = make("failed")
    with pytest.raises(RewardError, match="no judge"):
        run.evaluate()
    failing[0] = False
    run.record_metric("mine", 1.0)
    found = run.evaluate()
    kept = [name for name in expected if not _TIMING.fullmatch(name)]
    assert {name: found[name] for name in kept} == {name: expected[name] for name in kept}
    assert not [name for name in found if "gain" in name or "mine" in name]  # nor is it the baseline


# With a server of vLLM.


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(HttpClient, "first_pause", 0.02)
    shared_memory = tmp_path / "shm"
    shared_memory.mkdir()
    monkeypatch.setattr(transfer, "_SHARED_MEMORY", shared_memory)
    server = with_tokenizer(FakeVLLM(), runs.tokenizer())
    server.logprob = lambda position: -math.log(32)  # about that of every token of the tiny policy
    server.shared_memory = shared_memory
    yield server
    server.close()


def run_for(fake: Any, directory: Path, **given: Any) -> Any:
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": fake.url, "max_steps": 4}
    return runs.trainer(directory, **{**settings, "vllm_server_timeout": 60.0, **given})


def record_weights(fake: Any) -> list[dict[str, torch.Tensor]]:
    """Return a list to which the weights of the server are added at every request of completions."""
    loaded: dict[str, torch.Tensor] = {}
    at_requests: list[dict[str, torch.Tensor]] = []
    answer = fake.answer

    def load(path: str, query: Any, body: Any) -> Any:
        if path == "/update_weights" and body["update_info"].get("path"):
            loaded.update(load_file(body["update_info"]["path"]))
        if path == GENERATE:
            at_requests.append(dict(loaded))
        return answer(path, query, body)

    fake.answer = load
    return at_requests


def test_a_second_run_samples_from_the_weights_of_the_first(fake: Any, tmp_path: Path) -> None:
    seen = record_weights(fake)
    run = run_for(fake, tmp_path, max_steps=2)
    run.train()
    trained = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    seen.clear()
    run.train()
    assert seen and all(torch.equal(tensor, trained[name]) for name, tensor in seen[0].items())


def test_an_evaluation_samples_from_weights_that_a_script_loaded(fake: Any, tmp_path: Path) -> None:
    seen = record_weights(fake)
    run = run_for(fake, tmp_path, eval_dataset=runs.prompts(2))
    run.evaluate()
    other = runs.policy(seed=1).state_dict()
    run.model.load_state_dict(other)
    seen.clear()
    run.evaluate()
    assert seen and all(torch.equal(tensor, other[name]) for name, tensor in seen[0].items())


@pytest.mark.slow
def test_a_trainer_whose_server_was_lost_resumes_by_itself(fake: Any, tmp_path: Path) -> None:
    expected = run_for(fake, tmp_path / "whole")
    expected.train()
    run = run_for(fake, tmp_path / "lost", save_strategy="steps", save_steps=100)
    lose = Once("on_step_end", 2, lambda: fake.failures.update({GENERATE: [500] * 4}))
    run.add_callback(lose)
    with pytest.raises(ConnectionError, match="failed 4 times"):
        run.train()
    run.train(resume_from_checkpoint=True)
    assert_same_weights(run, expected)
    assert history(run) == history(expected)


@pytest.mark.parametrize("fails", [False, True])
def test_files_in_shared_memory_are_removed_when_a_run_ends(fake: Any, tmp_path: Path, fails: bool) -> None:
    used = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        used.extend(fake.shared_memory.iterdir())
        if fails:
            raise ValueError("no judge")
        return [float(len(text)) for text in completions]

    run = run_for(fake, tmp_path, rewards=reward, max_steps=1, eval_dataset=runs.prompts(2))
    try:
        run.train()
    except RewardError:
        assert fails
    assert used and list(fake.shared_memory.iterdir()) == []
    if not fails:
        run.train()  # connects again
        assert list(fake.shared_memory.iterdir()) == []


def test_files_in_shared_memory_end_with_their_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_SHARED_MEMORY", tmp_path)
    sender = transfer.BucketSender(None, [])
    assert sender.directory.is_dir()
    del sender  # as at the end of the process
    assert list(tmp_path.iterdir()) == []


def test_directories_with_another_lock_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_SHARED_MEMORY", tmp_path)
    owner = threading.Event()
    own, _ = transfer.shared_directory(owner)
    left = {
        "groupwise-killed": (own / "lock").read_text(),
        "groupwise-user": "",
        "groupwise-pid": "123",
        "groupwise-text": "\xe9",
    }
    for name, content in left.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text(content)
    transfer.shared_directory(other := threading.Event())
    found = {path.name for path in tmp_path.iterdir()}
    assert found & left.keys() == left.keys() - {"groupwise-killed"} and own.name in found
    del other


def test_a_forked_process_removes_no_directory_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_SHARED_MEMORY", tmp_path)
    directory, remove = transfer.shared_directory(threading.Event)
    if (child := os.fork()) == 0:
        remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert directory.is_dir()
    remove()
    assert list(tmp_path.iterdir()) == []
