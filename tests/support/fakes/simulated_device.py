"""A device that is not the CPU, for tests on machines without an accelerator.

Its tensors hold their values on the CPU. Like an accelerator it refuses operations on tensors of two devices,
and like Apple's GPUs float64. PyTorch registers it for the whole process: import this module in a process
of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "simulated"
#: Operations whose tensors may be of two devices: copies, and indices on the CPU.
_MIXED = {"_to_copy", "copy_", "index", "index_put_", "index_put", "_index_put_impl_"}
#: Operations that read a value or the shape of their result from the device.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive"}
#: By kind, and by the innermost function of groupwise: "waits" for a value of the device (reads, and copies
#: to the host), "copies" to the device. Clear it before what is counted.
counts: Counter[tuple[str, str]] = Counter()
_as_subclass = torch.Tensor.as_subclass


class _Module(backend_registration._DummyBackendModule):
    """``torch.simulated``."""

    __name__ = f"torch.{NAME}"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class DeviceTensor(torch.Tensor):
    """Tensor of the simulated device, with its values on the CPU."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        if values.dtype == torch.float64:
            raise TypeError("the simulated device has no float64")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
        )
        made.values = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values.detach().__reduce_ex__(protocol)  # files hold tensors of the CPU

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.values})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _compute(function, args, dict(kwargs or {}))


def _count(name: str, args: Sequence[Any], target: Any) -> None:
    """Add an operation to ``counts`` if the host waits for it, or if it copies to the device."""
    from_device = [isinstance(arg, DeviceTensor) for arg in args]
    kind = ""
    if name in ("_to_copy", "copy_"):
        source = args[name == "copy_"]
        goes_to = torch.device(target) if target is not None else args[0].device
        if isinstance(source, DeviceTensor) != (goes_to.type == NAME):
            kind = "copies" if goes_to.type == NAME else "waits"
    elif any(from_device) and name in _READS:
        kind = "waits"
    elif name in ("index", "index_put_") and any(getattr(i, "dtype", 0) == torch.bool for i in args[1]):
        kind = "waits"  # for the number of elements of a mask
    if kind:
        frame = sys._getframe()
        while frame is not None and "/src/groupwise/" not in frame.f_code.co_filename:
            frame = frame.f_back
        where = "elsewhere" if frame is None else frame.f_code
        file = "" if frame is None else where.co_filename.partition("/src/groupwise/")[2]
        counts[kind, where if frame is None else f"{file}:{where.co_name}"] += 1


def _compute(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation of ATen on the CPU, and put the result on the device of the real one."""
    name = function.overloadpacket.__name__
    _count(name, args, kwargs.get("device"))
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    if on_device and name not in _MIXED and any(t.dim() for t in tensors if not isinstance(t, DeviceTensor)):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found two, in {function}")
    target = kwargs.get("device")
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    inner_args, inner_kwargs = tree_map_only(DeviceTensor, lambda tensor: tensor.values, (args, kwargs))
    result = function(*inner_args, **inner_kwargs)
    if name == "copy_":
        return args[0]
    if (target is None and not on_device) or (target is not None and torch.device(target).type != NAME):
        return result
    result = tree_map_only(torch.Tensor, DeviceTensor, result)
    return return_and_correct_aliasing(function, args, kwargs, result) if on_device else result


class _Factories(TorchDispatchMode):
    """Make tensors such as ``torch.zeros(2, device="simulated")``."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        made_here = target is not None and torch.device(target).type == NAME
        if made_here or any(isinstance(value, DeviceTensor) for value in tree_leaves((args, kwargs))):
            return _compute(function, args, kwargs)
        return function(*args, **kwargs)


class _PythonValues(TorchFunctionMode):
    """Convert Python values to tensors and back through the CPU: PyTorch does it below its dispatcher."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            tensors = tuple(
                torch.tensor(part, dtype=None if part else torch.long) if isinstance(part, list) else part
                for part in index
            )
            return function(args[0], tensors, *args[2:])
        if function is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        if args and isinstance(args[0], DeviceTensor):
            if function is torch.Tensor.numpy:
                raise TypeError("can't convert a tensor of the simulated device to numpy")
            if function in (torch.Tensor.untyped_storage, torch.Tensor.data_ptr):
                return function(args[0].values)
        return function(*args, **kwargs)


def register() -> None:
    """Register the device; call it before the first backward pass of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to keeps tied parameters


@contextmanager
def simulated_device() -> Iterator[None]:
    """Context manager in which tensors can be made on the device and moved to it."""

    def as_subclass(tensor: torch.Tensor, kind: type) -> torch.Tensor:
        return tensor if isinstance(tensor, DeviceTensor) else _as_subclass(tensor, kind)

    torch.Tensor.as_subclass = as_subclass  # a DeviceTensor is a subclass already
    try:
        with _PythonValues(), _Factories():
            yield
    finally:
        torch.Tensor.as_subclass = _as_subclass
