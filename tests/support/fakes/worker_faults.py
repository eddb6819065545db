"""Faults on demand in the workers of a test's vLLM server, which imports it for ``--worker-extension-cls``.

A forward pass that runs out of memory, once, and a flipped bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PLANTED = Path(os.environ["OUT_OF_MEMORY_FILE"])

_forward = GPUModelRunner._model_forward


def _forward_or_fail(self: Any, *args: Any, **kwargs: Any) -> Any:
    if PLANTED.exists():
        PLANTED.unlink()
        raise torch.OutOfMemoryError("Tried to allocate more than there is")
    return _forward(self, *args, **kwargs)


GPUModelRunner._model_forward = _forward_or_fail


class Extension:
    """Methods for ``collective_rpc``."""

    def flip_bit(self: Any, engine: int, name: str) -> None:
        """Change one bit of a float32 parameter of one data-parallel engine."""
        if self.vllm_config.parallel_config.data_parallel_index == engine:
            parameter = self.model_runner.get_model().get_parameter(name)
            parameter.data.view(torch.int32).view(-1)[5] ^= 1
