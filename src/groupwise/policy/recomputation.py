"""Gradient checkpointing that recomputes only the layers whose activations do not fit into free memory.

``gradient_checkpointing=True`` of transformers recomputes every layer in every backward pass. Here the last
layers of a micro-batch keep their activations, as many as fit; the others are recomputed to the same values::

    6 layers, room for 2    forward    0  1  2  3  4  5  head
                            kept                   *  *
                            backward   head  5  4  (3) 3  (2) 2  (1) 1  (0) 0       (i): layer i again

The backward pass begins with the kept layers, so that their memory is free before the gradients of the first
layers are allocated.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import TrainerCallback, TrainingArguments

from groupwise.compat.transformers import checkpointed_layers, set_checkpoint_function
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import is_sharded
from groupwise.records.fast_paths import FastPath

logger = logging.getLogger(__name__)

#: Folder of the control groups that limit memory, and their files of limit and use, by version.
_MEMORY_FILES = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("sys/fs/cgroup", "memory.max", "memory.current"),
}


class SelectiveRecomputation(TrainerCallback):
    """Choice of the layers of each micro-batch whose activations are kept.

    Args:
        fraction: share of the memory left free by the first optimizer step that kept activations may use.

    Attributes:
        room: bytes for the kept activations of a micro-batch; None until the first step has shown them.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.room: float | None = None
        self._num_layers = 0
        self._tokens, self._bytes = 0, 0.0  # of the largest micro-batch seen, and what one layer keeps of it

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.install(kwargs["model"])  # Trainer.train has enabled gradient checkpointing

    def on_step_end(self, args: TrainingArguments, *given: Any, **kwargs: Any) -> None:
        self.begin(args.device)

    def install(self, model: nn.Module) -> None:
        """Wrap the checkpoint function of every layer; gradient checkpointing must be enabled."""
        self.room, self._tokens, self._bytes = None, 0, 0.0
        layers = checkpointed_layers(model)
        self._num_layers = len(layers)
        for index, (layer, checkpoint) in enumerate(layers):
            set_checkpoint_function(layer, partial(self._run, index, layer, checkpoint))

    def begin(self, device: torch.device) -> None:
        """Set the room from the memory that has stayed free so far; call after the first optimizer step."""
        if not self._num_layers or self.room is not None:
            return
        free = free_memory(device)
        self.room = self.fraction * free
        logger.info(
            "gradient checkpointing: %d of %d layers keep their activations in micro-batches of %d tokens; "
            "%.1f GB of memory were free, of which they may use the share activation_memory_fraction=%g",
            *(self.num_kept(self._tokens), self._num_layers, self._tokens, free / 1e9, self.fraction),
        )

    def halve(self) -> bool:
        """Keep half as many layers after an out-of-memory error; return False if none was kept."""
        num_kept = self.num_kept(self._tokens)
        if self.room is not None:
            self.room = num_kept // 2 * self._bytes  # of the largest micro-batch: a few repetitions reach 0
        return num_kept > 0

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of layers that keep activations in a micro-batch of ``num_tokens`` tokens."""
        if not self._bytes or self.room is None:
            return 0
        growth = num_tokens / self._tokens
        # Attention without a fused kernel keeps (tokens, tokens) per head, which may be the larger part.
        return min(self._num_layers, int(self.room // (self._bytes * max(growth, growth**2))))

    def _run(
        self,
        index: int,
        layer: nn.Module,
        checkpoint: Callable[..., Any],
        function: Callable[..., Any],
        *args: Any,
    ) -> Any:
        """Run a layer: ``function(*args)`` with activations kept, or within ``checkpoint``."""
        if not torch.is_grad_enabled() or not args:
            return checkpoint(function, *args)
        num_tokens = args[0].shape[:-1].numel()  # hidden states (B, S, H) or (1, S, H)
        keywords = function.keywords if isinstance(function, partial) else {}
        # Passes of the layout `forked` share the room: all their tokens count in each.
        all_tokens = max([num_tokens, *(getattr(value, "num_tokens", 0) for value in keywords.values())])
        is_last = index == self._num_layers - 1
        if is_last and num_tokens > self._tokens:  # the layer that is kept first shows what a layer keeps
            output, self._bytes = saved_bytes(layer, function, *args)
            self._tokens = num_tokens
            return output
        if index >= self._num_layers - self.num_kept(all_tokens):
            return function(*args)
        return checkpoint(function, *args)


def make_recomputation(args: GRPOConfig, accelerator: Accelerator) -> SelectiveRecomputation | None:
    """Return the choice of recomputed layers of a run, or None if every layer is recomputed (or none)."""
    if not args.gradient_checkpointing or recomputation_path(args, accelerator).reason:
        return None
    return SelectiveRecomputation(args.activation_memory_fraction)


def recomputation_path(args: GRPOConfig, accelerator: Accelerator) -> FastPath:
    """Return which layers the backward pass recomputes, and why all of them."""
    if not args.gradient_checkpointing:
        return FastPath("recomputation", "none")
    kwargs = args.gradient_checkpointing_kwargs
    unknown_memory = accelerator.device.type not in ("cpu", "cuda")
    reasons = {
        "recomputation gathers sharded parameters, in the same order on every rank": is_sharded(accelerator),
        "the device does not report its free memory": unknown_memory,
        "torch_compile compiles the checkpoints": args.torch_compile,
        "the memory that is free in training is that of the sleeping engine": args.vllm_enable_sleep_mode,
        "activations are offloaded": isinstance(kwargs, dict) and kwargs.get("offload"),
        "activation_memory_fraction=0": not args.activation_memory_fraction,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    choice = "every layer" if reason else "as memory demands"
    return FastPath("recomputation", choice, reason, unknown_memory and "device" in reason)


def saved_bytes(layer: nn.Module, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Return ``function(*args)`` and the bytes that autograd saves for its backward pass.

    Storages of parameters and of the arguments exist in any case and are not counted.
    """
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that saves itself would be a reference cycle

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*args)
    known = [*layer.parameters(), *(arg for arg in args if isinstance(arg, torch.Tensor))]
    for tensor in known:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return output, float(sum(storages.values()))


def free_memory(device: torch.device) -> float:
    """Return the bytes of ``device`` that were free when this process used most.

    On a CPU, processes of this machine share what is free.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return float(max(torch.cuda.mem_get_info(device)[0] + unused, 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    used_at_peak = max(peak - psutil.Process().memory_info().rss, 0)
    return max(min(psutil.virtual_memory().available, _container_memory()) / processes - used_at_peak, 0.0)


def _container_memory(root: Path = Path("/")) -> float:
    """Return the bytes that the limits of this process's control group and its parents leave.

    Infinity without a limit. Batch systems and systemd limit a parent. A container that shares the namespace
    of the host reads the names of the host's groups, and finds its own limit in the topmost folder.
    """
    left = [float("inf")]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups
        return left[0]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, *names = _MEMORY_FILES[1 if controllers else 2]
        for group in (Path(folder + path), *Path(folder + path).parents):
            try:
                limit, used = (int((root / group / name).read_text()) for name in names)
            except (OSError, ValueError):  # not visible here, or "max"
                continue
            left.append(float(limit - used))
    return min(left)
