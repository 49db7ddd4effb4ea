"""Rows of the store as values: what an editor, a disk or another version may have made of them.

Raises ValueError, in words, for a row that is none of ours; whoever reads the store skips it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

# A number that is shown or divided by; what is not measured yet is None.
Figure = FiniteFloat | None
# How results and plans are found, not the package's version: it is raised where what an earlier
# engine found can't be trusted or compared. Before 2 it was not written down.
ENGINE = 3


@dataclass(frozen=True)
class Saved:
    """A result as it was kept; `saved_at` in UTC, `result` as its `to_dict` gave it."""

    number: int
    name: str
    saved_at: datetime.datetime
    result: Mapping[str, Any]

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier engine found it."""
        return self.result.get("engine") != ENGINE


@dataclass(frozen=True)
class Learned:
    """A plan that was proven, as it was kept.

    `setting` stands for model, optimizers, machine and torch version; `task` for the shapes that
    went in and what was aimed at.
    """

    number: int
    setting: str
    task: str
    learned_at: datetime.datetime
    plan: Mapping[str, Any]

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier engine found it: it is listed, and not used."""
        return self.plan.get("engine") != ENGINE


class _Shape(BaseModel):
    """What others read of a row; the rest of it is as it may be."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Variant(_Shape):
    name: str
    times_s: list[Annotated[FiniteFloat, Field(ge=0)]]
    speedup: Figure = None
    verdict: str = ""
    plan: dict[str, Any] = {}


class ResultShape(_Shape):
    """What `to_dict` of a Comparison or a Timing gives."""

    variants: list[_Variant]
    environment: dict[str, Any] = {}


class PlanShape(_Shape):
    """What tuning keeps of a plan."""

    name: str
    values: dict[str, Any]
    speedup: Figure
    low: Figure
    high: Figure
    parameters: int
    device: str
    model: str
    inputs: list[str]
    trains: bool


def saved(number: int, name: Any, when: Any, result: Any) -> Saved:
    """Return a row of results."""
    return Saved(number, _text(name), _moment(when), _values(result, ResultShape))


def learned(number: int, setting: Any, task: Any, when: Any, plan: Any) -> Learned:
    """Return a row of learned plans."""
    values = _values(plan, PlanShape)
    return Learned(number, _text(setting), _text(task), _moment(when), values)


def _text(raw: Any) -> str:
    """Return a text column; SQLite keeps any bytes in it."""
    try:
        return bytes.decode(raw)
    except TypeError:
        raise ValueError(f"a text is stored as {type(raw).__name__}") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8 text") from None


def _moment(raw: Any) -> datetime.datetime:
    """Return a time in UTC."""
    text = _text(raw)
    try:
        return datetime.datetime.fromisoformat(text).astimezone(datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):  # the last two are years that no clock has
        raise ValueError(f"{text[:40]!r} is no date") from None


def _values(raw: Any, shape: type[BaseModel]) -> Mapping[str, Any]:
    """Return a JSON document of that shape."""
    try:
        read = json.loads(_text(raw))
        json.dumps(read, ensure_ascii=False).encode()  # an escape can stand for half a character
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    try:
        shape.model_validate(read)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where or 'it'}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    return read  # type: ignore[no-any-return]
