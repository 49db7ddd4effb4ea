"""The fields of a config, from the catalog; where their values come from; mistakes in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import AliasChoices, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from speedkit_jupyter.optimizations import CATALOG, find
from speedkit_jupyter.support import yaml_lines
from speedkit_jupyter.support.exceptions import did_you_mean

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
        """Return the name, with the line of that key or of what it stands in."""
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


def allowed_keys(key: str) -> str:
    """Return what is allowed instead of this one, with the nearest."""
    names = [*(entry.name for entry in CATALOG), ALONE]
    aliases = [alias for entry in CATALOG for alias in entry.aliases]
    return f"allowed: {', '.join(names)}.{did_you_mean(key, [*names, *aliases])}"


def problems_of(
    error: ValidationError, origin: Origin, variables: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each key that pydantic refuses: where, what was given, what is allowed."""
    paths = set()
    for detail in error.errors():
        path, allowed = _allowed(detail["loc"])
        if path in paths:  # each branch of a union complains by itself
            continue
        paths.add(path)
        variable = variables.get(path[0])
        where = f"environment variable {variable}: " if variable else origin.where(path)
        yield f"{where}{'.'.join(path)}: {_mistake(detail, path, allowed)}"


def _mistake(detail: ErrorDetails, path: Path_, allowed: str) -> str:
    if detail["type"] == "value_error":  # said by whoever knows what there is
        return str(detail["ctx"]["error"])
    unknown = detail["type"] == "extra_forbidden"
    if unknown and (twin := _other_spelling(path)):
        return f"the same as {twin!r}, which stands there too"
    word = path[-1] if unknown else detail["input"]
    hint = did_you_mean(word, allowed.split(", ")) if isinstance(word, str) else ""
    mistake = "unknown key" if unknown else f"{yaml_lines.shown(word)} is not allowed"
    return f"{mistake}; allowed: {allowed}.{hint}"


def _allowed(location: tuple[int | str, ...]) -> tuple[Path_, str]:
    """Return the key's path (without pydantic's union branches) and the words that are allowed
    there.
    """
    optimization = find(str(location[0]))
    if optimization is None:
        return (str(location[0]),), ", ".join(entry.name for entry in CATALOG)
    path: Path_ = (optimization.name,)
    fields = optimization.fields
    if fields:
        if len(location) == 1:
            return path, _described(next(iter(fields.values())))
        key = str(location[1])
        path = (*path, key)
        info = next((info for name, info in fields.items() if key in _spellings(name, info)), None)
        return path, _described(info) if info else ", ".join(fields)
    return path, _described(FromCatalog.model_fields[optimization.name])


def _other_spelling(path: Path_) -> str | None:
    """Return a field's name for its second spelling, which pydantic has taken already."""
    optimization = find(path[0])
    if optimization is None or len(path) == 1:
        return None
    fields = optimization.fields
    return next((name for name, info in fields.items() if path[1] in _spellings(name, info)), None)


def _spellings(name: str, info: FieldInfo) -> tuple[str, ...]:
    alias = info.validation_alias
    return (name, *(map(str, alias.choices) if isinstance(alias, AliasChoices) else ()))


def _described(info: FieldInfo) -> str:
    return info.description or str(info.annotation)


def _aliases(key: str) -> tuple[str, ...]:
    optimization = find(key)
    return optimization.aliases if optimization else ()
