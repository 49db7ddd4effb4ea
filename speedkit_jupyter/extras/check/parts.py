"""Parts of inputs and results: the place, the form and the numbers of each, and copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import isroutine
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.right.values import without_numpy
from speedkit_jupyter.torchglue.plain_values import has_values, is_plain

Values = dict[str, Any]  # of tensors
# A tensor of any other class can compute later, or compare as it likes.
TENSORS = (torch.Tensor, torch.nn.Parameter)
NUMBERS = (bool, int, float, complex)
# Values that are equal where their texts are.
WORDS = (str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
UNKNOWN = " that check() can't compare"
# Kernels read up to so many elements at once: a copy has the same place within them.
ALIGNED = 64


def places(value: Any, name: str = "output") -> dict[str, Any]:
    """Return a value and all that its containers hold, each by its place."""
    found: dict[str, Any] = {}
    for place, part in _walk(value, name):
        while place in found:  # keys that look the same
            place += "'"
        found[place] = part
    return found


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, value
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"[{at}]", part) for at, part in enumerate(value)]
    elif is_record(value):
        inside = [(f".{one.name}", getattr(value, one.name, None)) for one in fields(value)]
    for place, part in inside:
        yield from _walk(part, name + place)


def is_record(value: Any) -> bool:
    """Return whether it is an instance of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def is_container(value: Any) -> bool:
    """Return whether its parts have places of their own."""
    return isinstance(value, Mapping | list | tuple) or is_record(value)


def form(value: Any) -> str:
    """Return the class of a value, with dtype, shape and device, or its text. It ends with UNKNOWN
    where nothing is known of what is inside.
    """
    kind = type(value)
    if _is_dense(value):
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        return f"a {kind.__name__} of {dtype}, {shape}, {value.device}"
    if isinstance(value, torch.Tensor):
        layout = str(value.layout).removeprefix("torch.").removeprefix("strided")
        return f"a {layout or kind.__qualname__} tensor{UNKNOWN}"
    if _is_array(value):
        return f"a NumPy {kind.__name__} of {value.dtype}, {value.shape}"
    if kind in NUMBERS:
        return f"a Python {kind.__name__}"
    if kind in WORDS:
        return repr(value)
    known = {one.name for one in fields(value)} if is_record(value) else set[str]()
    is_known = is_container(value) and getattr(value, "__dict__", {}).keys() <= known
    return f"a {kind.__qualname__}{'' if is_known else UNKNOWN}"


def _is_dense(value: Any) -> bool:
    return type(value) in TENSORS and is_plain(value) and has_values(value)


def _is_array(value: Any) -> bool:
    is_array = type(value) is np.ndarray or isinstance(value, np.generic)
    return is_array and value.dtype.kind in "biufc"


def numbers(value: Any) -> torch.Tensor | None:
    """Return the numbers of a value that has some, in a dtype that torch can compare."""
    if isinstance(value, int):
        return torch.tensor(value if abs(value) < 2**63 else hash(value))
    if type(value) in NUMBERS:
        return torch.from_numpy(np.array(value))
    tensor: torch.Tensor = without_numpy(value) if _is_array(value) else value
    if not _is_dense(tensor):
        return None
    if tensor.is_floating_point():
        return tensor.float() if tensor.element_size() == 1 else tensor
    is_odd = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return tensor.long() if is_odd else tensor


def are_equal(value: Any, before: Any) -> bool:
    """Return whether two values have the same form and numbers, NaN too."""
    first, second = numbers(value), numbers(before)
    if first is None or second is None or first.dtype != second.dtype:
        return form(value) == form(before)
    if first.shape != second.shape or first.device != second.device:
        return False
    is_same = torch.equal(first, second)
    return is_same or bool(((first == second) | ((first != first) & (second != second))).all())


def tensors(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the dense tensors among parts."""
    return {name: part for name, part in parts.items() if _is_dense(part)}


def digest(value: Any) -> int | None:
    """Return a number that tells inputs apart; None of a setting: a number, text or function."""
    if isroutine(value) or type(value) in (*NUMBERS, *WORDS, slice):
        return None
    if (known := numbers(value)) is None:
        return 0
    flat = known.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hash(flat.view(torch.uint8).numpy().tobytes()) if len(flat) else None


def laid_out(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy with the same strides and alignment, in memory of its own.

    NaN follows: code that forgets the strides reads that, and not what is beyond.
    """
    tensor, dtype = tensor.detach().resolve_conj().resolve_neg(), dtype or tensor.dtype
    offset, count = tensor.storage_offset(), tensor.numel()
    if not count or (tensor.is_contiguous() and not offset):
        return tensor.to(dtype, copy=True)
    before, flat = offset % ALIGNED or min(offset, ALIGNED), memory(tensor)
    nothing = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    whole = tensor.new_full((before + max(len(flat), count),), nothing, dtype=dtype)
    whole[before : before + len(flat)] = flat
    return whole.as_strided(tensor.shape, tensor.stride(), before)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements from the first to the last one, and what is between them in memory."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * stride for length, stride in sides) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,), tensor.storage_offset())
