"""Compute gelu(x + bias) + residual in Triton; without a GPU, in Triton's slow interpreter."""

from __future__ import annotations

import os

import torch
from kernels.bias_gelu import Function, operator

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import triton
import triton.language as tl

BLOCK = 1024  # elements per Triton program


@triton.jit
def bias_gelu(x, bias, residual, out, size, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    h = tl.load(x + at, inside) + tl.load(bias + at % width, inside)
    gelu = 0.5 * h * (1.0 + tl.math.erf(h * 0.7071067811865476))
    tl.store(out + at, gelu + tl.load(residual + at, inside), inside)


def kernel(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    if size := x.numel():
        grid = (triton.cdiv(size, BLOCK),)
        bias_gelu[grid](x, bias, residual, out, size, x.shape[-1], BLOCK=BLOCK)
    return out


def built() -> Function:
    """Return the operator; Triton compiles the kernel at the first call."""
    return operator("triton", kernel)
