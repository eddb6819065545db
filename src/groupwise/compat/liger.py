"""Undocumented symbols of Liger Kernel, seen in 0.8."""

from __future__ import annotations

import inspect


def layer_switches() -> set[str]:
    """Return the names of the layer kernels of all architectures."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    functions = MODEL_TYPE_TO_APPLY_LIGER_FN.values()
    parameters = [p for function in functions for p in inspect.signature(function).parameters.values()]
    return {parameter.name for parameter in parameters if isinstance(parameter.default, bool)}
