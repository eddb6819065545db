"""One of two processes under ZeRO-3: whole weights are streamed, and an engine follows them.

torchrun --nproc_per_node 2 zero_worker.py OUTPUT_DIR
"""

from __future__ import annotations

import copy
import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from safetensors.torch import load_file

from groupwise.policy import weight_iterator as streams
from groupwise.policy.weight_iterator import buckets, weight_iterator
from support.engine_runs import engine_greedy, greedy, policy, sync, trainer
from support.workers.sharded_worker import lora

PATIENCE = 220
LIMIT = 2**14
ZERO_3: dict[str, Any] = {
    # Everything is partitioned, however small.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def step(model: Any, backward: Any, advance: Any) -> None:
    """One update on tokens that are the same on both processes."""
    ids = torch.arange(2, 12)[None]
    backward(model(ids, labels=ids).loss)
    advance()


def compare_streams() -> None:
    """Before and after an update, merged and plain; never more than one module is gathered."""
    gathering, gathered = streams.gathering, []

    def num_valid(tensors: Any) -> Any:
        tensors = list(tensors)
        gathered.append(sum(tensor.ds_numel for tensor in tensors if hasattr(tensor, "ds_numel")))
        return gathering(tensors)

    streams.gathering = num_valid
    for build in (policy, lora):
        alone = build()
        model = copy.deepcopy(alone)
        largest = max(parameter.numel() for parameter in model.parameters())
        optimizers = [
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.01)
            for each in (alone, model)
        ]
        config = {**ZERO_3, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizers[1], config=config)
        before = {name: tensor.clone() for name, tensor in weight_iterator(alone)}
        for updated in (False, True):
            if updated:
                step(alone, lambda loss: loss.backward(), optimizers[0].step)
                step(engine, engine.backward, engine.step)
            expected = dict(weight_iterator(alone))
            gathered.clear()
            got = {}
            for bucket in buckets(weight_iterator(engine.module), LIMIT):
                assert sum(p.numel() for p in engine.module.parameters()) == 0  # nothing stays gathered
                assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= LIMIT
                got.update(bucket)
            assert 0 < max(gathered) < 2 * largest  # one layer, with its adapter
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7, msg=name)
        assert any((got[name] - before[name]).abs().max() > 1e-4 for name in got)


def sample(output_dir: Path) -> None:
    """Two updates with an engine in each process; the policy is partitioned as it is loaded."""
    start = output_dir / "start"
    policy().save_pretrained(start)  # by the first process alone
    torch.distributed.barrier()
    settings = {**ZERO_3, "gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
    settings |= {"train_micro_batch_size_per_gpu": "auto"}
    run = trainer(
        output_dir,
        model=str(start),
        deepspeed=settings,
        learning_rate=0.1,
        optim="sgd",
        gradient_checkpointing=False,
    )
    run.train()
    run.save_model(str(output_dir / "saved"))  # consolidated by DeepSpeed itself
    torch.distributed.barrier()
    saved = load_file(output_dir / "saved" / "model.safetensors")
    wrapped = run.accelerator.unwrap_model(run.model_wrapped)
    got = dict(weight_iterator(wrapped))
    assert got.keys() == saved.keys()
    assert all(torch.equal(got[name], saved[name]) for name in saved)
    first, second = run.state.log_history[:2]
    for line in (first, second):
        assert 0 <= line["sampling/sampling_logp_difference/max"] < 1e-4, line
    whole = policy()
    assert not torch.equal(whole.state_dict()["lm_head.weight"], saved["lm_head.weight"])
    whole.load_state_dict(saved)
    prompts = [[4, 5, 6], [7], [8, 9]]
    sync(run, wrapped)
    assert engine_greedy(run.backend, prompts) == greedy(whole, prompts, 6, run.backend.end_tokens)
    run.backend.close()


def main(output_dir: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone, which needs no compiler
    deepspeed.init_distributed("gloo")
    compare_streams()
    sample(output_dir)
    os.write(1, b"followed\n")  # in one piece, unlike print


if __name__ == "__main__":
    main(Path(sys.argv[1]))
