"""Training on a real ``vllm serve``: weights arrive, and a server that is killed is no end of the run."""

from __future__ import annotations

import copy
import importlib.util
import time

import httpx
import pytest
import torch
from packaging.version import Version
from support.engine_runs import (
    assert_follows_four_bits,
    engine_greedy,
    four_bit_policy,
    greedy,
    policy,
    sync,
    trainer,
    trainer_logps,
    vllm_version,
)
from support.workers.vllm_process import ServerProcess
from transformers import TrainerCallback

from groupwise.errors import BackendError
from groupwise.generation.vllm import client as client_module
from groupwise.generation.vllm import transfer
from groupwise.generation.vllm.weight_check import WeightCheck
from groupwise.policy.weight_iterator import PolicyWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

reports_weights = pytest.mark.skipif(
    vllm_version() < Version("0.32"), reason="vLLM before 0.32 does not report the weights of each token"
)

PROMPTS = [[4, 5], [6], [7, 8, 9], [10, 11, 12, 13]]
FOUR_STEPS = {"max_steps": 4, "per_device_train_batch_size": 8}  # of two prompts


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "the key of server and trainer")
        process = ServerProcess(tmp_path_factory.mktemp("server")).start()
        yield process
        process.kill()


@pytest.fixture
def server(process):
    """Up when the test starts; if it died in it, its last words are shown and the next test has one again."""
    yield process.revive()
    process.revive()


def run_for(server, directory, **given):
    settings = {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 240.0}
    return trainer(directory, **{**settings, "vllm_engine_kwargs": None, **given})


def history(run):
    kept = ("loss", "grad_norm", "reward", "completions/mean_length")
    return [{name: line[name] for name in kept} for line in run.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def trained(process, tmp_path_factory):
    """Two optimizer steps; ``version`` is that of the server after them: a test may bring newer weights."""
    made = run_for(process.wait(), tmp_path_factory.mktemp("run"))
    made.train()
    made.version = made.backend.version
    yield made
    made.backend.close()


@pytest.mark.representative("a server follows the trainer")
@pytest.mark.slow
def test_the_server_samples_from_the_weights_of_every_step(trained):
    lines = [line for line in trained.state.log_history if "loss" in line]
    assert len(lines) == 2 and trained.version == 1
    for line in lines:
        assert line["staleness"] == 0 and line["time/sync"] > 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-3


def test_without_the_key_only_the_routes_for_monitoring_answer(server):
    paths = ("/collective_rpc", "/pause", "/update_weights", "/inference/v1/generate", "/health", "/metrics")
    post = [httpx.post(server.url + path, json={"method": "groupwise_place_adapter"}) for path in paths[:4]]
    found = [*post, *(httpx.get(server.url + path) for path in paths[4:])]
    assert [answer.status_code for answer in found] == [401, 401, 401, 401, 200, 200]


def test_after_a_sync_greedy_output_is_the_trainers(trained):
    sync(trained, trained.model)
    after = engine_greedy(trained.backend, PROMPTS)
    assert after == greedy(trained.model, PROMPTS, 6, trained.backend.end_tokens)
    assert trained.backend.version == 2


def test_a_flipped_bit_on_the_way_to_the_server_ends_the_run(server, tmp_path, monkeypatch):
    name = "model.layers.0.self_attn.k_proj.weight"
    save = transfer.save_file

    def flipped(tensors, path):
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name].view(torch.int32)[1, 2] ^= 1
        save(tensors, path)

    run = run_for(server, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "save_file", flipped)
        with pytest.raises(
            BackendError, match=rf"server at {server.url} does not compute.*: {name} has other"
        ):
            sync(run, run.model)
    sync(run, run.model)
    assert run.backend.weight_digests[0] == run.backend.generate([[4, 5]])[0].weight_digest
    run.backend.close()


def test_log_probs_are_those_of_the_sampling_distribution(server, tmp_path, monkeypatch):
    run, readers = run_for(server, tmp_path, temperature=0.7), []
    reader = client_module.GenerationReader
    monkeypatch.setattr(
        client_module, "GenerationReader", lambda **given: readers.append(reader(**given)) or readers[-1]
    )
    sync(run, run.model)
    for prompt in PROMPTS[:2]:
        for completion in run.backend.generate([prompt] * 2):
            expected = trainer_logps(run.model, prompt, completion.token_ids, 0.7)
            # Both compute in float32.
            assert torch.tensor(completion.logps).double().sub(expected).abs().max() < 1e-4
            assert completion.versions == [0] * len(completion.token_ids)
    # Token ids and log-probs of two completions, in the form that is decoded while it arrives.
    assert [len(one.lists) for one in readers] == [4, 4]
    run.backend.close()


@pytest.mark.slow
def test_the_server_follows_a_4_bit_policy(server, tmp_path):
    """The server has the checkpoint before quantization, and gets merged matrices of the 4-bit weights."""
    pytest.importorskip("bitsandbytes")
    assert_follows_four_bits(run_for(server, tmp_path, **four_bit_policy(tmp_path / "base")), PROMPTS)


@pytest.mark.slow
@reports_weights
def test_weights_updated_in_mid_completion_are_recorded_per_token(server, tmp_path):
    run = run_for(server, tmp_path, max_completion_length=100, temperature=1.5)
    sync(run, run.model)
    run.backend.end_tokens, run.backend.sampling["stop_token_ids"] = frozenset(), []
    run.backend.sampling["ignore_eos"] = True
    # Eight times what the server runs at once: some are under way whenever the weights arrive.
    prompts = [[4 + i] for i in range(16) for _ in range(16)]
    weights = [copy.deepcopy(run.model)]
    with torch.no_grad():
        for parameter in run.model.parameters():  # keys and values change too
            parameter.mul_(0.9)
    weights.append(run.model)
    client = run.backend.servers

    def num_tokens():
        return sum(client.on_all(lambda server: server.fetch_num_tokens()).values())

    before = num_tokens()
    run.backend.prefetch(prompts, step=1)
    end = time.monotonic() + 120
    while num_tokens() < before + 50 and time.monotonic() < end:
        pass
    client.pause()  # the tiny model would finish all of them while a busy machine prepares the weights
    run.backend.sync_weights(PolicyWeights(run.model), step=1)
    completions = run.backend.generate(prompts)
    mixed = [(p, c) for p, c in zip(prompts, completions, strict=True) if len(set(c.versions)) == 2]
    assert mixed
    for prompt, completion in mixed:
        assert completion.versions == sorted(completion.versions) and len(completion.versions) == 100
        by_version = [trainer_logps(model, prompt, completion.token_ids, 1.5) for model in weights]
        # Keys and values of the tokens before the swap are those of the new weights too.
        expected = torch.stack([by_version[v][i] for i, v in enumerate(completion.versions)])
        assert torch.tensor(completion.logps).double().sub(expected).abs().max() < 1e-4
    run.backend.close()


@pytest.mark.slow
def test_requests_of_a_rollout_that_is_repeated_stop_on_the_server(server, tmp_path):
    """Closing their connections ends them, running and waiting ones."""
    run = run_for(server, tmp_path, max_completion_length=100)
    sync(run, run.model)
    run.backend.end_tokens, run.backend.sampling["stop_token_ids"] = frozenset(), []
    run.backend.sampling["ignore_eos"] = True
    client = run.backend.servers

    def counted(name):
        texts = client.on_all(lambda server: server.once("GET", "/metrics", doing="reading its metrics"))
        (text,) = texts.values()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}"))

    def unfinished():
        return counted("num_requests_running{") + counted("num_requests_waiting{")

    def wait_for(condition):
        end = time.monotonic() + 120
        while not condition() and time.monotonic() < end:
            pass

    before, state = counted("generation_tokens_total{"), run.backend.snapshot()
    run.backend.prefetch([[4 + i] for i in range(16) for _ in range(16)], step=1)  # 25,600 tokens
    wait_for(lambda: counted("generation_tokens_total{") >= before + 50)
    client.pause()  # the tiny model would finish all of them while a busy machine closes the connections
    assert unfinished() > 0
    run.backend.restore(state)
    client.resume()
    wait_for(lambda: unfinished() == 0)
    assert unfinished() == 0
    assert counted("generation_tokens_total{") - before < 25_600 / 2
    run.backend.close()


@pytest.mark.slow
@reports_weights
def test_a_run_that_generates_ahead(server, tmp_path):
    run = run_for(server, tmp_path, max_steps=3, rollout_staleness=1)
    run.train()
    behind = [line["staleness"] for line in run.state.log_history if "loss" in line]
    assert behind[0] == 0 and all(0 < steps <= 1 for steps in behind[1:])
    run.backend.close()


@pytest.mark.slow
@reports_weights
def test_a_run_with_dynamic_sampling_generates_ahead(server, tmp_path):
    given = {"dynamic_sampling": True, "per_device_train_batch_size": 8, "max_steps": 3}
    run = run_for(server, tmp_path, rollout_staleness=1, **given)
    ahead, prefetch = [], run.backend.prefetch
    run.backend.prefetch = lambda prompts, *rest, step: (
        ahead.append(step) or prefetch(prompts, *rest, step=step)
    )
    run.train()
    behind = [line["staleness"] for line in run.state.log_history if "loss" in line]
    assert ahead == [1, 2] and behind[0] == 0 and all(0 < steps <= 1 for steps in behind[1:])
    assert not run.backend._pending  # what was sampled ahead was trained on
    run.backend.close()


@pytest.fixture(scope="module")
def undisturbed(process, tmp_path_factory):
    """An undisturbed run."""
    made = run_for(process.wait(), tmp_path_factory.mktemp("undisturbed"), **FOUR_STEPS)
    made.train()
    made.backend.close()
    return made


def assert_same_run(run, other):
    assert history(run) == history(other)
    for name, weight in other.model.state_dict().items():
        assert torch.equal(weight, run.model.state_dict()[name])


@pytest.mark.timeout(1200)  # the server starts three times
def test_a_killed_server_does_not_change_the_history(server, undisturbed, tmp_path):
    disturbed = run_for(server, tmp_path, **FOUR_STEPS)
    ask, push = disturbed.backend._submit, transfer.BucketSender._send_file
    killed = []

    def kill_once(when):
        if when not in killed:
            killed.append(when)
            server.kill()
            server.start()

    def ask_and_kill(requests, sampling):
        ask(requests, sampling)
        if disturbed.state.global_step == 1:
            kill_once("generating")

    def kill_and_send(sender, bucket, directory):
        if disturbed.state.global_step == 3:
            kill_once("taking weights")
        push(sender, bucket, directory)

    class KillBetween(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                kill_once("doing nothing")

    disturbed.add_callback(KillBetween())
    disturbed.backend._submit = ask_and_kill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.BucketSender, "_send_file", kill_and_send)
        disturbed.train()
    assert killed == ["generating", "doing nothing", "taking weights"]
    assert_same_run(disturbed, undisturbed)
    disturbed.backend.close()


@pytest.mark.slow
def test_a_run_continues_without_a_break_on_the_remaining_server(server, undisturbed, tmp_path):
    (tmp_path / "second").mkdir()
    second = ServerProcess(tmp_path / "second").start().wait()
    both = f"{server.url},{second.url}"
    run = run_for(server, tmp_path / "run", vllm_server_base_url=both, **FOUR_STEPS)
    ask, lost = run.backend._submit, []

    def ask_and_fail(requests, sampling):
        if run.state.global_step == 2:
            second.out_of_memory.touch()
        lost.append(set(run.backend.servers.lost))
        ask(requests, sampling)

    run.backend._submit = ask_and_fail
    try:
        run.train()
        assert not second.out_of_memory.exists() and "OutOfMemoryError" in second.output()
    finally:
        second.kill()
    assert lost[0] == set() and lost[-1] == {second.url}
    assert_same_run(run, undisturbed)
    run.backend.close()


@pytest.mark.slow
def test_the_second_data_parallel_engine_of_a_server_has_the_trainers_weights(tmp_path, monkeypatch):
    """vLLM answers for the first engine; a flipped bit in the second one ends the run."""
    name = "model.norm.weight"
    process = ServerProcess(tmp_path, ("--data-parallel-size", "2")).start().wait()
    run = run_for(process, tmp_path / "run")
    compare = WeightCheck.compare

    def flip_first(check):
        run.backend.servers.call_workers("flip_bit", {"engine": 1, "name": name})
        return compare(check)

    try:
        sync(run, run.model)
        assert run.backend.server_info[0].num_engines == 2
        prompts = [*PROMPTS, *([20 + i] for i in range(8))]  # enough for both
        assert engine_greedy(run.backend, prompts) == greedy(run.model, prompts, 6, run.backend.end_tokens)
        with monkeypatch.context() as patch:
            patch.setattr(WeightCheck, "compare", flip_first)
            with pytest.raises(BackendError, match=rf"one of the 2 data-parallel engines .* {name}'"):
                run.backend.sync_weights(PolicyWeights(run.model), step=1)
        run.backend.sync_weights(PolicyWeights(run.model), step=1)
        assert run.backend.version == 1
    finally:
        run.backend.close()
        process.kill()


def test_another_model_is_refused_before_training(server, tmp_path):
    run = run_for(server, tmp_path, model=policy(hidden_size=128))
    with pytest.raises(RuntimeError, match=r"hidden_size=64, but the policy has 128"):
        run.train()
