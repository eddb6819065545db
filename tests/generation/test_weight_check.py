"""Weights of engines are compared after every sync: faults of all kinds are found, clean syncs pass.

The engines load as vLLM does (``support.fakes.tiny_engine``): fused matrices, repacked copies that a kernel
reads, a head tied to the embedding. They are colocated, or behind the routes of two servers.

Files: ``generation/vllm/weight_check.py``, ``generation/vllm/plugin.py``.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.fakes.fake_vllm import FakeVLLM
from support.fakes.tiny_engine import TinyEngine, target
from support.runs import policy, tokenizer

from groupwise import GRPOConfig
from groupwise.compat.vllm_weights import as_loaded
from groupwise.errors import BackendError
from groupwise.generation.vllm.client import HttpClient
from groupwise.generation.vllm.colocate import ColocatedBackend
from groupwise.generation.vllm.plugin import WEIGHTS
from groupwise.generation.vllm.server import VLLMServerBackend
from groupwise.generation.vllm.weight_check import WeightCheck
from groupwise.policy.weight_iterator import PolicyWeights

MATRIX = "model.layers.1.self_attn.{}_proj.weight"
SQUARE = MATRIX.format("o")
TIED = "model.embed_tokens.weight"


def config_for(directory: Any, **given: Any) -> GRPOConfig:
    settings = {"use_cpu": True, "bf16": False, "num_generations": 2, "max_completion_length": 8}
    return GRPOConfig(str(directory), per_device_train_batch_size=4, use_vllm=True, **{**settings, **given})


def move(model: torch.nn.Module) -> None:
    """Change every weight, as an optimizer step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)


# Faults: each changes an engine for one sync and returns (part of) the name of the tensor that differs.


def flip(tensor: torch.Tensor, generator: random.Random) -> torch.Tensor:
    changed = tensor.clone()
    bits = changed.view(torch.int32).view(-1)
    bits[generator.randrange(len(bits))] ^= 1 << generator.randrange(31)
    return changed


def flipped_on_the_way(engine: TinyEngine, generator: random.Random) -> str:
    name = generator.choice(list(engine.shapes))
    engine.fault = lambda one, tensor: flip(tensor, generator) if one == name else tensor
    return name


def flipped_in_place(engine: TinyEngine, generator: random.Random) -> str:
    whole = generator.choice([name for name in engine.parameters if name not in engine.repacked])

    def damage(engine: TinyEngine) -> None:
        engine.parameters[whole] = flip(engine.parameters[whole], generator)

    engine.damage = damage
    return whole


def dropped(engine: TinyEngine, generator: random.Random) -> str:
    name = generator.choice(list(engine.shapes))
    engine.fault = lambda one, tensor: None if one == name else tensor
    return name


def loaded_twice(engine: TinyEngine, generator: random.Random) -> str:
    """The values of one layer are loaded in its place and in that of another."""
    part = generator.choice(["q", "k", "v", "o"])
    kept: dict[str, torch.Tensor] = {}
    name, other = (f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1))

    def fault(one: str, tensor: torch.Tensor) -> torch.Tensor:
        kept[one] = tensor
        return kept[name] if one == other else tensor

    engine.fault = fault
    return other


def stale(engine: TinyEngine, generator: random.Random) -> str:
    """One tensor is that of the update before, which the first call records."""
    name = generator.choice(list(engine.shapes))
    engine.fault = lambda one, tensor: engine.previous[one] if one == name else tensor
    return name


def transposed(engine: TinyEngine, generator: random.Random) -> str:
    engine.fault = lambda one, tensor: tensor.T.contiguous() if one == SQUARE else tensor
    return SQUARE


def rounded(engine: TinyEngine, generator: random.Random) -> str:
    name = generator.choice(list(engine.shapes))
    engine.fault = lambda one, tensor: tensor.bfloat16().float() if one == name else tensor
    return name


def wrong_dtype(engine: TinyEngine, generator: random.Random) -> str:
    whole = generator.choice([name for name in engine.parameters if name not in engine.repacked])

    def damage(engine: TinyEngine) -> None:
        engine.parameters[whole] = engine.parameters[whole].bfloat16()

    engine.damage = damage
    return whole


def skipped(engine: TinyEngine, generator: random.Random) -> str:
    engine.ignores = True
    return ""


def stale_head(engine: TinyEngine, generator: random.Random) -> str:
    """The head computes with the repacked copy that the update before made."""
    before = engine.kernels[TIED]
    engine.damage = lambda engine: engine.kernels.update({TIED: before})
    return TIED


def stale_kernel(engine: TinyEngine, generator: random.Random) -> str:
    """The matrix was not repacked: the kernel has the copy of the update before."""
    name = generator.choice(engine.repacked)
    before = engine.kernels[name]
    engine.damage = lambda engine: engine.kernels.update({name: before})
    return name


FAULTS = [
    *(flipped_on_the_way, flipped_in_place, dropped, loaded_twice, stale, transposed, rounded, wrong_dtype),
    *(skipped, stale_head, stale_kernel),
]


def repair(engine: TinyEngine) -> None:
    engine.fault, engine.damage, engine.ignores = (lambda name, tensor: tensor), (lambda engine: None), False
    engine.parameters = {name: tensor.float() for name, tensor in engine.parameters.items()}


def keep_previous(engine: TinyEngine, weights: dict[str, torch.Tensor]) -> None:
    engine.previous = {name: tensor.detach().clone() for name, tensor in weights.items()}


@pytest.fixture
def model():
    return policy(tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def adapted(model):
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])
    made = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return made


def colocated(
    directory: Any, model: Any, engine: TinyEngine, only_adapter: bool = False, **given: Any
) -> Any:
    config = config_for(directory, vllm_enable_sleep_mode=False, **given)
    return ColocatedBackend(engine, config, frozenset([1]), only_adapter=only_adapter)


class Servers:
    """Two servers, and the backend that sends weights to them."""

    def __init__(self, directory: Any, model: Any, lora_rank: int = 0, **given: Any) -> None:
        base = dict(PolicyWeights(model).base() if lora_rank else PolicyWeights(model).full())
        self.fakes = [FakeVLLM(), FakeVLLM()]
        for fake in self.fakes:
            fake.engine = TinyEngine(base.items())
            if lora_rank:
                fake.info["lora_config"] = {"max_lora_rank": 8}
                load(fake.engine, base)
        config = config_for(directory, vllm_mode="server", **given)
        config.vllm_server_base_url = ",".join(fake.url for fake in self.fakes)
        config.vllm_server_timeout = 60.0
        self.backend = VLLMServerBackend(lambda: model, config, tokenizer())

    def close(self) -> None:
        self.backend.close()
        for fake in self.fakes:
            fake.close()


def load(engine: TinyEngine, weights: dict[str, torch.Tensor]) -> None:
    engine.start_weight_update()
    engine.update_weights({"update_info": {"weights": list(weights.items())}})
    engine.finish_weight_update()


@pytest.fixture
def servers(model, tmp_path, monkeypatch):
    monkeypatch.setattr(HttpClient, "first_pause", 0.02)
    made = Servers(tmp_path, model)
    yield made
    made.close()


def inject(backend: Any, engine: TinyEngine, model: Any, seed: int, where: str, faults: Any = FAULTS) -> str:
    """Sync with one fault and check that it is found and named; returns the kind of the fault."""
    generator = random.Random(seed)
    kind = faults[seed % len(faults)]
    source = PolicyWeights(model)
    keep_previous(engine, dict(source.full()))
    move(model)
    named = kind(engine, generator)
    with pytest.raises(BackendError) as raised:
        backend.sync_weights(source, step=seed)
    repair(engine)
    assert backend.version is None and where in str(raised.value), raised.value
    message = str(raised.value)
    parts = [name for name in engine.shapes if named in (name, target(name)[0])]
    assert any(part in message for part in parts) or not named, (kind.__name__, named, message)
    return kind.__name__


@pytest.mark.slow
def test_faults_of_a_colocated_engine_are_found_and_named(model, tmp_path):
    engine = TinyEngine(PolicyWeights(model).full())
    backend = colocated(tmp_path, model, engine)
    backend.sync_weights(PolicyWeights(model), step=1000)
    found = [inject(backend, engine, model, seed, "the colocated engine") for seed in range(10 * len(FAULTS))]
    backend.sync_weights(PolicyWeights(model), step=1001)  # the repaired engine passes
    assert backend.version == 1001 and set(found) == {fault.__name__ for fault in FAULTS}


@pytest.mark.slow
def test_faults_of_one_of_two_servers_are_found_and_named(servers, model):
    backend = servers.backend
    backend.sync_weights(PolicyWeights(model), step=1000)
    for seed in range(4 * len(FAULTS)):
        faulty = servers.fakes[seed % 2]
        inject(backend, faulty.engine, model, seed, f"the vLLM server at {faulty.url}")
    backend.sync_weights(PolicyWeights(model), step=1001)
    assert backend.version == 1001


@pytest.mark.slow
def test_faults_of_a_second_data_parallel_engine_are_found_and_named(servers, model):
    """vLLM returns what the first engine answers, which has the weights."""
    faulty = servers.fakes[1]
    faulty.copy = TinyEngine(PolicyWeights(model).full())
    faulty.info["parallel_config"] = {"data_parallel_size": 2}
    servers.backend.sync_weights(PolicyWeights(model), step=1000)
    where = f"one of the 2 data-parallel engines of the vLLM server at {faulty.url}"
    found = [inject(servers.backend, faulty.copy, model, seed, where) for seed in range(len(FAULTS))]
    servers.backend.sync_weights(PolicyWeights(model), step=1001)
    assert servers.backend.version == 1001 and set(found) == {fault.__name__ for fault in FAULTS}


def test_engines_are_compared_with_each_other_only_where_there_are_several(servers, model):
    servers.backend.sync_weights(PolicyWeights(model), step=0)
    assert [fake.seen["/collective_rpc"] for fake in servers.fakes] == [1, 1]


# Adapters alone.


def ignored_adapter(engine: TinyEngine, generator: random.Random) -> str:
    engine.ignores = True
    return "lora"


def adapter_tensor(change: Any) -> Any:
    def fault(engine: TinyEngine, generator: random.Random) -> str:
        names = [name for name in engine.adapters[0] if "q_proj" in name or "v_proj" in name]
        name = generator.choice(sorted(names))
        engine.fault = lambda one, tensor: change(tensor, generator) if one == name else tensor
        return name

    return fault


def stale_adapter_tensor(engine: TinyEngine, generator: random.Random) -> str:
    name = generator.choice(sorted(name for name in engine.adapters[0] if "lora_A" in name))
    before = engine.adapters[0][name]
    engine.fault = lambda one, tensor: before if one == name else tensor
    return name


def unscaled(engine: TinyEngine, generator: random.Random) -> str:
    def damage(engine: TinyEngine) -> None:
        engine.adapters[0] = {
            name: tensor / 3 if "lora_B" in name else tensor for name, tensor in engine.adapters[0].items()
        }

    engine.damage = damage
    return "lora_B"


ADAPTER_FAULTS = [
    ignored_adapter,
    adapter_tensor(flip),
    adapter_tensor(lambda tensor, generator: None),
    adapter_tensor(lambda tensor, generator: tensor.flip(0)),
    adapter_tensor(lambda tensor, generator: tensor.bfloat16()),
    stale_adapter_tensor,
    unscaled,
]


def inject_into_adapter(backend: Any, engine: TinyEngine, model: Any, seed: int) -> None:
    generator = random.Random(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.01 * torch.randn_like(parameter)
    named = ADAPTER_FAULTS[seed % len(ADAPTER_FAULTS)](engine, generator)
    with pytest.raises(BackendError) as raised:
        backend.sync_weights(PolicyWeights(model), step=seed)
    repair(engine)
    assert named in str(raised.value), raised.value


@pytest.fixture
def lora_request(monkeypatch):
    """The class of a LoRA request, without vLLM."""
    request = lambda name, number, path: SimpleNamespace(lora_int_id=number, lora_path=path)  # noqa: E731
    for module in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(LoRARequest=request))


@pytest.mark.slow
def test_faults_of_an_adapter_in_a_colocated_engine_are_found(adapted, tmp_path, lora_request):
    base = dict(PolicyWeights(adapted).base())
    engine = TinyEngine(base.items())
    load(engine, base)
    backend = colocated(tmp_path, adapted, engine, only_adapter=True)
    backend.sync_weights(PolicyWeights(adapted), step=1000)
    for seed in range(70):
        inject_into_adapter(backend, engine, adapted, seed)
    backend.sync_weights(PolicyWeights(adapted), step=1001)
    assert backend.version == 1001
    backend.adapters.remove()


@pytest.mark.slow
@pytest.mark.parametrize(("faulty", "count"), [("engine", 14), ("copy", 14)])
def test_faults_of_an_adapter_on_servers_are_found(faulty, count, adapted, tmp_path, monkeypatch):
    """In the engines that vLLM answers for, and in their data-parallel copies."""
    monkeypatch.setattr(HttpClient, "first_pause", 0.02)
    servers = Servers(tmp_path, adapted, lora_rank=4)
    base = dict(PolicyWeights(adapted).base())
    for fake in servers.fakes:
        fake.copy = TinyEngine(base.items())
        load(fake.copy, base)
        fake.info["parallel_config"] = {"data_parallel_size": 2}
    try:
        servers.backend.sync_weights(PolicyWeights(adapted), step=1000)
        for seed in range(count):
            inject_into_adapter(servers.backend, getattr(servers.fakes[seed % 2], faulty), adapted, seed)
        servers.backend.sync_weights(PolicyWeights(adapted), step=1001)
    finally:
        servers.close()


def test_another_base_model_below_an_adapter_of_an_engine_is_found(adapted, tmp_path, lora_request):
    other = {name: tensor + 1e-6 for name, tensor in PolicyWeights(adapted).base()}
    engine = TinyEngine(other.items())
    load(engine, other)
    backend = colocated(tmp_path, adapted, engine, only_adapter=True)
    with pytest.raises(BackendError, match=r"embed_tokens\.weight has other values"):
        backend.sync_weights(PolicyWeights(adapted), step=0)
    backend.adapters.remove()


def test_another_base_model_below_an_adapter_of_one_server_is_found(adapted, tmp_path):
    servers = Servers(tmp_path, adapted, lora_rank=4)
    other = servers.fakes[1]
    try:
        load(other.engine, {name: tensor + 1e-6 for name, tensor in PolicyWeights(adapted).base()})
        way_out = r"it must serve the weights below the adapter \(of a policy in 4 bits"
        with pytest.raises(
            BackendError, match=rf"{other.url}.*embed_tokens\.weight has other values.*{way_out}"
        ):
            servers.backend.sync_weights(PolicyWeights(adapted), step=0)
    finally:
        servers.close()


@pytest.mark.parametrize(("kernels", "compared"), [("TRITON", True), ("FLASHINFER_CUTLASS", False)])
def test_experts_that_a_kernel_for_gpus_rearranges_are_not_compared(kernels, compared):
    backend = SimpleNamespace(name=kernels)
    layer = SimpleNamespace(quant_method=SimpleNamespace(unquantized_backend=backend))
    weight = torch.ones(2, 4, 3)
    assert as_loaded(layer, "w13_weight", weight) is (weight if compared else None)
    assert as_loaded(layer, "e_score_correction_bias", weight) is weight


# Clean syncs, and the setting.


@pytest.mark.slow
def test_2000_clean_syncs_of_a_tiny_engine_raise_no_alarm():
    """All values change, over many orders of magnitude, zeros of both signs included."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.q_proj.weight": (3, 20), "a.k_proj.weight": (2, 20), "norm.weight": (20,)}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    engine = TinyEngine(weights.items(), tied_head=False)
    fetch = lambda adapter, given: [("it", "float32", engine.collective_rpc(WEIGHTS, given))]  # noqa: E731
    check = WeightCheck("every_sync", ["float32"], fetch)
    digests = set()
    for _ in range(2_000):
        for tensor in weights.values():
            tensor.normal_(generator=generator).pow_(9)
            tensor.view(-1)[0] = -0.0
        load(engine, dict(check.record(weights.items())))
        digests.add(check.compare())
    assert check.num_syncs == len(digests) == 2_000


@pytest.mark.parametrize(("mode", "compared"), [("every_sync", 3), ("first", 1), ("off", 0)])
def test_the_setting_chooses_the_syncs(mode, compared, model, tmp_path):
    engine = TinyEngine(PolicyWeights(model).full())
    backend = colocated(tmp_path, model, engine, vllm_weight_check=mode)
    calls: list[str] = []
    call = engine.collective_rpc
    engine.collective_rpc = lambda method, kwargs: calls.append(method) or call(method, kwargs)
    for step in range(3):
        move(model)
        backend.sync_weights(PolicyWeights(model), step=step)
        assert bool(backend.weight_digests[step]) == (step < compared)
    assert len(calls) == compared


def test_a_server_that_cannot_report_is_refused_with_the_way_out(servers, model):
    servers.fakes[1].failures["/collective_rpc"] = [500]
    answer = "no attribute 'groupwise_weight_report'"
    servers.fakes[0].answer, plain = (
        (lambda path, query, body: (500, answer) if path == "/collective_rpc" else plain(path, query, body)),
        servers.fakes[0].answer,
    )
    with pytest.raises(
        BackendError, match="install groupwise in its environment, or set vllm_weight_check='off'"
    ):
        servers.backend.sync_weights(PolicyWeights(model), step=0)
