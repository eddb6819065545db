"""Adapters of LoRA runs on servers: their files, their names, and the requests that carry them.

Files: ``generation/vllm/server.py``, ``generation/vllm/client.py``, ``generation/vllm/plugin.py``.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.engine_runs import (
    assert_follows_four_bits,
    engine_greedy,
    four_bit_policy,
    greedy,
    sync,
    trainer,
    trainer_logps,
)
from support.fakes.fake_vllm import GENERATE, FakeVLLM
from support.runs import policy, tokenizer
from support.sweep_runs import alone, assert_equal_samples, sweep
from support.workers.vllm_process import ServerProcess
from test_vllm_server import UPDATE
from transformers import AutoModelForCausalLM

from groupwise import GRPOConfig
from groupwise.errors import BackendError
from groupwise.generation.vllm.client import VLLMServers
from groupwise.generation.vllm.plugin import ADAPTER_FILES, PLACE_ADAPTER, place_adapter
from groupwise.generation.vllm.server import VLLMServerBackend
from groupwise.policy.weight_iterator import PolicyWeights


@pytest.fixture
def model():
    made = get_peft_model(policy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return made


@pytest.fixture
def fake(fake, model):
    fake.info["lora_config"] = {"max_lora_rank": 8}
    fake.weights = dict(PolicyWeights(model).base())
    return fake


def backend_for(fake, model, tmp_path, lora_rank=4, **given):
    settings = {"use_cpu": True, "bf16": False, "num_generations": 2, "max_completion_length": 8}
    settings |= {"use_vllm": True, "vllm_mode": "server"}
    config = GRPOConfig(str(tmp_path), per_device_train_batch_size=4, **{**settings, **given})
    config.vllm_server_base_url, config.vllm_server_timeout = fake.url, 60.0
    backend = VLLMServerBackend(lambda: model, config, tokenizer())
    backend.lora_rank = lora_rank
    return backend


@pytest.fixture
def backend(fake, model, tmp_path):
    made = backend_for(fake, model, tmp_path)
    yield made
    made.close()


def names(fake):
    """Adapters of the requests, in order."""
    return [body.get("model") for path, body in fake.bodies if path == GENERATE]


def test_only_the_adapter_is_sent_and_every_request_carries_that_of_its_step(backend, fake, model):
    source = PolicyWeights(model)
    backend.sync_weights(source, step=4)
    (sent,) = fake.adapters.values()
    expected = source.adapter()
    assert sent["config"]["r"] == 4 and sent["tensors"].keys() == expected.tensors.keys()
    assert all(torch.equal(sent["tensors"][name], expected.tensors[name]) for name in expected.tensors)
    completions = backend.generate([[3], [3], [5]])
    assert [c.versions for c in completions] == [[4] * 4] * 3
    (first,) = fake.adapters
    assert names(fake) == [first] * 2
    backend.sync_weights(source, step=5)
    assert backend.generate([[3]])[0].versions == [5] * 4
    (second,) = fake.adapters  # the old one is gone
    assert second != first and names(fake)[-1] == second
    assert not fake.seen.keys() & {*UPDATE, "/init_weight_transfer_engine"}


def test_prefetched_requests_finish_with_their_adapter(fake, model, tmp_path):
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 1}
    backend = backend_for(fake, model, tmp_path, rollout_staleness=1, **settings)
    source = PolicyWeights(model)
    backend.sync_weights(source, step=0)
    backend.prefetch([[3], [3]], step=1)
    backend.sync_weights(source, step=1)
    assert len(fake.adapters) == 2  # that of step 0 may still be in use
    assert backend.generate([[3], [3]])[0].versions == [0] * 4
    backend.sync_weights(source, step=2)
    assert [int(name.rpartition(":")[2]) for name in fake.adapters] == [1, 2]
    backend.close()
    assert not fake.adapters


def test_a_restarted_server_gets_the_adapter_again(backend, fake, model):
    backend.sync_weights(PolicyWeights(model), step=4)
    before = backend.snapshot()
    undisturbed = backend.generate([[3], [3], [5]])
    fake.adapters.clear()
    backend.restore(before)
    assert backend.generate([[3], [3], [5]]) == undisturbed
    assert len(fake.adapters) == 1 and fake.seen["/v1/load_lora_adapter"] == 2


@pytest.mark.parametrize("failure", [500, "drop"])
def test_a_load_that_fails_is_made_again(backend, fake, model, failure):
    fake.failures["/v1/load_lora_adapter"] = [failure]
    backend.sync_weights(PolicyWeights(model), step=4)
    assert backend.generate([[3]])[0].versions == [4] * 4
    assert len(fake.adapters) == 1


def test_a_load_that_fails_on_one_server_leaves_nothing_on_the_others(fake, model, tmp_path):
    other = FakeVLLM()
    other.info["lora_config"], other.weights = {"max_lora_rank": 8}, fake.weights
    backend = backend_for(fake, model, tmp_path)
    backend.config.vllm_server_base_url = f"{fake.url},{other.url}"
    other.failures["/v1/load_lora_adapter"] = [500]
    backend.sync_weights(PolicyWeights(model), step=4)
    assert fake.adapters.keys() == other.adapters.keys() and len(fake.adapters) == 1
    backend.close()
    assert not fake.adapters and not other.adapters
    other.close()


def test_adapters_of_two_runs_on_one_server_do_not_mix(fake, model, tmp_path):
    backends = [backend_for(fake, model, tmp_path / str(i)) for i in range(2)]
    for step in (0, 1):
        for backend in backends:
            backend.sync_weights(PolicyWeights(model), step=step)
            backend.generate([[3]])
    used = names(fake)
    assert len(set(used)) == 4 and {*fake.adapters} == set(used[2:])
    backends[0].close()
    assert {*fake.adapters} == {used[3]}
    backends[1].close()


def test_the_files_are_in_shared_memory_for_servers_of_this_machine(backend, fake, model):
    backend.sync_weights(PolicyWeights(model), step=0)
    (path,) = [Path(body["lora_path"]) for route, body in fake.bodies if route == "/v1/load_lora_adapter"]
    assert os.path.commonpath([path, "/dev/shm"]) == "/dev/shm" and path.is_dir()
    backend.close()
    assert not path.exists()


def test_a_server_that_cannot_read_the_file_gets_its_bytes(fake, model, tmp_path, monkeypatch, caplog):
    """Of two servers one is on another machine: it writes the files to a directory of its own."""
    caplog.set_level("INFO", "groupwise.generation.vllm.server")
    other = FakeVLLM()
    other.info["lora_config"], other.weights, other.is_elsewhere = {"max_lora_rank": 8}, fake.weights, True
    backend, source = backend_for(fake, model, tmp_path), PolicyWeights(model)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for step in (4, 5):
        backend.config.vllm_server_base_url = f"{fake.url},{other.url}"
        backend.sync_weights(source, step=step)
        (own,) = tmp_path.glob("groupwise-adapters-*/*:*")  # the old one is gone
        (sent,), expected = other.adapters.values(), source.adapter().tensors
        assert [*other.adapters] == [*fake.adapters] == [own.name]
        assert all(torch.equal(sent["tensors"][name], expected[name]) for name in expected)
        assert "as bytes, because a server cannot read its path" in caplog.text
    backend.close()
    assert not own.exists() and not other.adapters
    other.close()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The directory for temporary files of a server that has placed no adapter, and a file beside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("GROUPWISE_ADAPTER_DIRECTORY", "groupwise-adapters-of-the-test")
    for kept in (tmp_path / "kept", tmp_path / "tmp" / "kept"):
        kept.write_text("as before")
    return tmp_path / "tmp"


def tree(directory):
    return {path: path.read_text() for path in directory.rglob("*") if path.is_file()}


TEXT = base64.b64encode(b"text").decode()
OUTSIDE = ["", ".", "..", "../kept", "a/../../kept", "/", ".hidden", "a\0b", "a b", "ä"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_adapters_and_their_files_have_plain_names(machine, name):
    before = tree(machine.parent)
    for path, files in ((f"run/{name}", {}), (f"run/{name}", {"file": TEXT}), ("run:1:2", {name: TEXT})):
        if Path(path).name in ("kept", "run") and "file" not in files:
            assert place_adapter(None, path, files) is None  # of a path only the name counts
        elif Path(path).name in ("kept", "run") and "file" in files:
            assert Path(place_adapter(None, path, files)).parent.parent == machine
            place_adapter(None, path, {})
        else:
            with pytest.raises(ValueError, match="not plain names"):
                place_adapter(None, path, files)
    assert tree(machine.parent) == before


def test_no_file_is_written_to_an_absolute_path(machine):
    before = tree(machine.parent)
    with pytest.raises(ValueError, match="not plain names"):
        place_adapter(None, "run:1:2", {str(machine / "kept"): TEXT})
    assert tree(machine.parent) == before


def test_a_prepared_link_is_not_followed(machine):
    (machine.parent / "aim").mkdir()
    (machine / "groupwise-adapters-of-the-test").symlink_to(machine.parent / "aim")
    for files in ({"file": TEXT}, {}):
        with pytest.raises(PermissionError, match="is a link"):
            place_adapter(None, "run:1:2", files)
    assert tree(machine.parent / "aim") == {}


def test_a_link_in_the_place_of_a_file_is_replaced(machine):
    own = Path(place_adapter(None, "run:1:2", {"file": TEXT}))
    (own / "other").symlink_to(machine / "kept")
    place_adapter(None, "run:1:2", {"other": TEXT})
    assert (own / "other").read_text() == "text" and (machine / "kept").read_text() == "as before"


def test_the_directory_is_private_and_another_one_in_every_server(machine, monkeypatch):
    directories = set()
    for _ in range(2):
        monkeypatch.delenv("GROUPWISE_ADAPTER_DIRECTORY")
        own = Path(place_adapter(None, "/somewhere/run:1:2", {"file": TEXT}))
        assert own.name == "run:1:2" and own.parent.stat().st_mode & 0o777 == 0o700
        assert place_adapter(None, "run:1:2", {"file": TEXT}) == str(own)  # by another worker
        directories.add(own.parent)
    assert len(directories) == 2 and all(one.parent == machine for one in directories)
    assert place_adapter(None, "run:1:2", {}) is None and not own.parent.exists()


def test_workers_that_write_at_once_write_files_of_their_own(machine, monkeypatch):
    """Workers of one process, or of two containers with one temporary directory, have one process id."""
    both_wrote, write = Barrier(2, timeout=60), Path.write_bytes

    def write_together(path, content):
        write(path, content)
        both_wrote.wait()

    monkeypatch.setattr(Path, "write_bytes", write_together)
    with ThreadPoolExecutor(2) as workers:
        placed = {*workers.map(lambda _: place_adapter(None, "run:1:2", {"file": TEXT}), range(2))}
    (own,) = map(Path, placed)
    assert tree(machine) == {machine / "kept": "as before", own / "file": "text"}


def test_a_path_is_used_only_if_all_files_of_the_adapter_can_be_read(tmp_path, monkeypatch):
    assert place_adapter(None, str(tmp_path)) is None
    for name in ADAPTER_FILES:
        assert place_adapter(None, str(tmp_path)) is None
        (tmp_path / name).touch()
    assert place_adapter(None, str(tmp_path)) == str(tmp_path)
    # As for another user of the machine, which root, who runs tests in containers, is not.
    unreadable = str(tmp_path / ADAPTER_FILES[1])
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != unreadable and mode == os.R_OK)
    assert place_adapter(None, str(tmp_path)) is None


def test_bytes_that_do_not_arrive_are_an_error(fake, model, tmp_path, monkeypatch):
    call = VLLMServers.call_workers

    def full_disk(self, method, given):
        if "files" in given:
            raise BackendError("No space left on device")
        return call(self, method, given)

    fake.is_elsewhere = True
    monkeypatch.setattr(VLLMServers, "call_workers", full_disk)
    backend = backend_for(fake, model, tmp_path)
    with pytest.raises(BackendError, match="No space left on device"):
        backend.sync_weights(PolicyWeights(model), step=0)
    assert fake.seen["/v1/load_lora_adapter"] == 0
    backend.close()


def test_the_log_names_the_path_way(backend, fake, model, caplog):
    caplog.set_level("INFO", "groupwise.generation.vllm.server")
    backend.sync_weights(PolicyWeights(model), step=0)
    (name,) = fake.adapters
    assert f"sending the adapter {name} by its path: 0." in caplog.text


def test_policies_whose_adapter_cannot_be_sent_alone_are_refused(fake, model, tmp_path):
    for rank, message in ((0, "no plain LoRA adapter, which can be sent"), (16, "--max-lora-rank 8")):
        backend = backend_for(fake, model, tmp_path, lora_rank=rank)
        with pytest.raises(BackendError, match=message):
            backend.sync_weights(PolicyWeights(model), step=0)
        backend.close()


def test_a_server_in_4_bits_gets_adapters_of_a_policy_in_4_bits(fake, model, tmp_path):
    fake.info["model_config"]["quantization"] = "bitsandbytes"
    for policy_in_4_bits in (False, True):
        backend = backend_for(fake, model, tmp_path)
        if policy_in_4_bits:
            backend.model_config.quantization_config = {"load_in_4bit": True}
            backend.sync_weights(PolicyWeights(model), step=0)
            assert len(fake.adapters) == 1
        else:
            with pytest.raises(BackendError, match="quantized by bitsandbytes, but full matrices are sent"):
                backend.sync_weights(PolicyWeights(model), step=0)
        backend.close()


def test_servers_that_differ_are_refused(fake, model, tmp_path):
    other = FakeVLLM()
    backend = backend_for(fake, model, tmp_path)
    backend.config.vllm_server_base_url = f"{fake.url},{other.url}"
    with pytest.raises(BackendError, match="differ in --enable-lora"):
        backend.sync_weights(PolicyWeights(model), step=0)
    backend.close()
    other.close()


def elsewhere(patch):
    """Give servers a path that they cannot read in place of the adapter's, as on another machine."""
    call = VLLMServers.call_workers

    def call_workers(servers, method, given, url=None):
        if method == PLACE_ADAPTER:
            given = {**given, "path": f"/another/machine/{Path(given['path']).name}"}
        return call(servers, method, given, url)

    patch.setattr(VLLMServers, "call_workers", call_workers)


def run_for(server, directory, **given):
    settings = {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 240.0}
    return trainer(directory, **{**settings, "vllm_engine_kwargs": None, **given})


def real(test):
    installed = importlib.util.find_spec("vllm") is not None
    test = pytest.mark.skipif(not installed, reason="vllm is not installed")(test)
    return pytest.mark.vllm(pytest.mark.timeout(900)(test))


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory):
    """The arguments of a trainer with a policy in 4 bits, and a server of its matrices."""
    pytest.importorskip("bitsandbytes")
    directory = tmp_path_factory.mktemp("server")
    given = four_bit_policy(directory / "base")
    options = given["model_init_kwargs"]
    AutoModelForCausalLM.from_pretrained(given["model"], **options).dequantize().save_pretrained(
        directory / "model"
    )
    tokenizer().save_pretrained(directory / "model")
    flags = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    server = ServerProcess(directory, flags)
    yield given, server.start().wait()
    server.kill()


@pytest.mark.slow
@real
def test_a_real_server_follows_the_adapter_of_a_4_bit_policy(four_bits, tmp_path, caplog):
    """It serves the dequantized matrices, and gets the adapter alone."""
    caplog.set_level("INFO", "groupwise.generation.vllm.server")
    given, server = four_bits
    assert_follows_four_bits(run_for(server, tmp_path, **given), [[4, 5], [6], [7, 8, 9]])
    assert caplog.text.count("by its path") == 4  # before training, in two steps and after them


@pytest.mark.slow
@real
def test_two_runs_on_a_real_server_sample_with_their_own_adapters(four_bits, tmp_path, monkeypatch):
    """One of them sends bytes, which the server writes to a directory for temporary files."""
    server, prompts = four_bits[1], [[4, 5], [6], [7, 8, 9], [10, 11, 12, 13]]
    settings = {"model": str(server.out_of_memory.parent / "model"), "learning_rate": 0.05, "max_steps": 2}
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    runs = [
        run_for(server, tmp_path / str(seed), seed=seed, peft_config=LoraConfig(**lora), **settings)
        for seed in (1, 2)
    ]
    load, sizes = VLLMServerBackend.load_adapter, []

    def counted(*given):
        sizes.append(load(*given))
        return sizes[-1]

    monkeypatch.setattr(VLLMServerBackend, "load_adapter", counted)
    for run in runs:
        run.train()
        name = "sampling/sampling_logp_difference/max"  # of steps with a gradient
        logged = [line[name] for line in run.state.log_history if name in line]
        assert logged and max(logged) < 1e-3
    sync(runs[0], runs[0].model)
    elsewhere(monkeypatch)
    sync(runs[1], runs[1].model)
    merged = sum(tensor.nbytes for _, tensor in PolicyWeights(runs[1].model).full())
    *by_path, by_bytes = sizes
    assert len(by_path) == 2 * 2 + 1  # per step, and after the steps of the first run
    assert max(by_path) < 0.2 * merged  # the adapter alone
    assert by_bytes >= 4 / 3 * by_path[-1]  # in base64
    names = [f"groupwise-adapters-*/{run.backend.servers.adapter}" for run in runs]
    none, (written,) = (list(Path(tempfile.gettempdir()).glob(name)) for name in names)
    assert none == [] and written.parent.stat().st_mode & 0o777 == 0o700
    found = [engine_greedy(run.backend, prompts) for run in (*runs, *runs)]
    expected = [greedy(run.model, prompts, 6, run.backend.end_tokens) for run in runs]
    assert found == expected * 2 and expected[0] != expected[1]
    for run in runs:
        for prompt in prompts[:2]:
            (completion,) = run.backend.generate([prompt])
            given = torch.tensor(completion.logps).double()
            gap = (given - trainer_logps(run.model, prompt, completion.token_ids, 1.0)).abs().max()
            with run.model.disable_adapter():
                ignored = (given - trainer_logps(run.model, prompt, completion.token_ids, 1.0)).abs().max()
            assert gap < 2e-4 and ignored > 10 * gap
            assert completion.versions == [2] * len(completion.token_ids)
        run.backend.close()
    assert not written.exists()


@pytest.mark.slow
@real
def test_a_sweep_on_a_real_server_has_the_histories_of_its_runs_alone(four_bits, tmp_path):
    server = four_bits[1]
    given = {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 240.0}
    given |= {"model": str(server.out_of_memory.parent / "model"), "vllm_engine_kwargs": None, "max_steps": 2}
    found = sweep(tmp_path, **given).run()
    for name, run in found.items():
        assert_equal_samples(run, alone(tmp_path, name, **given))
        run.trainer.backend.close()


@pytest.mark.slow
@real
def test_both_data_parallel_engines_of_a_real_server_get_the_adapter(tmp_path):
    flags = ("--enable-lora", "--max-lora-rank", "8", "--data-parallel-size", "2")
    server = ServerProcess(tmp_path, flags).start().wait()
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    run = run_for(server, tmp_path / "run", model=str(tmp_path / "model"), peft_config=lora)
    prompts = [[4 + i] for i in range(12)]  # enough for both
    try:
        sync(run, run.model)
        assert run.backend.server_info[0].num_engines == 2
        assert engine_greedy(run.backend, prompts) == greedy(run.model, prompts, 6, run.backend.end_tokens)
    finally:
        run.backend.close()
        server.kill()
