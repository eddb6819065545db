"""Settings that vLLM would refuse late or not at all; transport and sleep order without an engine.

Files: ``generation/vllm/colocate.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from support import tiny_vlm
from support.runs import policy, prompts, tokenizer, trainer

from groupwise import ConfigError, GRPOConfig, GRPOTrainer
from groupwise.errors import BackendError
from groupwise.generation.vllm import colocate, transfer
from groupwise.generation.vllm.colocate import ColocatedBackend, check_policy
from groupwise.generation.vllm.transfer import BucketSender, WeightTransfer
from groupwise.generation.vllm.weight_source import EngineWeights
from groupwise.records import SamplingOptions


def refused(tmp_path, **settings):
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, use_vllm=True, **settings)
    return str(error.value)


@pytest.mark.parametrize(
    "spec", [None, ModuleSpec("vllm", None, is_package=True)], ids=["nothing", "directory"]
)
def test_missing_vllm_error_names_the_package_to_install(tmp_path, monkeypatch, spec):
    """Python finds a directory called vllm in the working directory, too: a package without code."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: spec if name == "vllm" else find(name, *a)
    )
    assert "pip install 'groupwise[vllm]'" in refused(tmp_path)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_engine_kwargs": {"max_num_seq": 8}}, r"vllm_engine_kwargs['max_num_seq'] is unknown"),
        ({"vllm_engine_kwargs": {"max_num_seq": 8}}, "nearest valid: 'max_num_seqs'"),
        ({"vllm_engine_kwargs": {"max_model_len": 8}}, "it follows vllm_max_model_length"),
        ({"generation_kwargs": {"best": 2}}, "generation_kwargs['best'] is unknown"),
        ({"generation_kwargs": {"seed": 2}}, "generation_kwargs['seed'] is set by the trainer"),
        ({"generation_kwargs": {"min_tokens": 7}}, "less than or equal to max_tokens=6, got 7"),
        ({"temperature": 2.5}, "temperature must be in [0, 2], got 2.5"),
        ({"vllm_enable_sleep_mode": True}, "frees GPU memory"),
        (
            {"vllm_model_impl": "transformers", "vllm_engine_kwargs": {"enforce_eager": False}},
            "leave it out with vllm_model_impl='transformers'",
        ),
        ({"vllm_max_model_length": 9}, "a context of 9 (vllm_max_model_length) leaves 3"),
    ],
)
def test_settings_are_refused_before_anything_is_built(tmp_path, settings, message):
    pytest.importorskip("vllm")
    assert message in refused(tmp_path, train_dataset=prompts(8), **settings)


@pytest.mark.vllm
def test_zero3_with_a_transformers_engine_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(colocate, "is_deepspeed_zero3_enabled", lambda: True)
    assert "set vllm_model_impl='vllm'" in refused(tmp_path, vllm_model_impl="transformers")


@pytest.mark.vllm
def test_min_tokens_above_the_default_max_tokens_is_valid():
    pytest.importorskip("vllm")
    config = GRPOConfig(
        "unused", use_vllm=True, generation_kwargs={"min_tokens": 64}, use_cpu=True, bf16=False
    )
    colocate.check_engine(config)  # more than the 16 tokens that vLLM has by default


@pytest.mark.vllm
def test_an_engine_in_another_process_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert "use vllm_mode='server'" in refused(tmp_path)


def test_environment_variables_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    cpu = SimpleNamespace(device=torch.device("cpu"), vllm_tensor_parallel_size=1, world_size=1)
    colocate.prepare_environment(cpu)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


NO_CHECK = {"vllm_weight_check": "off", "use_cpu": True, "bf16": False}


class FakeEngine:
    """Writes down what it is asked to do."""

    def __init__(self):
        self.calls = []
        self.model_config = SimpleNamespace(max_model_len=64, max_logprobs=20, dtype=torch.float32)

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.values()))
            if name == "update_weights" and isinstance(args[0]["update_info"].get("weights"), Exception):
                raise args[0]["update_info"]["weights"]
            return []

        return call

    def names(self):
        called, self.calls = self.calls, []
        return [name for name, *_ in called]


def weights(*pairs):
    return SimpleNamespace(full=lambda: iter(pairs))


@pytest.fixture
def sleeping(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine = FakeEngine()
    config = GRPOConfig(str(tmp_path), vllm_enable_sleep_mode=True, **NO_CHECK)
    backend = ColocatedBackend(engine, config, frozenset([1]))
    backend.calls = lambda requests, sampling: []
    return backend


def test_the_engine_sleeps_while_the_trainer_trains(sleeping):
    engine = sleeping.engine
    assert engine.names() == ["init_weight_transfer_engine", "sleep"]
    for step in (0, 1):
        # Weights first, so that the cache finds its memory only when they are in place.
        sleeping.sync_weights(weights(("w", torch.ones(2))), step=step)
        update = [
            "start_weight_update",
            "update_weights",
            "update_weights",
            "finish_weight_update",
            "reset_prefix_cache",
        ]
        assert engine.names() == ["wake_up", *update]
        sleeping.generate([[5]], SamplingOptions())
        sleeping.generate([[5]], SamplingOptions())
        assert engine.names() == ["wake_up", "generate", "generate"]
        sleeping.release()
        assert engine.calls == [("sleep", 2)] and sleeping.version is None
        engine.names()


def test_an_engine_without_a_limit_of_log_probs_reports_the_mask_of_any_top_k(tmp_path):
    unlimited = FakeEngine()
    unlimited.model_config = SimpleNamespace(
        max_model_len=64, max_logprobs=-1, dtype=torch.float32, get_vocab_size=lambda: 100
    )
    backend = ColocatedBackend(unlimited, GRPOConfig(str(tmp_path), **NO_CHECK), frozenset([1]))
    assert backend.reports_sampling_mask({"top_k": 100}) and not backend.reports_sampling_mask({"top_k": 101})


def test_sampling_masks_of_the_engine_are_recorded(tmp_path):
    """An engine with Model Runner V2, which needs a GPU: its output is written down."""
    pytest.importorskip("vllm")
    recorded, asked = FakeEngine(), []
    recorded.model_config.return_sampling_mask = True
    sample = SimpleNamespace(
        token_ids=[7, 9, 1],
        logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in (7, 9, 1)],
        finish_reason="stop",
        sampling_mask=SimpleNamespace(token_ids=[[7, 8], [9], [1, 2, 3]]),
    )

    def generate(prompts, params, **_):
        asked.extend(params)
        return [SimpleNamespace(prompt_token_ids=[5], outputs=[sample])]

    recorded.generate = generate
    recorded.llm_engine = SimpleNamespace()
    config = GRPOConfig(str(tmp_path), top_p=0.9, **NO_CHECK)
    backend = ColocatedBackend(recorded, config, frozenset([1]))
    assert backend.reports_sampling_mask({})
    backend.sync_weights(weights(("w", torch.ones(2))), step=0)
    (completion,) = backend.generate([[5]], SamplingOptions())
    assert completion.sampling_mask.ids.tolist() == [7, 8, 9, 1, 2, 3]
    assert completion.sampling_mask.counts.tolist() == [2, 1, 3] and completion.logps == [-0.5] * 3
    (params,) = asked
    assert params.top_k == 2**31 - 1 and params.top_p == 0.9 and params.logprobs == 0


def test_a_failed_weight_update_resets_the_version_and_finishes(sleeping):
    sleeping.engine.names()

    def broken():
        yield "w", torch.ones(2)
        raise RuntimeError("gathering failed")

    with pytest.raises(RuntimeError, match="gathering failed"):
        sleeping.sync_weights(SimpleNamespace(full=broken), step=3)
    assert sleeping.engine.names() == ["wake_up", "start_weight_update", "finish_weight_update"]
    assert sleeping.version is None
    with pytest.raises(BackendError, match="no weights"):
        sleeping.generate([[5]], SamplingOptions())


class Receiver:
    """Reads a file as the engine's side does."""

    def __init__(self):
        self.infos, self.got = [], {}

    def init_weight_transfer_engine(self, request):
        self.infos.append(request)

    def start_weight_update(self):
        self.got = {}

    def update_weights(self, request):
        from safetensors.torch import load_file

        if not request["update_info"]:
            self.infos.append("complete")
            return
        self.got |= load_file(request["update_info"]["path"])

    def finish_weight_update(self, weight_version=None):
        self.infos.append(weight_version)


def pushed(receiver, pairs, **given):
    """A connection over which ``pairs`` were sent as step 7."""
    weights = EngineWeights()
    made = WeightTransfer("groupwise", receiver, weights, **given)
    weights.begin(lambda: iter(pairs))
    made.push(7)
    return made


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_buckets_pass_through_shared_memory_files_that_are_removed(shared_memory):
    receiver = Receiver()
    weights = {name: tensor.detach() for name, tensor in policy().state_dict().items()}
    made = pushed(receiver, list(weights.items()))
    assert receiver.infos == [{"init_info": {}}, "complete", "7"] and receiver.got.keys() == weights.keys()
    assert all(torch.equal(receiver.got[name], tensor) for name, tensor in weights.items())
    assert [path.name for path in made.engine.directory.iterdir()] == ["lock"]
    made.close()
    assert list(shared_memory.iterdir()) == []


def new_sender():
    return BucketSender(Receiver(), [])


@pytest.mark.slow
def test_files_of_a_killed_process_are_removed_by_the_next_sender(shared_memory):
    code = (
        "import os, pathlib, signal, sys\n"
        "from groupwise.generation.vllm import transfer\n"
        "transfer._SHARED_MEMORY = pathlib.Path(sys.argv[1])\n"
        "sender = transfer.BucketSender(None, [])\n"
        "(sender.directory / 'bucket').write_text('weights')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (shared_memory / "groupwise-of-another-program").mkdir()
    running = new_sender()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(shared_memory)]
    assert subprocess.run(command, env=environment).returncode == -9
    (killed,) = (path.parent for path in shared_memory.glob("*/bucket"))
    sender = new_sender()
    assert not killed.exists() and running.directory.exists() and sender.directory.exists()
    assert (shared_memory / "groupwise-of-another-program").exists()
    for one in (running, sender):
        one.shutdown()
        one.shutdown()
        assert not one.directory.exists()


def test_a_bucket_that_shared_memory_cannot_hold_is_refused(shared_memory, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(BackendError, match=r"2 MB .*1 MB left.*--shm-size"):
        pushed(Receiver(), [("w", torch.zeros(2**19))])


def test_an_engine_in_this_process_gets_the_tensors_themselves():
    engine, tensor = FakeEngine(), torch.ones(4)
    pushed(engine, [("w", tensor)], in_process=True)
    (_, given) = next(call for call in engine.calls if call[0] == "update_weights")
    assert given["update_info"]["weights"][0][1] is tensor


def test_a_push_after_a_failed_one_replaces_all_weights(shared_memory):
    receiver = Receiver()
    made = pushed(receiver, [("w", torch.ones(4))])

    def broken():
        yield "w", torch.zeros(4)
        raise RuntimeError("gathering failed")

    made.weights.begin(broken)
    with pytest.raises(RuntimeError, match="gathering failed"):
        made.push(8)
    made.weights.begin(lambda: iter([("w", torch.full((4,), 2.0))]))
    made.push(8)
    assert receiver.infos[-3:] == [None, "complete", "8"] and receiver.got["w"].tolist() == [2.0] * 4
    made.close()


def test_tensor_parallel_ranks_generate_all_requests_and_return_their_own(tmp_path, monkeypatch):
    asked, given = [], FakeEngine()

    def answer(engine, requests):
        asked.append(list(requests))
        return [request * 10 for request in requests]

    def gather(everyone, mine, group):
        everyone[:] = [[1, 2, 3], mine]

    config = GRPOConfig(str(tmp_path), **NO_CHECK)
    backend = ColocatedBackend(given, config, frozenset([1]), group="group")
    backend.calls = lambda requests, sampling: requests
    monkeypatch.setattr(colocate, "generate_together", answer)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 1)
    assert backend.complete([4, 5], SamplingOptions()) == [40, 50]
    assert asked == [[1, 2, 3, 4, 5]]


@pytest.mark.vllm
def test_the_engine_gets_the_architecture_of_a_policy_whose_config_has_none(tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm")
    given, model = [], policy()

    def start(model, **_):
        given.append(json.loads((Path(model) / "config.json").read_text())["architectures"])
        raise RuntimeError("far enough")

    monkeypatch.setattr(vllm, "LLM", start)
    with pytest.raises(RuntimeError, match="far enough"):
        trainer(tmp_path, model=model, use_vllm=True)
    assert given == [["LlamaForCausalLM"]] and model.config.architectures is None


@pytest.mark.vllm
def test_latent_attention_is_refused_on_a_cpu_where_vllm_rotates_its_queries_otherwise(tmp_path):
    pytest.importorskip("vllm")
    model = policy()
    model.config.kv_lora_rank = 512
    with pytest.raises(ConfigError, match=r"multi-head latent attention.*GPU, or set use_vllm=False"):
        trainer(tmp_path, model=model, use_vllm=True)


def test_a_processor_without_images_starts_an_engine_for_text_alone(tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm")
    given = []

    def start(**arguments):
        given.append(arguments)
        raise RuntimeError("far enough")

    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.setattr(colocate, "is_torchvision_available", lambda: False)
    rows = Dataset.from_dict({"prompt": ["w1"] * 8})
    vision, processor = tiny_vlm.build("gemma3")
    for model, processing_class in ((vision, processor), (policy(), tokenizer())):
        config = GRPOConfig(str(tmp_path), use_vllm=True, max_completion_length=8, bf16=False, use_cpu=True)
        with pytest.raises(RuntimeError, match="far enough"):
            GRPOTrainer(model, lambda **_: [], config, rows, processing_class=processing_class)
    assert [arguments.get("language_model_only") for arguments in given] == [True, None]


@pytest.mark.parametrize(
    ("settings", "is_allowed"),
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, False),
        ({"trainable_token_indices": [1, 2]}, True),
        ({}, True),
    ],
)
def test_adapters_of_tied_weights_are_refused_where_they_change_one_of_the_two(settings, is_allowed):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **settings})
    model = peft.get_peft_model(policy(tie_word_embeddings=True), config)
    with (
        nullcontext()
        if is_allowed
        else pytest.raises(ConfigError, match="either the embeddings or the output")
    ):
        check_policy(model)
    check_policy(peft.get_peft_model(policy(), config))
