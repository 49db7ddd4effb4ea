"""The control: a step rounded, as a dtype would round it, after each operation.

It says what the rounding of a dtype does to this very net, tensor by tensor. All controls but the
second move each result by a random share of its last digit (Monte Carlo arithmetic: Parker, UCLA
CSD-970002, 1997), so that sums that cancel by symmetry show what they are made of. The second one
rounds to nearest (Veltkamp's splitting: Dekker, Numerische Mathematik 18, 1971), so that equal
numbers err alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from speedkit_jupyter.right.reference import each_operation, name_of
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.private import (
    CAST,
    autocast_dtype,
    coo_parts,
    current_node,
    operator_schema,
    tree_leaves,
    tree_map,
)

# Digits of the significand, the hidden one included: the unit roundoff is 2 to the minus this.
DIGITS = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}
LOW = {"bfloat16": "bf16", "float16": "fp16"}
# Random numbers that are drawn once, and used again and again: a prime number of them, so that no
# two rows or columns of a tensor get the same ones.
STOCK = 262_147
# Operations that multiply in the lower precision, by their names.
PRODUCTS = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|linear|rnn|lstm_cell|gru_cell)(_|$)"
    r"|convolution|attention|transformer_encoder"
)
# The first operand decides about the result's dtype; weights and statistics stay in float32.
BY_FIRST_OPERAND = ("norm", "where", "prelu")
# Operations that compute nothing, next to views and draws.
COPIES = ("detach", CAST, "lift_fresh", "alias")


def unit(precision: str) -> float:
    """Return the largest relative error of one rounding."""
    return 2.0 ** -DIGITS[precision]


def lowest(*precisions: str) -> str:
    """Return the one with the fewest digits; float32 where there is none."""
    return max(("fp32", *precisions), key=unit)


def of_dtypes(dtypes: Iterable[object]) -> set[str]:
    """Return the lower precisions among them."""
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    return {LOW[name] for name in names if name in LOW}


@contextmanager
def noted_autocast() -> Iterator[set[str]]:
    """Yield the precisions of the autocast blocks that are entered in the block."""
    from torch.amp.autocast_mode import autocast

    precisions: set[str] = set()

    def make(enter: Any) -> Any:
        def entered(self: Any) -> Any:
            precisions.update(of_dtypes([autocast_dtype(self)]))
            return enter(self)

        return entered

    with patched(autocast, "__enter__", make):
        yield precisions


def rounded(
    precision: str, number: int = 0, loss_scale: float = 1.0
) -> AbstractContextManager[None]:
    """Round products and what follows from them to this precision, as autocast would.

    In fp32 everything is. Controls of another `number` round otherwise: 1 to nearest, all others at
    random. Small numbers become coarse in fp16, in the backward pass after the loss was scaled.
    """
    return each_operation(_Rounding(precision, number, loss_scale).make)


class _Rounding:
    """Moves numbers by up to one rounding, and knows which memory holds those that are lowered."""

    def __init__(self, precision: str, number: int, loss_scale: float) -> None:
        self._everything = precision == "fp32"
        # Fewer than the 24 of float32: kernels round at more places than there are operations.
        self._digits = 20 if self._everything else DIGITS[precision]
        self._smallest = 2.0**-25 if precision == "fp16" else 0.0  # half of the smallest number
        self._to_nearest, self._loss_scale = number == 1, loss_scale
        self._stock: dict[Any, torch.Tensor] = {}
        self._place = random.Random(number)  # not the user's generator
        self._lowered: set[int] = set()  # addresses
        self._in_backward = False

    def make(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Make an operation, with operands and result rounded."""
        was_in_backward, self._in_backward = self._in_backward, current_node() is not None
        if was_in_backward and not self._in_backward:  # gradients have the dtype of parameters
            self._lowered.clear()
        name = name_of(operation).rstrip("_")
        draws = torch.Tag.nondeterministic_seeded in operation.tags
        product = not draws and bool(PRODUCTS.search(name))
        if product and not self._everything and not operator_schema(operation).is_mutable:
            args = tree_map(self._rounded_operand, args)
        result = operation(*args, **kwargs)
        if operation.is_view:
            return result
        low = product or self._is_low(name, args)
        for tensor in _tensors([result]):
            if low and not draws and name not in COPIES and tensor.dim():  # a loss is in float32
                tensor.copy_(self._rounded(tensor))
            address = tensor.untyped_storage().data_ptr()
            (self._lowered.add if low else self._lowered.discard)(address)
        return result

    def _is_low(self, name: str, args: Any) -> bool:
        """Return whether the result of an operation on these would have the lower dtype."""
        tensors = [tensor for tensor in _tensors(args) if tensor.dim() or tensor.numel() > 1]
        if any(part in name for part in BY_FIRST_OPERAND):
            tensors = tensors[:1]
        lowered = (tensor.untyped_storage().data_ptr() in self._lowered for tensor in tensors)
        return bool(tensors) and (self._everything or all(lowered))

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a rounded copy."""
        if self._to_nearest:
            own = 24 if tensor.dtype is torch.float32 else 53
            large = tensor * (2.0 ** (own - self._digits) + 1)
            moved = large - (large - tensor)
        else:
            moved = torch.addcmul(tensor, tensor, self._noise(tensor), value=2.0**-self._digits)
        if self._smallest:
            smallest = self._smallest / (self._loss_scale if self._in_backward else 1.0)
            moved.addcmul_(self._noise(tensor), (tensor != 0).to(tensor.dtype), value=smallest)
        if moved.sum().isfinite():  # far cheaper than to ask of each
            return moved
        # Not a mask of the lowest number, which would become infinite.
        return torch.where(moved.isfinite(), moved, tensor)

    def _rounded_operand(self, operand: Any) -> Any:
        is_strided = isinstance(operand, torch.Tensor) and operand.layout is torch.strided
        return self._rounded(operand) if is_strided and _tensors([operand]) else operand

    def _noise(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return random numbers from -1 to 1, from anywhere in a stock of them."""
        begin, count = self._place.randrange(STOCK), tensor.numel()
        stock = self._stock.get(key := (tensor.device, tensor.dtype))
        if stock is None:
            generator = torch.Generator(tensor.device).manual_seed(0)
            stock = torch.empty(STOCK, device=tensor.device, dtype=tensor.dtype)
            self._stock[key] = stock = stock.uniform_(-1, 1, generator=generator)
        if len(stock) < begin + count:  # the same numbers again, kept for the next large tensor
            self._stock[key] = stock = stock[:STOCK].repeat((begin + count - 1) // STOCK + 1)
        return stock[begin : begin + count].view(tensor.shape)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return floating-point tensors among operands and in lists of them; of sparse ones, values."""
    tensors = []
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
            if value.layout is torch.sparse_coo:
                tensors.append(coo_parts(value)[1])
            elif str(value.layout).startswith("torch.sparse_"):  # compressed rows or columns
                tensors.append(value.values())
            elif value.layout is torch.strided:
                tensors.append(value)
    return tensors
