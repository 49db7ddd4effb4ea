"""glibc's heap: whether memory that a step frees stays with the process for the next one.

glibc hands tensors of 32 MiB and more, and what is free at the end of its heap, back to the system,
which clears them page by page when the next step takes them again. See mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

# glibc's names for what mallopt sets, and the values that its own adjusting ends at (malloc.c).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
LARGEST, TRIMMED_BEYOND, MMAPS = 32 << 20, 64 << 20, 65536
NEVER_TRIMMED = -1
# Other allocators, which take glibc's place where they are loaded.
OTHERS = ("jemalloc", "tcmalloc", "mimalloc")

# A bit of the word before an address that malloc gave: this memory is mapped for it alone.
IS_MAPPED = 2
# No more than 128 GiB of addresses are hidden, also where the system maps no memory any more.
MOST_HIDDEN = 4096

# glibc itself can't be asked. Whether addresses that were kept are free; those that are `hidden`.
_is_kept, _has_kept = False, False
_hidden: list[int] = []


@cache
def library() -> ctypes.CDLL | None:
    """Return glibc, if its own defaults are in force; None on other systems."""
    if platform.libc_ver()[0] != "glibc" or platform.system() != "Linux":
        return None
    names = [name for name in os.environ if name.startswith("MALLOC_")]
    if names or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    if any(name in loaded for name in OTHERS):
        return None
    glibc = ctypes.CDLL(None)
    glibc.malloc.restype, glibc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    glibc.free.argtypes, glibc.free.restype = [ctypes.c_void_p], None
    return glibc


@cache
def settle() -> None:
    """Bring glibc's thresholds to where they stay, as any process does that frees 32 MiB at once.

    Else a step would be measured as slow as in a process that has just begun, or as quick as in an
    old one, by chance. It takes no memory: none is written to.
    """
    if (glibc := library()) is not None:
        glibc.free(glibc.malloc(LARGEST - (1 << 16)))


def is_kept() -> bool:
    """Return whether freed memory stays with the process."""
    return _is_kept


def keep(on: bool) -> None:
    """Let freed memory stay; off, glibc does as before with what is freed from now on.

    Raises AttributeError where there is no glibc.
    """
    global _is_kept, _has_kept
    settle()
    glibc = library()
    if glibc is None:
        raise AttributeError("mallopt")
    glibc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIMMED if on else TRIMMED_BEYOND)
    glibc.mallopt(M_MMAP_MAX, 0 if on else MMAPS)
    while on and _hidden:
        glibc.free(_hidden.pop())
    _is_kept, _has_kept = on, _has_kept or on


@contextmanager
def kept() -> Iterator[None]:
    """Let freed memory stay for the block, where glibc can."""
    before = _is_kept
    with suppress(AttributeError):
        keep(True)
    try:
        yield
    finally:
        with suppress(AttributeError):
            keep(before)


def give_back() -> None:
    """Hand back to the system what is free, unless it is to stay or none was kept."""
    global _has_kept
    if (_has_kept or _hidden) and not _is_kept and (glibc := library()) is not None:
        while _hidden:
            glibc.free(_hidden.pop())
        glibc.malloc_trim(0)
        _has_kept = True  # the memory is gone, its addresses are free


def hide() -> None:
    """Do so until memory is kept again, as in a process that never kept any: there large tensors
    are mapped each time, but would find addresses here that are free in the heap.
    """
    global _has_kept
    if _has_kept and not _is_kept and (glibc := library()) is not None:
        give_back()
        while (block := glibc.malloc(LARGEST)) and not _is_mapped(block):
            _hidden.append(block)
            if len(_hidden) == MOST_HIDDEN:
                break
        else:
            glibc.free(block)
        _has_kept = False


def _is_mapped(block: int) -> bool:
    before = block - ctypes.sizeof(ctypes.c_size_t)
    return bool(ctypes.c_size_t.from_address(before).value & IS_MAPPED)


def fresh_bytes() -> int:
    """Return how much memory this process has got page by page so far; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()
