"""The server backend against stand-ins for vLLM: what it sends, and what it does when a server fails.

Files: ``generation/vllm/preflight.py``.
"""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.fakes.fake_vllm import GENERATE, FakeRouter, FakeVLLM, begun_together
from support.runs import policy, tokenizer
from support.serialization import reloaded
from support.workers.launch import free_port, run_ranks

from groupwise import GRPOConfig
from groupwise.errors import BackendError
from groupwise.generation.vllm import server as server_module
from groupwise.generation.vllm.client import HttpClient
from groupwise.generation.vllm.server import VLLMServerBackend
from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import Completion, SamplingOptions

UPDATE = [
    *("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/reset_prefix_cache", "/resume"),
]


WEIGHTS = PolicyWeights(policy())


def backend_for(fake, tmp_path, **given):
    settings = {"use_cpu": True, "bf16": False, "num_generations": 2, "max_completion_length": 8}
    config = GRPOConfig(str(tmp_path), per_device_train_batch_size=4, **{**settings, **given})
    config.vllm_server_base_url = (
        ",".join(server.url for server in fake) if isinstance(fake, list) else fake.url
    )
    config.vllm_server_timeout = 60.0  # a busy machine may take long for an answer
    return VLLMServerBackend(lambda: WEIGHTS.model, config, tokenizer())


@pytest.fixture
def backend(fake, tmp_path):
    made = backend_for(fake, tmp_path)
    yield made
    made.close()


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def control_calls(fake):
    """The calls that matter, in order; buckets of one update count once."""
    calls = [path for path, _ in fake.bodies if path in (*UPDATE, GENERATE, "/init_weight_transfer_engine")]
    same = zip(calls, ["", *calls], strict=False)
    return [call for call, before in same if call != before or call != "/update_weights"]


def test_weights_come_first_and_once_per_step(backend, fake):
    with pytest.raises(BackendError, match="call sync_weights"):
        backend.generate([[3]])
    backend.sync_weights(WEIGHTS, step=4)
    backend.sync_weights(WEIGHTS, step=4)
    completions = backend.generate([[3], [3], [5]])
    assert control_calls(fake) == ["/init_weight_transfer_engine", *UPDATE, GENERATE, GENERATE]
    assert [c.token_ids[0] for c in completions] == [3, 3, 5]
    assert [c.token_ids[2] for c in completions] == [0, 1, 0]  # two samples of one request, one of another
    assert completions[0].versions == [4] * 4
    backend.sync_weights(WEIGHTS, step=5)
    assert backend.generate([[3]])[0].versions == [5] * 4


def test_memory_of_responses_returns_to_the_system_once_per_generation(backend, monkeypatch):
    trims = []
    monkeypatch.setattr(server_module, "malloc_trim", lambda: trims.append(1))
    backend.sync_weights(WEIGHTS, step=4)
    backend.generate([[3], [3], [5]])
    assert trims == [1]


def received_weights(fake) -> dict[str, torch.Tensor]:
    """Return a dictionary that gets the tensors that are sent to the server later."""
    received = {}
    answer = fake.answer

    def load(path, query, body):
        if path == "/update_weights" and body["update_info"].get("path"):
            received.update(load_file(body["update_info"]["path"]))
        return answer(path, query, body)

    fake.answer = load
    return received


def test_weights_are_sent_under_checkpoint_names(backend, fake):
    received = received_weights(fake)
    backend.sync_weights(WEIGHTS, step=0)
    expected = WEIGHTS.model.state_dict()
    assert received.keys() >= expected.keys() - {"lm_head.weight"}
    assert all((received[name] == expected[name]).all() for name in received)


def test_a_server_in_half_precision_gets_half_the_bytes(backend, fake):
    fake.info["model_config"]["dtype"] = "torch.bfloat16"
    received = received_weights(fake)
    backend.sync_weights(WEIGHTS, step=0)
    policy_weights = dict(WEIGHTS.full())
    matrices = [name for name, tensor in policy_weights.items() if tensor.dim() > 1]
    assert matrices and received.keys() == policy_weights.keys()
    for name, tensor in policy_weights.items():
        assert received[name].nbytes == tensor.nbytes // (2 if name in matrices else 1)


def test_row_limits_and_the_context_of_the_server_are_respected(backend, fake):
    backend.sync_weights(WEIGHTS, step=0)
    assert [len(c.token_ids) for c in backend.generate([[3], [3], [4]], SamplingOptions([1, 4, 2]))] == [
        1,
        4,
        2,
    ]
    assert len(backend.generate([[3] * 126])[0].token_ids) == 2  # of 128
    with pytest.raises(BackendError, match=r"128 tokens leaves no room.*--max-model-len 128"):
        backend.generate([[3] * 128])


def test_stale_requests_are_cancelled_when_a_run_returns_to_a_mark(backend, fake):
    backend.sync_weights(WEIGHTS, step=4)
    before = backend.snapshot()
    fake.failures[GENERATE] = ["hang"]
    backend.prefetch([[3], [3]], step=4)
    wait_for(lambda: fake.seen[GENERATE] == 1)
    (stale,) = backend._pending.values()
    backend.restore(before)
    assert stale.cancelled()
    assert [c.versions for c in backend.generate([[3], [3]])] == [[4] * 4] * 2 and fake.seen[GENERATE] == 2


def test_a_server_restarted_empty_gets_the_weights_again_and_the_run_goes_on(backend, fake):
    backend.sync_weights(WEIGHTS, step=4)
    before = backend.snapshot()
    undisturbed = backend.generate([[3], [3], [5]])
    fake.version = "default"
    backend.restore(before)
    assert backend.generate([[3], [3], [5]]) == undisturbed
    assert fake.seen["/start_weight_update"] == 2


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", *UPDATE])
@pytest.mark.parametrize("failure", [500, "drop"])
def test_an_update_that_fails_is_made_again_from_its_start(backend, fake, path, failure):
    fake.failures[path] = [failure]
    backend.sync_weights(WEIGHTS, step=4)
    assert control_calls(fake)[-len(UPDATE) :] == UPDATE and not fake.paused
    assert backend.generate([[3]])[0].versions == [4] * 4


def test_updates_that_keep_failing_end_in_a_connection_error(backend, fake):
    fake.failures["/update_weights"] = [500] * 20
    with pytest.raises(ConnectionError, match=r"sending weights .* failed 4 times.*as planned"):
        backend.sync_weights(WEIGHTS, step=4)
    assert backend.version is None


def test_a_server_that_loses_its_weights_repeatedly_raises_an_error(backend, fake):
    backend.sync_weights(WEIGHTS, step=4)
    answer = fake.answer

    def forget(path, query, body):
        fake.version = "default" if path == GENERATE else fake.version
        return answer(path, query, body)

    fake.answer = forget
    with pytest.raises(BackendError, match=r"lost their weights 4 times.*another run"):
        backend.generate([[3]])


def test_after_an_error_the_backend_can_be_used_again(backend, fake):
    backend.sync_weights(WEIGHTS, step=4)
    fake.failures[GENERATE] = [400]
    with pytest.raises(BackendError, match="400"):
        backend.generate([[3]])
    backend.sync_weights(WEIGHTS, step=4)
    assert backend.generate([[3]])[0].versions == [4] * 4


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_recover_together_and_end_together(tmp_path):
    worker = Path(__file__).parents[1].joinpath("support", "workers", "server_worker.py")
    on_cpu = {"ACCELERATE_USE_CPU": "true"}
    done = run_ranks(worker, free_port(), tmp_path, timeout=150, environment=on_cpu)
    assert done.returncode == 0, done.stderr[-6000:]
    assert all(f"process {rank} ended" in done.stdout for rank in (0, 1))


def generate_together(backend, prompts):
    """Sample prompts, whose requests are spread over the servers in their order."""
    with begun_together(backend.servers):
        backend.prefetch(prompts, step=backend.version)
    return backend.generate(prompts)


def test_two_servers_return_the_completions_of_one(fake, tmp_path):
    second = FakeVLLM()
    second.info = fake.info
    prompts = [[3], [3], [5], [7]]
    answers = []
    for servers in ([fake], [fake, second]):
        backend = backend_for(servers, tmp_path)
        backend.sync_weights(WEIGHTS, step=4)
        answers.append(generate_together(backend, prompts))
        backend.close()
    assert answers[0] == answers[1] and second.seen[GENERATE] == 1
    second.close()


@pytest.fixture
def away(monkeypatch):
    """Addresses of servers that are not waited for while there are others, which have a minute to answer."""
    addresses, wait_until_up = set(), HttpClient.wait_until_up

    def wait_shortly(server, doing, patience=None):
        if patience is not None:
            patience = 0.0 if server.url in addresses else 60.0
        return wait_until_up(server, doing, patience)

    monkeypatch.setattr(HttpClient, "wait_until_up", wait_shortly)
    return addresses


def dying(fake, away):
    def die():
        away.add(fake.url)
        fake.close()
        return "drop"

    return die


@pytest.mark.parametrize("path", [GENERATE, "/pause", "/start_weight_update", "/update_weights"])
def test_a_lost_server_is_replaced_by_the_other_until_it_is_back(
    fake, away, tmp_path, path, monkeypatch, caplog
):
    prompts = [[3], [3], [5], [7]]
    alone = backend_for(fake, tmp_path)
    alone.sync_weights(WEIGHTS, step=4)
    undisturbed = alone.generate(prompts)
    alone.close()
    second = FakeVLLM()
    second.info, second.failures[path] = fake.info, [dying(second, away)]
    backend = backend_for([fake, second], tmp_path)
    backend.sync_weights(WEIGHTS, step=4)
    assert generate_together(backend, prompts) == undisturbed and not fake.paused
    assert backend.servers.lost == {second.url}
    if path == GENERATE:
        assert (
            f"the other vLLM servers continue alone: no vLLM server was ready at {second.url}" in caplog.text
        )
    # No update was left open: each that began was finished.
    assert fake.seen["/finish_weight_update"] >= fake.seen["/start_weight_update"]
    backend.sync_weights(WEIGHTS, step=5)  # it is still away
    assert [c.versions for c in backend.generate(prompts)] == [[5] * 4] * 4
    again = FakeVLLM(second.http.server_port)
    again.info = fake.info
    away.clear()
    received, compared = received_weights(again), []
    record = backend._check.record
    monkeypatch.setattr(
        backend._check, "record", lambda given: compared.append(backend._check.done) or record(given)
    )
    backend.sync_weights(WEIGHTS, step=6)
    assert compared == [False]  # as for servers that were not compared yet
    assert backend.servers.lost == set() and received.keys() == dict(WEIGHTS.full()).keys()
    assert [c.versions for c in generate_together(backend, prompts)] == [[6] * 4] * 4
    assert again.seen[GENERATE] == 1
    backend.close()
    again.close()


def test_the_last_server_has_the_full_time_to_come_back(fake, away, tmp_path):
    second = FakeVLLM()
    second.info = fake.info
    backend = backend_for([fake, second], tmp_path)
    backend.sync_weights(WEIGHTS, step=4)
    for server in (fake, second):
        server.failures[GENERATE] = [dying(server, away)]
    for server in backend.servers.servers:
        server.timeout = 2.0
    with pytest.raises(
        ConnectionError, match=r"no vLLM server was ready at .* within vllm_server_timeout=2 s"
    ):
        generate_together(backend, [[3], [5]])


@pytest.fixture
def router(fake):
    """A router in front of two servers."""
    second = FakeVLLM()
    second.info = fake.info
    router = FakeRouter([fake, second])
    yield router
    router.close()
    second.close()


def test_behind_a_router_weights_go_to_all_workers_and_requests_to_the_router(router, fake, tmp_path):
    alone = backend_for(fake, tmp_path)
    alone.sync_weights(WEIGHTS, step=4)
    undisturbed = alone.generate([[3], [3], [5], [7]])
    alone.close()
    backend = backend_for(router, tmp_path)
    backend.sync_weights(WEIGHTS, step=4)
    assert backend.generate([[3], [3], [5], [7]]) == undisturbed
    assert router.seen == {"/health": 1, "/list_workers": 1, GENERATE: 3}
    assert [worker.seen["/finish_weight_update"] for worker in router.workers] == [2, 1]
    assert {worker.url for worker in router.workers} == {info.url for info in backend.server_info}
    backend.close()


def test_a_worker_that_missed_an_update_gets_the_weights_before_its_tokens_count(
    router, away, tmp_path, caplog
):
    _, second = router.workers
    backend = backend_for(router, tmp_path)
    backend.sync_weights(WEIGHTS, step=4)
    away.add(second.url)
    second.failures["/health"] = [500]  # the router does not notice, and it has the weights of step 4
    backend.sync_weights(WEIGHTS, step=5)
    assert backend.servers.lost == {second.url}
    away.clear()
    completions = backend.generate([[3], [5]])
    assert [c.versions for c in completions] == [[5] * 4] * 2 and backend.servers.lost == set()
    assert "restarted without this run's weights" in caplog.text
    backend.close()


def test_a_request_that_a_router_loses_is_repeated_once_all_workers_have_the_weights(router, fake, tmp_path):
    backend = backend_for(router, tmp_path)
    backend.sync_weights(WEIGHTS, step=4)
    before = backend.snapshot()
    undisturbed = backend.generate([[3], [5]])
    router.failures[GENERATE], fake.version = [503], "default"
    backend.restore(before)
    assert backend.generate([[3], [5]]) == undisturbed
    assert router.seen["/readiness"] == 1  # vllm-router's /health would wait for all workers
    assert fake.seen["/weight_info"] == 1 and fake.seen["/finish_weight_update"] == 2
    backend.close()


def test_a_router_that_would_hide_which_weights_sampled_is_refused(router, fake, tmp_path):
    fake.info["kv_transfer_config"] = {"kv_role": "kv_producer"}
    with pytest.raises(BackendError, match="start it without --kv-transfer-config"):
        backend_for(router, tmp_path).sync_weights(WEIGHTS, step=0)
    fake.release = "0.31.0"
    with pytest.raises(BackendError, match=r"as routers and rollout_staleness need; install 0\.32"):
        backend_for(router, tmp_path).sync_weights(WEIGHTS, step=0)


def test_a_router_is_the_only_address_and_has_workers(router, fake, tmp_path):
    message = f"{router.url} is the address of a router; give it alone, with workers behind it"
    with pytest.raises(BackendError, match=message):
        backend_for([fake, router], tmp_path).sync_weights(WEIGHTS, step=0)
    router.workers = []
    with pytest.raises(BackendError, match=message):
        backend_for(router, tmp_path).sync_weights(WEIGHTS, step=0)


MISFITS = {
    "raw log-probs": ({"logprobs_mode": "raw_logprobs"}, {}, "--logprobs-mode processed_logprobs"),
    "packed weights": (
        {"quantization": "bitsandbytes"},
        {},
        "quantized by bitsandbytes, but full matrices are sent; serve the model without quantization",
    ),
    "logits": ({"logprobs_mode": "processed_logits"}, {}, "--logprobs-mode processed_logprobs"),
    "a short context": (
        {"max_model_len": 16},
        {"max_prompt_length": 9},
        "--max-model-len 16 is less than 17",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_server_that_does_not_fit_is_refused_before_training(fake, tmp_path, name):
    changes, settings, message = MISFITS[name]
    fake.info["model_config"].update(changes)
    with pytest.raises(BackendError, match=message):
        backend_for(fake, tmp_path, **settings).sync_weights(WEIGHTS, step=0)
    assert fake.seen["/pause"] == 0


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (None, "takes no weights; start it with --weight-transfer-config"),
        ({"backend": "sharded_rdt"}, "allowed: groupwise, nccl, ipc"),
        ({"backend": "nccl"}, "trains on cpu; start it with the backend 'groupwise'"),
    ],
)
def test_a_server_whose_weights_cannot_be_replaced_is_refused(backend, fake, transfer, message):
    fake.info["weight_transfer_config"] = transfer
    with pytest.raises(BackendError, match=message):
        backend.sync_weights(WEIGHTS, step=0)


def test_nccl_needs_an_ipv4_address_and_other_transfers_do_not(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(type(fake.http), "address_family", socket.AF_INET6)
    try:
        server = FakeVLLM(host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    server.info, server.url = fake.info, f"http://[::1]:{server.http.server_port}"
    backend = backend_for(server, tmp_path)
    backend.sync_weights(WEIGHTS, step=4)
    assert backend.generate([[3]])[0].versions == [4] * 4
    backend.server_info[0].weight_transfer = "nccl"
    backend.disconnect()
    with pytest.raises(BackendError, match=r"server at \[::1\]:\d+ has no IPv4 address for NCCL: "):
        backend.sync_weights(WEIGHTS, step=5)
    backend.close()
    server.close()


def test_a_server_that_reports_sampling_masks_needs_no_warning(fake, tmp_path):
    backend = backend_for(fake, tmp_path, top_p=0.9)
    assert not backend.reports_sampling_mask({})
    backend.close()
    fake.info["model_config"]["return_sampling_mask"] = True
    assert backend.reports_sampling_mask({})  # connects
    backend.sync_weights(WEIGHTS, step=0)
    (completion,) = backend.generate([[3]])
    assert [len(ids) for ids in completion.sampling_mask.ids.split([2] * 4)] == [2] * 4
    backend.close()
    with pytest.raises(BackendError, match=r"--return-sampling-mask.*start it without, or set top_k"):
        backend_for(fake, tmp_path).sync_weights(WEIGHTS, step=0)


def test_a_server_with_fewer_places_than_samples_is_refused(backend, fake):
    fake.info["scheduler_config"]["max_num_seqs"] = 1
    with pytest.raises(BackendError, match="raise --max-num-seqs"):
        backend.sync_weights(WEIGHTS, step=0)


def test_a_server_that_reports_no_weights_of_tokens_does_not_generate_ahead(fake, tmp_path):
    fake.release = "0.31.0"
    backend_for(fake, tmp_path).sync_weights(WEIGHTS, step=0)
    server = {"use_vllm": True, "vllm_mode": "server"}
    ahead = backend_for(fake, tmp_path, rollout_staleness=1, steps_per_generation=1, **server)
    with pytest.raises(BackendError, match=r"vLLM 0\.31\.0, .* install 0\.32 .* or set rollout_staleness=0"):
        ahead.sync_weights(WEIGHTS, step=0)


def test_engines_that_share_experts_are_refused_unless_weights_are_not_compared(backend, fake):
    fake.info["parallel_config"]["data_parallel_size"] = 2
    backend.model_config.num_experts = 4
    backend.config.vllm_weight_check = "first"
    with pytest.raises(BackendError, match=r"2 data-parallel engines share experts.*'off'"):
        backend.sync_weights(WEIGHTS, step=0)
    backend.config.vllm_weight_check = "off"
    backend.sync_weights(WEIGHTS, step=0)


def test_another_model_is_refused(backend, fake, tmp_path):
    policy(vocab_size=99).config.save_pretrained(tmp_path / "other")
    fake.info["model_config"]["model"] = str(tmp_path / "other")
    with pytest.raises(
        BackendError, match=r"other with vocab_size=99, but the policy has 32; serve that model"
    ):
        backend.sync_weights(WEIGHTS, step=0)


def test_another_tokenizer_is_refused(backend, fake):
    answer = fake.answer
    fake.answer = lambda path, q, body: {"tokens": [7, 8]} if path == "/tokenize" else answer(path, q, body)
    with pytest.raises(BackendError, match="tokenizer of tiny is not the policy's"):
        backend.sync_weights(WEIGHTS, step=0)


def test_another_dtype_is_warned_of(backend, fake, caplog):
    fake.info["model_config"]["dtype"] = "torch.bfloat16"
    with caplog.at_level(logging.WARNING):
        backend.sync_weights(WEIGHTS, step=0)
    assert (
        "computes in bfloat16 and the trainer in float32" in caplog.text and "--dtype float32" in caplog.text
    )


def test_without_a_server_the_error_names_the_command(fake, tmp_path):
    fake.close()
    backend = backend_for(fake, tmp_path)
    backend.config.vllm_server_timeout = 0.3
    with pytest.raises(ConnectionError, match=r"VLLM_SERVER_DEV_MODE=1.*vllm.* --weight-transfer-config"):
        backend.sync_weights(WEIGHTS, step=0)


def test_prefetched_requests_are_not_repeated(backend, fake):
    backend.sync_weights(WEIGHTS, step=4)
    backend.prefetch([[3], [3], [5]], step=5)
    wait_for(lambda: len(backend.snapshot()["finished"]) == 2)
    backend.sync_weights(WEIGHTS, step=5)
    completions = backend.generate([[3], [3], [5]])
    assert fake.seen[GENERATE] == 2
    assert [c.versions[0] for c in completions] == [4] * 3  # the weights that sampled it, not the newest


def test_a_prefetched_request_is_repeated_after_the_server_lost_its_weights(backend, fake):
    backend.sync_weights(WEIGHTS, step=4)
    fake.version = "default"
    wait(backend.prefetch([[3], [3]], step=5))  # an answer after the update would have its weights
    backend.sync_weights(WEIGHTS, step=5)
    assert [c.versions[0] for c in backend.generate([[3], [3]])] == [5, 5]
    assert fake.seen[GENERATE] == 2


def test_ranks_of_another_number_have_the_finished_completions_of_all_once(backend):
    first, second, third = (((seed, 2, 8), [Completion([seed])] * 2) for seed in (7, 9, 11))
    others = {"num_samples": (None, {}), "weight_digests": {}}
    snapshots = [{"finished": [first, second], **others}, {"finished": [second, third], **others}]
    backend.restore(backend.merge(snapshots, backend.config))
    assert [key for key, _ in backend.snapshot()["finished"]] == [(7, 2, 8), (9, 2, 8), (11, 2, 8)]


def test_a_prompt_repeated_within_a_step_gets_other_samples(backend, fake):
    backend.sync_weights(WEIGHTS, step=4)
    first, second = backend.generate([[3], [3]]), backend.generate([[3], [3]])
    seeds = [body["sampling_params"]["seed"] for path, body in fake.bodies if path == GENERATE]
    assert seeds[1] == seeds[0] + 2 and first != second
    backend.sync_weights(WEIGHTS, step=5)
    backend.generate([[3], [3]])
    assert fake.bodies[-1][1]["sampling_params"]["seed"] not in (*seeds, seeds[1] + 2)


def test_finished_prefetched_completions_are_restored_and_others_are_requested_again(backend, fake, tmp_path):
    backend.sync_weights(WEIGHTS, step=4)
    backend.prefetch([[3], [3], [5]], step=5)
    wait_for(lambda: len(backend.snapshot()["finished"]) == 2)
    state = backend.snapshot()
    del state["finished"][1]
    resumed = backend_for(fake, tmp_path)
    resumed.restore(reloaded(state))
    resumed.sync_weights(WEIGHTS, step=5)
    asked = fake.seen[GENERATE]
    again = resumed.generate([[3], [3], [5]])
    assert fake.seen[GENERATE] == asked + 1
    assert [c.versions[0] for c in again] == [4, 4, 5]
    resumed.close()
