"""The contract of ``GenerationBackend``, on every backend; vLLM servers are stand-ins.

Files: ``generation/base.py``, ``generation/backends.py``, ``generation/vllm/server.py``,
``records/images.py``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import engine_runs, runs
from support.fakes.fake_backend import EchoBackend
from support.fakes.fake_vllm import FakeVLLM
from support.serialization import reloaded

from groupwise import ConfigError, GRPOConfig, register_backend
from groupwise.generation.backends import check_backend, check_images, make_backend
from groupwise.generation.base import GenerationBackend
from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import SamplingOptions
from groupwise.records.images import ImageInputs

SETTINGS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "server": {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 60.0},
    "colocate": {"use_vllm": True, "vllm_engine_kwargs": engine_runs.ENGINE},
    "fake": {},
}
VLLM = pytest.param(
    "colocate",
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    ],
)
NAMES = ["transformers", "server", VLLM, "fake"]
PROMPTS = [[4, 5, 6]] * 8 + [[9]] * 8


class Case(SimpleNamespace):
    """A backend with the policy's weights of step 3, and the log of its weight loads."""

    backend: GenerationBackend
    weights: Any
    name: str

    def tokens(self, prompts: list[list[int]], *sampling: SamplingOptions) -> list[list[int]]:
        return [completion.token_ids for completion in self.backend.generate(prompts, *sampling)]


class CountedWeights(PolicyWeights):
    """Weights of the policy; counts how often they are read."""

    reads = 0

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reads += 1
        return super().full()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes one backend per name; engines are slow to start."""
    made: dict[str, Case] = {}
    fake = FakeVLLM()

    def case(name: str) -> Case:
        if name not in made:
            model = engine_runs.policy()
            settings = {"bf16": False, "use_cpu": True, "report_to": "none", "max_completion_length": 6}
            config = GRPOConfig(str(tmp_path_factory.mktemp(name)), **settings, **SETTINGS[name])
            if name == "server":
                config.vllm_server_base_url = fake.url
            weights = CountedWeights(model)
            chosen: Any = EchoBackend() if name == "fake" else None
            check_backend(config, chosen)
            backend = make_backend(lambda: model, config, runs.tokenizer(), chosen)
            made[name] = Case(backend=backend, weights=weights, name=name)
        made[name].backend.sync_weights(made[name].weights, step=3)
        return made[name]

    yield case
    for one in made.values():
        one.backend.close()
        one.backend.close()  # a second close does nothing
    fake.close()


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, cases: Any) -> Case:
    torch.manual_seed(0)
    return cases(request.param)


def test_it_is_a_generation_backend_with_end_tokens(case):
    assert isinstance(case.backend, GenerationBackend)
    assert case.backend.end_tokens == {1}
    assert case.backend.context_length is None or case.backend.context_length > 6


def test_equal_prompts_give_independent_samples(case):
    completions = case.tokens(PROMPTS)
    assert len(completions) == len(PROMPTS)
    assert len({tuple(tokens) for tokens in completions[:8]}) > 1
    assert case.tokens(PROMPTS) != completions  # and so does a second call


def test_completions_are_in_the_order_of_the_prompts(case):
    greedy = SamplingOptions(generation_kwargs={"temperature": 0.0})
    prompts = [[4, 5, 6], [7], [8, 9, 10, 11], [4, 5, 6]]
    together = case.tokens(prompts, greedy)
    if case.name == "server":  # the first token of the stand-in is the last one of the prompt
        assert [tokens[0] for tokens in together] == [6, 7, 11, 6]
        return
    assert together == [case.tokens([prompt], greedy)[0] for prompt in prompts]
    assert together[0] == together[3] and len({tuple(tokens) for tokens in together}) > 1


def test_each_row_has_its_own_limit(case):
    limits = [1, 2, 3, 4] * 4
    for completion, limit in zip(
        case.backend.generate(PROMPTS, SamplingOptions(max_tokens=limits)), limits, strict=True
    ):
        assert 1 <= len(completion.token_ids) <= limit
        assert completion.truncated == (completion.token_ids[-1] not in case.backend.end_tokens)
    assert all(len(tokens) <= 6 for tokens in case.tokens(PROMPTS))  # max_completion_length


def test_only_the_last_token_ends_a_completion(case):
    if case.name == "server":
        pytest.skip("the stand-in's tokens are sample indices")
    for tokens in case.tokens(PROMPTS):
        assert not set(tokens[:-1]) & case.backend.end_tokens


def test_generation_kwargs_hold_for_one_call(case):
    greedy = SamplingOptions(generation_kwargs={"temperature": 0.0})
    alike = case.tokens([[4, 5, 6]] * 8, greedy)
    assert len({tuple(tokens) for tokens in alike}) == 1
    assert len({tuple(tokens) for tokens in case.tokens([[4, 5, 6]] * 8)}) > 1


def test_versions_are_the_step_of_the_weights(case):
    for completion in case.backend.generate(PROMPTS):
        assert completion.sampled_at(3)
        assert completion.logps is None or len(completion.logps) == len(completion.token_ids)


def test_weights_are_loaded_once_per_step_and_again_when_invalid(case):
    assert case.backend.version == 3
    loads_weights = case.weights.reads > 0
    for act, loaded in (
        (lambda: None, False),
        (case.backend.invalidate_weights, True),
        (lambda: None, False),
    ):
        act()
        before = case.weights.reads
        case.backend.sync_weights(case.weights, step=3)
        assert case.backend.version == 3
        assert (case.weights.reads > before) == (loads_weights and loaded)
    before = case.weights.reads
    case.backend.sync_weights(case.weights, step=4)
    assert case.backend.version == 4 and (case.weights.reads > before) == loads_weights
    case.backend.invalidate_weights()
    assert case.backend.version is None


def test_a_restored_state_repeats_the_samples(case):
    case.backend.invalidate_weights()
    case.backend.sync_weights(case.weights, step=5)
    state = reloaded(case.backend.snapshot())
    torch.manual_seed(7)
    first = case.tokens(PROMPTS)
    case.backend.restore(state)
    torch.manual_seed(7)
    assert case.tokens(PROMPTS) == first


def test_release_keeps_the_backend_usable(case):
    case.backend.release()
    case.backend.sync_weights(case.weights, step=3)
    assert len(case.backend.generate([[4]])) == 1


def test_a_backend_is_chosen_by_instance_or_by_name(tmp_path, monkeypatch):
    config = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    model, seen = runs.policy(), []

    def factory(policy, config, processing_class, suppress_tokens=()):
        seen.append((policy(), config, suppress_tokens))
        return EchoBackend()

    def check(config):
        if config.top_k:
            raise ConfigError("echo has no top_k")

    register_backend("echo", factory, check)
    check_backend(config, "echo")
    assert isinstance(make_backend(lambda: model, config, runs.tokenizer(), "echo"), EchoBackend)
    assert seen == [(model, config, [])]
    config.top_k = 5
    with pytest.raises(ConfigError, match="echo has no top_k"):
        check_backend(config, "echo")
    instance = EchoBackend()
    assert make_backend(lambda: model, config, runs.tokenizer(), instance) is instance
    with pytest.raises(ConfigError, match=r"unknown backend 'colocated'; .*nearest valid: 'colocate'"):
        check_backend(config, "colocated")


def test_images_need_a_backend_that_supports_them(tmp_path):
    config = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match="a column of images, but the backend 'EchoBackend' samples from"):
        check_backend(config, EchoBackend(), with_images=True)
    check_backend(config, EchoBackend())
    check_backend(config, with_images=True)  # the policy itself
    model = runs.policy()
    assert make_backend(lambda: model, config, runs.tokenizer()).supports_images


def test_prompts_with_images_are_refused_by_a_backend_of_text():
    with_image = ImageInputs({"pixel_values": torch.zeros(1, 3, 2, 2)})
    check_images(EchoBackend(), [ImageInputs(), ImageInputs()])
    check_images(EchoBackend(), None)
    with pytest.raises(ConfigError, match="a prompt has images, but the backend 'EchoBackend' samples from"):
        check_images(EchoBackend(), [ImageInputs(), with_image])
