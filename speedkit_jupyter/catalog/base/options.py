"""What the type of an option says about it: its fields, and the words that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo

Flag = Annotated[bool, Strict()]


class Fields(BaseModel):
    """Options of more than one field. A bare word (`compile: false`) means the first one, or that
    which knows it; then the first one is on (`compile: blocks`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for info in cls.model_fields.values():
            info.description = info.description or ", ".join(choices(info.annotation))

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value
        words = {name: choices(info.annotation) for name, info in cls.model_fields.items()}
        first, *others = words
        given = dict(value) if isinstance(value, Mapping) else {first: value}
        word = given.get(first)
        takers = [name for name in others if word in words[name]]
        if takers and takers[0] not in given and word not in words[first]:
            given |= {first: True, takers[0]: word}
        return given


def described(options: Any) -> Any:
    """Return the type of a bare value with its words as the description, unless it has one."""
    if any(isinstance(one, FieldInfo) for one in getattr(options, "__metadata__", ())):
        return options
    return Annotated[options, Field(description=", ".join(choices(options)))]


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that an option takes, true and false included."""
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        words = get_args(annotation)
        return tuple(str(word).lower() if isinstance(word, bool) else str(word) for word in words)
    return tuple(word for part in get_args(annotation) for word in choices(part))
