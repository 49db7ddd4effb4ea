"""Where compiled code is kept between sessions: a folder of the user's own, bounded in size.

Compiled code runs as soon as it is loaded, so a folder that others can write to is not used. Each
combination of hardware, torch, Python and C++ compiler has a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from speedkit_jupyter.machines import compile_kernels, probes
from speedkit_jupyter.machines.compile_kernels import JOINED
from speedkit_jupyter.machines.flags import OVERRIDES, Switch, Values, attribute
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.torchglue import private as torch_private

# Beyond this the files that were not used for longest go; a transformer takes a few MiB.
MOST_BYTES = 2 * 2**30
# In these variables torch and Triton look for a folder.
FOLDER, TRITON_FOLDER = VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Whether torch takes it for granted that the compiler knows the CPU's vector instructions.
INSTRUCTIONS = "inductor.cpp.vec_isa_ok"
# Whether torch compiles its C++ headers before the first kernel, for all later ones.
HEADERS = "inductor.cpp_cache_precompile_headers"
# In a machine's folder: torch's own cache, the code of learned plans, and code that the compiler
# has compiled on trial.
COMPILED, BUNDLES, TRIAL = "inductor", "bundles", "instructions.o"
TRIAL_CODE = """
#include <cstdint>
#include <immintrin.h>
#include <omp.h>
int trial() { return omp_get_max_threads(); }
"""
# A compiler that takes longer for these lines is left to torch.
TRIAL_S = 20.0


def root() -> Path:
    """Return the folder of all machines, which may not be there yet."""
    return database.folder() / "compiled"


def place() -> Path:
    """Return this machine's folder, which may not be there yet."""
    return root() / _digest(json.dumps(machine(), sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return what compiled code depends on."""
    return dict(_machine(probes.cxx() or ""))


@cache
def _machine(cxx: str) -> tuple[tuple[str, str], ...]:
    hardware = Hardware.detect()
    gpus = (f"{one.name} {one.capability or one.rocm or ''}" for one in hardware.accelerators)
    version = ""
    if cxx:
        with suppress(OSError, subprocess.SubprocessError):
            shown = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=5)
            version = shown.stdout.partition("\n")[0]
    return (
        ("torch", hardware.torch),
        ("Python", ".".join(platform.python_version_tuple()[:2])),
        ("system", f"{hardware.system} {hardware.cpu.architecture}"),
        ("processor", " ".join((hardware.cpu.name, *hardware.cpu.features))),
        # The compiler builds for all of them, and virtual machines of one name differ in them.
        ("instructions", _digest(probes.instructions())),
        ("GPUs", ", ".join(gpus)),
        ("compiler", f"{cxx} {version}".strip()),
    )


# --- whose it is ---


def why_unsafe(folder: Path) -> str:
    """Return why code in this folder can't be trusted; empty where only its owner can write to it.

    A folder that is not there yet is as safe as those above it.
    """
    if not hasattr(os, "getuid"):  # Windows keeps others out of a user's own folders
        return ""
    folder = folder.resolve()
    for path in (folder, *folder.parents):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path}: {error.strerror}"
        if path == folder and not stat.S_ISDIR(found.st_mode):
            return f"{path} is no folder"
        if path == folder and found.st_uid != os.getuid():
            return f"{path} belongs to another user"
        # Where the folder lies others may add files, as in /tmp, but not replace it.
        is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if is_open or (path == folder and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            return f"others can write to {path}: `chmod go-w` makes it yours alone"
        if path == folder and os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):
            return f"programs can't be run from {path} (noexec)"
    return ""


def usable() -> Path | None:
    """Return this machine's folder, or None where it can't be trusted; makes nothing."""
    folder = place()
    why = why_unsafe(folder.parent) or why_unsafe(folder)
    if why:
        _warn_once(f"compiled code is not kept, and none is loaded: {why}")
    return None if why else folder


def prepare() -> Path | None:
    """Return this machine's folder, made and bounded; None where it can't be used."""
    folder = usable()
    if folder is None:
        return None
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder.parent, folder, folder / COMPILED):
            path.mkdir(mode=0o700, exist_ok=True)
        _prune_once(folder.parent)
        if torch_private.inductor_config().cpp.vec_isa_ok is None:
            try_instructions(folder)
    except OSError as error:
        _warn_once(f"compiled code is not kept: {folder}: {error.strerror}")
        return None
    return folder


def has_bundles() -> bool:
    """Return whether a plan that compiles was learned on this machine."""
    with suppress(OSError):
        return any((place() / BUNDLES).iterdir())
    return False


# Once in a process: plans are applied often while they are measured.
_warn_once = cache(messages.warn)


@cache
def _prune_once(folder: Path) -> int:
    return prune(folder)


# --- what torch is told of it ---


def switches() -> dict[str, Switch]:
    """Return the switches by which torch finds the folder, and skips its search for instructions.

    A folder that torch itself has written into a variable counts as none.
    """
    others = (tempfile.gettempdir(),)
    table = {n: Switch(partial(_chosen, n), partial(_choose, n), others) for n in VARIABLES}
    if (config := sys.modules.get(torch_private.INDUCTOR_CONFIG)) is not None:
        table[INSTRUCTIONS] = attribute(config.cpp, INSTRUCTIONS.rpartition(".")[2], True)
        table[HEADERS] = attribute(config, HEADERS.rpartition(".")[2], False)
    return table | compile_kernels.switches()


def values(now: Values) -> dict[str, Any]:
    """Return the values of these switches for this machine's folder. What the user chose stays."""
    # One run of the compiler for all kernels of a graph takes less time than the headers do.
    joined = {JOINED: True, HEADERS: False} if JOINED in now and probes.cxx() else {}
    folder = usable()
    if folder is None or not os.access(folder / COMPILED, os.W_OK):  # `prepare` has said why
        return joined
    compiled, wanted = folder / COMPILED, dict[str, Any]()
    if now.get(FOLDER) in (None, str(compiled)):
        wanted |= {FOLDER: str(compiled), TRITON_FOLDER: str(compiled / "triton")}
    if (folder / TRIAL).exists():
        wanted[INSTRUCTIONS] = True
    return joined | {name: one for name, one in wanted.items() if now.get(name) in (None, one)}


@contextmanager
def in_use() -> Iterator[None]:
    """Have torch use this machine's folder for the block, as while a plan compiles."""
    prepare()
    table = switches()
    wanted = values({name: switch.read() for name, switch in table.items()})

    def change() -> None:
        for name, value in wanted.items():
            table[name].write(value)

    layer = OVERRIDES.push(wanted, change)
    try:
        yield
    finally:
        OVERRIDES.pop(layer)


def _chosen(name: str) -> str | None:
    value, usual = os.environ.get(name), torch_private.usual_cache_folder()
    if value is None or (usual and Path(value).is_relative_to(usual)):
        return None
    # torch writes Triton's, with the number of a device, once it compiles for that.
    folder = os.environ.get(FOLDER)
    is_torchs = name == TRITON_FOLDER and folder and Path(value).parent == Path(folder, "triton")
    return None if is_torchs else value


def _choose(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


# --- the compiler ---


def try_instructions(folder: Path) -> None:
    """Compile some lines for all of the CPU's vector instructions, and keep that in the folder.

    torch asks the same in each process, by compiling for seconds. This is once for a compiler, on
    Linux and x86; elsewhere torch asks.
    """
    compiler = probes.cxx()
    if compiler is None or sys.platform != "linux":
        return
    code, options = torch_private.instruction_probes()
    if (folder / TRIAL).exists() or not options:
        return
    # Some probes have a function of the same name.
    apart = (text.replace('extern "C"', "") for text in code)
    spaces = (f"namespace probe{number} {{{text}}}" for number, text in enumerate(apart))
    command = [compiler, *" ".join(options).split(), "-fopenmp", "-c", "-x", "c++", "-"]
    command += ["-o", str(folder / TRIAL)]  # which a compiler that fails does not leave
    trial = "\n".join((TRIAL_CODE, *spaces)).encode()
    try:
        subprocess.run(command, input=trial, capture_output=True, check=True, timeout=TRIAL_S)
    except (OSError, subprocess.SubprocessError) as error:
        torch_private.forget_instructions()
        messages.debug(f"torch looks for vector instructions itself: {error}")


def write(path: Path, content: bytes) -> None:
    """Write a file at once: another process sees all of it or nothing. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(number)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


# --- its size ---


def files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return each file below a folder: when it was last used, its bytes, its path. No links."""
    found = []
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in names):
            with suppress(OSError):  # another process has deleted it
                seen = path.lstat()
                if stat.S_ISREG(seen.st_mode):
                    found.append((max(seen.st_atime, seen.st_mtime), seen.st_size, path))
    return found


def prune(folder: Path, most_bytes: int = MOST_BYTES) -> int:
    """Delete the files that were not used for longest, until the rest fits; return how many."""
    every = sorted(files(folder))
    excess, gone = sum(size for _, size, _ in every) - most_bytes, 0
    for _, size, path in every:
        if excess <= 0:
            break
        with suppress(OSError):
            path.unlink()
            excess, gone = excess - size, gone + 1
    return gone
