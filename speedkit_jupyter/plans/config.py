"""What the user asks for: built from the catalog, read from YAML, dicts and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import PrivateAttr, ValidationError

from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.catalog.base.decision import Request, Source
from speedkit_jupyter.catalog.base.optimization import Fields
from speedkit_jupyter.plans.sources import (
    ALONE,
    FromCatalog,
    Origin,
    from_file,
    prepared,
    problems_of,
)
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ConfigError
from speedkit_jupyter.support.tracebacks import hide_internal_frames


class SpeedConfig(FromCatalog):
    """What the user asks for; `SpeedConfig()` is all-auto. Its fields come from the catalog.

    `alone=True` leaves what is auto as it is: the plan is what was asked for, and no more.
    Environment variables (`SPEEDKIT_<NAME>`, the entry's `variable`) win over the values given.
    Raises ConfigError, which holds every mistake at once.
    """

    _variables: dict[str, str] = PrivateAttr(default_factory=dict)
    _source: Source = PrivateAttr(default="user")
    _why: str = PrivateAttr(default="")
    _left: str = PrivateAttr(default="")
    _alone: bool = PrivateAttr(default=False)
    _firm: frozenset[str] = PrivateAttr(default=frozenset())

    def __init__(self, origin: Origin | None = None, /, **values: Any) -> None:
        origin = origin or Origin()
        problems = list(origin.problems)
        alone = values.pop(ALONE, False)
        if not isinstance(alone, bool):
            wrong = f"{ALONE}: {arguments.shown(alone)} is not allowed; allowed: true, false."
            problems.append(origin.where((ALONE,)) + wrong)
        known, variables = prepared(values, origin, problems)
        try:
            super().__init__(**known)
        except ValidationError as error:
            problems += problems_of(error, origin, variables)
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
        values, origin = from_file(path)
        return cls(origin, **values)

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
        """Return the same config, said to come from `source`; `why` stands in its reasons."""
        twin = self.model_copy()
        twin._source, twin._why = source, why
        return twin

    def alone(self, why: str = "") -> SpeedConfig:
        """Return the same options and no others, `why` with a reason: rules decide nothing."""
        twin = self.model_copy()
        twin._alone, twin._left = True, why
        return twin

    def changed(self, path: str, value: Any) -> SpeedConfig:
        """Return a config with one more option: its name (`tf32`) or a field (`compile.mode`).

        No environment variable overrides it, as it was typed just now. None takes a field back to
        its default. Raises ConfigError.
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
        """Return the word that an option or field has: `true`, `bf16`, `2`; empty for none."""
        name, _, field = path.partition(".")
        value = getattr(self, name)
        if isinstance(value, Fields):
            value = getattr(value, field or next(iter(type(value).model_fields)))
        if isinstance(value, bool):
            return str(value).lower()
        return "" if value is None else str(value)

    @property
    def is_alone(self) -> bool:
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
        """Return what is asked of one optimization, and where that came from."""
        value = getattr(self, name)
        if name in self._variables:
            return Request(name, value, "env", self._variables[name])
        if value == type(self).model_fields[name].default:
            return Request(name, value)
        return Request(name, value, self._source, measured=self._why)


def from_arguments(values: Mapping[str, Any], origin: str, firm: Iterable[str] = ()) -> SpeedConfig:
    """Return a config of values; the environment does not override those that are `firm`.

    Errors begin with `origin`, the command.
    """
    return SpeedConfig(Origin(origin, firm=frozenset(firm)), **values)


def nothing() -> SpeedConfig:
    """Return a config that leaves everything as it is, whatever rules and environment ask for."""
    return from_arguments({}, "baseline", firm=(entry.name for entry in CATALOG)).alone()
