"""oneDNN's float32 products as kernels for torch's dispatcher, for what they are faster at.

torch has one way to a float32 product by oneDNN, of two matrices. A batch goes to it matrix by
matrix, which pays from some size of each on. (A grouped convolution is a batch at once: 1.5 times
as fast as the BLAS on 128 x 64 x 128, and half as fast on 300 x 64 x 300, so no size tells.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Internals(NamedTuple):
    """What this stands on and torch does not promise: oneDNN's product, whether oneDNN may be used
    (`torch.backends.mkldnn.flags`), the kernels that users have put on the dispatcher, what says
    which code torch.compile leaves alone, and how it does (that and all it calls).
    """

    product: Callable[..., Any]
    is_allowed: Callable[[], bool]
    others: set[str]
    set_strategy: Callable[..., None]
    skip: Any


def internals() -> Internals:
    """Raises AttributeError where torch has moved one of them."""
    import torch

    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    return Internals(
        torch.ops.mkldnn._linear_pointwise.default,
        torch._C._get_mkldnn_enabled,
        torch.library._impls,
        frames.set_code_exec_strategy,
        frames._FrameExecStrategy(skip, skip),
    )


def kernels(crossover: Crossover) -> dict[str, Kernel]:
    """oneDNN's by operator, from the crossover on; torch's own go on for what is smaller.

    Where a compiled model computes between its graphs, torch.compile looks at every Python function
    that is called, these too: it would compile them, and Inductor fails on oneDNN's product.
    """
    found = _single(crossover.single)
    if crossover.batched is not None:
        found |= _batched(crossover.batched, crossover.terms)
    within = internals()
    for kernel in found.values():
        within.set_strategy(kernel.__code__, within.skip)
    return found


def _single(least: int) -> dict[str, Kernel]:
    """Closures, since what they ask is asked at each product: 1.6 to 2 microseconds for a small
    one.
    """
    plain_mm, plain_mm_out, plain_addmm, plain_addmm_out = _plain(SINGLE)
    product, suits = _product(), _suits(2, least)

    def mm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return product(a, b) if suits(a, b) else plain_mm(keys, a, b)

    def mm_out(keys: Any, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> Any:
        if suits(a, b) and _takes(out, a, b):
            return out.copy_(product(a, b))
        return plain_mm_out(keys, a, b, out=out)

    def addmm(
        keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        *, beta: Any = 1, alpha: Any = 1,
    ) -> Any:  # fmt: skip
        if suits(a, b) and _is_a_row(bias, a, b, beta, alpha):
            return product(a, b, _row(bias))
        return plain_addmm(keys, bias, a, b, beta=beta, alpha=alpha)

    def addmm_out(
        keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        *, beta: Any = 1, alpha: Any = 1, out: torch.Tensor,
    ) -> Any:  # fmt: skip
        if suits(a, b) and _is_a_row(bias, a, b, beta, alpha) and _takes(out, a, b):
            return out.copy_(product(a, b, _row(bias)))
        return plain_addmm_out(keys, bias, a, b, beta=beta, alpha=alpha, out=out)

    return dict(zip(SINGLE, (mm, mm_out, addmm, addmm_out), strict=True))


def _batched(least: int, terms: int) -> dict[str, Kernel]:
    """The same for batches; `least` multiply-adds of each product."""
    plain_bmm, plain_bmm_out, plain_baddbmm, plain_baddbmm_out = _plain(BATCHED)
    product, suits = _product(), _suits(3, least, terms)

    def multiplied(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for left, other, place in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
            place.copy_(product(left, other))
        return out

    def made(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return multiplied(a, b, a.new_empty(_shape(a, b)))

    def bmm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return made(a, b) if suits(a, b) else plain_bmm(keys, a, b)

    def bmm_out(keys: Any, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> Any:
        if suits(a, b) and _takes(out, a, b):
            return multiplied(a, b, out) if _is_apart(out, a, b) else out.copy_(made(a, b))
        return plain_bmm_out(keys, a, b, out=out)

    def baddbmm(
        keys: Any, added: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        *, beta: Any = 1, alpha: Any = 1,
    ) -> Any:  # fmt: skip
        if suits(a, b) and _is_added(added, a, b, beta, alpha):
            return made(a, b).add_(added)
        return plain_baddbmm(keys, added, a, b, beta=beta, alpha=alpha)

    def baddbmm_out(
        keys: Any, added: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        *, beta: Any = 1, alpha: Any = 1, out: torch.Tensor,
    ) -> Any:  # fmt: skip
        if suits(a, b) and _is_added(added, a, b, beta, alpha) and _takes(out, a, b):
            if _is_apart(out, a, b, added):
                return multiplied(a, b, out).add_(added)
            return out.copy_(made(a, b).add_(added))
        return plain_baddbmm_out(keys, added, a, b, beta=beta, alpha=alpha, out=out)

    return dict(zip(BATCHED, (bmm, bmm_out, baddbmm, baddbmm_out), strict=True))


def _plain(names: tuple[str, ...]) -> list[Kernel]:
    """torch's own."""
    import torch

    return [torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed for name in names]


def _product() -> Callable[..., torch.Tensor]:
    linear = internals().product

    def product(a: torch.Tensor, b: torch.Tensor, row: torch.Tensor | None = None) -> torch.Tensor:
        weight = b.t()
        if not (weight.is_contiguous() or b.is_contiguous()):
            # Copied as it lies: by oneDNN's reference kernel it would take 200 times as long.
            weight = weight.contiguous() if b.stride(0) == 1 else b.contiguous().t()
        result: torch.Tensor = linear(a, weight, row, "none", [], "")
        return result

    return product


def _suits(
    dimensions: int, least: int, terms: int = 0
) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Whether oneDNN is given a product: what is wrong with one torch says itself."""
    import torch

    is_allowed, float32 = internals().is_allowed, torch.float32

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
    """Whether a result can simply be copied into it; else torch resizes it, or says why not."""
    return out.dtype is a.dtype and out.shape == _shape(a, b)


def _is_apart(out: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether it can be written piece by piece: it is in one piece, and nothing is read there."""
    memory = out.untyped_storage().data_ptr()
    shares = any(operand.untyped_storage().data_ptr() == memory for operand in operands)
    return out.is_contiguous() and not shares


def _is_a_row(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any) -> bool:
    """A bias as a linear layer has it, also where compiled code has expanded it."""
    if beta != 1 or alpha != 1 or bias.dtype is not b.dtype or bias.device != b.device:
        return False
    if bias.dim() == 2 and bias.stride(0) == 0:
        return bias.shape == (a.shape[0], b.shape[1])
    return bias.dim() == 1 and bias.shape[0] == b.shape[1]


def _is_added(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any) -> bool:
    """Something that is simply added to the products, broadcast or not."""
    if beta != 1 or alpha != 1 or added.dtype is not b.dtype or added.device != b.device:
        return False
    wanted = _shape(a, b)[3 - added.dim() :] if added.dim() <= 3 else ()
    sizes = zip(added.shape, wanted, strict=False)
    return added.dim() == len(wanted) and all(length in (1, side) for length, side in sizes)


def _row(bias: torch.Tensor) -> torch.Tensor:
    """Without strides of its own, which oneDNN would not look at."""
    row = bias if bias.dim() == 1 else bias[0]
    return row.contiguous()
