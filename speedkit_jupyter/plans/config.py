"""The user's config: built from the catalog, read from YAML, dicts and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, PrivateAttr, ValidationError, create_model

from speedkit_jupyter import machines
from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.catalog.base.decision import Request, Source
from speedkit_jupyter.catalog.base.optimization import Fields
from speedkit_jupyter.support import arguments, database, messages
from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

# The key of `SpeedConfig.alone()` in files and dicts.
# The variable by which the extension begins with `%speedkit auto`.
AUTO = "SPEEDKIT_AUTO"
ALONE = "alone"

FromCatalog: Any = create_model(
    "_Fields",
    __config__=ConfigDict(frozen=True, extra="forbid"),
    **{item.name: (item.Options, item.default) for item in CATALOG},  # type: ignore[call-overload]
)


@dataclass(frozen=True)
class Origin:
    """The place that values come from, for messages: a name and the line of each option."""

    name: str = "SpeedConfig"
    lines: Mapping[str, int] = field(default_factory=dict)
    firm: frozenset[str] = frozenset()  # fields that no environment variable changes

    def where(self, key: str) -> str:
        """Return the name, with the option's line if it has one."""
        names = (key, *getattr(find(key), "aliases", ()))
        line = next((self.lines[name] for name in names if name in self.lines), None)
        return f"{self.name}: " if line is None else f"{self.name}, line {line}: "


class SpeedConfig(FromCatalog):
    """The options for a plan; `SpeedConfig()` is all-auto. Its fields come from the catalog.

    Args:
        alone: If True, rules decide nothing: options that are not given stay unchanged.
        values: Options by name, as `precision="bf16"`. Environment variables (`SPEEDKIT_<NAME>`,
            the entry's `variable`) win over these.

    Raises:
        ConfigError: A name or value is invalid; `problems` lists every mistake.

    Example::

        config = SpeedConfig(precision="bf16", channels_last=True)
        model, ctx = apply_speedups(model, config)
    """

    _variables: dict[str, str] = PrivateAttr(default_factory=dict)
    _source: Source = PrivateAttr(default="user")
    _why: str = PrivateAttr(default="")
    _left: str = PrivateAttr(default="")
    _alone: bool = PrivateAttr(default=False)
    _firm: frozenset[str] = PrivateAttr(default=frozenset())

    def __init__(self, origin: Origin | None = None, /, **values: Any) -> None:
        origin = origin or Origin()
        problems: list[str] = []
        alone = values.pop(ALONE, False)
        if not isinstance(alone, bool):
            wrong = f"{ALONE}: {arguments.shown(alone)} is not allowed; allowed: true, false."
            problems.append(origin.where(ALONE) + wrong)
        known, variables = _prepared(values, origin, problems)
        try:
            super().__init__(**known)
        except ValidationError as error:
            problems += _problems_of(error, origin, variables)
        if problems:
            raise ConfigError(problems)
        self._variables, self._firm, self._alone = variables, origin.firm, alone

    @classmethod
    @hide_internal_frames
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedConfig:
        """Build a config from plain values; raises ConfigError with every mistake."""
        if not isinstance(values, Mapping):
            raise ConfigError([f"a config is a mapping of options, not {type(values).__name__}"])
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    @hide_internal_frames
    def from_yaml(cls, path: str | os.PathLike[str]) -> SpeedConfig:
        """Read a YAML file, safely; raises ConfigError with file, line and key of every mistake.

        An empty file is all-auto.
        """
        values, origin = _from_file(path)
        return cls(origin, **{str(key): value for key, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` takes without loss; defaults are left out."""
        values: dict[str, Any] = self.model_dump(exclude_defaults=True)
        for name, value in values.items():
            optimization = find(name)
            first = next(iter(optimization.fields if optimization else ()), None)
            if first is not None and list(value) == [first]:
                values[name] = value[first]
        return {ALONE: True, **values} if self._alone else values

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return YAML that `from_yaml` reads without loss; write it to `path` too, if given."""
        values = self.to_dict()
        text = yaml.safe_dump(values, sort_keys=False) if values else "# everything is auto\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def with_source(self, source: Source, why: str = "") -> SpeedConfig:
        """Return a copy whose reasons name `source` as the origin of its options, and `why`."""
        twin = self.model_copy()
        twin._source, twin._why = source, why
        return twin

    def alone(self, why: str = "") -> SpeedConfig:
        """Return a copy in which rules decide nothing; `why` is the reason in reports."""
        twin = self.model_copy()
        twin._alone, twin._left = True, why
        return twin

    def changed(self, path: str, value: Any) -> SpeedConfig:
        """Return a config with one more option: its name (`tf32`) or a field (`compile.mode`).

        No environment variable overrides it. None resets a field to its default. Raises ConfigError
        for an invalid name or value.
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
        """Return the value of an option or field as a word: `true`, `bf16`, `2`."""
        name, _, field = path.partition(".")
        value = getattr(self, name)
        if isinstance(value, Fields):
            value = getattr(value, field or next(iter(type(value).model_fields)))
        return str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def is_alone(self) -> bool:
        return self._alone

    @property
    def why_left(self) -> str:
        """The measured reason for leaving auto options unchanged; else empty."""
        return self._left

    @property
    def is_auto(self) -> bool:
        """True if all options are auto, here and in the environment."""
        return not (self._alone or self._variables or self.to_dict())

    def request(self, name: str) -> Request:
        """Return the request for one optimization, and its origin."""
        value = getattr(self, name)
        if name in self._variables:
            return Request(name, value, "env", self._variables[name])
        if value == type(self).model_fields[name].default:
            return Request(name, value)
        return Request(name, value, self._source, measured=self._why)


def from_arguments(values: Mapping[str, Any], origin: str, firm: Iterable[str] = ()) -> SpeedConfig:
    """Return a config of values; the environment does not override the `firm` ones.

    Errors begin with `origin`, the command.
    """
    return SpeedConfig(Origin(origin, firm=frozenset(firm)), **values)


def nothing() -> SpeedConfig:
    """Return a config that leaves everything unchanged, against rules and environment."""
    return from_arguments({}, "baseline", firm=(entry.name for entry in CATALOG)).alone()


def from_word(word: str, allowed: tuple[str, ...] = ()) -> Any:
    """Return a value as it is written in a shell: digits are a number.

    Where true is `allowed`, 1, on and yes mean it, and 0, off and no false.
    """
    word = word.strip().lower()
    if "true" in allowed and word in ("1", "true", "on", "yes"):
        return True
    if "false" in allowed and word in ("0", "false", "off", "no"):
        return False
    return int(word) if word.isdecimal() and len(word) < 19 else word  # a larger number is a typo


def _from_file(path: str | os.PathLike[str]) -> tuple[dict[Any, Any], Origin]:
    """Read YAML, safely; raises ConfigError with the file's name and the line."""
    name = str(arguments.path("path", path))
    try:
        text = arguments.file_text(path)
    except FileNotFoundError:
        siblings = [sibling.name for sibling in Path(path).parent.glob("*.y*ml")]
        hint = did_you_mean(Path(path).name, siblings)
        raise ConfigError([f"{name}: there is no such file.{hint}"]) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no possible path
        raise ConfigError([f"{name}: can't be read: {arguments.why(error)}"]) from None
    try:
        values = yaml.safe_load(text)
        node = yaml.compose(text, yaml.SafeLoader)
    # PyYAML's own constructors raise KeyError and others for `!!bool no-bool`.
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError([f"{name}{where}: YAML syntax: {what:.300}"]) from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        must_be = "a config is a mapping, as in 'precision: auto'; this is"
        raise ConfigError([f"{name}, line 1: {must_be} {arguments.shown(values)}"])
    keys = list(_keys(node)) if node else []
    words = [word for word, _ in keys]
    twice = [place for i, place in enumerate(keys) if place[0] in words[:i]]
    if twice:
        raise ConfigError(f"{name}, line {n}: {word}: this key is there twice" for word, n in twice)
    return values, Origin(name, dict(keys))


def _keys(node: yaml.Node) -> Iterator[tuple[str, int]]:
    """Yield the keys of a mapping, inner ones as `compile.mode`, with their lines."""
    mappings = [("", node), *((f"{key.value}.", value) for key, value in node.value)]
    for before, part in mappings:
        if isinstance(part, yaml.MappingNode):
            yield from ((f"{before}{key.value}", key.start_mark.line + 1) for key, _ in part.value)


def _prepared(
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
            wrong = f"the same as {optimization.name!r}, which is there too"
        else:
            known[optimization.name] = value
            continue
        problems.append(f"{origin.where(key)}{key}: {wrong}")
    variables = {entry.variable: entry for entry in CATALOG if entry.variable}
    others = (*variables, database.FOLDER, machines.VARIABLE, messages.VARIABLE, AUTO)
    for name in os.environ:
        if name.startswith("SPEEDKIT_") and name not in others:
            messages.warn(f"{name}: no such environment variable.{did_you_mean(name, others)}")
    used = {}
    for variable, entry in variables.items():
        if os.environ.get(variable) and entry.name not in origin.firm:
            used[entry.name] = variable
            known[entry.name] = from_word(os.environ[variable], entry.words)
    return known, used


def _problems_of(
    error: ValidationError, origin: Origin, variables: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each key that pydantic refuses: its place, the value, the allowed ones."""
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
        if detail["type"] == "value_error":  # a validator of the catalog's
            mistake = str(detail["ctx"]["error"])
        variable = variables.get(path[0])
        where = f"environment variable {variable}: " if variable else origin.where(path[0])
        yield f"{where}{'.'.join(path)}: {mistake}"


def _allowed(location: tuple[int | str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the key's path (without pydantic's union branches), and the allowed values."""
    name, *inner = map(str, location)
    fields: Mapping[str, Any] = getattr(find(name), "fields", {})
    if not fields:
        return (name,), str(FromCatalog.model_fields[name].description)
    if not inner:
        return (name,), str(next(iter(fields.values())).description)
    for field_name, info in fields.items():
        if inner[0] in (field_name, *getattr(info.validation_alias, "choices", ())):
            return (name, inner[0]), str(info.description)
    return (name, inner[0]), ", ".join(fields)
