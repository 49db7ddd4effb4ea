"""What a mask is made from, as a key: equal keys, equal masks."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import torch

from speedkit_jupyter.torchglue.private import version

# What can't change.
PLAIN = {int, float, complex, bool, str, type(None), torch.dtype, torch.device}
# Tensors on the CPU of up to this size are compared by their values, others by how often torch has
# written to them.
COMPARED_BYTES = 2**20
NUMBERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
           torch.float16, torch.float32, torch.float64)  # fmt: skip
# Builtins, and what torch and its tensors have, that give the same for the same and change nothing.
PURE = {
    "abs", "all", "any", "bitwise_and", "bitwise_or", "bool", "clamp", "device", "dtype", "eq",
    "float", "floor", "floor_divide", "int", "int32", "int64", "isin", "len", "logical_and",
    "logical_not", "logical_or", "long", "math", "max", "maximum", "min", "minimum", "ne",
    "new_ones", "new_zeros", "range", "remainder", "shape", "size", "sqrt", "torch", "where",
}  # fmt: skip


def key_of(value: Any, within: tuple[FunctionType, ...] = ()) -> object:
    """Return a key that is another one after each change of `value`, or of what it reads as a
    function; None where that can't be told. `within` are the functions that led here.
    """
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in (tuple, list):
        keys = [key_of(one, within) for one in value]
        return None if None in keys else (kind, *keys)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _of_tensor(value)
    if kind is FunctionType:
        return "itself" if value in within else _of_function(value, (*within, value))
    return value.__name__ if value is torch or value is math else None


def _of_tensor(value: torch.Tensor) -> object:
    if value.device.type == "cpu" and value.dtype in NUMBERS and value.nbytes <= COMPARED_BYTES:
        return value.dtype, value.shape, value.detach().numpy().tobytes()
    # The tensor itself, so that no other one gets its place in memory.
    return None if value.requires_grad or value.is_inference() else (value, version(value))


def _of_function(function: FunctionType, within: tuple[FunctionType, ...]) -> object:
    """Return its code and the keys of all that this reads beside its arguments."""
    code, names = function.__code__, function.__globals__
    is_known = all(name in names or name in PURE for name in code.co_names)
    if not is_known or any(isinstance(one, type(code)) for one in code.co_consts):
        return None
    try:
        cells = [one.cell_contents for one in function.__closure__ or ()]
    except ValueError:  # a variable without a value yet
        return None
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    read = [names[name] for name in code.co_names if name in names]
    keys = key_of([cells, defaults, read], within)
    return keys and (code, keys)
