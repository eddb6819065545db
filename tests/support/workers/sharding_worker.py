"""Process of runs under one kind of sharding on a CPU; the first one writes OUTPUT_DIR/ENGINE.pt.

    run_ranks(sharding_worker.py, OUTPUT_DIR, ENGINE, TOTAL, CASE..., world_size=N)

ENGINE: ddp, zero1, zero2, zero3 or fsdp2. "zero3, bf16" trains in bfloat16 and clips no ratio; "ddp, float32"
clips none either. The result has the weights after the steps of each case of fixed completions, "grpo" or, in
another layout, "grpo/packed". N is TOTAL, or 1: one process with the rows of TOTAL. Two more cases: "resumed"
gives, under "whole" and "resumed", the weights of a run that samples, and of one that is resumed in it;
"refused" gives the errors of an adapter that is resumed on its own base model, "", and on another one, and
"memory" the bytes of the first rank's tensors at a step, of all weights and of an adapter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.errors import ConfigError
from support.workers import distributed_worker as worker

FILE = Path(__file__).parents[3] / "examples" / "accelerate" / "fsdp2.yaml"
PATIENCE = float(os.environ.get("PATIENCE", 280))
#: Completions of a micro-batch on all processes; groups of 4 on 2 and 4 processes with 6 and 3 rows.
ROWS = 12
FORKED = {
    **{"sequence_layout": "forked", "make_model": worker.gated_delta_net},
    **{"gradient_checkpointing": True, "learning_rate": 0.05},
}
#: Bytes that no tensor of a step with the policy ``wide`` has; DeepSpeed reserves larger buckets.
LARGEST = 10**8
#: At the end of the clip range a rounding error turns the gradient of a token on or off.
UNCLIPPED = {"epsilon": 10.0}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in worker.OBJECTIVES},
    **{layout: {"sequence_layout": layout} for layout in ("padded", "packed", "shared_prefix", "forked")},
    "forked, gated delta net": FORKED,
    "forked, gated delta net, LoRA": {
        **FORKED,
        "peft_config": LoraConfig(r=4, target_modules="all-linear"),
        "beta": 0.1,
    },
    "experts": {
        "sequence_layout": "shared_prefix",
        "make_model": worker.mixture,
        "router_aux_loss_coef": 0.1,
    },
    "experts, balanced over the update": {
        **{"make_model": worker.mixture, "router_aux_loss_coef": 0.1, "accumulate": 2},
        "router_aux_loss_scope": "global_batch",
    },
    "accumulation": {"accumulate": 2},
    "gradient clipping": {"max_grad_norm": 0.05},
    "LoRA": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "beta": 0.1},
    "sync_ref_model": {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2},
    # Of every three groups one has a gradient: a rank may have none.
    "all": {"accumulate": 2, "max_grad_norm": 0.05, "sequence_layout": "shared_prefix", "sparse": True},
}


def use_fsdp_on_a_cpu() -> None:
    """Let accelerate choose FSDP for gloo processes, with the settings of the file; PyTorch is unchanged."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    for name, value in yaml.safe_load(FILE.read_text())["fsdp_config"].items():
        os.environ[name.upper()] = str(value)
    chosen = AcceleratorState.__init__

    if os.environ.get("WORLD_SIZE") == "1":  # accelerate starts no group for one process
        torch.distributed.init_process_group("gloo")

    def choose(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        chosen(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if torch.distributed.is_initialized():
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin or FullyShardedDataParallelPlugin()
            if self._mixed_precision != "no":
                self.fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = choose


def start(engine: str) -> dict[str, Any]:
    """Prepare the process for a kind of sharding, and return its settings."""
    engine, _, dtype = engine.partition(", ")
    settings: dict[str, Any] = {"bf16": dtype == "bf16", **UNCLIPPED} if dtype else {}
    if engine == "fsdp2":
        use_fsdp_on_a_cpu()
    if not engine.startswith("zero"):
        return settings
    from support.workers import deepspeed_worker

    deepspeed_worker.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_worker.deepspeed.init_distributed("gloo")
    stage = {
        **deepspeed_worker.zero(int(engine[-1])),
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    return {**settings, "deepspeed": stage}


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Gather the parameters of a trainer, in float32 those that the optimizer updates."""
    parameters = dict(trainer.model.named_parameters())
    if trainer.is_deepspeed_enabled:
        from support.workers import deepspeed_worker

        return deepspeed_worker.whole_weights(trainer)
    if trainer.is_fsdp_enabled:
        alone = torch.distributed.get_world_size() == 1
        assert alone or all(part.to_local().numel() < part.numel() for part in parameters.values())
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in parameters.items()
    }


def update(output_dir: Path, name: str, processes: int, total: int, **settings: Any) -> Any:
    """Return the weights after the steps of a case.

    Args:
        processes: of this run.
        total: processes that the rows of an optimizer step are divided by; one process takes the rows of all.
    """
    name, _, layout = name.partition("/")
    case = {**CASES[name], **({"sequence_layout": layout} if layout else {})}
    micro_batches = case.get("accumulate", 1) * (total // processes)
    given = {"max_steps": 4, **case, **settings}
    return worker.update(
        output_dir, rows=ROWS // total, micro_batches=micro_batches, read_weights=whole_weights, **given
    )


def storages() -> dict[int, int]:
    """Return the bytes of the storages of all tensors and their gradients, up to ``LARGEST``, by address."""
    gc.collect()
    found = dict[int, int]()
    for tensor in [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]:
        with contextlib.suppress(Exception):  # tensors of other kinds have no storage
            for part in (tensor, tensor.grad if tensor.is_leaf else None):
                local = getattr(part, "_local_tensor", part)
                if local is not None and local.untyped_storage().nbytes() <= LARGEST:
                    found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return found


def bytes_at_a_step(output_dir: Path, **settings: Any) -> int:
    """Return the bytes of this run's tensors at an update; ZeRO updates the groups of parameters in turn."""
    kept = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]  # of earlier runs
    before, step, found = storages(), torch.optim.AdamW.step, list[int]()

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(sum(size for address, size in storages().items() if address not in before))
        return step(self, *args, **kwargs)

    torch.optim.AdamW.step = counted  # type: ignore[method-assign]
    try:
        given = {"optim": "adamw_torch", "learning_rate": 1e-3, "make_model": wide, **settings}
        worker.update(output_dir, rows=4, micro_batches=1, read_weights=lambda _: None, **given)
    finally:
        torch.optim.AdamW.step = step  # type: ignore[method-assign]
    del kept  # until here their memory was not used again
    return max(found)


def wide() -> LlamaForCausalLM:
    """A policy of 0.7 million weights, beside which the rows of a step are small."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(worker.LETTERS) + 3, **sizes, **ends))


def sampled(output_dir: Path, **settings: Any) -> Any:
    """A run that samples, with a checkpoint in the middle of a generation's use."""
    size = 8 // int(os.environ["WORLD_SIZE"])
    batches = {"per_device_train_batch_size": size, "num_generations": 2, "steps_per_generation": 2}
    saving = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    return worker.make_trainer(output_dir, learning_rate=1e-2, **batches, **saving, **settings)


def resumed_adapter(run: Path, base: int, settings: dict[str, Any]) -> str:
    """Resume an adapter that was trained on base model 0 and return the error, "" if there is none."""
    adapter, make = CASES["LoRA"]["peft_config"], worker.policy
    if base == 0:
        sampled(run / "adapter", peft_config=adapter, **settings).train()
    worker.policy = partial(make, base)
    try:
        trainer = sampled(run / f"base-{base}", peft_config=adapter, **settings)
        trainer.train(resume_from_checkpoint=str(run / "adapter" / "checkpoint-2"))
    except ConfigError as error:
        return str(error)
    finally:
        worker.policy = make
    return ""


def main(output_dir: Path, engine: str, total: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    settings, size = start(engine), int(os.environ["WORLD_SIZE"])
    run = output_dir / engine
    results = {}
    for name in names:
        if name in ("resumed", "refused", "memory"):
            continue
        try:
            results[name] = update(run, name, size, total, **settings)
        except ConfigError as error:  # of all ranks
            results[name] = f"refused: {error}"
    if "resumed" in names:
        whole = sampled(run / "whole", **settings)
        whole.train()
        resumed = sampled(run / "resumed", **settings)
        resumed.train(resume_from_checkpoint=str(run / "whole" / "checkpoint-2"))
        results["whole"], results["resumed"] = whole_weights(whole), whole_weights(resumed)
        resumed.save_model(str(run / "saved"))
    if "refused" in names:
        results["refused"] = [resumed_adapter(run, base, settings) for base in (0, 1)]
    if "memory" in names:
        adapter = {"peft_config": CASES["LoRA"]["peft_config"]}
        results["memory"] = [bytes_at_a_step(run / "memory", **settings, **given) for given in ({}, adapter)]
    if os.environ["RANK"] == "0":
        torch.save(results, output_dir / f"{engine}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
