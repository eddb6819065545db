"""Runs of a sweep that vLLM samples have the history of their run alone, and are sampled together.

Files: ``commands/sweeps/vllm.py``.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support import runs
from support.engine_runs import ENGINE, policy
from support.fakes.fake_vllm import GENERATE, FakeVLLM, with_tokenizer
from support.fakes.tiny_engine import TinyEngine
from support.sweep_runs import SETTINGS, alone, assert_equal, assert_equal_samples, history, sweep
from transformers import TrainerCallback

from groupwise import GRPOConfig
from groupwise.errors import BackendError
from groupwise.generation.vllm.client import HttpClient
from groupwise.generation.vllm.colocate import ColocatedBackend
from groupwise.policy.weight_iterator import PolicyWeights


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(HttpClient, "first_pause", 0.02)
    server = with_tokenizer(FakeVLLM(), runs.tokenizer())
    server.info["lora_config"] = {"max_lora_rank": 8}
    server.weights = dict(PolicyWeights(policy()).full())
    yield server
    server.close()


def on_server(fake: FakeVLLM, **given: Any) -> dict[str, Any]:
    return {
        **{"vllm_mode": "server", "vllm_server_base_url": fake.url, "vllm_server_timeout": 60.0},
        **{"logprob_mismatch_check": "off", **given},  # those of the stand-in are no log-probs
        "vllm_engine_kwargs": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_histories_on_a_server_are_those_of_the_runs_alone(fake, tmp_path, staleness):
    given = on_server(fake, rollout_staleness=staleness)
    both = threading.Barrier(2 * 2 * (1 + staleness))  # two prompts per run, and those of the next step
    fake.failures[GENERATE] = [lambda: [both.wait(60)].clear()] * both.parties
    found = sweep(tmp_path, **given).run()
    assert not both.broken  # the requests of both runs were on the server at the same time
    used = Counter(body["model"].split(":")[0] for path, body in fake.bodies if path == GENERATE)
    assert [*used.values()] == [2 * 3] * 2  # prompts and steps; a run has its own names
    for name in SETTINGS:
        assert found[name].status == "finished"
        assert_equal(found[name], alone(tmp_path, name, **given))
    assert history(found["plain"].state) != history(found["hot"].state)


@pytest.mark.slow
def test_a_clone_samples_with_adapters_of_its_own(fake, tmp_path):
    made = sweep(tmp_path, **on_server(fake, save_strategy="steps", save_steps=100))

    class Control(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                made.clone("hot", "twin")

    made.runs["hot"].trainer.add_callback(Control())
    found = made.run()
    assert found["twin"].resume_from == str(tmp_path / "hot" / "checkpoint-1")
    assert_equal(found["twin"], found["hot"].trainer)
    used = Counter(body["model"].split(":")[0] for path, body in fake.bodies if path == GENERATE)
    assert [*used.values()] == [6, 6, 4]


def test_a_server_of_merged_weights_is_refused(fake, tmp_path):
    del fake.info["lora_config"]
    with pytest.raises(BackendError, match=r"without --enable-lora.*--max-lora-rank 2"):
        sweep(tmp_path, **on_server(fake)).run()
    assert not fake.seen["/update_weights"] and not fake.seen[GENERATE]


@pytest.mark.slow
def test_an_adapter_that_a_server_does_not_load_fails_its_run_alone(fake, tmp_path):
    answer = fake.answer

    def ignoring(path: str, query: Any, body: Any) -> Any:
        if path == "/v1/load_lora_adapter" and body["lora_name"].startswith(ignored):
            return {}
        return answer(path, query, body)

    made = sweep(tmp_path, **on_server(fake))
    backend = made.runs["hot"].trainer.backend
    backend._connect()
    ignored, fake.answer = backend.servers.run_id, ignoring
    found = made.run()
    assert (found["plain"].status, found["hot"].status) == ("finished", "failed")
    assert "does not compute with the trainer's weights" in str(found["hot"].error)


class FakeEngine(TinyEngine):
    """An engine whose completions follow from seed and temperature; ``calls`` has those of ``generate``."""

    def __init__(self) -> None:
        weights = dict(PolicyWeights(policy()).full())
        super().__init__(weights.items())
        self.start_weight_update()
        self.update_weights({"update_info": {"weights": list(weights.items())}})
        self.finish_weight_update()
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.calls: list[Counter[tuple[str, float]]] = []

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool, lora_request: list[Any]) -> Any:
        given = zip(lora_request, params, strict=True)
        self.calls.append(Counter((one.name, param.temperature) for one, param in given))
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[self.sample(param, index) for index in range(param.n)],
            )
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def sample(self, param: Any, index: int) -> Any:
        tokens = [(param.seed + index) % 28 + 4, int(10 * param.temperature), 1]
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens]
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="stop")


@pytest.fixture
def without_vllm(monkeypatch):
    """The records of vLLM that a colocated backend makes, and no check of an installed one."""
    request = lambda name, number, path: SimpleNamespace(name=name, lora_int_id=number, lora_path=path)  # noqa: E731
    records = {"LoRARequest": request, "SamplingParams": SimpleNamespace, "StructuredOutputsParams": dict}
    for module in ("vllm", "vllm.lora", "vllm.lora.request", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**records))
    for module in ("commands.sweeps.scheduler", "trainer"):
        monkeypatch.setattr(f"groupwise.{module}.check_backend", lambda *_, **__: None)
    monkeypatch.setattr(
        "groupwise.commands.sweeps.vllm.colocate.engine_arguments",
        lambda given, *_: {"max_logprobs": given.seed},
    )


def backend_on(engine: FakeEngine, given: GRPOConfig) -> ColocatedBackend:
    ends = frozenset([1])
    return ColocatedBackend(engine, given, ends, only_adapter=True)


@pytest.mark.slow
def test_one_call_of_an_engine_samples_the_requests_of_all_runs(without_vllm, tmp_path, monkeypatch):
    engine, started = FakeEngine(), []

    def start(make_policy: Any, given: GRPOConfig, *_: Any) -> ColocatedBackend:
        started.append((make_policy(), given.vllm_engine_kwargs))
        return backend_on(engine, given)

    given = {"logprob_mismatch_check": "off", "vllm_engine_kwargs": {"max_num_seqs": 8}}
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.commands.sweeps.vllm.colocate.make_backend", start)
        found = sweep(tmp_path, **given).run()
    ((widest, arguments),) = started
    expected = {"enable_lora": True, "max_loras": 2, "max_num_seqs": 8, "max_logprobs": 42}
    assert arguments == expected and widest.peft_config["default"].r == 4
    assert [[*call.values()] for call in engine.calls] == [[2, 2]] * 3  # prompts of each run, steps
    names = [name for call in engine.calls for name, _ in call]
    assert len({*names}) == 6 and {temperature for _, temperature in engine.calls[0]} == {1.0, 1.5}
    for name in SETTINGS:
        solo = alone(tmp_path, name, make_backend=lambda own: backend_on(FakeEngine(), own), **given)
        assert_equal(found[name], solo)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_a_history_with_a_real_engine_is_that_of_the_run_alone(tmp_path):
    made = sweep(tmp_path, max_steps=2)
    found = made.run()
    made.sampler.started.close()
    solo = alone(tmp_path, "hot", max_steps=2, vllm_engine_kwargs={**ENGINE, "enable_lora": True})
    assert_equal_samples(found["hot"], solo)
    assert found["plain"].status == "finished"
