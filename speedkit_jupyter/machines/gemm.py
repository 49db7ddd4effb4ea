"""The engine of float32 matrix products on the CPU: torch's BLAS, or the oneDNN inside torch.

torch gives float32 products to its BLAS whatever the processor is, and MKL takes its AVX2 path on
processors that are not Intel's; oneDNN asks the processor. Kernels for `mm` and `addmm` lie on the
dispatcher's CPU key in place of torch's own, which go on for all that is small or not plain
float32. Autograd, compiled code, `inference_mode`, subclasses and `vmap` lie above that key.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support import interrupts
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch

BLAS, ONEDNN = "blas", "onednn"
# From so many multiply-adds on where that was not measured: above it oneDNN was ahead wherever it
# was tried, below it the call itself is what takes time.
LEAST = 128**3
OPERATORS = ("mm", "mm.out", "addmm", "addmm.out")
Kernel = Callable[..., Any]


def internals() -> tuple[Callable[..., Any], Callable[[], bool], set[str]]:
    """What this stands on and torch does not promise: oneDNN's product, whether oneDNN may be used
    (`torch.backends.mkldnn.flags`), the kernels that users have put on the dispatcher. Raises
    AttributeError where torch has moved one of them.
    """
    import torch

    product = torch.ops.mkldnn._linear_pointwise.default
    return product, torch._C._get_mkldnn_enabled, torch.library._impls


def _kernels(least: int) -> dict[str, Kernel]:
    """oneDNN's for products of `least` multiply-adds and more; torch's own go on for the others.

    Closures, since what they ask is asked at each product: 1.6 to 2 microseconds for a small one.
    """
    import torch

    plain = {
        name: torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed for name in OPERATORS
    }
    plain_mm, plain_mm_out, plain_addmm, plain_addmm_out = plain.values()
    (linear, is_allowed, _), float32 = internals(), torch.float32

    def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.dim() != 2 or b.dim() != 2:
            return False  # torch says what is wrong
        (rows, inner), (others, columns) = a.shape, b.shape
        if rows * inner * columns < least or inner != others:
            return False
        return a.dtype is float32 and b.dtype is float32 and is_allowed()

    def product(a: torch.Tensor, b: torch.Tensor, row: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = linear(a, b.t(), row, "none", [], "")
        return result

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

    return dict(zip(OPERATORS, (mm, mm_out, addmm, addmm_out), strict=True))


def _takes(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a result can simply be copied into it; else torch resizes it, or says why not."""
    return out.dtype is a.dtype and out.shape == (a.shape[0], b.shape[1])


def _is_a_row(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any) -> bool:
    """A bias as a linear layer has it, also where compiled code has expanded it."""
    if beta != 1 or alpha != 1 or bias.dtype is not b.dtype or bias.device != b.device:
        return False
    if bias.dim() == 2 and bias.stride(0) == 0:
        return bias.shape == (a.shape[0], b.shape[1])
    return bias.dim() == 1 and bias.shape[0] == b.shape[1]


def _row(bias: torch.Tensor) -> torch.Tensor:
    """Without strides of its own, which oneDNN would not look at."""
    row = bias if bias.dim() == 1 else bias[0]
    return row.contiguous()


class _Installed:
    """oneDNN's kernels in place of torch's."""

    def __init__(self, least: int) -> None:
        import torch

        self.least = least
        _, _, others = internals()
        if others := others & {f"aten/{name}/CPU" for name in OPERATORS}:
            found = ", ".join(sorted(others))
            raise SpeedKitError(f"gemm: there are other kernels than torch's own already: {found}")
        kernels = _kernels(least)
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that a kernel was there: so it should
            for name, kernel in kernels.items():
                self._library.impl(name, kernel, "CPU", with_keyset=True)

    def remove(self) -> None:
        """torch's own kernels are in force again."""
        self._library._destroy()


# State at module level, on purpose: the dispatcher belongs to the whole process.
_now: list[_Installed] = []


def engine() -> str:
    """The one in force: `blas` or `onednn`."""
    return ONEDNN if _now else BLAS


def use(name: str, least: int = LEAST) -> None:
    """From now on products are given to this one: to oneDNN those of `least` multiply-adds and
    more. An interrupt waits until that is done. Raises SpeedKitError where somebody else has put
    kernels of his own in the place of torch's.
    """
    if name == engine() and (name == BLAS or _now[0].least == least):
        return
    with interrupts.undisturbed():
        if _now:
            _now.pop().remove()
        if name == ONEDNN:
            _now.append(_Installed(least))
