"""Imported by the workers of a test's vLLM server: a forward pass that runs out of memory, once, on demand.

vLLM imports it for ``--worker-extension-cls``; the class itself adds nothing.
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
    """Interface that vLLM requires."""
