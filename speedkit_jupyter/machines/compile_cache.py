"""Where compiled code is kept between sessions: a folder of the user's own, bounded in size.

Compiled code runs as soon as it is loaded, so a folder that others can write to is not used. Each
combination of hardware, torch, Python and C++ compiler has a folder of its own. Only such folders
are ever emptied, inside of a folder with our mark: the data folder may hold what is the user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from speedkit_jupyter.machines import compile_kernels, probes
from speedkit_jupyter.machines.compile_kernels import JOINED
from speedkit_jupyter.machines.flags import OVERRIDES, Switch, Values, attribute
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import inductor as torch_private

# Beyond this the files that were not used for longest go; a transformer takes a few MiB.
MOST_BYTES = 2 * 2**30
NAME, MACHINE = "speedkit-compiled", re.compile(r"[0-9a-f]{16}")
# Our mark, by which programs for backups know a cache, too (bford.info/cachedir).
MARK, MARKED = (
    "CACHEDIR.TAG",
    b"""Signature: 8a477f597d28d172789f06886806bc55
# SpeedKit for Jupyter made this folder, and deletes what was not used for long.
""",
)
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
    """Return the folder of all machines, which may not be there yet: in the data folder, or where
    a C++ compiler finds it if torch can't name that one to it. Raises SpeedKitError.
    """
    import platformdirs

    own = database.folder() / NAME
    name = f"{NAME}-{_digest(str((own, getattr(os, 'getuid', int)())))}"
    elsewhere = (lambda: platformdirs.user_cache_path("speedkit"), tempfile.gettempdir)
    try:
        if not is_plain(found := own.resolve()):  # as `~/Library/Application Support`
            every = (Path(folder(), name).resolve() for folder in elsewhere)
            found = next(filter(is_plain, every), found)
    except (OSError, RuntimeError) as error:  # links in a circle, or no such folder
        raise SpeedKitError(f"{own}: {error}") from None
    return found


def is_plain(path: Path) -> bool:
    """Return whether torch can name a path to the C++ compiler, by a command that is split."""
    with suppress(ValueError):  # one quote
        return shlex.split(path.as_posix()) == [path.as_posix()] and str(path).isprintable()
    return False


def place() -> Path:
    """Return this machine's folder, which may not be there yet. Raises SpeedKitError."""
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
    for path in (folder, *folder.parents[:-1]):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path}: {error.strerror}"
        if path == folder and not stat.S_ISDIR(found.st_mode):
            return f"{path} is no folder"
        if found.st_uid not in (os.getuid(), *[0] * (path != folder)):
            return f"{path} belongs to another user"
        # Where the folder lies others may add files, as in /tmp, but not replace it.
        if path == folder or not found.st_mode & stat.S_ISVTX:
            is_own = path != folder and _is_private(found.st_gid)
            if found.st_mode & (stat.S_IWOTH | (0 if is_own else stat.S_IWGRP)):
                return f"others can write to {path}: `chmod go-w` makes it yours alone"
        if path == folder and os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):
            return f"programs can't be run from {path} (noexec)"
    return ""


def _is_private(group: int) -> bool:
    """Return whether a group is this user's alone, as most Linux systems make one for each."""
    import grp
    import pwd

    with suppress(KeyError):  # no name
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
        is_users = user.pw_uid != 0 and found.gr_name == user.pw_name
        return is_users and {*found.gr_mem} <= {user.pw_name}
    return False


def machines() -> list[Path]:
    """Return the folders of machines that we made: with our mark beside them. Raises OSError."""
    every = root()
    if not _is_marked(every):
        return []
    return [one for one in every.iterdir() if MACHINE.fullmatch(one.name) and not one.is_symlink()]


def _is_marked(folder: Path) -> bool:
    with suppress(OSError):
        return (folder / MARK).read_bytes() == MARKED
    return False


def trusted() -> Path:
    """Return this machine's folder, which may not be there yet. Raises SpeedKitError where it, or
    those that it is in, can't be trusted, or are not ours.
    """
    folder = place()
    if why := why_unsafe(folder.parent) or why_unsafe(folder):
        raise SpeedKitError(why)
    with suppress(OSError):
        names = os.listdir(folder.parent)
        if not _is_marked(folder.parent) and any(name[0] != "." for name in names):
            raise SpeedKitError(
                f"{folder.parent} has files and no {MARK} of SpeedKit's: move it away, or let "
                f"{database.FOLDER} name another folder"
            )
    return folder


def usable() -> Path | None:
    """Return this machine's folder, or None where it can't be trusted; makes nothing."""
    return _or_warned(trusted)


def prepare() -> Path | None:
    """Return this machine's folder, made and bounded; None where it can't be used."""
    return _or_warned(made)


def made() -> Path:
    """Return this machine's folder, made and bounded. Raises SpeedKitError."""
    folder = trusted()
    try:
        database.make(folder.parent)
        if not _is_marked(folder.parent):
            write(folder.parent / MARK, MARKED)
        database.make(folder / COMPILED)
        _prune_once(folder.parent)
        if torch_private.inductor_config().cpp.vec_isa_ok is None:
            try_instructions(folder)
    except OSError as error:
        raise SpeedKitError(f"{folder}: {error.strerror}") from None
    return folder


def _or_warned(find: Callable[[], Path]) -> Path | None:
    try:
        return find()
    except SpeedKitError as error:
        _warn_once(f"compiled code is not kept, and none is loaded: {error}")
        return None


def has_bundles() -> bool:
    """Return whether a plan that compiles was learned on this machine."""
    with suppress(OSError, SpeedKitError):
        return any((place() / BUNDLES).iterdir())
    return False


# Once in a process: plans are applied often while they are measured.
_warn_once = cache(messages.warn)


@cache
def _prune_once(folder: Path) -> tuple[int, int]:
    return prune(machines())


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


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to, which has its name after the block: another process sees all of it
    or nothing. Raises OSError.
    """
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(number, "w+b") as file:
            yield file
            file.flush()
            os.fsync(number)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write(path: Path, content: bytes) -> None:
    """Write a file at once, as `written` does. Raises OSError."""
    database.make(path.parent)
    with written(path) as file:
        file.write(content)


# --- its size ---


def files(machine: Path) -> list[tuple[float, int, Path]]:
    """Return each file of a machine: when it was last used, its bytes, its path. Only such as are
    ours: no links, and nothing that someone has put beside our folders.
    """
    found, every = [], [machine / TRIAL]
    for folder in (machine / COMPILED, machine / BUNDLES):
        walk = () if folder.is_symlink() else os.walk(folder)
        every += [Path(where, name) for where, _, names in walk for name in names]
    for path in every:
        with suppress(OSError):  # another process has deleted it
            seen = path.lstat()
            if stat.S_ISREG(seen.st_mode):
                found.append((max(seen.st_atime, seen.st_mtime), seen.st_size, path))
    return found


def prune(folders: Iterable[Path], most_bytes: int = MOST_BYTES) -> tuple[int, int]:
    """Delete the files of machines that were not used for longest, until the rest fits; return how
    many, and their bytes.
    """
    every = sorted(file for folder in folders for file in files(folder))
    total = left = sum(size for _, size, _ in every)
    gone = 0
    for _, size, path in every:
        if left <= most_bytes:
            break
        with suppress(OSError):
            path.unlink()
            left, gone = left - size, gone + 1
    return gone, total - left
