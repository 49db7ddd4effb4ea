"""The engine of float32 matrix products on the CPU: torch's BLAS, or the oneDNN inside torch.

MKL, torch's BLAS, takes its AVX2 path on processors that are not Intel's; oneDNN asks the
processor. Its kernels lie on the dispatcher's CPU key in place of torch's own, which go on for
batches and all that is small or not plain float32. Autograd and compiled code lie above that key.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import interrupts
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.dynamo import leave_uncompiled

if TYPE_CHECKING:
    import torch

BLAS, ONEDNN = "blas", "onednn"
OPERATORS = ("mm", "mm.out", "addmm", "addmm.out")
# Multiply-adds from which on oneDNN is ahead where nothing was measured: above, it was ahead
# wherever it was tried; below, the call itself takes the time.
LEAST = 128**3
# A product with a shorter side is one of a vector, or nearly: bound by memory, and 0.1 to 0.6 times
# as fast by oneDNN wherever its operands lie the other way.
SHORTEST = 4
Kernel = Callable[..., Any]


@dataclass
class _Engine:
    """The library of kernels in force, and the least multiply-adds that were said last."""

    library: torch.library.Library | None = None
    least: int = LEAST


# State at module level, on purpose: the dispatcher belongs to the whole process.
_now = _Engine()


def engine() -> str:
    """Return the one in force: `blas` or `onednn`."""
    return BLAS if _now.library is None else ONEDNN


def use(name: str, least: int | None = None) -> None:
    """Give products to this engine from now on: to oneDNN those of at least so many multiply-adds.

    Raises SpeedKitError where somebody else has put kernels in the place of torch's.
    """
    least = least or _now.least
    if name == engine() and (name == BLAS or least == _now.least):
        return
    with interrupts.uninterrupted():
        _now.library = None  # with it go its kernels
        if name == ONEDNN:
            _now.library, _now.least = _installed(least), least


def _installed(least: int) -> torch.library.Library:
    import torch

    library = torch.library.Library("aten", "IMPL")
    taken = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel was there: so it should
        for name, kernel in kernels(least).items():
            try:
                library.impl(name, kernel, "CPU", with_keyset=True, allow_override=False)
            except RuntimeError:
                taken = f"aten/{name}/CPU"
                break
    if not taken:
        return library
    del library  # the error would keep it, and the kernels that are placed already
    raise SpeedKitError(f"gemm: there are other kernels than torch's own already: {taken}")


def kernels(least: int) -> dict[str, Kernel]:
    """Return kernels by operator, as closures: each product asks, in about 2 microseconds.

    They stay uncompiled: between the graphs of a compiled model torch.compile would compile them,
    and Inductor fails on oneDNN's product.
    """
    import torch

    product, suits = _product(), _suits(least)

    def kernel(plain: Kernel) -> Kernel:
        def multiply(keys: Any, *operands: Any, **more: Any) -> Any:
            *row, a, b = operands
            if suits(a, b) and more.get("beta", 1) == 1 == more.get("alpha", 1):
                out, shape = more.get("out"), (a.shape[0], b.shape[1])
                # Into another result than one of this form torch copies, or says why it can't.
                fits = out is None or (out.dtype is a.dtype and out.shape == shape)
                if fits and (not row or _is_a_row(row[0], a, b)):
                    result = product(a, b, *row)
                    return result if out is None else out.copy_(result)
            return plain(keys, *operands, **more)

        leave_uncompiled(multiply)
        return multiply

    return {
        name: kernel(torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed)
        for name in OPERATORS
    }


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


def _suits(least: int) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Return whether oneDNN is given a product: what is wrong with one torch says itself."""
    import torch

    onednn: Any = torch.backends.mkldnn
    float32 = torch.float32

    def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.dim() != 2 or b.dim() != 2:
            return False
        (rows, inner), (others, columns) = a.shape, b.shape
        if rows * inner * columns < least or inner != others:
            return False
        is_long = min(rows, inner, columns) >= SHORTEST
        return is_long and a.dtype is b.dtype is float32 and bool(onednn.enabled)

    return suits


def _is_a_row(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether it is as a linear layer has it, also where compiled code has expanded it."""
    if bias.dtype is not b.dtype or bias.device != b.device:
        return False
    if bias.dim() == 2 and bias.stride(0) == 0:
        return bias.shape == (a.shape[0], b.shape[1])
    return bias.dim() == 1 and bias.shape[0] == b.shape[1]
