"""A step rounded after each operation, in float64 (`promotion`): the control.

The control says what the rounding of a dtype does to this very net: how far it is off, in each
tensor, row and element. What a variant in that dtype is off by beyond this is no rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support import torch_private

if TYPE_CHECKING:
    import torch

# Digits of the significand, the hidden one included: the unit roundoff is 2 to the minus this.
DIGITS = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}
LOW = {"bfloat16": "bf16", "float16": "fp16"}
SMALLEST_FP16 = 2.0**-24
# What is multiplied in the lower precision, by the name of its operation.
PRODUCTS = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|linear|rnn|lstm_cell|gru_cell)(_|$)"
    r"|convolution|attention|transformer_encoder"
)
# The dtype of the first operand is that of the result; weights and statistics stay in float32.
BY_FIRST_OPERAND = ("norm", "where", "prelu")


def unit(precision: str) -> float:
    """The largest relative error of one rounding."""
    return 2.0 ** -DIGITS[precision]


def lowest(*precisions: str) -> str:
    """The one with the fewest digits; float32 where there is none."""
    return max(("fp32", *precisions), key=unit)


def of_parameters(parameters: Iterable[torch.Tensor]) -> set[str]:
    """The lower precisions in which they are."""
    return {LOW[name] for name in map(_dtype, parameters) if name in LOW}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def noted_autocast() -> Iterator[set[str]]:
    """The precisions of the autocast blocks that are entered in the block."""
    import torch
    from torch.amp.autocast_mode import autocast

    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    precisions: set[str] = set()

    def make(enter: Any) -> Any:
        def entered(self: Any) -> Any:
            if self._enabled and self.fast_dtype in names:
                precisions.add(names[self.fast_dtype])
            return enter(self)

        return entered

    with patched(autocast, "__enter__", make):
        yield precisions


@contextmanager
def rounded(
    precision: str,
    scale: float = 1.0,
    loss_scale: float = 1.0,
    suspends: bool = True,
    digits: int | None = None,
) -> Iterator[None]:
    """Products and what follows from them rounded to this precision, as autocast would.

    In fp32 everything is. Another `scale` of the same precision rounds other values up and
    others down: a second control. What fp16 has no smaller numbers for becomes coarse, in the
    backward pass after the loss was scaled. `suspends` is whether the step's own
    `autocast(enabled=False)` keeps that away, which it does not from a model in the lower dtype.
    `digits` are those of another significand.
    """

    everything, digits = precision == "fp32", digits or DIGITS[precision]
    lowered = _Lowered(everything)

    def low_digits(value: Any) -> Any:
        if precision != "fp16":
            return to_digits(value, digits, scale)
        smallest = SMALLEST_FP16 / loss_scale if _in_backward() else SMALLEST_FP16
        return to_digits(value, digits, scale, smallest)

    class Rounding(torch_private.dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            lowered.arrived()
            if not _computes(function):
                result = function(*args, **(kwargs or {}))
                if not function.is_view:  # memory of its own: a copy of its operand, or a draw
                    lowered.note_all(result, lowered.all_of("copy", args[:1]))
                return result
            name = function._schema.name.partition("::")[2].rstrip("_")
            product = bool(PRODUCTS.search(name)) and not (suspends and suspended)
            if product and not everything:
                args = [low_digits(operand) for operand in args]
            result = function(*args, **(kwargs or {}))
            low = product or lowered.all_of(name, args)
            for tensor in _tensors([result]) if low else ():
                if tensor.dim():  # the loss itself is taken in float32
                    tensor.copy_(low_digits(tensor))
            lowered.note_all(result, low)
            return result

    with _suspensions() as suspended, Rounding():
        yield


class _Lowered:
    """Which memory holds numbers of the lower precision."""

    def __init__(self, everything: bool) -> None:
        self._everything = everything
        self._held: set[int] = set()
        self._in_backward: set[int] = set()

    def arrived(self) -> None:
        """After a backward pass its gradients have the dtype of their parameters."""
        if self._in_backward and not _in_backward():
            self._held -= self._in_backward
            self._in_backward.clear()

    def all_of(self, name: str, args: Any) -> bool:
        """Whether the result of an operation on these would have the lower dtype."""
        tensors = [tensor for tensor in _tensors(args) if tensor.dim() or tensor.numel() > 1]
        if any(part in name for part in BY_FIRST_OPERAND):
            tensors = tensors[:1]
        return bool(tensors) and (self._everything or all(map(self._holds, tensors)))

    def note_all(self, result: Any, low: bool) -> None:
        """Remember results, under the address of their memory, which views share."""
        inside = _in_backward()
        for tensor in _tensors([result]):
            address = tensor.untyped_storage()._cdata
            (self._held.add if low else self._held.discard)(address)
            (self._in_backward.add if low and inside else self._in_backward.discard)(address)

    def _holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._held


def _in_backward() -> bool:
    return torch_private.current_node() is not None


def _computes(function: Any) -> bool:
    """Not a view, and not what only moves numbers or draws them."""
    import torch

    if function.is_view or torch.Tag.nondeterministic_seeded in function.tags:
        return False
    schema = function._schema
    return schema.name not in ("aten::detach", "aten::_to_copy", "aten::lift_fresh", "aten::alias")


def _tensors(values: Any) -> list[Any]:
    """The floating-point tensors among operands, lists of them too; of sparse ones the values."""
    import torch

    tensors = []
    for value in values:
        if isinstance(value, (list, tuple)):
            tensors += _tensors(value)
        elif isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
            tensors += _values(value)
    return tensors


def _values(tensor: torch.Tensor) -> list[torch.Tensor]:
    """In memory that operations can write; none of a layout that gives none."""
    import torch

    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    compressed = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    return [tensor.values()] if tensor.layout in compressed else []


def to_digits(value: Any, digits: int, scale: float = 1.0, smallest: float = 0.0) -> Any:
    """A float32 or float64 tensor with so many binary digits, rounded to nearest, and to multiples
    of the `smallest` number.

    Veltkamp's splitting (Dekker, Numerische Mathematik 18, 1971); what it would overflow on, a
    mask of the lowest number say, stays. Anything else is given back.
    """
    import torch

    if isinstance(value, (list, tuple)):
        return type(value)(to_digits(part, digits, scale, smallest) for part in value)
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
        return value
    if value.layout is not torch.strided:
        return value
    own = 24 if value.dtype is torch.float32 else 53
    scaled = value if scale == 1.0 else value * scale
    if digits >= own:
        return scaled if scale == 1.0 else scaled / scale
    large = scaled * (2.0 ** (own - digits) + 1)
    nearest = large - (large - scaled)
    nearest = nearest if scale == 1.0 else nearest / scale
    if smallest:
        coarse = nearest.abs() < smallest * 2.0**digits
        nearest = torch.where(coarse, (nearest / smallest).round() * smallest, nearest)
    return torch.where(nearest.isfinite(), nearest, value)


@contextmanager
def _suspensions() -> Iterator[list[Any]]:
    """The blocks of `autocast(enabled=False)` that the step is in: what is there stays exact."""
    from torch.amp.autocast_mode import autocast

    enter, leave = autocast.__enter__, autocast.__exit__
    inside: list[Any] = []

    def entered(self: Any) -> Any:
        if not self._enabled:
            inside.append(self)
        return enter(self)

    def left(self: Any, *exception: Any) -> Any:
        if inside and inside[-1] is self:
            inside.pop()
        return leave(self, *exception)

    autocast.__enter__, autocast.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield inside
    finally:
        autocast.__enter__, autocast.__exit__ = enter, leave  # type: ignore[method-assign]
