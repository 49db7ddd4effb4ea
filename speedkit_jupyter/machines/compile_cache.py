"""Keep compiled code in a folder between sessions, and build C++ kernels faster.

Compiled code runs as soon as it is loaded, so a folder that others can write to is not used. Each
combination of hardware, torch and Python has its own folder.
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

from speedkit_jupyter.machines import probes
from speedkit_jupyter.machines.flags import Switch, Values, attribute
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import inductor as torch_private

# Code beyond this size is deleted when a process begins to compile; a transformer takes a few MiB.
MOST_BYTES = 2 * 2**30
NAME = "speedkit-compiled"
# torch's own cache in a machine's folder. Nothing else is ever deleted.
COMPILED = "inductor"
# Environment variable by which torch finds the folder; its entries contain Triton's kernels.
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# Whether torch takes for granted that the C++ compiler knows the CPU's vector instructions.
INSTRUCTIONS = "inductor.cpp.vec_isa_ok"
# Whether torch compiles its C++ headers before the first kernel, for all later ones.
HEADERS = "inductor.cpp_cache_precompile_headers"
# Whether the C++ kernels of a graph are built in one run of the compiler.
JOINED = "inductor.async_compile.AsyncCompile"


def root() -> Path:
    """Return the folder of all machines, which may not exist yet. Raises SpeedKitError.

    It is in the data folder, or in the cache folder if torch's C++ build can't take that path.
    """
    import platformdirs

    try:
        data = database.folder().resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise SpeedKitError(str(error)) from None
    return (data if is_plain(data) else platformdirs.user_cache_path("speedkit")) / NAME


def is_plain(path: Path) -> bool:
    """Return whether torch can pass a path to the C++ compiler, in a command that it splits."""
    with suppress(ValueError):  # one quote
        return shlex.split(path.as_posix()) == [path.as_posix()] and str(path).isprintable()
    return False


def place() -> Path:
    """Return this machine's folder, which may not exist yet. Raises SpeedKitError."""
    return root() / _machine()


@cache
def _machine() -> str:
    """Return a digest of everything that running compiled code depends on."""
    found = Hardware.detect()
    gpus = [(one.name, one.capability, one.rocm) for one in found.accelerators]
    # The compiler builds for all instructions, and virtual machines of one name differ in them.
    cpu = (found.cpu.architecture, found.cpu.name, probes.instructions())
    parts = (found.torch, sys.version_info[:2], found.system, cpu, gpus)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def trusted() -> Path:
    """Return this machine's folder, which may not exist yet. Raises SpeedKitError if unusable."""
    folder = place()
    if not is_plain(folder):
        raise SpeedKitError(f"torch's C++ build can't take the path {folder}")
    for one in (folder.parent, folder):
        if not hasattr(os, "getuid") or not one.exists():  # Windows keeps users apart itself
            continue
        found = one.stat()
        if found.st_uid != os.getuid():
            raise SpeedKitError(f"{one} belongs to another user")
        if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
            raise SpeedKitError(f"others can write to {one}: `chmod go-w` makes it yours alone")
        if os.statvfs(one).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise SpeedKitError(f"programs can't be run from {one} (noexec)")
    return folder


def prepare() -> Path | None:
    """Return this machine's folder, made and bounded; None, with a warning, if it can't be used."""
    try:
        folder = trusted()
        _bound_once(folder.parent)
        database.make(folder / COMPILED)
    except (SpeedKitError, OSError) as error:
        _warn_once(f"compiled code is not kept, and none is loaded: {error}")
        return None
    return folder


# Once in a process: plans are applied often while they are measured.
_warn_once = cache(messages.warn)


# --- torch's switches ---


def switches() -> dict[str, Switch]:
    """Return the switches by which torch finds the folder and builds kernels."""
    table = {FOLDER: Switch(_chosen, _choose, (tempfile.gettempdir(),))}
    if (config := sys.modules.get(torch_private.INDUCTOR_CONFIG)) is not None:
        table[INSTRUCTIONS] = attribute(config.cpp, INSTRUCTIONS.rpartition(".")[2], True)
        table[HEADERS] = attribute(config, HEADERS.rpartition(".")[2], False)
    return table | _joining_switch()


def values(now: Values) -> dict[str, Any]:
    """Return the values of these switches for this machine's folder. The user's choice stays."""
    # One run of the compiler for all kernels of a graph takes less time than the headers do.
    wanted: dict[str, Any] = {}
    if JOINED in now and probes.cxx():
        wanted |= {JOINED: True, HEADERS: False}
    if now.get(INSTRUCTIONS, False) in (None, True) and _knows_instructions(probes.cxx()):
        wanted[INSTRUCTIONS] = True
    with suppress(SpeedKitError):  # `prepare` has warned
        compiled = str(trusted() / COMPILED)
        if os.access(compiled, os.W_OK) and now.get(FOLDER) in (None, compiled):
            wanted[FOLDER] = compiled
    return wanted


@cache
def _knows_instructions(cxx: str | None) -> bool:
    """Return whether the C++ compiler knows all of the CPU's vector instructions."""
    options = torch_private.instruction_options()
    if cxx is None or not options or sys.platform != "linux":
        return False
    command = [cxx, *options, "-fsyntax-only", "-x", "c++", os.devnull]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, timeout=5).returncode == 0
    return False


def _chosen() -> str | None:
    """Return the folder that the user chose; torch writes its own usual one into the variable."""
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
    """Return the bytes of the code of all machines. Raises SpeedKitError."""
    total = 0
    for where, _, names in (found for folder in _folders() for found in os.walk(folder)):
        for name in names:
            with suppress(OSError):  # another process has deleted it
                total += Path(where, name).lstat().st_size
    return total


def clear() -> int:
    """Delete the code of all machines; return its bytes."""
    total = size_bytes()
    for folder in _folders():
        shutil.rmtree(folder, ignore_errors=True)
    return total


@cache
def _bound_once(_: Path) -> None:
    if size_bytes() > MOST_BYTES:
        clear()


# --- joined kernels ---

# torch starts the compiler for each C++ kernel of a graph, which reads torch's headers for 1.4 s;
# one more kernel in the same run takes 0.06 s (g++ 12, AVX-512). Code and flags stay the same.

# Kernels of one run, which then takes as long for these as for the headers.
MOST = 30
# The beginning of a kernel. One with more headers is left to torch: here it is in a namespace.
HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Headers of the code by which Python calls a kernel.
BINDING_HEADERS = ("Python.h", "sstream", "cstdlib", "cerrno")


class KernelCode(str):
    """The code of a kernel that is not built yet, with its bindings to Python."""


def joined(kernels: Iterable[str]) -> str:
    """Return the code of a library in which each kernel is a module: `kernel`, `kernel1`, …"""
    parts = [HEADER, "#define PY_SSIZE_T_CLEAN", *(f"#include <{one}>" for one in BINDING_HEADERS)]
    for number, code in enumerate(kernels):
        code = code.replace(HEADER, "").replace('extern "C"', "")
        code = code.replace("PyInit_kernel", f"PyInit_kernel{number or ''}")
        parts.append(f"namespace kernel{number} {{\n{code}\n}}")
    return "\n".join(parts)


def build(kernels: Sequence[str]) -> Callable[[], list[Any]]:
    """Begin to build kernels in one library; return a function that waits and returns them."""
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
    """Return a subclass of torch's class by which generated code has kernels built."""

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


def _joining_switch() -> dict[str, Switch]:
    """Return the switch that joins kernels, on Linux, once torch's compiler is loaded."""
    module = torch_private.kernel_builder()
    if module is None or sys.platform != "linux":
        return {}
    usual = next(one for one in module.AsyncCompile.__mro__ if one.__module__ == module.__name__)

    def write(on: bool) -> None:
        module.AsyncCompile = _joining(usual) if on else usual

    return {JOINED: Switch(lambda: module.AsyncCompile is _joining(usual), write, (True,))}
