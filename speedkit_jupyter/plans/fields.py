"""The fields of a config, from the catalog, and where their values come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, create_model

from speedkit_jupyter.optimizations import CATALOG, find

# The key of `SpeedConfig.alone()` in files and dicts.
ALONE = "alone"
Path_ = tuple[str, ...]
Lines = Mapping[Path_, int]


@dataclass(frozen=True)
class Origin:
    """Where values come from, for messages: a name and the line of each key's path."""

    name: str = "SpeedConfig"
    lines: Lines = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    firm: frozenset[str] = frozenset()  # fields that no environment variable changes

    def where(self, path: Path_) -> str:
        """The name, with the line of that key or of what it stands in."""
        paths = [path, *((alias, *path[1:]) for alias in _aliases(path[0]))]
        candidates = [*paths, *(candidate[:1] for candidate in paths)]
        line = next(
            (self.lines[candidate] for candidate in candidates if candidate in self.lines), None
        )
        return f"{self.name}: " if line is None else f"{self.name}, line {line}: "


FromCatalog: Any = create_model(
    "_Fields",
    __config__=ConfigDict(frozen=True, extra="forbid"),
    **{item.name: (item.Options, item.default) for item in CATALOG},  # type: ignore[call-overload]
)


def _aliases(key: str) -> tuple[str, ...]:
    optimization = find(key)
    return optimization.aliases if optimization else ()
