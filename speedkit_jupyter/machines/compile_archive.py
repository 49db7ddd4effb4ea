"""Compiled code and learned plans in one file, to be kept where a machine's own disk is not.

The code runs as soon as it is loaded: import only what you exported. All of an archive is checked
against its manifest before anything is written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from json import dumps
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.machines.compile_cache import BUNDLES, COMPILED, MOST_BYTES
from speedkit_jupyter.support import arguments, database, reading
from speedkit_jupyter.support.exceptions import SpeedKitError, printable

FORMAT, MANIFEST, MOST_MANIFEST = 1, "manifest.json", 2**24
# What no other process needs.
LEFT_OUT = ("locks", ".part", ".lock")


class _Plan(BaseModel):
    setting: str
    task: str
    plan: database.Learned


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True)

    machine: dict[str, str]
    files: dict[str, str]
    plans: list[_Plan]


def save(file: str | os.PathLike[str]) -> tuple[int, int]:
    """Write this machine's code and all learned plans; return how many files and plans.

    Raises SpeedKitError, also where the file is there already.
    """
    folder, path = compile_cache.made(), Path(arguments.path("file", file))
    plans = [
        {"setting": one.name, "task": one.task, "plan": dict(one.value)}
        for one in database.learned()
        if not one.is_earlier
    ]
    sums: dict[str, str] = {}
    with _said(path):
        path = path.expanduser()
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        with (
            compile_cache.written(path) as opened,
            zipfile.ZipFile(opened, "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for one in (found for _, _, found in compile_cache.files(folder)):
                if _is_inside(name := one.relative_to(folder).as_posix()):
                    content = one.read_bytes()
                    sums[name] = hashlib.sha256(content).hexdigest()
                    packed.writestr(name, content)
            about = {"format": FORMAT, "machine": compile_cache.machine()}
            packed.writestr(MANIFEST, dumps(about | {"files": sums, "plans": plans}))
    return len(sums), len(plans)


def load(file: str | os.PathLike[str]) -> tuple[int, int]:
    """Take over the code and the plans of an archive that are not here yet; return how many.

    Raises SpeedKitError where anything is wrong with it; nothing is taken over then.
    """
    folder, path = compile_cache.made(), Path(arguments.path("file", file))
    with _said(path, "no archive of SpeedKit's, or damaged ({}): export it anew"):
        path = path.expanduser()
        mode = path.stat().st_mode
        if hasattr(os, "getuid") and mode & stat.S_IWOTH:
            raise SpeedKitError("others can write to it: `chmod o-w` makes it yours alone")
        if not stat.S_ISREG(mode):
            raise ValueError("this is no file")
        with unpacked(path) as packed:
            manifest = _checked(packed)
            known = {(one.name, one.task) for one in database.learned() if not one.is_earlier}
            every = [(one["setting"], one["task"], one["plan"]) for one in manifest["plans"]]
            ours = [one for one in every if one[2].get("engine") == database.ENGINE]
            plans = [one for one in ours if one[:2] not in known]
            new = [name for name in manifest["files"] if not (folder / name).exists()]
            try:
                for name in new:
                    database.make((folder / name).parent)
                    with packed.open(name) as source, compile_cache.written(folder / name) as to:
                        shutil.copyfileobj(source, to)
                database.learn_all(plans)
            except BaseException:
                for name in new:
                    with suppress(OSError, ValueError):
                        (folder / name).unlink()
                raise
    return len(new), len(plans)


def clear() -> tuple[int, int]:
    """Delete the code of all machines; return how many files and bytes there were. Plans stay."""
    return compile_cache.prune(compile_cache.machines(), -1)


@contextmanager
def unpacked(file: Path | IO[bytes]) -> Iterator[zipfile.ZipFile]:
    """Open an archive such as we write, of no more than the cache may hold. Raises anything."""
    with zipfile.ZipFile(file) as packed:
        every = packed.infolist()
        if {one.compress_type for one in every} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise ValueError("it is packed otherwise")
        if sum(one.file_size for one in every) > MOST_BYTES:
            raise SpeedKitError("it is larger than the cache may be")
        yield packed


@contextmanager
def _said(path: Path, otherwise: str = "{}") -> Iterator[None]:
    """Raise one line for whatever goes wrong: damaged archives raise a dozen kinds of errors."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise SpeedKitError(f"{path}: {reading.why(error)}") from None
    except SpeedKitError as error:
        raise SpeedKitError(f"{path}: {error}") from None
    except Exception as error:
        raise SpeedKitError(f"{path}: {otherwise.format(reading.why(error))}") from None


def _checked(packed: zipfile.ZipFile) -> dict[str, Any]:
    """Return the manifest of an archive. Raises where its files are not as they were."""
    with packed.open(MANIFEST) as file:  # its size is what the archive says, not what is read
        content = file.read(MOST_MANIFEST + 1)
    if len(content) > MOST_MANIFEST:
        raise SpeedKitError("its manifest is too large")
    manifest = reading.record(content)
    if manifest["format"] != FORMAT:
        raise SpeedKitError(f"its format is {manifest['format']!r:.20}, this SpeedKit's {FORMAT}")
    _Manifest.model_validate(manifest)
    here = compile_cache.machine()
    if others := [key for key in here if manifest["machine"].get(key) != here[key]]:
        key = others[0]
        theirs = printable(str(manifest["machine"].get(key)))
        raise SpeedKitError(f"it is of another machine: {key} {theirs:.80}, here {here[key]}")
    sums, listed = manifest["files"], [one.filename for one in packed.infolist()]
    if sorted([MANIFEST, *sums]) != sorted(listed):
        raise SpeedKitError("it does not hold the files that its manifest names")
    if outside := [name for name in sums if not _is_inside(name)]:
        raise SpeedKitError(f"it names a file outside of the cache: {outside[0]!r:.80}")
    for name, checksum in sums.items():
        found = hashlib.sha256()
        with packed.open(name) as file:  # in parts: few bytes can unfold to many
            while part := file.read(2**20):
                found.update(part)
        if found.hexdigest() != checksum:
            raise SpeedKitError(f"{printable(name)[-80:]} does not match its checksum")
    return manifest


def _is_inside(name: str) -> bool:
    """Return whether this is the name of a file of code, below the folders that hold it."""
    parts = PurePosixPath(name).parts
    plain = name == "/".join(parts) and "\\" not in name and ":" not in name
    kept = not any(part == ".." or part.endswith(LEFT_OUT) for part in parts)
    return plain and kept and len(parts) > 1 and parts[0] in (COMPILED, BUNDLES)
