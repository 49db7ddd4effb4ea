"""Read and restore torch's float32 precision flags.

torch has an old API (`set_float32_matmul_precision`, `cudnn.allow_tf32`) and a new API
(`fp32_precision` per backend and operation). After code has used both, reading the old API may
raise RuntimeError. The new API returns inherited values, so `restore` writes only values that
differ, and prefers `none` (inherit). No setter restores the initial state of CUDA's conv and rnn:
TF32, unless a parent setting has another precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

from speedkit_jupyter.torchglue import interrupts

MATMUL_PRECISION = "float32_matmul_precision"
CUDNN_TF32 = "cudnn.allow_tf32"
MKLDNN_TF32 = "mkldnn.allow_tf32"
# The settings of the new API, and their owners. Parents come first, because others inherit them.
NEW = {
    "fp32_precision": "backends",
    "cuda.fp32_precision": "backends.cudnn",
    "cuda.matmul.fp32_precision": "backends.cuda.matmul",
    "cuda.conv.fp32_precision": "backends.cudnn.conv",
    "cuda.rnn.fp32_precision": "backends.cudnn.rnn",
    "mkldnn.fp32_precision": "backends.mkldnn",
    "mkldnn.matmul.fp32_precision": "backends.mkldnn.matmul",
    "mkldnn.conv.fp32_precision": "backends.mkldnn.conv",
    "mkldnn.rnn.fp32_precision": "backends.mkldnn.rnn",
}
NAMES = (MATMUL_PRECISION, CUDNN_TF32, MKLDNN_TF32, *NEW)


def read() -> dict[str, Any]:
    """Return the current value of every fp32 flag, by name. No flag is written.

    Infer old settings that torch can't read; `cudnn.allow_tf32` is None if conv and rnn differ.
    """
    import torch

    new = {name: owner.fp32_precision for name, owner in _owners().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about deprecation, or about Intel GPUs
        old = {
            MATMUL_PRECISION: _matmul_precision(new),
            CUDNN_TF32: _cudnn_tf32(new),
            MKLDNN_TF32: torch.backends.mkldnn.set_flags(_fp32_precision=None)[2],
        }
    return old | new


def restore(values: Mapping[str, Any]) -> None:
    """Write values from `read`. Flags missing from `values` are left unchanged."""
    import torch

    onednn = torch.backends.mkldnn
    with interrupts.interrupts_delayed():
        now = read()
        wanted = now | dict(values)
        # Writing an old setting also writes new settings, so changed old settings come first.
        changed = {name for name in NAMES if wanted[name] != now[name]}
        if MATMUL_PRECISION in changed:
            torch.set_float32_matmul_precision(wanted[MATMUL_PRECISION])
        if CUDNN_TF32 in changed and wanted[CUDNN_TF32] is not None:
            torch.backends.cudnn.allow_tf32 = wanted[CUDNN_TF32]
        if MKLDNN_TF32 in changed and wanted[MKLDNN_TF32] is not None:
            onednn.set_flags(_allow_tf32=wanted[MKLDNN_TF32], _fp32_precision=None)
        for name, owner in _owners().items():
            for value in ("none", wanted[name]):
                if owner.fp32_precision == wanted[name]:
                    break
                if owner is onednn:  # its attribute sets `torch.backends.fp32_precision`
                    onednn.set_flags(_fp32_precision=value)
                else:
                    owner.fp32_precision = value


def _owners() -> dict[str, Any]:
    import torch

    return {name: attrgetter(owner)(torch) for name, owner in NEW.items()}


def _matmul_precision(new: Mapping[str, str]) -> str:
    import torch

    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    agrees = False
    with suppress(RuntimeError):  # torch raises if the old and new settings disagree
        torch.backends.cuda.matmul.allow_tf32  # noqa: B018
        agrees = True
    if (new["cuda.matmul.fp32_precision"] == "tf32") is agrees:
        return "high" if new["mkldnn.matmul.fp32_precision"] == "bf16" else "medium"
    return "highest"


def _cudnn_tf32(new: Mapping[str, str]) -> bool | None:
    import torch

    with suppress(RuntimeError):
        return torch.backends.cudnn.allow_tf32
    conv, rnn = (new[f"cuda.{operation}.fp32_precision"] == "tf32" for operation in ("conv", "rnn"))
    return not conv if conv is rnn else None
