"""The control: a step rounded, as a dtype would round it, after each operation.

It says what the rounding of a dtype does to this very net, tensor by tensor. The first control
moves each result by a random share of its last digit (Monte Carlo arithmetic: Parker, UCLA
CSD-970002, 1997), so that sums that cancel by symmetry show what they are made of. The second one
rounds to nearest (Veltkamp's splitting: Dekker, Numerische Mathematik 18, 1971), so that equal
numbers err alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.torch_private import current_node, dispatch_mode

if TYPE_CHECKING:
    import torch

# Digits of the significand, the hidden one included: the unit roundoff is 2 to the minus this.
DIGITS = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}
LOW = {"bfloat16": "bf16", "float16": "fp16"}
# Of a control in float32, where kernels round at more places than there are operations.
COARSE_DIGITS = 20
SMALLEST_FP16 = 2.0**-24
# So many random numbers are drawn, and used again and again: a prime number, so that no two rows or
# columns of a tensor get the same ones.
STOCK = 262_147
# What is multiplied in the lower precision, by the name of its operation.
PRODUCTS = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|linear|rnn|lstm_cell|gru_cell)(_|$)"
    r"|convolution|attention|transformer_encoder"
)
# The dtype of the first operand is that of the result; weights and statistics stay in float32.
BY_FIRST_OPERAND = ("norm", "where", "prelu")
# What computes nothing, beside views and draws.
COPIES = ("detach", "_to_copy", "lift_fresh", "alias")


def unit(precision: str) -> float:
    """The largest relative error of one rounding."""
    return 2.0 ** -DIGITS[precision]


def lowest(*precisions: str) -> str:
    """The one with the fewest digits; float32 where there is none."""
    return max(("fp32", *precisions), key=unit)


def of_parameters(parameters: Iterable[torch.Tensor]) -> set[str]:
    """The lower precisions in which they are."""
    names = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    return {LOW[name] for name in names if name in LOW}


@contextmanager
def noted_autocast() -> Iterator[set[str]]:
    """Yield the precisions of the autocast blocks that are entered in the block."""
    from torch.amp.autocast_mode import autocast

    precisions: set[str] = set()

    def make(enter: Any) -> Any:
        def entered(self: Any) -> Any:
            name = str(self.fast_dtype).removeprefix("torch.")
            if self._enabled and name in LOW:
                precisions.add(LOW[name])
            return enter(self)

        return entered

    with patched(autocast, "__enter__", make):
        yield precisions


@contextmanager
def rounded(precision: str, to_nearest: bool = False, loss_scale: float = 1.0) -> Iterator[None]:
    """Round products and what follows from them to this precision, as autocast would.

    In fp32 everything is. `to_nearest` is another control than at random. Small numbers become
    coarse in fp16, in the backward pass after the loss was scaled.
    """
    import torch

    everything = precision == "fp32"
    noise, lowered = _Noise(precision, to_nearest, loss_scale), _Lowered(everything)

    class Rounding(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            lowered.follow_backward()
            name = function._schema.name.partition("::")[2].rstrip("_")
            draws = torch.Tag.nondeterministic_seeded in function.tags
            product = not draws and bool(PRODUCTS.search(name))
            if product and not everything and not function._schema.is_mutable:
                args = [noise.on_copies(operand) for operand in args]
            result = function(*args, **(kwargs or {}))
            if function.is_view:
                return result
            low = product or lowered.all_of(name, args)
            if low and not draws and name not in COPIES:
                for tensor in _tensors([result]):
                    if tensor.dim():  # the loss itself is taken in float32
                        noise.on(tensor)
            lowered.note(result, low)
            return result

    with Rounding():
        yield


class _Noise:
    """Moves numbers by up to one rounding."""

    def __init__(self, precision: str, to_nearest: bool, loss_scale: float) -> None:
        self._digits = COARSE_DIGITS if precision == "fp32" else DIGITS[precision]
        self._smallest = SMALLEST_FP16 / 2 if precision == "fp16" else 0.0
        self._to_nearest, self._loss_scale = to_nearest, loss_scale
        self._drawn: dict[Any, torch.Tensor] = {}
        self._place = random.Random(0)  # not the user's generator

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Change a tensor in place."""
        import torch

        if self._to_nearest:
            own = 24 if tensor.dtype is torch.float32 else 53
            large = tensor * (2.0 ** (own - self._digits) + 1)
            moved = large - (large - tensor)
        else:
            moved = torch.addcmul(tensor, tensor, self._noise(tensor), value=2.0**-self._digits)
        if self._smallest:
            smallest = self._smallest / (self._loss_scale if _in_backward() else 1.0)
            moved.addcmul_(self._noise(tensor), (tensor != 0).to(tensor.dtype), value=smallest)
        # Not a mask of the lowest number, which would become infinite.
        return torch.where(moved.isfinite(), moved, tensor, out=tensor)

    def on_copies(self, operand: Any) -> Any:
        """Return an operand of a product, or a list of them, rounded."""
        import torch

        if isinstance(operand, (list, tuple)):
            return type(operand)(self.on_copies(part) for part in operand)
        floats = (torch.float32, torch.float64)
        if not isinstance(operand, torch.Tensor) or operand.dtype not in floats:
            return operand
        return self.on(operand.clone()) if operand.layout is torch.strided else operand

    def _noise(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return random numbers from -1 to 1, from anywhere in a stock of them."""
        import torch

        stock = self._drawn.get(key := (tensor.device, tensor.dtype))
        if stock is None:
            generator = torch.Generator(tensor.device).manual_seed(0)
            stock = torch.empty(STOCK, device=tensor.device, dtype=tensor.dtype)
            stock = self._drawn[key] = stock.uniform_(-1, 1, generator=generator)
        begin, count = self._place.randrange(STOCK), tensor.numel()
        times = (begin + count - 1) // STOCK + 1
        noise = stock if times == 1 else stock.repeat(times)
        return noise[begin : begin + count].view(tensor.shape)


class _Lowered:
    """Which memory holds numbers of the lower precision, by its address."""

    def __init__(self, everything: bool) -> None:
        self._everything, self._was_in_backward = everything, False
        self._held: set[int] = set()

    def follow_backward(self) -> None:
        """Forget all at the end of a backward pass: gradients have the dtype of parameters."""
        if self._was_in_backward and not _in_backward():
            self._held.clear()
        self._was_in_backward = _in_backward()

    def all_of(self, name: str, args: Any) -> bool:
        """Whether the result of an operation on these would have the lower dtype."""
        tensors = [tensor for tensor in _tensors(args) if tensor.dim() or tensor.numel() > 1]
        if any(part in name for part in BY_FIRST_OPERAND):
            tensors = tensors[:1]
        held = (tensor.untyped_storage().data_ptr() in self._held for tensor in tensors)
        return bool(tensors) and (self._everything or all(held))

    def note(self, result: Any, low: bool) -> None:
        """Remember results; views share their memory."""
        for tensor in _tensors([result]):
            address = tensor.untyped_storage().data_ptr()
            (self._held.add if low else self._held.discard)(address)


def _in_backward() -> bool:
    return current_node() is not None


def _tensors(values: Any) -> list[torch.Tensor]:
    """The floating-point tensors among operands, lists of them too; of sparse ones the values."""
    import torch

    compressed = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    tensors = []
    for value in values:
        if isinstance(value, (list, tuple)):
            tensors += _tensors(value)
        elif isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
            if value.layout is torch.sparse_coo:
                tensors.append(value._values())
            elif value.layout in compressed:
                tensors.append(value.values())
            elif value.layout is torch.strided:
                tensors.append(value)
    return tensors
