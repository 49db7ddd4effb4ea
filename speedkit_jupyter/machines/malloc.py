"""The thresholds of glibc's malloc: when memory is asked of the system, and when it is given back.

glibc raises both by itself with what is freed, up to `OWN`, and can't be asked where they are. Who
sets them ends that for the process. So what goes back is the most that glibc would raise them to:
its documented defaults (128 KiB) had a transformer's training step fault in 30,000 pages, where
glibc by itself has 4,000 and `OWN` none.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NamedTuple

from speedkit_jupyter.support.exceptions import SpeedKitError

NAME = "malloc.thresholds"
GLIBC, RAISED, ENVIRONMENT = "glibc", "raised", "environment"
# Of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_",
)  # fmt: skip


class Thresholds(NamedTuple):
    """Blocks of `mmap_bytes` and more come from the system one by one; `trim_bytes` that are free
    at the heap's end go back to it.
    """

    mmap_bytes: int
    trim_bytes: int


OWN = Thresholds(32 << 20, 64 << 20)
# No more than 32 MiB can be set for blocks; at most 1 GiB stays with the process.
LARGE = Thresholds(32 << 20, 1 << 30)

# State at module level, on purpose: malloc belongs to the whole process, and doesn't say.
_now: list[str] = []


def thresholds() -> str:
    """Whose are in force: `glibc` (its own), `raised`, or those of the `environment`."""
    if _now:
        return _now[-1]
    is_set = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    is_set = is_set or any(name in os.environ for name in VARIABLES)
    return ENVIRONMENT if is_set else GLIBC


def use(name: str) -> None:
    """Raise them, or put back what glibc may have by itself. Raises SpeedKitError where malloc is
    not glibc's.
    """
    if name not in (GLIBC, RAISED) or name == thresholds():
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    wanted = LARGE if name == RAISED else OWN
    if set_option is None or not (
        set_option(M_MMAP_THRESHOLD, wanted.mmap_bytes)
        and set_option(M_TRIM_THRESHOLD, wanted.trim_bytes)
    ):
        raise SpeedKitError("allocator: thresholds can't be set here: malloc is not glibc's")
    _now[:] = [name]
