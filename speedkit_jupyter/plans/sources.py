"""Where a config's values come from (YAML, dicts, the environment), and mistakes in words."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from speedkit_jupyter import machines
from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.support import arguments, database, messages, reading
from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean

# The key of `SpeedConfig.alone()` in files and dicts.
ALONE = "alone"
# A config has an option and its fields.
MOST_DEPTH = 8
KeyPath = tuple[str, ...]

FromCatalog: Any = create_model(
    "_Fields",
    __config__=ConfigDict(frozen=True, extra="forbid"),
    **{item.name: (item.Options, item.default) for item in CATALOG},  # type: ignore[call-overload]
)


@dataclass(frozen=True)
class Origin:
    """Where values come from, for messages: a name and the line of each key's path."""

    name: str = "SpeedConfig"
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    firm: frozenset[str] = frozenset()  # fields that no environment variable changes

    def where(self, path: KeyPath) -> str:
        """Return the name, with the line of that key or of what it stands in."""
        entry = find(path[0])
        names = (path[0], *(entry.aliases if entry else ()))
        paths = [(name, *path[1:]) for name in names] + [(name,) for name in names]
        line = next((self.lines[one] for one in paths if one in self.lines), None)
        return f"{self.name}: " if line is None else f"{self.name}, line {line}: "


class _Loader(yaml.SafeLoader):
    """Refuses aliases, of which few bytes make gigabytes, and deep nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark, self.depth = self.peek_event().start_mark, self.depth + 1
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not taken", mark)
        if self.depth > MOST_DEPTH:
            raise yaml.composer.ComposerError(None, None, "this is nested too deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def from_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Origin]:
    """Read YAML, safely; raises ConfigError with the file's name and the line."""
    name = str(arguments.path("path", path))
    try:
        text = reading.text(path)
    except FileNotFoundError:
        siblings = [sibling.name for sibling in Path(path).parent.glob("*.y*ml")]
        hint = did_you_mean(Path(path).name, siblings)
        raise ConfigError([f"{name}: there is no such file.{hint}"]) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no possible path
        raise ConfigError([f"{name}: can't be read: {reading.why(error)}"]) from None
    lines: dict[KeyPath, int] = {}
    twice: list[str] = []

    def walk(node: Any, path: KeyPath) -> None:
        """Note the line of each key; `on:` and `1:` are words too where keys stand."""
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                key.tag = "tag:yaml.org,2002:str"
                here, line = (*path, str(key.value)), key.start_mark.line + 1
                if here in lines:
                    twice.append(f"{name}, line {line}: {'.'.join(here)}: this key stands twice")
                lines[here] = line
                walk(value, here)

    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        walk(node, ())
        values = {} if node is None else loader.construct_document(node)
    # PyYAML's own constructors raise KeyError and others for `!!bool no-bool`.
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError([f"{name}{where}: YAML syntax: {what:.300}"]) from None
    if not isinstance(values, dict):
        must_be = "a config is a mapping, as in 'precision: auto'; this is"
        raise ConfigError([f"{name}, line 1: {must_be} {arguments.shown(values)}"])
    return values, Origin(name, lines, tuple(twice))


def prepared(
    values: Mapping[str, Any], origin: Origin, problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by name, the environment's first, and its variables; add to `problems`."""
    known: dict[str, Any] = {}
    for key, value in values.items():
        optimization = find(key)
        if optimization is None:
            names = [*(entry.name for entry in CATALOG), ALONE]
            near = did_you_mean(key, [*names, *(a for entry in CATALOG for a in entry.aliases)])
            wrong = f"unknown key; allowed: {', '.join(names)}.{near}"
        elif optimization.name in known:
            wrong = f"the same as {optimization.name!r}, which stands there too"
        else:
            known[optimization.name] = value
            continue
        problems.append(f"{origin.where((key,))}{key}: {wrong}")
    variables = {entry.variable: entry for entry in CATALOG if entry.variable}
    others = (*variables, database.FOLDER, machines.VARIABLE, messages.VARIABLE)
    for name in os.environ:
        if name.startswith("SPEEDKIT_") and name not in others:
            messages.warn(f"{name}: no such environment variable.{did_you_mean(name, others)}")
    used = {}
    for variable, entry in variables.items():
        if os.environ.get(variable) and entry.name not in origin.firm:
            used[entry.name] = variable
            known[entry.name] = from_word(os.environ[variable], entry.words)
    return known, used


def from_word(word: str, allowed: tuple[str, ...] = ()) -> Any:
    """Return a value as it is written in a shell: digits are a number, unless they are too many.

    Where true is `allowed`, 1, on and yes mean it, and 0, off and no false.
    """
    word = word.strip().lower()
    if "true" in allowed and word in ("1", "true", "on", "yes"):
        return True
    if "false" in allowed and word in ("0", "false", "off", "no"):
        return False
    return int(word) if word.isdecimal() and len(word) < 19 else word


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
        unknown = detail["type"] == "extra_forbidden"
        word = path[-1] if unknown else detail["input"]
        hint = did_you_mean(word, allowed.split(", ")) if isinstance(word, str) else ""
        mistake = "unknown key" if unknown else f"{arguments.shown(word)} is not allowed"
        mistake = f"{mistake}; allowed: {allowed}.{hint}"
        if detail["type"] == "value_error":  # said by whoever knows what there is
            mistake = str(detail["ctx"]["error"])
        variable = variables.get(path[0])
        where = f"environment variable {variable}: " if variable else origin.where(path)
        yield f"{where}{'.'.join(path)}: {mistake}"


def _allowed(location: tuple[int | str, ...]) -> tuple[KeyPath, str]:
    """Return the key's path (without pydantic's union branches), and what is allowed there."""
    name, *inner = map(str, location)
    fields: Mapping[str, FieldInfo] = getattr(find(name), "fields", {})
    if not fields:
        return (name,), str(FromCatalog.model_fields[name].description)
    if not inner:
        return (name,), str(next(iter(fields.values())).description)
    for field_name, info in fields.items():
        if inner[0] in (field_name, *getattr(info.validation_alias, "choices", ())):
            return (name, inner[0]), str(info.description)
    return (name, inner[0]), ", ".join(fields)
