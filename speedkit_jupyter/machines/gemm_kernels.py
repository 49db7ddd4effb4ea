"""oneDNN's float32 products as kernels for torch's dispatcher, for what they are faster at.

torch has one way to a float32 product by oneDNN, of two matrices. A batch goes to it matrix by
matrix, which pays from some size of each on. (A grouped convolution is a batch at once: 1.5 times
as fast as the BLAS on 128 x 64 x 128, and half as fast on 300 x 64 x 300, so no size tells.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support import torch_private

if TYPE_CHECKING:
    import torch

SINGLE = ("mm", "mm.out", "addmm", "addmm.out")
BATCHED = ("bmm", "bmm.out", "baddbmm", "baddbmm.out")
OPERATORS = (*SINGLE, *BATCHED)
# A product with a shorter side is one of a vector, or nearly: bound by memory, and 0.1 to 0.6 times
# as fast by oneDNN wherever its operands lie the other way.
SHORTEST = 4
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Crossover:
    """The multiply-adds from which on oneDNN is ahead: of a product, and of each of a batch (None:
    of none), whose sums have at least so many terms: each result is written twice.

    Where nothing was measured: above this it was ahead wherever it was tried, below it the call
    itself is what takes time.
    """

    single: int = 128**3
    batched: int | None = None
    terms: int = 32


def internals() -> None:
    """Raise AttributeError where torch has moved a private name that this stands on."""
    torch_private.linear_by_onednn()
    torch_private.onednn_is_allowed()
    torch_private.kernels_of_others()
    torch_private.leave_uncompiled(lambda: None)


def kernels(crossover: Crossover) -> dict[str, Kernel]:
    """Return oneDNN's by operator, from the crossover on; torch's own go on for what is smaller.

    Where a compiled model computes between its graphs, torch.compile looks at every Python function
    that is called, these too: it would compile them, and Inductor fails on oneDNN's product.
    """
    product = _product()

    def batched(a: torch.Tensor, b: torch.Tensor, added: Any = None) -> torch.Tensor:
        made = a.new_empty(_shape(a, b))
        for left, other, place in zip(a.unbind(), b.unbind(), made.unbind(), strict=True):
            place.copy_(product(left, other))
        return made if added is None else made.add_(added)

    found = _kernels(SINGLE, product, _suits(2, crossover.single), _is_a_row)
    if crossover.batched is not None:
        suits = _suits(3, crossover.batched, crossover.terms)
        found |= _kernels(BATCHED, batched, suits, _is_added)
    for kernel in found.values():
        torch_private.leave_uncompiled(kernel)
    return found


def _kernels(
    names: tuple[str, ...], made: Kernel, suits: Callable[..., bool], fits: Callable[..., bool]
) -> dict[str, Kernel]:
    """Return closures, since what they ask is asked at each product: 1.6 to 2 microseconds for a
    small one.
    """
    import torch

    plain_mm, plain_mm_out, plain_addmm, plain_addmm_out = (
        torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed for name in names
    )

    def mm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return made(a, b) if suits(a, b) else plain_mm(keys, a, b)

    def mm_out(keys: Any, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> Any:
        if suits(a, b) and _takes(out, a, b):
            return out.copy_(made(a, b))
        return plain_mm_out(keys, a, b, out=out)

    def addmm(
        keys: Any, added: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        *, beta: Any = 1, alpha: Any = 1,
    ) -> Any:  # fmt: skip
        if suits(a, b) and beta == 1 == alpha and fits(added, a, b):
            return made(a, b, added)
        return plain_addmm(keys, added, a, b, beta=beta, alpha=alpha)

    def addmm_out(
        keys: Any, added: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        *, beta: Any = 1, alpha: Any = 1, out: torch.Tensor,
    ) -> Any:  # fmt: skip
        if suits(a, b) and beta == 1 == alpha and fits(added, a, b) and _takes(out, a, b):
            return out.copy_(made(a, b, added))
        return plain_addmm_out(keys, added, a, b, beta=beta, alpha=alpha, out=out)

    return dict(zip(names, (mm, mm_out, addmm, addmm_out), strict=True))


def _product() -> Kernel:
    linear = torch_private.linear_by_onednn()

    def product(a: torch.Tensor, b: torch.Tensor, bias: Any = None) -> torch.Tensor:
        weight = b.t()
        if not (weight.is_contiguous() or b.is_contiguous()):
            # Copied as it lies: by oneDNN's reference kernel it would take 200 times as long.
            weight = weight.contiguous() if b.stride(0) == 1 else b.contiguous().t()
        if bias is not None:  # without strides of its own, which oneDNN would not look at
            bias = (bias if bias.dim() == 1 else bias[0]).contiguous()
        return linear(a, weight, bias, "none", [], "")

    return product


def _suits(dimensions: int, least: int, terms: int = 0) -> Callable[..., bool]:
    """Return whether oneDNN is given a product: what is wrong with one torch says itself."""
    import torch

    is_allowed, float32 = torch_private.onednn_is_allowed(), torch.float32

    def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.dim() != dimensions or b.dim() != dimensions:
            return False
        *batch, rows, inner = a.shape
        *same, others, columns = b.shape
        if rows * inner * columns < least or inner != others or batch != same:
            return False
        if min(rows, inner, columns) < SHORTEST or inner < terms:
            return False
        return a.dtype is float32 and b.dtype is float32 and is_allowed()

    return suits


def _shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1])


def _takes(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a result can simply be copied into it; else torch resizes it, or says why."""
    return out.dtype is a.dtype and out.shape == _shape(a, b)


def _is_a_row(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether it is as a linear layer has it, also where compiled code has expanded it."""
    if bias.dtype is not b.dtype or bias.device != b.device:
        return False
    if bias.dim() == 2 and bias.stride(0) == 0:
        return bias.shape == _shape(a, b)
    return bias.dim() == 1 and bias.shape[0] == b.shape[1]


def _is_added(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether it is simply added to the products, broadcast or not."""
    if added.dtype is not b.dtype or added.device != b.device or added.dim() > 3:
        return False
    wanted = _shape(a, b)[3 - added.dim() :]
    return all(size in (1, side) for size, side in zip(added.shape, wanted, strict=True))
