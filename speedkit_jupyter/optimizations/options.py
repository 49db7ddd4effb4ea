"""What the type of an option says about it: its fields, and the words that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo


class Fields(BaseModel):
    """Options of more than one field. A bare word (`compile: false`) means the first one, or that
    which knows it; then the first one is on (`compile: blocks`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        if isinstance(value, Mapping | BaseModel):
            return value
        first, *others = cls.model_fields
        takers = [name for name in others if value in choices(cls.model_fields[name].annotation)]
        is_firsts = value in choices(cls.model_fields[first].annotation)
        return {first: value} if is_firsts or not takers else {first: True, takers[0]: value}


def fields_of(options: Any) -> dict[str, FieldInfo]:
    """Its fields by name; none where it is a bare value."""
    is_fields = isinstance(options, type) and issubclass(options, Fields)
    return dict(options.model_fields) if is_fields else {}


def choices(annotation: Any) -> tuple[str, ...]:
    """The words that an option takes, for completion: `Literal` values, true and false included."""
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(
            str(value).lower() if isinstance(value, bool) else str(value)
            for value in get_args(annotation)
        )
    return tuple(word for part in get_args(annotation) for word in choices(part))
