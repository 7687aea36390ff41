"""A GPU without a GPU: CUDA tensors with a shape and a device but without values, so that misplaced tensors show anywhere.

torch's FakeTensorMode refuses a CPU operand beside a CUDA one. Tensors on the CPU stay what they are, values included.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention.rope import Rotary
from convert.methods.blocks import Blocks

GPU = torch.device("cuda", 0)
# What is said of a meeting of devices, which depends on the operation and on torch's version.
REFUSED = "same device|different devices|device between"

_READ = {"is_nonzero", "_local_scalar_dense", "equal"}
_INDEXED = {"index", "index_put", "index_put_"}
# Before these do anything in C++ they switch to the tensor's device, which a CPU build of torch cannot.
_SWITCHING = (
    "__getitem__", "__setitem__", "__float__", "__int__", "__complex__", "__index__", "__invert__",
    "contiguous", "copy_", "nonzero",
)  # fmt: skip
_GUARDED = {getattr(torch.Tensor, name) for name in _SWITCHING}


@contextlib.contextmanager
def fake_gpu(truths: bool | Iterable[bool] = True) -> Iterator[None]:
    """Inside the block `device="cuda"` makes fake tensors; a meeting of devices that a GPU would refuse raises a
    RuntimeError (`REFUSED`).

    Code that asks a fake tensor for its value gets a made-up one: of floats a smaller one each time, so that the last of
    several errors is the least; of integers 1; of booleans what `truths` says, one after the other if there are several.
    What is copied to the CPU is zero there.
    There are no gradients: a CPU build of torch cannot record any for CUDA tensors.
    """
    answers = itertools.repeat(truths) if isinstance(truths, bool) else iter(truths)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _Operations(answers) as operations, _Calls(operations):
        yield


def to_gpu(value: Any, device: torch.device = GPU) -> Any:
    """The tensor on the GPU, or a record with all of its tensors there, as moving a layer's weights leaves it.

    Rotary frequencies stay where they are: they are moved where they are used.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(to_gpu(part, device) for part in value)
    if isinstance(value, Rotary) or not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: to_gpu(getattr(value, field.name), device) for field in fields(value)})


def devices(value: Any) -> set[str]:
    """Where the tensors of a record, a list or a mapping lie, but for rotary frequencies and positions."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    if isinstance(value, Blocks):
        return devices(value.rows)
    if isinstance(value, Mapping):
        return devices(list(value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(devices, value))
    if isinstance(value, Rotary) or not is_dataclass(value):
        return set()
    return devices([getattr(value, field.name) for field in fields(value)])


class _Operations(TorchDispatchMode):
    """Runs what has to do with the GPU on fakes and the rest for real; makes values up; sees what fakes let pass."""

    def __init__(self, truths: Iterator[bool]) -> None:
        super().__init__()
        self._truths, self._numbers = truths, itertools.count(1)
        self.guarded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return torch.device("cpu") if self.guarded else args[0].device
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves) and _device(kwargs) != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _INDEXED:
            args = args[0], _indices(args[0], args[1]), *args[2:]
        if name == "equal" and args[0].device != args[1].device:
            raise RuntimeError(f"compared tensors are not on the same device: {args[0].device}, {args[1].device}")
        _check_generator(func, kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if name not in _READ:
                raise
            return self._made_up(torch.bool if name == "equal" else args[0].dtype)
        if name == "_to_copy" and result.device.type == "cpu":
            with unset_fake_temporarily():
                return torch.zeros(result.shape, dtype=result.dtype)
        return result

    def _made_up(self, dtype: torch.dtype) -> bool | int | float:
        if dtype == torch.bool:
            return next(self._truths)
        return 1 / next(self._numbers) if dtype.is_floating_point or dtype.is_complex else 1


class _Calls(TorchFunctionMode):
    """Sees what fakes cannot do, and what would switch devices, before it gets to `_Operations`."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if func is torch.Tensor.new_tensor and isinstance(first, FakeTensor):
            return torch.tensor(args[1], **({"dtype": first.dtype, "device": first.device} | kwargs))
        if func is torch.Tensor.data_ptr and isinstance(first, FakeTensor):
            return id(first)
        if func is torch.Tensor.to:  # without a number torch would ask which one is in use
            args, kwargs = tuple(map(_numbered, args)), {name: _numbered(value) for name, value in kwargs.items()}
        self._operations.guarded = func in _GUARDED
        try:
            return func(*args, **kwargs)
        finally:
            self._operations.guarded = False


def _numbered(value: Any) -> Any:
    return GPU if isinstance(value, str | torch.device) and torch.device(value) == torch.device("cuda") else value


def _device(kwargs: dict[str, Any]) -> str:
    return torch.device(kwargs.get("device") or "cpu").type


def _indices(indexed: torch.Tensor, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks as numbers of what they select, where that is not known of as much as they could."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.device.type not in ("cpu", indexed.device.type):
            raise RuntimeError(f"a tensor and its index are not on the same device: {indexed.device}, {index.device}")
        if index is None or index.dtype != torch.bool:
            found.append(index)
        elif isinstance(index, FakeTensor):
            found += torch.zeros(index.ndim, index.numel(), dtype=torch.long, device=index.device)
        else:
            with unset_fake_temporarily():
                found += index.nonzero(as_tuple=True)
    return found


def _check_generator(func: Any, kwargs: dict[str, Any]) -> None:
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != _device(kwargs):
        raise RuntimeError(f"{func} and its generator are not on the same device: {_device(kwargs)}, {generator.device}")
