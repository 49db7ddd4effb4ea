"""Triton's interpreter (that of 3.9) made to compute what compiled kernels of Liger's compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are scalars with a dtype, CUDA's own functions are there, and bf16 is a number."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    convert, binary, cast = interpreter._implicit_cvt, builder.binary_op, builder.cast_impl

    def with_floats(value: Any) -> Any:
        """Else `eps.to(tl.float32)` of a float fails."""
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(handle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    def with_bf16(self: Any, one: Any, other: Any, operation: Callable[..., Any]) -> Any:
        """Else it computes with the bits of bf16 as whole numbers."""
        if one.dtype.scalar != tl.bfloat16:
            return binary(self, one, other, operation)
        result = operation(_to_float(one.data), _to_float(other.data))
        return handle(result if result.dtype == np.bool_ else _to_bits(result), tl.bfloat16)

    def rounded(self: Any, one: Any, to: Any) -> Any:
        """Else it cuts the last bits off, where a GPU rounds."""
        if (one.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
            return handle(_to_bits(one.data), tl.bfloat16)
        return cast(self, one, to)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(builder, "binary_op", with_bf16)
    monkeypatch.setattr(builder, "cast_impl", rounded)
    names = {"rms_norm": {"rsqrt": _rsqrt}, "geglu": {"tanh": _tanh}}
    for module, functions in names.items():
        for name, function in functions.items():
            kernels = importlib.import_module(f"liger_kernel.ops.{module}")
            monkeypatch.setattr(kernels, name, function)


def _to_float(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bits(numbers: Any) -> Any:
    """To the nearest, to even ones between two."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _rsqrt(x: Any) -> Any:
    from triton import language as tl

    return tl.rsqrt(x)


def _tanh(x: Any) -> Any:
    from triton import language as tl

    return 2 * tl.sigmoid(2 * x) - 1
