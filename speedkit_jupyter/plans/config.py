"""What the user asks for: built from the catalog, read from YAML, dicts and the environment."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import AliasChoices, ConfigDict, PrivateAttr, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from speedkit_jupyter import machines
from speedkit_jupyter.optimizations import CATALOG, find
from speedkit_jupyter.optimizations.base.decision import Request, Source
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.support import arguments, database, yaml_lines
from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean

# The key of `SpeedConfig.alone()` in files and dicts.
ALONE = "alone"
Path_ = tuple[str, ...]
Lines = Mapping[Path_, int]


@dataclass(frozen=True)
class _Origin:
    """Where values come from, for messages: a name and the line of each key's path."""

    name: str = "SpeedConfig"
    lines: Lines = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    firm: frozenset[str] = frozenset()  # fields that no environment variable changes


_Fields: Any = create_model(
    "_Fields",
    __config__=ConfigDict(frozen=True, extra="forbid"),
    **{item.name: (item.Options, item.default) for item in CATALOG},  # type: ignore[call-overload]
)


class SpeedConfig(_Fields):
    """What the user asks for; `SpeedConfig()` is all-auto. Its fields come from the catalog.

    `alone=True` leaves what is auto as it is: the plan is what was asked for, and no more.
    Environment variables (`SPEEDKIT_PRECISION` …) win over the values given. Raises ConfigError,
    which holds every mistake at once.
    """

    _variables: dict[str, str] = PrivateAttr(default_factory=dict)
    _sources: dict[str, Source] = PrivateAttr(default_factory=dict)
    _why: str = PrivateAttr(default="")
    _left: str = PrivateAttr(default="")
    _alone: bool = PrivateAttr(default=False)
    _firm: frozenset[str] = PrivateAttr(default=frozenset())

    def __init__(self, origin: _Origin | None = None, /, **values: Any) -> None:
        origin = origin or _Origin()
        problems = list(origin.problems)
        alone = values.pop(ALONE, False)
        if not isinstance(alone, bool):
            where, shown = _where(origin, (ALONE,)), yaml_lines.shown(alone)
            problems.append(f"{where}{ALONE}: {shown} is not allowed; allowed: true, false.")
        prepared, variables = _prepared(values, origin, problems)
        try:
            super().__init__(**prepared)
        except ValidationError as error:
            problems += _problems(error, origin, variables)
        if problems:
            raise ConfigError(problems)
        self._variables, self._firm, self._alone = variables, origin.firm, alone

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedConfig:
        """Build a config from plain values; raises ConfigError with every mistake."""
        if not isinstance(values, Mapping):
            raise ConfigError([f"a config is a mapping of options, not {type(values).__name__}"])
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> SpeedConfig:
        """Read a YAML file, safely; raises ConfigError with file, line and key of every mistake.

        An empty file is all-auto.
        """
        name = str(arguments.path("path", path))
        try:
            text = yaml_lines.read(path)
        except FileNotFoundError:
            siblings = [sibling.name for sibling in Path(path).parent.glob("*.y*ml")]
            hint = did_you_mean(Path(path).name, siblings)
            raise ConfigError([f"{name}: there is no such file.{hint}"]) from None
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no possible path
            why = getattr(error, "strerror", None) or error
            raise ConfigError([f"{name}: can't be read: {why}"]) from None
        raw, lines, duplicates = yaml_lines.load(text, name)
        twice = tuple(
            f"{name}, line {line}: {'.'.join(path)}: this key stands twice"
            for path, line in duplicates
        )
        return cls(_Origin(name, lines, twice), **raw)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes without loss; defaults are left out."""
        values = self.model_dump(exclude_defaults=True)
        alone = {ALONE: True} if self._alone else {}
        return alone | {
            name: next(iter(value.values())) if _is_bare(name, value) else value
            for name, value in values.items()
        }

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """YAML that `from_yaml` reads without loss; also written to `path` where one is given."""
        values = self.to_dict()
        text = yaml.safe_dump(values, sort_keys=False) if values else "# everything is auto\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def with_source(self, source: Source, why: str = "") -> SpeedConfig:
        """The same wishes, said to come from `source`; `why` stands in their reasons."""
        twin = self._twin()
        twin._sources, twin._why = dict.fromkeys(type(self).model_fields, source), why
        return twin

    def alone(self, why: str = "") -> SpeedConfig:
        """The same wishes and no others: what is auto is left as it is, not decided by rules.

        `why` is the reason for what is left, where there is a better one than that.
        """
        twin = self._twin()
        twin._alone, twin._left = True, why
        return twin

    def changed(self, path: str, value: Any) -> SpeedConfig:
        """A config with one more wish: `path` is an option (`tf32`) or a field (`compile.mode`).

        As it was typed just now, no environment variable overrides it. None takes a field back
        to its default. Raises ConfigError.
        """
        name, _, field = path.partition(".")
        values = self.to_dict()
        optimization = find(name)
        if optimization is not None and optimization.fields:
            given = getattr(self, name).model_dump(exclude_defaults=True)
            given[field or next(iter(optimization.fields))] = value
            value = {key: part for key, part in given.items() if part is not None}
        values[name] = value
        twin = from_arguments(values, "the panel", firm={*self._firm, name})
        return twin.alone() if self._alone else twin

    def word(self, path: str) -> str:
        """The word that an option or field has: `true`, `bf16`, `2`; empty for none."""
        name, _, field = path.partition(".")
        value = getattr(self, name)
        if isinstance(value, Fields):
            value = getattr(value, field or next(iter(type(value).model_fields)))
        if isinstance(value, bool):
            return str(value).lower()
        return "" if value is None else str(value)

    def _twin(self) -> SpeedConfig:
        twin = self.model_copy()
        twin._variables, twin._sources = dict(self._variables), dict(self._sources)
        twin._alone, twin._left = self._alone, self._left
        twin._firm, twin._why = self._firm, self._why
        return twin

    @property
    def is_alone(self) -> bool:
        """Whether what is auto is left as it is."""
        return self._alone

    @property
    def why_left(self) -> str:
        """Why what is auto is left as it is, where that was measured."""
        return self._left

    @property
    def is_auto(self) -> bool:
        """Whether nothing definite is asked for, neither here nor by the environment."""
        return not (self._alone or self._variables or self.to_dict())

    def request(self, name: str) -> Request:
        """What is asked of one optimization, and where that came from."""
        value = getattr(self, name)
        if name in self._variables:
            return Request(name, value, "env", self._variables[name])
        if value == _default(find(name)):
            return Request(name, value)
        return Request(name, value, self._sources.get(name, "user"), measured=self._why)


def _prepared(
    values: Mapping[str, Any], origin: _Origin, problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Aliases resolved and the environment laid over; adds wrong keys to `problems`."""
    prepared: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        where = _where(origin, (key,))
        optimization = find(key)
        if optimization is None:
            problems.append(f"{where}{key}: unknown key; {_keys(key)}")
        elif optimization.name in spelled:
            spelling = spelled[optimization.name]
            problems.append(f"{where}{key}: the same as {spelling!r}, which stands there too")
        else:
            spelled[optimization.name] = key
            prepared[optimization.name] = value
    _warn_of_unknown_variables()
    variables = {}
    for optimization in CATALOG:
        if optimization.name in origin.firm:
            continue
        if optimization.variable and os.environ.get(optimization.variable):
            variables[optimization.name] = optimization.variable
            word = os.environ[optimization.variable]
            prepared[optimization.name] = from_word(word, optimization.words)
    return prepared, variables


def _warn_of_unknown_variables() -> None:
    variables = {optimization.variable for optimization in CATALOG if optimization.variable}
    variables |= {database.FOLDER, machines.VARIABLE}
    for name in os.environ:
        if name.startswith("SPEEDKIT_") and name not in variables:
            hint = did_you_mean(name, variables)
            warnings.warn(f"{name}: no such environment variable.{hint}", stacklevel=4)


def from_arguments(values: Mapping[str, Any], origin: str, firm: Iterable[str] = ()) -> SpeedConfig:
    """Like `SpeedConfig.from_dict`, for values of which the `firm` ones were typed just now.

    The environment does not override those. Errors begin with `origin`, the command.
    """
    return SpeedConfig(_Origin(origin, firm=frozenset(firm)), **values)


def nothing() -> SpeedConfig:
    """Asks for nothing, whatever rules and environment wish: everything is left as it is."""
    return from_arguments({}, "baseline", firm=(entry.name for entry in CATALOG)).alone()


def from_word(word: str, allowed: tuple[str, ...] = ()) -> Any:
    """A value as it is written in a shell.

    Where true is among the `allowed` words, 1, on and yes mean it too, and 0, off and no false;
    elsewhere digits are a number.
    """
    word = word.strip().lower()
    if "true" in allowed and word in ("1", "true", "on", "yes"):
        return True
    if "false" in allowed and word in ("0", "false", "off", "no"):
        return False
    return int(word) if word.isdecimal() else word


def _keys(key: str) -> str:
    names = [*(entry.name for entry in CATALOG), ALONE]
    aliases = [alias for entry in CATALOG for alias in entry.aliases]
    return f"allowed: {', '.join(names)}.{did_you_mean(key, [*names, *aliases])}"


def _default(optimization: Optimization | None) -> Any:
    assert optimization is not None
    return optimization.default


def _is_bare(name: str, value: Any) -> bool:
    optimization = find(name)
    fields = optimization.fields if optimization else {}
    return bool(fields) and list(value) == [next(iter(fields))]


def _problems(
    error: ValidationError, origin: _Origin, variables: Mapping[str, str]
) -> Iterator[str]:
    """One line for each key that pydantic refuses: where, what was given, what is allowed."""
    paths = set()
    for detail in error.errors():
        path, allowed = _allowed(detail["loc"])
        if path in paths:  # each branch of a union complains by itself
            continue
        paths.add(path)
        variable = variables.get(path[0])
        where = f"environment variable {variable}: " if variable else _where(origin, path)
        yield f"{where}{'.'.join(path)}: {_mistake(detail, path, allowed)}"


def _mistake(detail: ErrorDetails, path: Path_, allowed: str) -> str:
    if detail["type"] == "value_error":  # said by whoever knows what there is
        return str(detail["ctx"]["error"])
    unknown = detail["type"] == "extra_forbidden"
    if unknown and (twin := _other_spelling(path)):
        return f"the same as {twin!r}, which stands there too"
    word = path[-1] if unknown else detail["input"]
    known = [*allowed.split(", "), *([] if unknown else _bare_words(path))]
    hint = did_you_mean(word, known) if isinstance(word, str) else ""
    mistake = "unknown key" if unknown else f"{yaml_lines.shown(word)} is not allowed"
    return f"{mistake}; allowed: {allowed}.{hint}"


def _bare_words(path: Path_) -> list[str]:
    """The words of other fields, which stand for the first one too: `compile: blocks`."""
    optimization = find(path[0])
    if optimization is None or list(path[1:]) != [*optimization.fields][:1]:
        return []
    return [word.partition(":")[2] for word in optimization.changes() if ":" in word]


def _where(origin: _Origin, path: Path_) -> str:
    paths = [path, *((alias, *path[1:]) for alias in _aliases(path[0]))]
    candidates = [*paths, *(candidate[:1] for candidate in paths)]
    line = next(
        (origin.lines[candidate] for candidate in candidates if candidate in origin.lines), None
    )
    return f"{origin.name}: " if line is None else f"{origin.name}, line {line}: "


def _aliases(key: str) -> tuple[str, ...]:
    optimization = find(key)
    return optimization.aliases if optimization else ()


def _allowed(location: tuple[int | str, ...]) -> tuple[Path_, str]:
    """The key's path (without pydantic's union branches) and the words that are allowed there."""
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
    return path, _described(SpeedConfig.model_fields[optimization.name])


def _other_spelling(path: Path_) -> str | None:
    """For a field's second spelling the name of the field, which pydantic has taken already."""
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
