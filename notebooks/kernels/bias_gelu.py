"""Compute gelu(x + bias) + residual, the end of many layers, by a module or a custom operator.

Eager torch makes three passes over memory; a kernel needs one. The kernels are next to this file:
C++ for CPUs, Triton and CUDA C++ for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class BiasGelu(nn.Module):
    """Compute gelu(x + bias) + residual for tensors of shape (..., width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width) / 10)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + self.bias) + residual


def reference(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return gelu(x + bias) + residual, computed by eager torch."""
    return functional.gelu(x + bias) + residual


def inputs(size: tuple[int, ...]) -> list[torch.Tensor]:
    """Return random x, bias and residual for `check`."""
    return [torch.randn(size), torch.randn(size[-1]), torch.randn(size)]


def operator(name: str, kernel: Function) -> Function:
    """Return a function that calls the kernel as a custom operator of torch, with gradients.

    `kernel` receives contiguous float32 tensors. `reference` computes other dtypes and shapes.
    """

    def forward(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return kernel(x.contiguous(), bias.contiguous(), residual.contiguous())

    def keep(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:2])

    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, bias = ctx.saved_tensors
        inner = torch.ops.aten.gelu_backward(gradient, x + bias)
        return inner, inner.sum_to_size(bias.shape), gradient

    schema = "(Tensor x, Tensor bias, Tensor residual) -> Tensor"
    made = torch.library.custom_op(f"bias_gelu::{name}", forward, mutates_args=(), schema=schema)
    made.register_fake(
        lambda x, bias, residual: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    )
    made.register_autograd(backward, setup_context=keep)

    def call(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        fits = x.shape == residual.shape and bias.shape == x.shape[-1:]
        is_float32 = {one.dtype for one in (x, bias, residual)} == {torch.float32}
        return made(x, bias, residual) if fits and is_float32 else reference(x, bias, residual)

    return call
