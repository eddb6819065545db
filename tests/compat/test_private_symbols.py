"""Private symbols of other libraries that ``groupwise.compat`` uses exist with the expected signatures.

Files: ``compat/accelerate.py``, ``compat/deepspeed.py``, ``compat/liger.py``, ``compat/peft.py``,
``compat/torch.py``, ``compat/transformers.py``, ``compat/vllm.py``, ``compat/vllm_weights.py``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import DistributedDataParallelKwargs
from huggingface_hub import HfApi
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import trainer as trainer_module

from groupwise import GRPOTrainer, compat
from groupwise.compat import accelerate as compat_accelerate
from groupwise.compat import bitsandbytes as compat_bitsandbytes
from groupwise.compat import deepspeed as compat_deepspeed
from groupwise.compat import torch as compat_torch
from groupwise.compat import transformers as compat_transformers
from groupwise.hf.base import BaseTrainer

#: Module, attribute path, and the parameters that are passed; further ones must have defaults.
SIGNATURES = [
    ("transformers.utils.generic", "is_flash_attention_requested", ["config"]),
    ("transformers.conversion_mapping", "get_model_conversion_mapping", ["model", "*", "add_legacy"]),
    ("transformers.core_model_loading", "revert_weight_conversion", ["model", "state_dict"]),
    ("transformers", "GenerationMixin._supports_default_dynamic_cache", []),
    ("transformers", "GenerationMixin.generate", ["self", "inputs", "generation_config"]),
    (
        "transformers",
        "GenerationMixin._sample",
        ["self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"],
    ),
    ("transformers", "GenerationMixin._prefill", ["self", "input_ids", "generation_config", "model_kwargs"]),
    ("transformers", "GenerationMixin._optimize_model_for_decode", ["self"]),
    ("transformers.integrations.moe", "_grouped_mm", ["input", "weight", "offs"]),
    ("torch.overrides", "_get_current_function_mode", []),
    (
        "transformers",
        "GenerationMixin._update_model_kwargs_for_generation",
        ["self", "outputs", "model_kwargs"],
    ),
    ("transformers", "GenerationMixin._get_logits_processor", ["self", "generation_config"]),
    ("torch.multiprocessing.reductions", "reduce_tensor", ["tensor"]),
    ("accelerate.utils.memory", "should_reduce_batch_size", ["exception"]),
    ("peft.tuners.tuners_utils", "BaseTunerLayer.get_base_layer", ["self"]),
    ("peft.tuners.tuners_utils", "BaseTunerLayer.merge", ["self"]),
    ("peft.tuners.lora", "Linear.merge", ["self"]),
    ("peft.tuners.lora", "Linear.get_delta_weight", ["self", "adapter"]),
    ("peft.tuners.trainable_tokens", "TrainableTokensLayer.get_merged_weights", ["self", "active_adapters"]),
    (
        "vllm.distributed.weight_transfer",
        "WeightTransferEngineFactory.register_engine",
        ["name", "module_path_or_cls", "class_name"],
    ),
    (
        "vllm.distributed.weight_transfer",
        "WeightTransferTrainerFactory.trainer_init",
        ["init_info", "client", "source"],
    ),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload", ["model"]),
    ("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info", ["layer"]),
    ("vllm.model_executor.model_loader.reload.layerwise", "_get_original_loader", ["tensor"]),
    ("vllm.model_executor.model_loader.reload.meta", "restore_layer_on_meta", ["layer", "info"]),
    ("vllm.model_executor.model_loader.reload.meta", "to_meta_tensor", ["tensor"]),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ["layer", "remove_weight"]),
    ("vllm._custom_ops", "cpu_prepack_moe_weight", ["weight", "isa"]),
    ("vllm.lora.utils", "parse_fine_tuned_lora_name", ["name", "weights_mapper"]),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_lora", ["self", "lora_request"]),
    ("vllm.v1.engine.llm_engine", "LLMEngine.remove_lora", ["self", "lora_id"]),
]

#: Public and private hooks of ``Trainer`` that ``BaseTrainer`` and ``GRPOTrainer`` override or call.
TRAINER_HOOKS = {
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "floating_point_ops": ["self", "inputs"],
    "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
    "predict": ["self", "test_dataset", "ignore_keys", "metric_key_prefix"],
    "log": ["self", "logs", "start_time"],
    "evaluation_loop": [
        *("self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix")
    ],
    "get_train_dataloader": ["self"],
    "get_eval_dataloader": ["self", "eval_dataset"],
    "get_test_dataloader": ["self", "test_dataset"],
    "num_examples": ["self", "dataloader"],
    "_get_dataloader": [
        *("self", "dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key")
    ],
    "_get_train_sampler": ["self", "train_dataset"],
    "_get_eval_sampler": ["self", "eval_dataset"],
    "_set_signature_columns_if_needed": ["self"],
    "_prepare_inputs": ["self", "inputs"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_get_output_dir": ["self", "trial"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_rng_state": ["self", "output_dir"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_best_model": ["self"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_load_rng_state": ["self", "checkpoint"],
}

#: Overrides with parameters of their own, those of TRL or any: ``Trainer`` passes what they accept.
OWN_PARAMETERS = {"create_model_card", "train", "_get_train_sampler", "push_to_hub"}


@cache
def needs(package: str) -> None:
    """Skip without ``package``, or with a vLLM that does not take the installed transformers."""
    pytest.importorskip(package)
    if package == "vllm":
        name = importlib.metadata.packages_distributions()["vllm"][0]
        asked = [Requirement(each) for each in importlib.metadata.requires(name) or ()]
        accepted = next(each.specifier for each in asked if each.name == "transformers")
        if not accepted.contains(transformers.__version__):
            pytest.skip(f"{name} needs transformers{accepted}, and {transformers.__version__} is installed")


def find(module: str, path: str) -> Callable[..., Any]:
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def accepts(function: Callable[..., Any], passed: list[str]) -> bool:
    """Positional parameters come first, in this order; names after "*" exist; all others have defaults."""
    parameters = inspect.signature(function).parameters
    positional, keywords = passed, []
    if "*" in passed:
        positional, keywords = passed[: passed.index("*")], passed[passed.index("*") + 1 :]
    others = [parameters[name] for name in parameters if name not in {*positional, *keywords}]
    optional = all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others)
    return list(parameters)[: len(positional)] == positional and {*keywords} <= {*parameters} and optional


@pytest.mark.parametrize(("module", "path", "passed"), SIGNATURES, ids=[path for _, path, _ in SIGNATURES])
def test_a_function_takes_the_arguments_that_are_passed(module, path, passed):
    needs(module.split(".")[0])
    assert accepts(find(module, path), passed)


def test_other_signatures_are_refused():
    def function(one, two, three, four=4, **rest): ...

    assert accepts(function, ["one", "two", "three"])
    assert accepts(function, ["one", "two", "three", "*", "four"])
    assert not accepts(function, ["one", "two"])  # a new argument is required
    assert not accepts(function, ["one", "three", "two"])
    assert not accepts(function, ["one", "two", "three", "five"])
    assert not accepts(function, ["one", "two", "three", "*", "five"])


@pytest.mark.parametrize("hook", TRAINER_HOOKS)
def test_trainer_has_the_hook_with_these_parameters(hook):
    assert list(inspect.signature(getattr(transformers.Trainer, hook)).parameters) == TRAINER_HOOKS[hook]


@pytest.mark.parametrize("cls", [BaseTrainer, GRPOTrainer])
def test_overrides_take_the_parameters_of_the_hook(cls):
    overridden = {
        name
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and hasattr(transformers.Trainer, name) and not name.startswith("__")
    }
    assert overridden - OWN_PARAMETERS <= TRAINER_HOOKS.keys()
    for name in overridden - OWN_PARAMETERS:
        assert list(inspect.signature(getattr(cls, name)).parameters) == TRAINER_HOOKS[name], name


def test_trainer_leaves_the_loss_unscaled_on_request():
    """``smoke.py`` compares the gradients of one and of two micro-batches."""
    source = inspect.getsource(transformers.Trainer.training_step)
    public = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")
    assert ("self.loss_is_scaled_for_ga" if public else "self.compute_loss_func is None") in source


def llama() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )


def test_flags_of_a_transformers_model():
    model = llama()
    assert compat_transformers.attention_implementation(model) == "sdpa"
    assert compat_transformers.supports_attention_interface(model)
    assert not compat_transformers.is_stateful(model)
    assert hasattr(type(model), "_is_stateful") and hasattr(type(model), "_supports_attention_backend")
    assert compat_transformers.supports_dynamic_cache(model)
    assert compat_transformers.has_stock_sampling_loop(model)
    assert compat_transformers.has_stock_processors(model)
    model._get_logits_processor = lambda: None
    assert not compat_transformers.has_stock_processors(model)
    model.generate = lambda: None
    assert not compat_transformers.has_stock_sampling_loop(model)


def test_constants_of_checkpoints():
    assert compat_transformers.TRAINER_STATE == transformers.trainer.TRAINER_STATE_NAME
    assert compat_transformers.CHECKPOINT == transformers.trainer_utils.PREFIX_CHECKPOINT_DIR


def test_uploads_of_the_trainer_leave_out_files(monkeypatch):
    seen = []
    monkeypatch.setattr(HfApi, "upload_folder", lambda _, **given: seen.append(given["ignore_patterns"]))

    def upload():
        owner = trainer_module.hf_api() if hasattr(trainer_module, "hf_api") else trainer_module
        owner.upload_folder(repo_id="r", folder_path=".", ignore_patterns=["_*"])

    with compat_transformers.uploads_without(["private*"]):
        upload()
        other = threading.Thread(target=upload)
        other.start()
        other.join()
    upload()
    assert seen == [["_*", "private*"], ["_*"], ["_*"]]


def test_weight_names_of_a_plain_model_are_those_of_its_checkpoint():
    model = llama()
    weights = dict(model.state_dict())
    assert compat_transformers.to_checkpoint_names(model)(weights).keys() == weights.keys()


def test_one_decoding_step():
    model = llama()
    config = transformers.GenerationConfig(max_new_tokens=2, temperature=0.5, do_sample=True)
    seen = {}

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        outputs = compat_transformers.prefill(model, input_ids, generation_config, model_kwargs)
        seen["kwargs"] = compat_transformers.update_model_kwargs(model, outputs, model_kwargs)
        with compat_transformers.optimize_for_decode(model):
            return input_ids

    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    ids = torch.tensor([[1, 2, 3], [0, 4, 5]])
    model.generate(ids, attention_mask=mask, generation_config=config, custom_generate=loop)
    assert seen["kwargs"][compat_transformers.cache_argument(model)].get_seq_length() == 3
    assert seen["kwargs"]["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


def test_sdpa_attention_computes_softmax_attention():
    query, key, value = torch.randn(3, 1, 2, 4, 8)  # (1, heads, positions, head size) each
    module = nn.Module()
    module.is_causal = True
    output, _ = transformers.AttentionInterface()["sdpa"](module, query, key, value, None, scaling=1.0)
    mask = torch.ones(4, 4).tril().log()
    expected = ((query @ key.transpose(-1, -2) + mask).softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_groups_of_heads(dtype):
    query, key = torch.randn(1, 4, 8, 16, dtype=dtype), torch.randn(1, 2, 8, 16, dtype=dtype)
    assert compat_torch.has_fused_gqa(query, key, key)
    with sdpa_kernel(SDPBackend.MATH):
        assert not compat_torch.has_fused_gqa(query, key, key)


def test_native_bf16_of_the_cpu():
    probes = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()
    # False below AVX-512, and where ONEDNN_MAX_CPU_ISA says so
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert compat_torch.has_native_bf16_cpu() is (any(probes) and supported)


@pytest.mark.slow
def test_bf16_is_emulated_where_onednn_may_not_use_it():
    program = "from groupwise.compat.torch import has_native_bf16_cpu as native; print(native())"
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", program], env=limited, capture_output=True, check=True)
    assert run.stdout.decode().strip() == "False"


def test_a_dataloader_worker_is_hidden(monkeypatch):
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils import worker

    monkeypatch.setattr(worker, "_worker_info", object())
    assert get_worker_info() is not None
    compat_torch.hide_dataloader_worker()
    assert get_worker_info() is None


def test_persistent_buffers_are_those_of_the_state_dict():
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    names = [name for name, _ in compat_torch.persistent_buffers(module)]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]


def test_a_parameter_is_replaced():
    module = nn.Linear(1, 1)
    parameter = nn.Parameter(torch.ones(1, 1))
    compat_torch.set_parameter(module, "weight", parameter)
    assert module.weight is parameter and [*module.state_dict()] == ["weight", "bias"]


def test_process_group_and_the_next_forward_of_ddp_without_broadcast(tmp_path):
    from torch.nn.parallel import DistributedDataParallel

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(1, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a name that DDP has replaced
            handler = compat_accelerate.without_buffer_broadcast(
                DistributedDataParallelKwargs(find_unused_parameters=True)
            )
            given = handler.to_kwargs()
            assert given.pop("find_unused_parameters") and len(given) == 1
            normed = DistributedDataParallel(nn.BatchNorm1d(1), **given)
            compat_torch.process_group_store(6)
        assert handler.broadcast_buffers or not normed.broadcast_buffers
        assert getattr(normed, "forward_sync_buffers", False) is False
        for wrapped in (model, torch.compile(model)):
            model.require_forward_param_sync = True
            compat_torch.skip_buffer_broadcast(wrapped)
            assert model.require_forward_param_sync is False
        model(torch.ones(1, 1))
        assert "require_forward_param_sync" in inspect.getsource(DistributedDataParallel)
        compat_torch.process_group_store(5).set("groupwise", "of this group")
        assert compat_torch.process_group_store(7).get("groupwise") == b"of this group"
        gloo = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert gloo.options._timeout.total_seconds() == 7
    finally:
        torch.distributed.destroy_process_group()
    compat_torch.skip_buffer_broadcast(nn.Linear(1, 1))


def test_wrappers_add_these_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = torch.compile(nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1))))
    parts = {part for name in nn.Module.state_dict(model) for part in name.split(".")}
    assert "_orig_mod" in parts | {name for name, _ in model.named_children()}
    assert {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"} == compat_torch.WRAPPER_NAMES
    inner = {name for name, _ in checkpoint_wrapper(nn.Linear(1, 1)).named_children()}
    assert inner <= compat_torch.WRAPPER_NAMES
    from torch.distributed.fsdp import FullyShardedDataParallel

    assert "_fsdp_wrapped_module" in inspect.getsource(FullyShardedDataParallel)


@pytest.mark.skipif(not compat_torch.has_onednn_linear(), reason="this PyTorch has no oneDNN")
def test_onednn_computes_a_linear_layer():
    left, right, bias = torch.randn(8, 128), torch.randn(128, 128), torch.randn(128)
    expected = nn.functional.linear(left.double(), right.double(), bias.double()).float()
    for weight in (right, compat_torch.onednn_pack(right, 8)):
        torch.testing.assert_close(
            compat_torch.onednn_linear(left, weight, bias), expected, atol=1e-4, rtol=0
        )


def test_out_of_memory_errors_are_recognised():
    assert compat_accelerate.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not compat_accelerate.is_out_of_memory(RuntimeError("shape mismatch"))


def test_hooks_of_accelerate_keep_the_forward_that_they_wrap():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    module = nn.Linear(1, 1)
    assert compat_accelerate.forward_attribute(module) == "forward"
    wrapper = vars(add_hook_to_module(module, ModelHook()))["forward"]
    vars(module)[compat_accelerate.forward_attribute(module)] = torch.neg
    assert vars(module)["forward"] is wrapper and module(torch.ones(1)).item() == -1
    remove_hook_from_module(module)
    assert compat_accelerate.forward_attribute(module) == "forward"


def test_peft_types():
    pytest.importorskip("peft")
    from groupwise.compat import peft as compat_peft

    layer, saved = compat_peft.wrapper_types()
    assert isinstance(layer, type) and isinstance(saved, type)
    assert {"merged_adapters", "disable_adapters"} <= {*dir(layer), *vars(layer)}


def test_zero3_marks_its_parameters():
    assert not compat_deepspeed.is_partitioned(nn.Parameter(torch.ones(1)))
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero import partition_parameters

    assert "ds_id" in inspect.getsource(partition_parameters)
    assert hasattr(deepspeed.zero, "GatheredParameters")


def test_forward_hooks_are_ordered_by_key_and_those_of_deepspeed_are_defined_there():
    layer = nn.Linear(2, 2)
    handle = layer.register_forward_pre_hook(print)
    layer.register_forward_hook(print)
    assert list(layer._forward_pre_hooks.values()) == list(layer._forward_hooks.values()) == [print]
    assert handle.id in layer._forward_pre_hooks
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero import parameter_offload

    source = inspect.getsource(parameter_offload)
    assert "register_forward_pre_hook(_pre_forward_module_hook)" in source
    assert "register_forward_hook(_post_forward_module_hook)" in source


def test_bitsandbytes_marks_its_parameters():
    assert not compat_bitsandbytes.is_quantized(nn.Parameter(torch.ones(1)))
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert "quant_state" in inspect.getsource(bitsandbytes.nn.Params4bit)
    assert "SCB" in inspect.getsource(bitsandbytes.nn.Int8Params)
    layer = bitsandbytes.nn.Linear4bit(8, 8)
    assert hasattr(layer, "support_avx512bf16_for_cpu") and hasattr(layer, "quant_state")


def test_liger_switches_are_boolean_arguments():
    pytest.importorskip("liger_kernel")
    from groupwise.compat import liger as compat_liger

    assert {
        "rope",
        "rms_norm",
        "cross_entropy",
        "fused_linear_cross_entropy",
    } <= compat_liger.layer_switches()


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_trainers_sides_of_vllm_take_the_fields_that_are_given(backend):
    needs("vllm")
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightTransferTrainerFactory

    rendezvous = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
    packed = {"packed": True, "packed_buffer_size_bytes": 8}
    given = {
        "nccl": {**rendezvous, **packed, "packed_num_buffers": 1},
        "ipc": packed,
    }[backend]
    engine = WeightTransferTrainerFactory._registry[backend]()
    assert issubclass(engine, TrainerWeightTransferEngine)
    info = engine.init_info_cls(rank=0, **given)
    assert info.backend == backend and info.is_sender
    assert accepts(engine.send_weights, ["self"]) and accepts(engine.shutdown, ["self"])


def test_the_weight_source_of_vllm_has_our_members():
    needs("vllm")
    from vllm.distributed import weight_transfer

    from groupwise.compat.vllm import weight_source
    from groupwise.generation.vllm.weight_source import EngineWeights

    weights = EngineWeights()
    weights.begin(lambda: iter([("w", torch.zeros(2, 3))]))
    expected = [weight_transfer.ParamMeta("w", torch.float32, (2, 3))]
    source = weight_source(weights)
    assert isinstance(source, weight_transfer.WeightSource) and source.metadata() == expected
    assert [name for name, _ in source] == ["w"]


def test_vllm_symbols():
    needs("vllm")
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.engine import core_client

    from groupwise.compat import vllm as compat_vllm

    assert compat_vllm.device_type() in ("cpu", "cuda", "rocm", "xpu", "tpu")
    assert all(callable(function) for function in compat_vllm.layerwise_reload())
    assert isinstance(WeightTransferEngineFactory._registry, dict)
    assert accepts(core_client.EngineCoreClient.shutdown, ["self"])
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.v1.engine.llm_engine import LLMEngine

    assert accepts(LLMEngine.reset_encoder_cache, ["self"])
    assert accepts(DummyModelLoader.load_weights, ["self", "model", "model_config"])


def test_dummy_weights_leave_buffers_as_they_are():
    needs("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from groupwise.compat import vllm as compat_vllm

    def loaded() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("normalization", torch.full((3,), 2.0))
        nn.init.constant_(model.weight, 2.0)
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)
        return model

    assert not torch.equal(loaded().normalization, torch.full((3,), 2.0))  # what vLLM does alone
    with compat_vllm.preserve_buffers():
        model = loaded()
    assert torch.equal(model.normalization, torch.full((3,), 2.0))
    assert model.weight.abs().max() < 1.0
    assert not torch.equal(loaded().normalization, torch.full((3,), 2.0))


def test_every_module_of_compat_is_imported_without_its_library():
    """A missing optional library is an error only when a function is called."""
    import pkgutil
    import subprocess
    import sys

    names = [f"groupwise.compat.{module.name}" for module in pkgutil.iter_modules(compat.__path__)]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]; " + (
        "print([m for m in ('torch', 'transformers', 'accelerate', 'peft', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_products_with_another_dtype_are_known_by_their_overloads():
    assert compat_torch.has_out_dtype() == (Version(torch.__version__) >= Version("2.8"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_products_are_not_rounded_where_they_cannot_have_another_dtype(dtype, monkeypatch):
    monkeypatch.setattr(compat_torch, "has_out_dtype", lambda: False)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 64), (64, 7)))
    exact = left.double() @ right.double()
    assert ((left @ right).double() - exact).abs().max() > 1e-3
    out, total = torch.empty(5, 7), torch.ones(5, 7)
    torch.testing.assert_close(compat_torch.mm_into(out, left, right), exact.float())
    torch.testing.assert_close(compat_torch.addmm_into(total, left, right), (1 + exact).float())
    torch.testing.assert_close([out, total], [exact.float(), (1 + exact).float()])  # written in place


def test_instances_of_accelerate_share_their_state():
    accelerator = accelerate.Accelerator(cpu=True)
    states = compat_accelerate.shared_states()
    assert states[2] is vars(accelerator.gradient_state) and states[1] is vars(accelerator.state)
