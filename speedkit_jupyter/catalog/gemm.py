"""The engine of float32 matrix products on a CPU: torch's BLAS, or the oneDNN inside torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Optimization, dotted
from speedkit_jupyter.catalog.base.target import Target, overridden
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags, gemm
from speedkit_jupyter.machines.gemm_rates import GemmRates
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.private import LIBRARY_DESTROY, ONEDNN_LINEAR

# oneDNN must multiply large matrices this much faster, as each product costs microseconds more.
WORTH_TRYING = 1.1
# The first version tested with `torch.library.get_kernel`, which keeps torch's own kernels.
SINCE = (2, 11)
UNMEASURED = "both engines are measured first, once for this machine, which takes 2 to 10 s"
CODE = """\
if torch.backends.mkldnn.is_available():  # oneDNN; gemm.{destroy}() takes all of it back
    gemm = torch.library.Library("aten", "IMPL")
    plain_mm = torch.library.get_kernel("aten::mm", "CPU")
    plain_addmm = torch.library.get_kernel("aten::addmm", "CPU")

    def suits(a, b):
        if a.dim() != 2 or b.dim() != 2:
            return False
        (rows, inner), (others, columns) = a.shape, b.shape
        fits = inner == others and min(rows, inner, columns) >= {shortest}
        is_float32 = a.dtype is b.dtype is torch.float32
        return fits and is_float32 and rows * inner * columns >= {least}

    def product(a, b, row=None):
        b = b if b.t().is_contiguous() else b.contiguous()  # else 200 times as slow
        return {onednn}(a, b.t(), row, "none", [], "")

    @torch.compiler.disable  # between a compiled model's graphs it would look into these, too
    def mm(keys, a, b):
        return product(a, b) if suits(a, b) else plain_mm.call_boxed(keys, a, b)

    @torch.compiler.disable
    def addmm(keys, row, a, b, *, beta=1, alpha=1):
        fits = row.shape == b.shape[1:] and row.dtype is b.dtype and beta == alpha == 1
        if fits and suits(a, b):
            return product(a, b, row.contiguous())
        return plain_addmm.call_boxed(keys, row, a, b, beta=beta, alpha=alpha)

    gemm.impl("mm", mm, "CPU", with_keyset=True)
    gemm.impl("addmm", addmm, "CPU", with_keyset=True)
"""


class Gemm(Optimization):
    """torch's BLAS (mostly MKL) takes its AVX2 path on processors other than Intel's; oneDNN takes
    AVX-512 where there is any: 2.1x on products, 0.9x to 1.45x on whole steps. Both engines are
    measured once for a machine.
    """

    name = "gemm"
    flag, none = "gemm", gemm.BLAS
    effect = Effect.ROUNDING  # another order of summation
    excludes = frozenset({"precision", "tf32"})  # bf16 products go to oneDNN anyway
    summary = "the engine of float32 matrix products on a CPU"
    helps = "CPUs where torch's BLAS does not use what the processor has: AMD with AVX-512"
    risk = (
        "the order of summation; every product pays some 2 microseconds, so tiny models lose; "
        "products that stay torch's own hold Python's lock, so threads of yours that multiply wait "
        "for one another"
    )
    undone = "torch's own kernels are on the dispatcher again"
    page = "https://docs.pytorch.org/docs/stable/library.html"
    Options = Literal["auto", "blas", "onednn"]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        now = self.as_is(facts)
        if facts.device_type != "cpu":
            return request.decline(now, f"the model is on {facts.device}: this is about CPUs")
        if request.value == gemm.BLAS:
            if now == gemm.BLAS:
                return request.leave(now, "torch's own, as it is", asked=True)
            return request.obey(gemm.BLAS)
        if tuple(map(int, hardware.torch.split(".")[:2])) < SINCE:
            return request.decline(now, f"needs torch {dotted(SINCE)}; this is {hardware.torch}")
        gemm.kernels(gemm.LEAST)  # raises if torch has moved a name that this needs
        if facts.precision != "fp32":
            return request.decline(now, f"no float32 product inside {facts.precision} autocast")
        if own := facts.no_float32:
            return request.decline(now, f"parameters are {own}: this is about float32 products")
        rates = hardware.cpu.gemm
        if rates is not None and rates.failure:
            return request.decline(now, rates.failure)
        if request.value == gemm.ONEDNN:
            return request.obey(gemm.ONEDNN, _compared(rates) if rates else UNMEASURED)
        if rates is not None and rates.gain > WORTH_TRYING:
            return request.offer(now, gemm.ONEDNN, _compared(rates))
        return request.leave(now, _compared(rates))

    def switches(self) -> Mapping[str, flags.Switch]:
        return {"gemm": flags.Switch(gemm.engine, gemm.use, (gemm.ONEDNN,))}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        least = _least_here() if decision.value == gemm.ONEDNN else None
        with overridden(target, ("gemm",), lambda: gemm.use(decision.value, least)):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if decision.value == gemm.BLAS:
            return Snippet()
        rates = Hardware.detect().cpu.gemm
        least = (rates and rates.least) or gemm.LEAST
        lines = CODE.format(
            least=least,
            shortest=gemm.SHORTEST,
            onednn=ONEDNN_LINEAR,
            destroy=LIBRARY_DESTROY,
        )
        return Snippet(setup=tuple(lines.splitlines()))

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        rates = hardware.cpu.gemm
        is_ahead = rates is not None and not rates.failure and rates.gain > WORTH_TRYING
        is_used = facts.device_type == "cpu" and not facts.convolves
        return (gemm.ONEDNN,) if is_used and is_ahead else ()


@cache
def _least_here() -> int:
    """Return the least multiply-adds of a product for oneDNN, measured in another process, which
    oneDNN may crash. Raises SpeedKitError if oneDNN can't be used.
    """
    rates = Hardware.detect().with_gemm().cpu.gemm
    if rates is not None and rates.failure:
        raise SpeedKitError(f"gemm: onednn can't be used here: {rates.failure}")
    return (rates and rates.least) or gemm.LEAST


def _compared(rates: GemmRates | None) -> str:
    if rates is None:
        return "not measured on this machine yet: a search does"
    blas, onednn = (f"{rate / 1e9:.0f} GFLOP/s" for rate in (rates.blas, rates.onednn))
    return f"oneDNN multiplies float32 at {onednn} here, torch's BLAS at {blas}"
