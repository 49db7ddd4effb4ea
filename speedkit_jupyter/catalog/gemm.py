"""The switch `gemm`: the library that multiplies float32 matrices on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Optimization, dotted
from speedkit_jupyter.catalog.base.target import Target, overridden
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags, gemm_rates
from speedkit_jupyter.machines.gemm_rates import GemmRates
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import private as torch_private

# A search tries oneDNN above this ratio of rates (oneDNN ÷ BLAS). oneDNN adds 2 µs to each call.
WORTH_TRYING = 1.1
# The first tested version of torch with `torch.library.get_kernel`, which returns torch's kernels.
SINCE = (2, 11)
UNMEASURED = "both libraries are measured once per machine, which takes 2 to 10 s"
GEMM_CODE = """\
gemm = torch.library.Library("aten", "IMPL")  # oneDNN multiplies matrices until `del gemm`


def suits(a, b, *row, out=None, beta=1, alpha=1):
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or not beta == alpha == 1:
        return False
    (rows, inner), columns = a.shape, b.shape[1]
    is_large = min(rows, inner, columns) >= {shortest} and rows * inner * columns >= {least}
    fits = out is None or (out.shape == (rows, columns) and out.dtype is a.dtype)
    for one in row:  # compiled code expands it to a matrix
        is_row = one.dim() == 1 or one.stride()[:-1] == (0,)
        fits &= is_row and one.shape in ((columns,), (rows, columns))
    return is_large and fits and all(one.dtype is torch.float32 for one in (a, b, *row))


def by_onednn(plain):
    @torch.compiler.disable  # between the graphs of a compiled model it would be compiled, too
    def multiply(keys, *operands, **more):
        *row, a, b = operands
        if not (torch.backends.mkldnn.enabled and suits(a, b, *row, **more)):
            return plain.call_boxed(keys, *operands, **more)
        is_dense = b.is_contiguous() or b.t().is_contiguous()
        weight = (b if is_dense else b.contiguous()).t()  # else 200 times as slow
        bias = (row[0] if row[0].dim() == 1 else row[0][0]).contiguous() if row else None
        result = {onednn}(a, weight, bias, "none", [], "")
        return more["out"].copy_(result) if "out" in more else result

    return multiply


if torch.backends.mkldnn.is_available():
    for name in ("mm", "mm.out", "addmm", "addmm.out"):
        kernel = by_onednn(torch.library.get_kernel(f"aten::{{name}}", "CPU"))
        gemm.impl(name, kernel, "CPU", with_keyset=True)"""


class Gemm(Optimization):
    """Multiply with oneDNN: 2.1× as fast on AMD's CPUs, where MKL doesn't use AVX-512."""

    name = "gemm"
    flag, none = "gemm", gemm_rates.BLAS
    effect = Effect.ROUNDING  # another order of summation
    excludes = frozenset({"precision", "tf32"})  # both lower the products' precision
    summary = "the library that multiplies float32 matrices on a CPU"
    helps = "CPUs whose AVX-512 torch's BLAS does not use: AMD's"
    risk = "another order of summation; 2 microseconds more per product, so tiny models get slower"
    page = "https://docs.pytorch.org/docs/stable/library.html"
    Options = Literal["auto", "blas", "onednn"]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        now = self.as_is(facts)
        if facts.device_type != "cpu":
            return request.decline(now, f"the model is on {facts.device}: gemm is for CPUs")
        if request.value == gemm_rates.BLAS:
            if now == gemm_rates.BLAS:
                return request.leave(now, "torch's own, unchanged", asked=True)
            return request.obey(gemm_rates.BLAS)
        if tuple(map(int, hardware.torch.split(".")[:2])) < SINCE:
            return request.decline(now, f"needs torch {dotted(SINCE)}; this is {hardware.torch}")
        gemm_rates.kernels()  # raises AttributeError without torch's private names
        if facts.precision != "fp32":
            return request.decline(now, f"no float32 product inside {facts.precision} autocast")
        if own := facts.no_float32:
            return request.decline(now, f"parameters are {own}: gemm is for float32 products")
        rates = hardware.cpu.gemm
        if rates is not None and rates.failure:
            return request.decline(now, rates.failure)
        if request.value == gemm_rates.ONEDNN:
            return request.obey(gemm_rates.ONEDNN, _compared(rates) if rates else UNMEASURED)
        if rates is not None and rates.gain > WORTH_TRYING:
            return request.offer(now, gemm_rates.ONEDNN, _compared(rates))
        return request.leave(now, _compared(rates))

    def process_flags(self) -> Mapping[str, flags.Flag]:
        return {"gemm": flags.Flag(gemm_rates.in_use, gemm_rates.use, (gemm_rates.ONEDNN,))}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        if decision.value == gemm_rates.ONEDNN:
            _require_onednn()
        with overridden(target, ("gemm",), lambda: gemm_rates.use(decision.value)):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if decision.value == gemm_rates.BLAS:
            return Snippet()
        limits = {"least": gemm_rates.LEAST_PRODUCT, "shortest": gemm_rates.SHORTEST}
        lines = GEMM_CODE.format(**limits, onednn=torch_private.ONEDNN_LINEAR).splitlines()
        return Snippet(setup=tuple(lines))

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        rates = hardware.cpu.gemm
        is_ahead = rates is not None and not rates.failure and rates.gain > WORTH_TRYING
        is_used = facts.device_type == "cpu" and not facts.convolves
        return (gemm_rates.ONEDNN,) if is_used and is_ahead else ()


@cache
def _require_onednn() -> None:
    """Raise SpeedKitError if oneDNN can't be used here; measure the rates if unknown."""
    rates = Hardware.detect().with_gemm().cpu.gemm
    if rates is not None and rates.failure:
        raise SpeedKitError(f"gemm: onednn can't be used here: {rates.failure}; leave gemm out")


def _compared(rates: GemmRates | None) -> str:
    if rates is None:
        return "not measured on this machine yet: a search does"
    blas, onednn = (f"{rate / 1e9:.0f} GFLOP/s" for rate in (rates.blas, rates.onednn))
    return f"oneDNN multiplies float32 at {onednn} here, torch's BLAS at {blas}"
