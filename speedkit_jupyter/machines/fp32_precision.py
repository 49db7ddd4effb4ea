"""torch's float32 precision switches, read and written exactly.

torch has two APIs for one thing: the old one (`set_float32_matmul_precision`,
`cudnn.allow_tf32`) and the new one (`fp32_precision` per backend and operation). Mixing them
makes torch's own readers raise RuntimeError, and the new getters answer with *inherited* values:
writing those back would cut the inheritance. So `own` finds each operation's own value by
probing, and the old settings, where they can't be read, by trying what makes them readable again.
Probing writes, for a moment that other threads may see: only what changes these settings anyway
may ask for it. `read` is for everybody else: it writes nothing, and shows what is in force.

A fresh torch (since 2.13 at the latest) has one more value for CUDA's conv and rnn, which no
setter can write: TF32 unless a parent says otherwise. So nothing is written that is so already.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from speedkit_jupyter.support import interrupts
from speedkit_jupyter.support.torch_private import (
    allow_tf32,
    allows_tf32,
    fp32_precision,
    set_fp32_precision,
)

ROOT = ("generic", "all")
BACKENDS = ("cuda", "mkldnn")
OPERATIONS = ("matmul", "conv", "rnn")
PRECISIONS = {"cuda": ("none", "ieee", "tf32"), "mkldnn": ("none", "ieee", "tf32", "bf16")}

MATMUL_PRECISION = "float32_matmul_precision"
CUDNN_TF32 = "cudnn.allow_tf32"
MKLDNN_TF32 = "mkldnn.allow_tf32"
LEGACY = (MATMUL_PRECISION, CUDNN_TF32, MKLDNN_TF32)


def name_of(backend: str, operation: str) -> str:
    """Return the switch's name, as in `torch.backends`: `cuda.matmul.fp32_precision`."""
    parts = [part for part in (backend, operation) if part not in ROOT]
    return ".".join([*parts, "fp32_precision"])


KEYS = (ROOT, *((b, o) for b in BACKENDS for o in ("all", *OPERATIONS)))
NAMES = (*LEGACY, *(name_of(*key) for key in KEYS))


def read() -> dict[str, Any]:
    """Return every fp32 switch as it is in force, by name; writes nothing.

    The old settings, where torch can't read them, follow from which of its readers raise; None
    for cuDNN's where its operations disagree, since then nothing tells.
    """
    said = {key: fp32_precision(*key) for key in KEYS}
    legacy = {
        MATMUL_PRECISION: _told_matmul_precision(said),
        CUDNN_TF32: _told_cudnn_tf32(said),
        MKLDNN_TF32: _mkldnn_tf32(),
    }
    return legacy | {name_of(*key): value for key, value in said.items()}


def restore(values: Mapping[str, Any]) -> None:
    """Bring in force what `read` gave; `values` holds all of NAMES.

    What differs follows its parent wherever that is enough.
    """
    with interrupts.held_back():
        _write_legacy(read(), values)
        for key in KEYS:
            for value in ("none", values[name_of(*key)]):
                if fp32_precision(*key) != values[name_of(*key)]:
                    set_fp32_precision(*key, value)


def own() -> dict[str, Any]:
    """Return every fp32 switch's own value, by name, found by probing; leaves torch as it was."""
    with interrupts.held_back():
        values = _own_values()
        try:
            legacy = {
                MATMUL_PRECISION: _readable_matmul_precision(),
                CUDNN_TF32: _readable_cudnn_tf32(),
                MKLDNN_TF32: _mkldnn_tf32(),
            }
        finally:
            _write_own(values)
    return legacy | {name_of(*key): value for key, value in values.items()}


def write(values: Mapping[str, Any]) -> None:
    """Make every switch what `own` gave; `values` holds all of NAMES."""
    with interrupts.held_back():
        _write_legacy(own(), values)
        _write_own({key: values[name_of(*key)] for key in KEYS})


def _write_legacy(now: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write the old settings. They write the new ones too: so first, and only where needed."""
    import torch

    if now[MATMUL_PRECISION] != values[MATMUL_PRECISION]:
        torch.set_float32_matmul_precision(values[MATMUL_PRECISION])
    for name, library in ((CUDNN_TF32, "cudnn"), (MKLDNN_TF32, "onednn")):
        if values[name] is not None and now[name] != values[name]:
            allow_tf32(library, values[name])


def _told_matmul_precision(said: Mapping[tuple[str, str], str]) -> str:
    """Return what it must be: torch compares it with the new settings, so what raises tells."""
    import torch

    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    lower = (said["cuda", "matmul"] == "tf32") is not _raises(partial(allows_tf32, "cublas"))
    if not lower:
        return "highest"
    return "high" if said["mkldnn", "matmul"] == "bf16" else "medium"


def _told_cudnn_tf32(said: Mapping[tuple[str, str], str]) -> bool | None:
    with suppress(RuntimeError):
        return _cudnn_tf32()
    conv, rnn = (said["cuda", operation] == "tf32" for operation in ("conv", "rnn"))
    return not conv if conv is rnn else None


def _raises(reader: Callable[[], Any]) -> bool:
    try:
        reader()
    except RuntimeError:
        return True
    return False


def _own_values() -> dict[tuple[str, str], str]:
    """Return each operation's own value, `none` where it follows its parent.

    The value that can't be written is given as what it means at present.
    """
    own = {ROOT: fp32_precision(*ROOT)}
    for backend in BACKENDS:
        own[backend, "all"] = _own((backend, "all"), ROOT)
        set_fp32_precision(*ROOT, own[ROOT])
        for operation in OPERATIONS:
            own[backend, operation] = _own((backend, operation), (backend, "all"))
            # A child is probed through its backend's value, whose own is known by now.
            set_fp32_precision(backend, "all", own[backend, "all"])
            if own[backend, operation] == own[backend, "all"] == own[ROOT] == "none":
                own[backend, operation] = fp32_precision(backend, operation)
    return own


def _own(key: tuple[str, str], parent: tuple[str, str]) -> str:
    """Return `none` where `key` follows its parent through two values; the caller undoes these."""
    values = []
    for probe in ("ieee", "tf32"):
        set_fp32_precision(*parent, probe)
        values.append(fp32_precision(*key))
    return "none" if values == ["ieee", "tf32"] else values[0]


def _write_own(values: Mapping[tuple[str, str], str]) -> None:
    """Write parents first, as what is left alone depends on them; only what differs is written."""
    for key in (ROOT, *((backend, "all") for backend in BACKENDS)):
        set_fp32_precision(*key, values[key])
    for key, value in _own_values().items():
        if value != values[key]:
            set_fp32_precision(*key, values[key])


def _readable_matmul_precision() -> str:
    """Return the old setting, read once the new ones agree with it; the caller puts those back."""
    keys = [("cuda", "matmul"), ("mkldnn", "matmul")]
    tries: Iterable[tuple[str, ...]] = itertools.product(*(PRECISIONS[b] for b, _ in keys))
    try:
        return _matmul_precision()
    except RuntimeError:
        for values in tries:
            for key, value in zip(keys, values, strict=True):
                set_fp32_precision(*key, value)
            with suppress(RuntimeError):
                return _matmul_precision()
        raise


def _matmul_precision() -> str:
    import torch

    precision = torch.get_float32_matmul_precision()
    allows_tf32("cublas")  # raises where the two disagree, though the first did not
    return precision


def _readable_cudnn_tf32() -> bool:
    """Return the old setting: it is True exactly if it can be read while conv and rnn are tf32."""
    if not _raises(_cudnn_tf32):
        return _cudnn_tf32()
    set_fp32_precision("cuda", "all", "tf32")
    for key in (("cuda", "conv"), ("cuda", "rnn")):
        if fp32_precision(*key) != "tf32":
            set_fp32_precision(*key, "tf32")
    return not _raises(_cudnn_tf32)


def _cudnn_tf32() -> bool:
    return allows_tf32("cudnn")


def _mkldnn_tf32() -> bool | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "available for Intel GPUs" on every other build
        return allows_tf32("onednn")
