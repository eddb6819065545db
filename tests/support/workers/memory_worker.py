"""Process of a launch whose second process runs out of memory once.

    torchrun --nproc_per_node 2 memory_worker.py OUTPUT_DIR

The weights of every case, with and without, come to OUTPUT_DIR. The last run is to end with an error.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.workers import distributed_worker as worker

#: Where it happens, at which training forward of the run, and the settings: windows of one micro-batch, or
#: two. The first forward of a window begins with a broadcast of buffers.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "first forward": ("forward", 1, {}),
    "forward after an exchange": ("forward", 2, {}),
    "with gradient checkpointing": (
        "forward",
        3,
        {"gradient_checkpointing": True, "activation_memory_fraction": 0.0},
    ),
    "with kept layers": ("forward", 3, {"gradient_checkpointing": True}),  # fewer are kept, no row is split
    "forward of the first of two": ("forward", 3, {"accumulate": 2}),
    "forward of the last of two": ("forward", 4, {"accumulate": 2}),
    "loss of the first of two": ("loss", 3, {"accumulate": 2}),
    "backward of the first of two": ("backward", 3, {"accumulate": 2}),
    "packed": ("forward", 2, {"sequence_layout": "packed"}),
}
PADDED = {"sequence_layout": "padded", "skip_zero_advantage": False}
POLICY = worker.policy


class Full:
    """Runs out of memory in the forward, the loss or the backward of one training forward, by its number."""

    def __init__(self, where: str, number: int) -> None:
        self.where, self.number = where, number
        self.forwards, self.raised = 0, 0

    def policy(self) -> nn.Module:
        model = POLICY()
        model.model.layers[0].register_forward_hook(self.after_layer)
        return model

    def after_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not (module.training and torch.is_grad_enabled()):
            return
        self.forwards += 1
        if self.forwards == self.number and self.where == "forward":
            self.fail()
        if self.forwards == self.number and self.where == "backward":
            # The first layer's backward comes last, when gradients of the layers behind it are added up.
            hidden.register_hook(self.fail)

    def fail(self, *_: Any) -> None:
        self.raised += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Trainer(worker.GRPOTrainer):
    full: Full | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logprob_computer.checked = True  # its forwards do not count

    def compute_policy_loss(self, *given: Any) -> Any:
        full = Trainer.full
        if full is not None and full.where == "loss" and full.forwards == full.number and not full.raised:
            full.fail()
        return super().compute_policy_loss(*given)


def run(output_dir: Path, full: Full | None, settings: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The weights after the updates of ``worker.update``, and the trainer."""
    worker.policy = POLICY if full is None else full.policy
    worker.GRPOTrainer, Trainer.full = Trainer, full
    trainers: list[Any] = []

    def read_weights(trainer: Any) -> dict[str, torch.Tensor]:
        trainers.append(trainer)
        return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}

    settings = {**PADDED, **settings}
    window = settings.get("accumulate", 1)
    weights = worker.update(output_dir, rows=6, micro_batches=window, read_weights=read_weights, **settings)
    return weights, trainers[0]


def main(output_dir: Path) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    faulthandler.dump_traceback_later(worker.PATIENCE, exit=True)
    torch.distributed.init_process_group("gloo")
    second = torch.distributed.get_rank() == 1
    results, ample = {}, {}
    for name, (place, number, settings) in CASES.items():
        full = Full(place, number) if second else None
        scarce, trainer = run(output_dir / "run", full, settings)
        assert full is None or full.raised == 1, name
        splits = second and name != "with kept layers"
        assert (trainer.splitter.max_tokens is not None) == splits, name
        kind = str(settings)
        ample[kind] = ample.get(kind) or run(output_dir / "run", None, settings)[0]
        results[name] = scarce, ample[kind]
    if not second:
        torch.save(results, output_dir / "split.pt")
    # After the forward whose gradients are to be exchanged there is no way back.
    run(output_dir / "run", Full("loss", 2) if second else None, {})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
