"""Show a warning of a measured step as often as one plain run would, however often it runs."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import Any


class _Probe(Warning):
    """Tells which registries of shown warnings are valid still."""


class RepeatedWarnings:
    """Drops a warning that was shown already: while it holds, or by the session before.

    Python notes what it has shown in `__warningregistry__`, which counts until a filter changes.
    State that is put back, and filters that are, would make it show all of them again. Processes
    that are forked meanwhile (workers) are silent.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, type[Warning], int]] = set()
        self._found: Any = None

    def hold(self) -> None:
        """Begin; may be called again after `release`."""
        found = self._found = warnings.showwarning
        here, seen = os.getpid(), self._seen

        def show(message: Any, category: type[Warning], filename: str, lineno: int,
                 file: Any = None, line: Any = None) -> None:  # fmt: skip
            what = str(message), category, lineno
            if category is not _Probe and os.getpid() == here and what not in seen:
                seen.add(what)
                found(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        seen.update(_shown())

    def release(self) -> None:
        """End."""
        warnings.showwarning = self._found


def _shown() -> set[tuple[str, type[Warning], int]]:
    """Return what Python would not show again: text, category and line."""
    probe: dict[Any, Any] = {}
    with suppress(_Probe):
        warnings.warn_explicit(_Probe(), _Probe, "", 0, registry=probe)
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    registries = [space.get("__warningregistry__") for space in spaces]
    return {
        key
        for registry in registries
        if isinstance(registry, dict) and registry.get("version") == probe.get("version")
        for key, is_shown in registry.items()
        if is_shown and isinstance(key, tuple) and len(key) == 3
    }
