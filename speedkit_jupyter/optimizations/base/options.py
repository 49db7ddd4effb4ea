"""What the type of an option says about it: its fields, and the words that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo


class Fields(BaseModel):
    """Options of more than one field. A bare word (`compile: false`) means the first one, or that
    which knows it; then the first one is on (`compile: blocks`). The name of a switch among them
    is that switch alone (`rewrites: gelu`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value
        first, *others = cls.model_fields
        given = dict(value) if isinstance(value, Mapping) else {first: value}
        word = given.get(first)
        takers = [name for name in others if word in _choices_of(cls, name)]
        if takers and takers[0] not in given and word not in _choices_of(cls, first):
            given |= {first: True, takers[0]: word}
        switches = [name for name, info in cls.model_fields.items() if info.annotation is bool]
        if isinstance(word, str) and word in switches:
            others_off = {name: False for name in switches if name != word}
            given = others_off | given | {first: True, word: True}
        return given


def _choices_of(options: type[BaseModel], name: str) -> tuple[str, ...]:
    return choices(options.model_fields[name].annotation)


def fields_of(options: Any) -> dict[str, FieldInfo]:
    """Return its fields by name; none where it is a bare value."""
    is_fields = isinstance(options, type) and issubclass(options, Fields)
    return dict(options.model_fields) if is_fields else {}


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that an option takes, true and false included."""
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(
            str(value).lower() if isinstance(value, bool) else str(value)
            for value in get_args(annotation)
        )
    return tuple(word for part in get_args(annotation) for word in choices(part))
