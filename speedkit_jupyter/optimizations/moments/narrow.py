"""Moments in 8 or 4 bits, by torchao: made of plain ones, and plain again."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.twins import quantizing

if TYPE_CHECKING:
    import torch

# What each keeps for a parameter, and whether that has a sign (torch.optim).
SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False, "momentum_buffer": True}
# Of which class of torchao's, and numbers that share a scale; smaller tensors, and those that are
# no multiple of it, stay as they are (torchao.optim.adam._AdamBase._new_buffer).
KINDS = {
    "8bit": ("subclass_8bit.OptimState8bit", 256),
    "4bit": ("subclass_4bit.OptimState4bit", 128),
}
LEAST = 4096


def is_large(parameter: torch.Tensor, bits: str) -> bool:
    """Whether its moments are worth it."""
    return parameter.numel() >= LEAST and parameter.numel() % KINDS[bits][1] == 0


def widen(state: MutableMapping[str, Any]) -> None:
    """Plain tensors in place of narrow ones."""
    for name, value in state.items():
        if is_narrow(value):
            state[name] = plain(value)


def narrowed(state: MutableMapping[str, Any], parameter: torch.Tensor, bits: str) -> None:
    """Narrow ones in place of plain ones that lie like the parameter."""
    import torch

    for name, signed in SIGNED.items():
        value: Any = state.get(name)
        is_plain = type(value) is torch.Tensor and value.shape == parameter.shape
        if is_plain and value.is_floating_point() and value.is_contiguous():
            state[name] = _narrow(value, signed, bits)


def is_narrow(value: Any) -> bool:
    """Whether it is one of these."""
    return getattr(type(value), "is_narrow_moment", False) is True


def plain(value: Any) -> Any:
    """In its own dtype."""
    return value.dequantize().view(value.shape).to(value.dtype)


def all_narrow(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Those that an optimizer holds."""
    for state in optimizer.state.values():
        yield from filter(is_narrow, state.values())


def _narrow(value: torch.Tensor, signed: bool, bits: str) -> Any:
    kind = _kind(bits)
    found = kind.zeros(value.shape, signed, KINDS[bits][1], value.device, dtype=value.dtype)
    return found.copy_(value)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of plain tensors; what it writes to is narrow again."""
    from torch.utils._pytree import tree_map

    own: dict[int, tuple[Any, Any]] = {}

    def of(leaf: Any) -> Any:
        if not is_narrow(leaf):
            return leaf
        return own.setdefault(id(leaf), (leaf, plain(leaf)))[1]

    result = func(*tree_map(of, args), **tree_map(of, kwargs))
    if func._schema.is_mutable:
        for leaf, written in own.values():
            leaf.copy_(written)
            if result is written:
                result = leaf
    return result


@cache
def _kind(bits: str) -> Any:
    """torchao's class, whose copies and files are plain tensors."""
    module, name = KINDS[bits][0].split(".")
    base: Any = getattr(quantizing.imported(f"optim.{module}"), name)

    class Narrow(base):  # type: ignore[misc]
        __module__ = base.__module__  # state of the user's, and nothing that a plan takes back
        is_narrow_moment = True

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            """What torchao has nothing for is done with plain tensors."""
            try:
                return super().__torch_dispatch__(func, types, args, kwargs or {})
            except NotImplementedError:
                return _plainly(func, args, kwargs or {})

        def __deepcopy__(self, memo: Any) -> Any:
            return plain(self)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return plain(self).__reduce_ex__(protocol)

    return Narrow
