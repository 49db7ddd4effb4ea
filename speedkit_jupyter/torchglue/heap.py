"""Control glibc's heap, so that the next step can reuse memory that a step has freed.

After `settle`, glibc returns freed blocks of about 32 MiB and more to the system, and free memory
above about 64 MiB at the heap's top. The next step then needs new, zeroed pages. See mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# From malloc.c: mallopt's parameters, the maximum dynamic thresholds, M_MMAP_MAX's default.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
LARGEST, TRIMMED_BEYOND, MMAPS = 32 << 20, 64 << 20, 65536
NEVER_TRIMMED = -1
# Bit of malloc's size word: the block has its own memory mapping.
IS_MAPPED = 2
# Maximum number of 32 MiB blocks to occupy (128 GiB), in case the system refuses new mappings.
MOST_BLOCKS = 4096

# State that glibc can't report: whether freed memory is kept now, whether an earlier `keep` may
# have left free addresses in the heap, and the blocks that occupy such addresses.
_is_kept, _has_kept = False, False
_occupied: list[int] = []


@cache
def library() -> ctypes.CDLL | None:
    """Return glibc if this process allocates with glibc's malloc and its defaults; else None."""
    if platform.libc_ver()[0] != "glibc" or platform.system() != "Linux":
        return None
    chosen = [name for name in os.environ if name.startswith("MALLOC_")]
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    if any(name in loaded for name in ("jemalloc", "tcmalloc", "mimalloc")):
        return None
    glibc = ctypes.CDLL(None)
    glibc.malloc.restype, glibc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    glibc.free.argtypes, glibc.free.restype = [ctypes.c_void_p], None
    return glibc


@cache
def settle() -> None:
    """Raise glibc's dynamic thresholds to almost their maxima, by freeing almost 32 MiB."""
    if (glibc := library()) is not None:
        glibc.free(glibc.malloc(LARGEST - (1 << 16)))


def is_kept() -> bool:
    """Return whether freed memory stays with the process."""
    return _is_kept


def keep(on: bool) -> None:
    """Start (`on`) or stop keeping freed memory in the process; no effect without `library()`."""
    global _is_kept, _has_kept
    settle()
    if (glibc := library()) is None:
        return
    glibc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIMMED if on else TRIMMED_BEYOND)
    glibc.mallopt(M_MMAP_MAX, 0 if on else MMAPS)
    while on and _occupied:
        glibc.free(_occupied.pop())
    _is_kept, _has_kept = on, _has_kept or on


@contextmanager
def kept() -> Iterator[None]:
    """Keep freed memory in the process within the block; no effect if `library()` is None."""
    before = _is_kept
    keep(True)
    try:
        yield
    finally:
        keep(before)


def give_back() -> None:
    """Return free memory to the system, unless memory is kept now or was never kept."""
    global _has_kept
    if (_has_kept or _occupied) and not _is_kept and (glibc := library()) is not None:
        while _occupied:
            glibc.free(_occupied.pop())
        glibc.malloc_trim(0)
        _has_kept = True  # the memory is returned, but the heap has free address ranges


def occupy_free_addresses() -> None:
    """Occupy free heap addresses, unless memory is kept, so large tensors get new mappings."""
    global _has_kept
    if _has_kept and not _is_kept and (glibc := library()) is not None:
        give_back()
        for _ in range(MOST_BLOCKS):
            block = glibc.malloc(LARGEST)
            if not block or _is_mapped(block):
                glibc.free(block)
                break
            _occupied.append(block)
        _has_kept = False


def _is_mapped(block: int) -> bool:
    before = block - ctypes.sizeof(ctypes.c_size_t)
    return bool(ctypes.c_size_t.from_address(before).value & IS_MAPPED)


def fresh_bytes() -> int:
    """Return the bytes of pages that minor page faults have mapped so far; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()
