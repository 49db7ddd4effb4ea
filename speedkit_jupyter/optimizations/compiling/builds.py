"""What a killed C++ compiler leaves behind in Inductor's caches, and how that is mended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def is_compiler_error(error: BaseException) -> bool:
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    return isinstance(error, TorchDynamoException | CppCompileError)


def was_interrupted(error: BaseException | None) -> bool:
    """Whether the compiler died of Ctrl-C: Jupyter signals the whole process group."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        if getattr(error, "returncode", 0) in (-2, 130):
            return True
        error = error.__cause__ or error.__context__
    return False


def forget_broken_builds(since: float | None = None) -> None:
    """Inductor remembers a build that was killed as failed for the life of the process.

    What was begun `since` then (seconds of the epoch) and never finished may be half a library,
    and is deleted: Inductor takes any file of that name for a finished one, also later on.
    """
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for cache in (CppCodeCache, CppPythonBindingsCodeCache):
        cache.cache_clear()
    # A killed probe of the vector instructions is remembered as "there are none".
    for holder in (cpu_vec_isa, cpu_vec_isa.VecISA):
        for remembered in list(vars(holder).values()):
            if hasattr(remembered, "cache_clear"):
                remembered.cache_clear()
    if since is not None:
        for library in _unfinished(Path(cache_dir()), since):
            library.unlink(missing_ok=True)


def _unfinished(cache: Path, since: float) -> Iterator[Path]:
    """The libraries that were begun and that nobody is building any more.

    Other processes use the cache too: who builds a library holds its lock, and leaves a scratch
    folder beside it that only a finished build takes away.
    """
    from filelock import FileLock, Timeout  # torch's own dependency
    from torch._inductor import cpp_builder
    from torch._inductor.codecache import get_lock_dir

    scratch = getattr(cpp_builder, "_BUILD_TEMP_DIR", None)
    for folder in cache.rglob(f"*_{scratch}") if scratch else ():
        name = folder.name.removesuffix(f"_{scratch}")
        library = folder.with_name(f"{name}.so")
        with suppress(OSError, Timeout):
            if library.stat().st_mtime < since - 1:
                continue
            lock = Path(get_lock_dir()) / f"{name.partition('.')[0]}.lock"
            with FileLock(str(lock), timeout=0):
                yield library


def removed_half_written_build(error: BaseException) -> bool:
    """Delete the library that a killed linker left half written, so that it is built anew.

    Inductor takes any file of that name for a finished one, also in later processes.
    """
    match = re.search(
        r"(\S+\.so): (file too short|invalid ELF header|file is truncated)", str(error)
    )
    if match is None or not Path(match[1]).is_file():
        return False
    Path(match[1]).unlink()
    forget_broken_builds()
    return True
