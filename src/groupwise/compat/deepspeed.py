"""Private attributes of DeepSpeed, seen in 0.19."""

from __future__ import annotations

import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from accelerate import DeepSpeedPlugin
    from torch import nn


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return True if ZeRO-3 partitions ``parameter`` over processes."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context manager in which each rank has all parameters of a ZeRO-3 model; all ranks enter it.

    DeepSpeed's forward hooks are removed meanwhile: they gather each layer and free it again, which ranks
    can do only in the same order.
    """
    import deepspeed

    parameters = [parameter for parameter in model.parameters() if is_partitioned(parameter)]
    hooks = [
        hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]
    before = [dict(each) for each in hooks]
    with deepspeed.zero.GatheredParameters(parameters):
        for each in hooks:
            for key, hook in list(each.items()):
                if str(getattr(hook, "__module__", "")).startswith("deepspeed."):
                    del each[key]
        try:
            yield
        finally:
            for each, saved in zip(hooks, before, strict=True):
                each.clear()
                each.update(saved)


def convert_to_universal(directory: str) -> None:
    """Write the universal form of a checkpoint into it, once: whole parameters, for any number of processes.

    It is as large as weights and optimizer state in float32.
    """
    from deepspeed.checkpoint.ds_to_universal import main

    tag = Path(directory, "latest").read_text().strip()
    made = Path(directory, f"{tag}_universal")
    if Path(directory, "latest_universal").is_file():  # written last
        return
    shutil.rmtree(made, ignore_errors=True)  # of a process that was killed
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}  # more are forked, beside gloo's threads
    checks = {"strict": True, "inject_missing_state": True, "keep_temp_folder": False}
    with redirect_stdout(io.StringIO()):
        main(Namespace(input_folder=str(Path(directory, tag)), output_folder=str(made), **workers, **checks))


def expect_universal(plugin: DeepSpeedPlugin, expected: bool = True) -> None:
    """Let engines that are made from now on load checkpoints in their universal form, or not."""
    plugin.hf_ds_config.config.setdefault("checkpoint", {})["load_universal"] = expected


def end_universal(engine: Any, plugin: DeepSpeedPlugin, optimizer: Any) -> None:
    """Let an engine that has loaded a universal checkpoint load others, and repair the optimizer's steps.

    DeepSpeed gives all states of a ZeRO-3 optimizer one step tensor. PyTorch's optimizers increment it in
    place, once per state.
    """
    if not engine.load_universal_checkpoint():
        return
    engine._config.load_universal_checkpoint = False
    expect_universal(plugin, False)
    for state in optimizer.state.values():
        if hasattr(state.get("step"), "clone"):
            state["step"] = state["step"].clone()
