"""Compiled code and learned plans in one file, to be kept where a machine's own disk is not.

The code runs as soon as it is loaded: import only what you exported. All of an archive is checked
against its manifest before anything is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.machines.compile_cache import BUNDLES, COMPILED, MOST_BYTES
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError

FORMAT, MANIFEST = 1, "manifest.json"
# What no other process needs.
LEFT_OUT = ("locks", ".part", ".lock")


def save(file: str | os.PathLike[str]) -> tuple[int, int]:
    """Write this machine's code and all learned plans; return how many files and plans.

    Raises SpeedKitError, also where the file is there already.
    """
    folder, path = _folder(), Path(file).expanduser()
    every = [p for _, _, p in compile_cache.files(folder) if _is_inside(_name(p, folder))]
    contents = {_name(path, folder): path.read_bytes() for path in every}
    plans = [
        {"setting": one.name, "task": one.task, "plan": dict(one.value)}
        for one in database.learned()
        if not one.is_earlier
    ]
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    about = {"format": FORMAT, "machine": compile_cache.machine(), "files": sums, "plans": plans}
    try:
        with (
            path.open("xb") as opened,
            zipfile.ZipFile(opened, "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            packed.writestr(MANIFEST, json.dumps(about))
            for name, content in contents.items():
                packed.writestr(name, content)
    except OSError as error:
        raise SpeedKitError(f"{path}: {error.strerror}") from None
    return len(contents), len(plans)


def load(file: str | os.PathLike[str]) -> tuple[int, int]:
    """Take over the code and the plans of an archive that are not here yet; return how many.

    Raises SpeedKitError where anything is wrong with it; nothing is taken over then.
    """
    folder, path = _folder(), Path(file).expanduser()
    try:
        found = path.stat()
        if hasattr(os, "getuid") and found.st_mode & stat.S_IWOTH:
            raise SpeedKitError(f"{path}: others can write to it: `chmod o-w` makes it yours alone")
        with zipfile.ZipFile(path) as packed:
            manifest, contents = _checked(packed)
    except OSError as error:
        raise SpeedKitError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SpeedKitError(f"{path}: no archive of SpeedKit's, or damaged: {error}") from None
    except SpeedKitError as error:
        raise SpeedKitError(f"{path} is not imported: {error}") from None
    new = {folder / name: content for name, content in contents.items()}
    new = {place: content for place, content in new.items() if not place.exists()}
    for place, content in new.items():
        compile_cache.write(place, content)
    known = {(one.name, one.task) for one in database.learned() if not one.is_earlier}
    plans = [p for p in manifest["plans"] if (p["setting"], p["task"]) not in known]
    for one in plans:
        database.learn(one["setting"], one["task"], one["plan"])
    return len(new), len(plans)


def clear() -> tuple[int, int]:
    """Delete the code of all machines; return how many files and bytes there were. Plans stay."""
    every = compile_cache.files(compile_cache.root())
    compile_cache.prune(compile_cache.root(), 0)
    return len(every), sum(size for _, size, _ in every)


def _checked(packed: zipfile.ZipFile) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    """Return the manifest and the files of an archive. Raises where these are not as they were."""
    manifest = json.loads(packed.read(MANIFEST))
    if manifest["format"] != FORMAT:
        raise SpeedKitError(f"its format is {manifest['format']!r:.20}, this SpeedKit's {FORMAT}")
    here = compile_cache.machine()
    if others := [key for key in here if manifest["machine"].get(key) != here[key]]:
        key = others[0]
        theirs = str(manifest["machine"].get(key))
        raise SpeedKitError(f"it is of another machine: {key} {theirs:.80}, here {here[key]}")
    sums, listed = manifest["files"], [one.filename for one in packed.infolist()]
    if sorted([MANIFEST, *sums]) != sorted(listed):
        raise SpeedKitError("it does not hold the files that its manifest names")
    if outside := [name for name in sums if not _is_inside(name)]:
        raise SpeedKitError(f"it names a file outside of the cache: {outside[0]!r:.80}")
    if sum(one.file_size for one in packed.infolist()) > MOST_BYTES:
        raise SpeedKitError("it is larger than the cache may be")
    contents = {name: packed.read(name) for name in sums}
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != sums[name]:
            raise SpeedKitError(f"{name} does not match its checksum")
    for one in manifest["plans"]:
        if not (isinstance(one["setting"], str) and isinstance(one["task"], str)):
            raise SpeedKitError("a plan in it has no name")
        dict(one["plan"])["values"]
    return manifest, contents


def _is_inside(name: str) -> bool:
    """Return whether this is the name of a file of code, below the folders that hold it."""
    parts = PurePosixPath(name).parts
    plain = name == "/".join(parts) and "\\" not in name and ":" not in name
    kept = not any(part == ".." or part.endswith(LEFT_OUT) for part in parts)
    return plain and kept and len(parts) > 1 and parts[0] in (COMPILED, BUNDLES)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _folder() -> Path:
    folder = compile_cache.prepare()
    if folder is None:
        why = compile_cache.why_unsafe(compile_cache.root())
        raise SpeedKitError(why or f"{compile_cache.place()} can't be used")
    return folder
