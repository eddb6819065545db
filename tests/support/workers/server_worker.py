"""One of two processes that train with the same server, which fails for one of them."""

from __future__ import annotations

import sys

from groupwise import GRPOConfig
from groupwise.errors import BackendError
from groupwise.generation.vllm.client import HttpClient
from groupwise.generation.vllm.server import VLLMServerBackend
from groupwise.policy.weight_iterator import PolicyWeights
from support.fakes.fake_vllm import GENERATE, FakeVLLM
from support.runs import policy, tokenizer


def main(port: int, directory: str) -> None:
    HttpClient.first_pause = 0.02
    settings = {"use_cpu": True, "bf16": False, "num_generations": 2, "max_completion_length": 8}
    config = GRPOConfig(
        directory, per_device_train_batch_size=4, use_vllm=True, vllm_mode="server", **settings
    )
    config.vllm_server_base_url, config.vllm_server_timeout = f"http://127.0.0.1:{port}", 20.0
    rank = config.process_index
    fake = FakeVLLM(port) if rank == 0 else None
    config.distributed_state.wait_for_everyone()
    model = policy()
    backend = VLLMServerBackend(lambda: model, config, tokenizer())
    prompts = [[3], [3], [5 + rank]]

    backend.sync_weights(PolicyWeights(model), step=4)
    first = backend.generate(prompts)
    assert [c.versions for c in first] == [[4] * 4] * 3
    if fake is not None:  # one update, and a request of every process with a seed of its own
        assert (fake.seen["/start_weight_update"], fake.seen[GENERATE]) == (1, 4), fake.seen
        seeds = [body["sampling_params"]["seed"] for path, body in fake.bodies if path == GENERATE]
        assert len(set(seeds)) == 4
        fake.failures[GENERATE] = [forget(fake)]
    config.distributed_state.wait_for_everyone()

    # The server forgets in the middle: not every process notices, all take part in sending the weights.
    assert [c.versions for c in backend.generate(prompts)] == [[4] * 4] * 3
    if fake is not None:
        assert fake.seen["/start_weight_update"] == 2
    config.distributed_state.wait_for_everyone()

    # A refusal for one of them ends both.
    bad = [[120] * 127, [3]] if rank == 1 else [[3], [3]]
    if fake is not None:
        answer = fake.answer
        fake.answer = lambda path, query, body: refuse_long(answer, path, query, body)
    config.distributed_state.wait_for_everyone()
    try:
        backend.generate(bad)
    except BackendError as error:
        assert "rank 1: " in str(error) and "400: too long" in str(error)
        print(f"process {rank} ended", flush=True)
    config.distributed_state.wait_for_everyone()


def forget(fake):
    def failure():
        fake.version = "default"

    return failure


def refuse_long(answer, path, query, body):
    if path == GENERATE and len(body["token_ids"]) > 100:
        return 400, "too long"
    return answer(path, query, body)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
