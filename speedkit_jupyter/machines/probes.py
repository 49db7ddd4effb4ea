"""What this machine and this environment say of themselves: each fact is asked in its own way."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal


def system() -> Literal["Linux", "Windows", "Darwin"]:
    """Every other one counts as Linux."""
    name = platform.system()
    return name if name in ("Windows", "Darwin") else "Linux"  # type: ignore[return-value]


def features(capabilities: dict[str, object]) -> tuple[str, ...]:
    """The instructions that matter here, by torch's `capabilities`."""
    import torch

    found = [
        feature
        for feature in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
        if capabilities.get(feature)
    ]
    # torch before 2.11 has no public list of capabilities, but these.
    for feature, probe in (
        ("avx512_bf16", "_is_avx512_bf16_supported"),
        ("amx_bf16", "_is_amx_tile_supported"),
    ):
        if feature not in found and getattr(torch.cpu, probe, bool)():
            found.append(feature)
    if capabilities.get("arm_bf16") or capabilities.get("bf16"):
        found.append("arm_bf16")
    return tuple(found)


def cpu_name(capabilities: dict[str, object]) -> str:
    """As torch, Linux or Python call it; `unknown` where none does."""
    name = str(capabilities.get("cpu_name") or "")
    if not name:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
            match = re.search(r"model name\s*:\s*(.+)", lines)
            name = match.group(1) if match else ""
        except OSError:
            name = ""
    return name.strip() or platform.processor() or "unknown"


def memory_bytes() -> int:
    """Main memory in all."""
    import psutil

    return psutil.virtual_memory().total


def cxx() -> str | None:
    """The compiler by Inductor's own rule: CXX, or the platform's usual name."""
    usual = {"Windows": "cl", "Darwin": "clang++"}.get(platform.system(), "g++")
    return shutil.which(os.environ.get("CXX") or usual)


def has_triton() -> bool:
    """Whether torch.compile finds it."""
    if not _is_found("triton"):
        return False
    try:
        version("triton-windows" if platform.system() == "Windows" else "triton")
    except Exception:
        # ROCm, XPU and nightly builds ship it under another name; the module itself decides.
        return _is_found("triton.language")
    return True


def _is_found(module: str) -> bool:
    """Not so where an importer of the user's raises: then it can't be imported either."""
    try:
        return find_spec(module) is not None
    except Exception:
        return False


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those that are here; imports none of them."""
    versions = {}
    for name in names:
        with suppress(Exception):  # not there, or an importer of the user's is in the way
            versions[name] = version(name)
    return versions
