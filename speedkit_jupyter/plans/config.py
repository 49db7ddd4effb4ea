"""The user's config. Its options come from the catalog; code, YAML and environment set them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, PrivateAttr, ValidationError, create_model

from speedkit_jupyter import machines
from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.catalog.base.decision import Request, Source
from speedkit_jupyter.catalog.base.optimization import Fields, Optimization
from speedkit_jupyter.support import AUTO, arguments, database, messages
from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

# The key of `SpeedConfig.alone()` in files and dicts.
ALONE = "alone"
# Functions called with each catalog entry that is added later, to extend the magics' options.
WHEN_ADDED: list[Callable[[Optimization], None]] = []

FromCatalog: Any = create_model(
    "_Fields",
    __config__=ConfigDict(frozen=True, extra="forbid"),
    **{item.name: (item.Options, item.default) for item in CATALOG},  # type: ignore[call-overload]
)


@dataclass(frozen=True)
class Origin:
    """The source of values (a file or command), named in messages."""

    name: str = "SpeedConfig"
    firm: Collection[str] = ()  # options that no environment variable overrides


class SpeedConfig(FromCatalog):
    """The options for a plan; `SpeedConfig()` is all auto. The fields come from the catalog.

    Args:
        alone: If True, options not given stay unchanged. Only grad_scaler follows precision.
        values: Options by name, as in `precision="bf16"`. Environment variables, such as
            `SPEEDKIT_PRECISION` for `precision`, take precedence.

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
        if isinstance(origin, Mapping):
            raise ConfigError(["SpeedConfig takes options by name: SpeedConfig(**options)"])
        origin = origin or Origin()
        problems: list[str] = []
        alone = values.pop(ALONE, False)
        if not isinstance(alone, bool):
            wrong = f"{ALONE}: {arguments.shown(alone)} is not allowed; allowed: true, false."
            problems.append(f"{origin.name}: {wrong}")
        known, variables = _prepared(values, origin, problems)
        try:
            super().__init__(**known)
        except ValidationError as error:
            problems += _problems_of(error, origin, variables)
        if problems:
            raise ConfigError(problems)
        self._variables, self._firm, self._alone = variables, frozenset(origin.firm), alone

    @classmethod
    @hide_internal_frames
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedConfig:
        """Build a config from plain values. Raises ConfigError, which lists every mistake."""
        if not isinstance(values, Mapping):
            raise ConfigError([f"a config is a mapping of options, not {type(values).__name__}"])
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    @hide_internal_frames
    def from_yaml(cls, path: str | os.PathLike[str]) -> SpeedConfig:
        """Return the config in a YAML file. Raises ConfigError, which lists every mistake.

        PyYAML's safe loader reads the file. An empty file gives the config `SpeedConfig()`.
        """
        name = str(arguments.path("path", path))
        try:
            values = yaml.safe_load(arguments.file_text(path))
        except FileNotFoundError:
            siblings = [sibling.name for sibling in Path(path).parent.glob("*.y*ml")]
            hint = did_you_mean(Path(path).name, siblings)
            raise ConfigError([f"{name}: there is no such file.{hint}"]) from None
        except (OSError, ValueError) as error:
            raise ConfigError([f"{name}: can't be read: {arguments.why(error)}"]) from None
        except Exception as error:  # PyYAML raises KeyError for `!!bool no-bool`
            what = " ".join(str(error).split())
            raise ConfigError([f"{name}: YAML syntax: {what:.300}"]) from None
        if not isinstance(values, dict | None):
            must_be = "a config is a mapping, as in 'precision: auto'; this is"
            raise ConfigError([f"{name}: {must_be} {arguments.shown(values)}"])
        return cls(Origin(name), **{str(key): value for key, value in (values or {}).items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `from_dict`, without defaults."""
        values: dict[str, Any] = self.model_dump(exclude_defaults=True)
        for name, value in values.items():
            optimization = find(name)
            first = next(iter(optimization.fields if optimization else ()), None)
            if first is not None and list(value) == [first]:
                values[name] = value[first]
        return {ALONE: True, **values} if self._alone else values

    def with_source(self, source: Source, why: str = "") -> SpeedConfig:
        """Return a copy with `source` and `why` for all options except the environment's."""
        twin = self.model_copy()
        twin._source, twin._why = source, why
        return twin

    def alone(self, why: str = "") -> SpeedConfig:
        """Return a copy with `alone`. Options not given stay unchanged, for the reason `why`."""
        twin = self.model_copy()
        twin._alone, twin._left = True, why
        return twin

    def changed(self, path: str, value: Any) -> SpeedConfig:
        """Return a config with `value` for an option (`tf32`) or for a field (`compile.mode`).

        No environment variable overrides this option. None resets a field to its default. Raises
        ConfigError for an invalid name or value.
        """
        name, _, field = path.partition(".")
        values = self.to_dict()
        optimization = find(name)
        if optimization is not None and optimization.fields:
            given = getattr(self, name).model_dump(exclude_defaults=True)
            given[field or next(iter(optimization.fields))] = value
            value = {key: part for key, part in given.items() if part is not None}
        values[name] = value
        twin = SpeedConfig(Origin("the panel", {*self._firm, name}), **values)
        return twin.alone(self._left) if self._alone else twin

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
        """Return the measured reason for leaving auto options unchanged; empty if none."""
        return self._left

    @property
    def is_auto(self) -> bool:
        """Return whether neither `alone` nor any option is given, not even in the environment."""
        return not (self._alone or self._variables or self.to_dict())

    def request(self, name: str) -> Request:
        """Return the request for one optimization, with the value's origin."""
        value = getattr(self, name)
        if name in self._variables:
            return Request(name, value, "env", self._variables[name])
        if value == type(self).model_fields[name].default:
            return Request(name, value)
        return Request(name, value, self._source, measured=self._why)


def from_word(word: str, allowed: tuple[str, ...] = ()) -> Any:
    """Return the value of a word: a bool, an int (up to 18 digits), or the word in lower case.

    Words such as `1` and `on` are True only if "true" is `allowed`; likewise for "false".
    """
    word = word.strip().lower()
    if "true" in allowed and word in ("1", "true", "on", "yes"):
        return True
    if "false" in allowed and word in ("0", "false", "off", "no"):
        return False
    return int(word) if word.isdecimal() and len(word) < 19 else word  # a larger number is a typo


def _prepared(
    values: Mapping[str, Any], origin: Origin, problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values and the environment variables that override values, by option.

    Add a message for each wrong key to `problems`, and warn of unknown environment variables.
    """
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
        problems.append(f"{origin.name}: {key}: {wrong}")
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
    """Yield a line for each key or value that pydantic rejects, with the reason."""
    paths = set()
    for detail in error.errors():
        path, allowed = _allowed(detail["loc"])
        if path in paths:  # each branch of a union reports an error
            continue
        paths.add(path)
        unknown = detail["type"] == "extra_forbidden"
        word = path[-1] if unknown else detail["input"]
        hint = did_you_mean(word, allowed.split(", ")) if isinstance(word, str) else ""
        mistake = "unknown key" if unknown else f"{arguments.shown(word)} is not allowed"
        mistake = f"{mistake}; allowed: {allowed}.{hint}"
        if detail["type"] == "value_error":  # raised by a validator of the catalog
            mistake = str(detail["ctx"]["error"])
        variable = variables.get(path[0])
        where = f"environment variable {variable}" if variable else origin.name
        yield f"{where}: {'.'.join(path)}: {mistake}"


def _allowed(location: tuple[int | str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the key's path, without pydantic's union branches, and the allowed values or keys."""
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
