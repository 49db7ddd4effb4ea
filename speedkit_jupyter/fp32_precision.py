"""torch's float32 precision switches, read and written exactly.

torch has two APIs for one thing: the old one (`set_float32_matmul_precision`,
`cudnn.allow_tf32`) and the new one (`fp32_precision` per backend and operation). Mixing them
makes torch's own readers raise RuntimeError, and the new getters answer with *inherited* values:
writing those back would cut the inheritance. So each operation's own value is found by probing,
and the old settings, where they can't be read, by trying what makes them readable again.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ROOT = ("generic", "all")
BACKENDS = ("cuda", "mkldnn")
OPERATIONS = ("matmul", "conv", "rnn")
PRECISIONS = {"cuda": ("none", "ieee", "tf32"), "mkldnn": ("none", "ieee", "tf32", "bf16")}

MATMUL_PRECISION = "float32_matmul_precision"
CUDNN_TF32 = "cudnn.allow_tf32"
MKLDNN_TF32 = "mkldnn.allow_tf32"
LEGACY = (MATMUL_PRECISION, CUDNN_TF32, MKLDNN_TF32)


def name_of(backend: str, operation: str) -> str:
    """The switch's name, as in `torch.backends`: `cuda.matmul.fp32_precision`."""
    parts = [part for part in (backend, operation) if part not in ROOT]
    return ".".join([*parts, "fp32_precision"])


KEYS = (ROOT, *((b, o) for b in BACKENDS for o in ("all", *OPERATIONS)))
NAMES = (*LEGACY, *(name_of(*key) for key in KEYS))


def read() -> dict[str, Any]:
    """Every fp32 switch's own value, by name; leaves torch as it was."""
    with _preserved_new_settings() as own:
        legacy = {
            MATMUL_PRECISION: _readable(_matmul_precision, ("cuda", "mkldnn"), ("matmul",)),
            CUDNN_TF32: _readable(_cudnn_tf32, ("cuda",), ("conv", "rnn")),
            MKLDNN_TF32: _mkldnn_tf32(),
        }
    return legacy | {name_of(*key): value for key, value in own.items()}


def write(values: Mapping[str, Any]) -> None:
    """Make every switch what `read` gave; `values` holds all of NAMES."""
    import torch

    # The old setters write the new settings too, so they come first.
    torch.set_float32_matmul_precision(values[MATMUL_PRECISION])
    torch._C._set_cudnn_allow_tf32(values[CUDNN_TF32])
    if values[MKLDNN_TF32] is not None and values[MKLDNN_TF32] != _mkldnn_tf32():
        torch._C._set_onednn_allow_tf32(values[MKLDNN_TF32])
    for key in KEYS:
        _set(key, values[name_of(*key)])


def is_mixed() -> bool:
    """Whether the two APIs disagree, so that torch's own readers raise RuntimeError."""
    import torch

    try:
        torch.get_float32_matmul_precision()
        torch._C._get_cublas_allow_tf32()
        torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        return True
    return False


def repair() -> bool:
    """Make both APIs agree on what is in force for CUDA, so that reading works again.

    Returns whether anything was wrong. TF32 stays on where it was on.
    """
    import torch

    if not is_mixed():
        return False
    matmul, conv = _get(("cuda", "matmul")), _get(("cuda", "conv"))
    oneDNN = _get(("mkldnn", "matmul"))
    for key in KEYS:
        _set(key, "none")
    high = "medium" if oneDNN == "bf16" else "high"
    torch.set_float32_matmul_precision(high if matmul == "tf32" else "highest")
    torch._C._set_cudnn_allow_tf32(conv == "tf32")
    return True


def _get(key: tuple[str, str]) -> str:
    import torch

    return torch._C._get_fp32_precision_getter(*key)


def _set(key: tuple[str, str], value: str) -> None:
    import torch

    torch._C._set_fp32_precision_setter(*key, value)


@contextmanager
def _preserved_new_settings() -> Iterator[dict[tuple[str, str], str]]:
    """Yields each operation's own value and writes all of them back at the end."""
    own = {ROOT: _get(ROOT)}
    for backend in BACKENDS:
        own[backend, "all"] = _own((backend, "all"), ROOT)
        # A child is probed through its backend's value, whose own is known by now.
        for operation in OPERATIONS:
            own[backend, operation] = _own((backend, operation), (backend, "all"))
            _set((backend, "all"), own[backend, "all"])
        _set(ROOT, own[ROOT])
    try:
        yield own
    finally:
        for key, value in own.items():
            _set(key, value)


def _own(key: tuple[str, str], parent: tuple[str, str]) -> str:
    """`none` where `key` follows its parent through two different values; the caller undoes."""
    seen = []
    for probe in ("ieee", "tf32"):
        _set(parent, probe)
        seen.append(_get(key))
    return "none" if seen == ["ieee", "tf32"] else seen[0]


def _readable(
    reader: Callable[[], Any], backends: tuple[str, ...], operations: tuple[str, ...]
) -> Any:
    """What `reader` gives once the new settings agree with the old one that it reads."""
    keys = [(b, o) for b in backends for o in operations]
    try:
        return reader()
    except RuntimeError:
        for values in itertools.product(*(PRECISIONS[b] for b, _ in keys)):
            for key, value in zip(keys, values, strict=True):
                _set(key, value)
            try:
                return reader()
            except RuntimeError:
                continue
        raise


def _matmul_precision() -> str:
    import torch

    precision = torch.get_float32_matmul_precision()
    torch._C._get_cublas_allow_tf32()  # raises where the two disagree, though the first did not
    return precision


def _cudnn_tf32() -> bool:
    import torch

    return torch._C._get_cudnn_allow_tf32()


def _mkldnn_tf32() -> bool | None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "available for Intel GPUs" on every other build
        return torch._C._get_onednn_allow_tf32()
