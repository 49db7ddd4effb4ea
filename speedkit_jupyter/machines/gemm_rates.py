"""Choose and time the library that multiplies float32 matrices on CPUs: torch's BLAS or oneDNN.

On x86, torch's BLAS is MKL, which uses AVX2 kernels on non-Intel processors. oneDNN's kernels are
registered in place of torch's CPU kernels, so autograd and compiled code call them. torch's own
kernels still compute batched products, small products and other dtypes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, ValidationError

from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import interrupts
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.dynamo import leave_uncompiled

if TYPE_CHECKING:
    import torch

BLAS, ONEDNN = "blas", "onednn"
OPERATORS = ("mm", "mm.out", "addmm", "addmm.out")
# oneDNN computes products with at least this many multiply-adds. It was faster on every machine
# tried. In smaller products, the call itself takes most of the time.
LEAST_PRODUCT = 128**3
# torch computes products with a shorter side. It is faster there if operands are transposed.
SHORTEST = 4
Kernel = Callable[..., Any]
# The library with oneDNN's kernels, while it is in use. Global, because torch's dispatcher is.
_LIBRARY: list[torch.library.Library] = []


def in_use() -> str:
    """Return the library in force: `blas` or `onednn`."""
    return ONEDNN if _LIBRARY else BLAS


def use(name: str) -> None:
    """Switch to the library `name`. Raises SpeedKitError if other code has replaced the kernels."""
    with interrupts.uninterrupted():
        if name == BLAS:
            _LIBRARY.clear()  # also unregisters its kernels
        elif not _LIBRARY:
            _LIBRARY.append(_installed())


def _installed() -> torch.library.Library:
    import torch

    library = torch.library.Library("aten", "IMPL")
    taken = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a replaced kernel, which is intended
        for name, kernel in kernels().items():
            try:
                library.impl(name, kernel, "CPU", with_keyset=True, allow_override=False)
            except RuntimeError:
                taken = f"aten/{name}/CPU"
                break
    if not taken:
        return library
    del library  # else the error's traceback keeps it alive, and its kernels registered
    raise SpeedKitError(f"gemm: a library has replaced torch's kernels: {taken}; leave gemm out")


def kernels() -> dict[str, Kernel]:
    """Return a kernel for each operator. Each call chooses oneDNN or torch, which takes 2 µs."""
    import torch

    product, suits = _product(), _suits()

    def kernel(plain: Kernel) -> Kernel:
        def multiply(keys: Any, *operands: Any, **more: Any) -> Any:
            *row, a, b = operands
            if suits(a, b) and more.get("beta", 1) == 1 == more.get("alpha", 1):
                out, shape = more.get("out"), (a.shape[0], b.shape[1])
                # `out` may have any layout; torch handles other dtypes and shapes.
                fits = out is None or (out.dtype is a.dtype and out.shape == shape)
                if fits and (not row or _is_a_row(row[0], a, b)):
                    result = product(a, b, *row)
                    return result if out is None else out.copy_(result)
            return plain(keys, *operands, **more)

        leave_uncompiled(multiply)  # torch.compile doesn't trace the choice
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
            # With other strides, oneDNN uses its reference kernel, which takes 200 times as long.
            weight = weight.contiguous() if b.stride(0) == 1 else b.contiguous().t()
        if bias is not None:  # oneDNN ignores a bias's strides
            bias = (bias if bias.dim() == 1 else bias[0]).contiguous()
        return linear(a, weight, bias, "none", [], "")

    return product


def _suits() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Return a predicate that tells whether oneDNN should multiply two given operands."""
    import torch

    onednn: Any = torch.backends.mkldnn
    float32 = torch.float32

    def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.dim() != 2 or b.dim() != 2:
            return False
        (rows, inner), (others, columns) = a.shape, b.shape
        if rows * inner * columns < LEAST_PRODUCT or inner != others:
            return False
        is_long = min(rows, inner, columns) >= SHORTEST
        return is_long and a.dtype is b.dtype is float32 and bool(onednn.enabled)

    return suits


def _is_a_row(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a bias is one row, or a row that compiled code has expanded to a matrix."""
    if bias.dtype is not b.dtype or bias.device != b.device:
        return False
    if bias.dim() == 2 and bias.stride(0) == 0:
        return bias.shape == (a.shape[0], b.shape[1])
    return bias.dim() == 1 and bias.shape[0] == b.shape[1]


# --- rates ---

# Time limit in seconds for SCRIPT, which spends most of its time importing torch.
PATIENCE_S = 60.0
# Side of the square matrices. With a power of two, rows compete for the same cache sets: oneDNN
# without FMA reached 130 GFLOP/s at 384 and 70 at 512.
SIZE = 384
UNMEASURED, BUSY = "the libraries could not be measured", "the machine is busy"
# The script times each library on the three products of a linear layer in training: the output, and
# the gradients of input and weight. It runs in a child process, because oneDNN crashes on some
# machines (pytorch#89817, pytorch#177227).
SCRIPT = f"""
import json, sys, timeit, torch
torch.set_num_threads(int(sys.argv[1]))
linear, a = {torch_private.ONEDNN_LINEAR}, torch.ones({SIZE}, {SIZE})
pairs = (a, a.mT), (a, a), (a.mT, a)
calls = (
    lambda: [torch.mm(*pair) for pair in pairs],
    lambda: [linear(a, b.t(), None, "none", [], "") for a, b in pairs],
)
with torch.inference_mode():
    print(json.dumps([min(timeit.repeat(call, number=1, repeat=30)) for call in calls]))
"""


class GemmRates(BaseModel):
    """Each library's rate in float32 products, in FLOP/s, or why the measurement failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blas: NonNegativeFloat = 0.0
    onednn: NonNegativeFloat = 0.0
    failure: str = ""

    @property
    def gain(self) -> float:
        """Return oneDNN's rate ÷ the BLAS's rate; 0 if not measured."""
        return self.onednn / self.blas if self.blas else 0.0


def known(machine: str) -> GemmRates | None:
    """Return the stored rates of `machine`, or None if none can be read."""
    with suppress(SpeedKitError, ValidationError):  # reported when a plan is stored
        if (rates := database.newest("rates", machine)) is not None:
            return GemmRates.model_validate(rates)
    return None


def measured(machine: str, threads: int, patience_s: float = PATIENCE_S) -> GemmRates:
    """Return stored rates, or measure them in 2 to 10 s. Store them unless the CPU is busy."""
    rates = known(machine)
    if rates is None:
        rates = _measure(threads, patience_s)
        if BUSY not in rates.failure:
            with suppress(SpeedKitError):
                database.keep("rates", machine, "", rates.model_dump())
    return rates


def _measure(threads: int, patience_s: float) -> GemmRates:
    command = [sys.executable, "-c", SCRIPT, str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s)
    except subprocess.TimeoutExpired:
        return GemmRates(failure=f"{UNMEASURED} within {patience_s:.2g} s: {BUSY}")
    except OSError as error:
        return GemmRates(failure=f"{UNMEASURED}: {error}: {BUSY}")
    if done.returncode < 0:
        return GemmRates(failure=f"oneDNN crashed with signal {-done.returncode}")
    if done.returncode:
        return GemmRates(failure=(done.stderr.strip().splitlines() or [UNMEASURED])[-1])
    blas, onednn = (3 * 2 * SIZE**3 / seconds for seconds in json.loads(done.stdout))
    return GemmRates(blas=blas, onednn=onednn)
