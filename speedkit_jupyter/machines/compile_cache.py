"""Keep compiled code in a folder between sessions, and build C++ kernels faster.

Compiled code runs as soon as it is loaded, so a folder that other users can write to is not used.
Each combination of hardware, torch and Python has its own folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from speedkit_jupyter.machines.flags import Flag, Values, attribute
from speedkit_jupyter.machines.hardware import Hardware, cxx_compiler, instruction_sets
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import inductor as torch_private

# The first `prepare` of a process deletes all compiled code if it is larger (a model: a few MiB).
MOST_CACHE_BYTES = 2 * 2**30
NAME = "speedkit-compiled"
# Subfolder for torch's cache in each machine's folder. This module deletes only such subfolders.
COMPILED = "inductor"
# Environment variable with torch's cache folder, which also contains Triton's kernels.
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# torch's flag to skip its test that the C++ compiler supports the CPU's vector instructions.
INSTRUCTIONS = "inductor.cpp.vec_isa_ok"
# torch's flag to precompile its C++ headers before the first kernel.
HEADERS = "inductor.cpp_cache_precompile_headers"
# SpeedKit's flag to build up to MOST C++ kernels of a graph in one run of the compiler.
JOINED = "inductor.async_compile.AsyncCompile"


def root() -> Path:
    """Return the folder with compiled code of all machines; it may not exist. Raises SpeedKitError.

    The folder is in the data folder, or in the cache folder if `is_plain` refuses the data folder.
    """
    import platformdirs

    try:
        data = database.folder().resolve()
    except (OSError, RuntimeError) as error:  # circular links
        raise SpeedKitError(str(error)) from None
    return (data if is_plain(data) else platformdirs.user_cache_path("speedkit")) / NAME


def is_plain(path: Path) -> bool:
    """Return whether a path is printable and remains one word when torch splits a command."""
    with suppress(ValueError):  # an unpaired quote
        return shlex.split(path.as_posix()) == [path.as_posix()] and str(path).isprintable()
    return False


def place() -> Path:
    """Return this machine's folder of compiled code; it may not exist. Raises SpeedKitError."""
    return root() / _machine()


@cache
def _machine() -> str:
    """Return a digest of system, hardware, torch and Python, which compiled code depends on."""
    import torch

    found = Hardware.detect()
    gpus = [(one.name, one.capability, one.rocm) for one in found.accelerators]
    # The compiler builds for all of a CPU's instructions, which differ between virtual machines of
    # one CPU model. ATEN_CPU_CAPABILITY limits them; keys of torch's graph cache omit this limit.
    allowed = torch.backends.cpu.get_cpu_capability()
    cpu = (found.cpu.architecture, found.cpu.name, instruction_sets(), allowed)
    parts = (found.torch, sys.version_info[:2], found.system, cpu, gpus)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def trusted() -> Path:
    """Return `place()` if others can't write there and code can run; else raise SpeedKitError."""
    folder = place()
    if not is_plain(folder):
        raise SpeedKitError(f"torch's C++ build can't take the path {folder}")
    for one in (folder.parent, folder):
        if not hasattr(os, "getuid") or not one.exists():  # Windows: a folder for each user
            continue
        found = one.stat()
        if found.st_uid != os.getuid():
            raise SpeedKitError(f"{one} belongs to another user")
        if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
            raise SpeedKitError(f"other users can write to {one}: run `chmod go-w` on it")
        if os.statvfs(one).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise SpeedKitError(f"programs can't be run from {one} (noexec)")
    return folder


def prepare() -> Path | None:
    """Limit the cache's size; create and return the folder. On errors, warn and return None."""
    try:
        folder = trusted()
        _bound_once(folder.parent)
        database.make(folder / COMPILED)
    except (SpeedKitError, OSError) as error:
        _warn_once(f"compiled code is neither saved nor loaded: {error}")
        return None
    return folder


# Each warning is shown once per process, because measurements apply plans often.
_warn_once = cache(messages.warn)


# --- torch's flags ---


def compiler_flags() -> dict[str, Flag]:
    """Return the flags for the cache folder and, if Inductor is loaded, for C++ builds."""
    table = {FOLDER: Flag(_chosen, _choose, (tempfile.gettempdir(),))}
    if (config := sys.modules.get(torch_private.INDUCTOR_CONFIG)) is not None:
        table[INSTRUCTIONS] = attribute(config.cpp, INSTRUCTIONS.rpartition(".")[2], True)
        table[HEADERS] = attribute(config, HEADERS.rpartition(".")[2], False)
    return table | _joining_flag()


def values(now: Values) -> dict[str, Any]:
    """Return flag values to set, without the folder if it is unusable or the user set another."""
    # Building all kernels of a graph in one run takes less time than precompiling the headers.
    wanted: dict[str, Any] = {}
    if JOINED in now and cxx_compiler():
        wanted |= {JOINED: True, HEADERS: False}
    if now.get(INSTRUCTIONS, False) in (None, True) and _knows_instructions(cxx_compiler()):
        wanted[INSTRUCTIONS] = True
    with suppress(SpeedKitError):  # `prepare` has warned
        compiled = str(trusted() / COMPILED)
        if os.access(compiled, os.W_OK) and now.get(FOLDER) in (None, compiled):
            wanted[FOLDER] = compiled
    return wanted


@cache
def _knows_instructions(cxx: str | None) -> bool:
    """Return whether the compiler supports the CPU's vector instructions; False except on Linux."""
    options = torch_private.instruction_options()
    if cxx is None or not options or sys.platform != "linux":
        return False
    command = [cxx, *options, "-fsyntax-only", "-x", "c++", os.devnull]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, timeout=5).returncode == 0
    return False


def _chosen() -> str | None:
    """Return the value of the variable FOLDER; None if unset or within torch's default folder."""
    value, usual = os.environ.get(FOLDER), torch_private.usual_cache_folder()
    is_torchs = value is not None and usual and Path(value).is_relative_to(usual)
    return None if is_torchs else value


def _choose(value: str | None) -> None:
    if value is None:
        os.environ.pop(FOLDER, None)
    else:
        os.environ[FOLDER] = value


# --- size ---


def _folders() -> list[Path]:
    return [one for one in root().glob(f"*/{COMPILED}") if not one.parent.is_symlink()]


def size_bytes() -> int:
    """Return the size of all machines' compiled code, in bytes. Raises SpeedKitError."""
    total = 0
    for where, _, names in (found for folder in _folders() for found in os.walk(folder)):
        for name in names:
            with suppress(OSError):  # another process has deleted it
                total += Path(where, name).lstat().st_size
    return total


def clear() -> int:
    """Delete the compiled code of all machines; return its size in bytes. Raises SpeedKitError."""
    total = size_bytes()
    for folder in _folders():
        shutil.rmtree(folder, ignore_errors=True)
    return total


@cache
def _bound_once(_: Path) -> None:
    if size_bytes() > MOST_CACHE_BYTES:
        clear()


# --- joined kernels ---

# torch runs the C++ compiler for each kernel of a graph, and each run spends 1.4 s on headers.
# A further kernel in a run takes 0.06 s (g++ 12, AVX-512). Kernels' code and flags stay the same.

# Maximum number of kernels per compiler run: 30 kernels take about as long as the headers.
MOST = 30
# A kernel's first line. Kernels with more headers can't be in a namespace: torch builds each alone.
HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Headers of a kernel's Python bindings.
BINDING_HEADERS = ("Python.h", "sstream", "cstdlib", "cerrno")


class KernelCode(str):
    """The C++ code of a kernel and its Python bindings, before the build."""


def joined(kernels: Iterable[str]) -> str:
    """Return the code of a library with a Python module per kernel: `kernel`, `kernel1`, etc."""
    parts = [HEADER, "#define PY_SSIZE_T_CLEAN", *(f"#include <{one}>" for one in BINDING_HEADERS)]
    for number, code in enumerate(kernels):
        code = code.replace(HEADER, "").replace('extern "C"', "")
        code = code.replace("PyInit_kernel", f"PyInit_kernel{number or ''}")
        parts.append(f"namespace kernel{number} {{\n{code}\n}}")
    return "\n".join(parts)


def build(kernels: Sequence[str]) -> Callable[[], list[Any]]:
    """Return a function that builds and loads kernels. Compile threads, if any, begin now."""
    load = torch_private.kernel_library(joined(kernels))

    def functions() -> list[Any]:
        first = load()
        others = (f"{first.__name__}{number}" for number in range(1, len(kernels)))
        return [first.kernel, *(_module(first.__file__, name).kernel for name in others)]

    return functions


def _module(library: str, name: str) -> Any:
    loader = ExtensionFileLoader(name, library)
    module = module_from_spec(ModuleSpec(name, loader, origin=library))
    loader.exec_module(module)
    return module


@cache
def _joining(usual: Any) -> Any:
    """Return a subclass of `AsyncCompile` that builds the C++ kernels of a graph together."""

    class Joining(usual):  # type: ignore[misc]
        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            if source_code.count("#include") == source_code.count(HEADER) == 1:
                return KernelCode(torch_private.with_bindings(argtypes, source_code))
            return super().cpp_pybinding(argtypes, source_code)

        def wait(self, scope: dict[str, Any]) -> None:
            names = [name for name, one in scope.items() if isinstance(one, KernelCode)]
            parts = [names[at : at + MOST] for at in range(0, len(names), MOST)]
            builds = [(part, build([scope[name] for name in part])) for part in parts]
            for part, functions in builds:
                scope.update(zip(part, functions(), strict=True))
            super().wait(scope)

    return Joining


def _joining_flag() -> dict[str, Flag]:
    """Return the flag for joint builds; empty unless on Linux with Inductor loaded."""
    module = torch_private.kernel_builder()
    if module is None or sys.platform != "linux":
        return {}
    usual = next(one for one in module.AsyncCompile.__mro__ if one.__module__ == module.__name__)

    def write(on: bool) -> None:
        module.AsyncCompile = _joining(usual) if on else usual

    return {JOINED: Flag(lambda: module.AsyncCompile is _joining(usual), write, (True,))}
