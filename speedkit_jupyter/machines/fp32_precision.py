"""torch's float32 precision switches: their values in force, and how to restore them.

torch has an old API (`set_float32_matmul_precision`, `cudnn.allow_tf32`) and a new one
(`fp32_precision` per backend and operation). Once both are used, torch's readers of the old one
raise RuntimeError. The new ones answer with inherited values: `restore` writes `none`, which
follows the parent, wherever that is enough.

A fresh torch (since 2.13 at the latest) has one more value for CUDA's conv and rnn, which no
setter can write: TF32 unless a parent says otherwise. So `restore` writes only differing values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from speedkit_jupyter.torchglue import interrupts

MATMUL_PRECISION = "float32_matmul_precision"
CUDNN_TF32 = "cudnn.allow_tf32"
MKLDNN_TF32 = "mkldnn.allow_tf32"
# Parents first: inherited values depend on them.
NEW = (
    "fp32_precision",
    "cuda.fp32_precision",
    "cuda.matmul.fp32_precision",
    "cuda.conv.fp32_precision",
    "cuda.rnn.fp32_precision",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)
NAMES = (MATMUL_PRECISION, CUDNN_TF32, MKLDNN_TF32, *NEW)


def read() -> dict[str, Any]:
    """Return every fp32 switch as it is in force, by name; writes nothing.

    Where torch can't read the old settings, they follow from which of its readers raise. cuDNN's is
    None where its operations disagree.
    """
    import torch

    new = {name: owner.fp32_precision for name, owner in _owners().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "deprecated", and "available for Intel GPUs"
        old = {
            MATMUL_PRECISION: _matmul_precision(new),
            CUDNN_TF32: _cudnn_tf32(new),
            MKLDNN_TF32: torch.backends.mkldnn.set_flags(_fp32_precision=None)[2],
        }
    return old | new


def restore(values: Mapping[str, Any]) -> None:
    """Write the values that `read` returned. Names that `values` lacks stay as they are."""
    import torch

    onednn = torch.backends.mkldnn
    with interrupts.held_back():
        now = read()
        wanted = now | dict(values)
        # The old settings write the new ones too: they come first, and only where they differ.
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
                if owner is onednn:  # its attribute writes the one of torch.backends
                    onednn.set_flags(_fp32_precision=value)
                else:
                    owner.fp32_precision = value


def _owners() -> dict[str, Any]:
    """Return the object that has each of NEW as its attribute `fp32_precision`."""
    import torch

    root: Any = torch.backends
    cuda = (root.cudnn, root.cuda.matmul, root.cudnn.conv, root.cudnn.rnn)
    onednn = (root.mkldnn, root.mkldnn.matmul, root.mkldnn.conv, root.mkldnn.rnn)
    return dict(zip(NEW, (root, *cuda, *onednn), strict=True))


def _matmul_precision(new: Mapping[str, str]) -> str:
    import torch

    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    agrees = False
    with suppress(RuntimeError):  # torch compares the old setting with the new
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
