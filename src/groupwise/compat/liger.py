"""Undocumented symbols of Liger Kernel, seen in 0.8."""

from __future__ import annotations

import inspect
from importlib.metadata import version


def layer_switches() -> set[str]:
    """Return the names of the layer kernels of all architectures."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    functions = MODEL_TYPE_TO_APPLY_LIGER_FN.values()
    parameters = [p for function in functions for p in inspect.signature(function).parameters.values()]
    return {parameter.name for parameter in parameters if isinstance(parameter.default, bool)}


def layer_problem(model_type: str) -> str:
    """Return why Liger cannot patch an architecture, with the installed versions; "" if it can.

    ``Trainer`` patches the layers in ``train()``. Every switch is off here, so that nothing is patched.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:  # Trainer leaves such a model as it is
        return ""
    switches = layer_switches() & set(inspect.signature(function).parameters)
    try:
        function(**dict.fromkeys(switches, False))
    except ImportError as error:
        packages = ("liger-kernel", "transformers")
        return f"{error} ({', '.join(f'{name} {version(name)}' for name in packages)})"
    return ""
