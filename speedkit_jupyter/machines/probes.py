"""Properties of this machine and environment: processor, compiler, Triton, libraries."""

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


def features(capabilities: dict[str, object]) -> tuple[str, ...]:
    """Return the instruction sets that plans use, from torch's `capabilities` (2.11) or Linux."""
    known = dict(capabilities or dict.fromkeys(_in_cpuinfo("(?:flags|Features)").split(), True))
    known["avx512_f"] = known.get("avx512_f") or known.get("avx512f")
    known["arm_bf16"] = known.get("arm_bf16") or known.get("bf16")
    every = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "arm_bf16")
    return tuple(feature for feature in every if known.get(feature))


def instructions() -> str:
    """Return all of the processor's instruction sets, as Linux lists them; empty elsewhere."""
    return " ".join(sorted(_in_cpuinfo("(?:flags|Features)").split()))


def cpu_name(capabilities: dict[str, object]) -> str:
    """Return the processor's name from torch, Linux or Python, or `unknown`."""
    name = str(capabilities.get("cpu_name") or "") or _in_cpuinfo("model name")
    return name.strip() or platform.processor() or "unknown"


def _in_cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    match = re.search(rf"^{key}\s*:\s*(.+)", text, re.MULTILINE)
    return match.group(1) if match else ""


def cxx() -> str | None:
    """Return the C++ compiler that Inductor would call: CXX, or the platform's default."""
    usual = {"Windows": "cl", "Darwin": "clang++"}.get(platform.system(), "g++")
    return shutil.which(os.environ.get("CXX") or usual)


def has_triton() -> bool:
    """Return whether torch.compile finds Triton; a folder with that name does not count."""
    with suppress(Exception):  # the user's import hooks may raise anything
        spec = find_spec("triton")
        return spec is not None and spec.origin is not None
    return False


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed libraries, without importing them."""
    versions = {}
    for name in names:
        with suppress(Exception):  # not installed, or an import hook of the user raises
            versions[name] = version(name)
    return versions
