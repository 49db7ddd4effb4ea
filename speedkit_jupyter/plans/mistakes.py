"""What a config can't be made of, in words: where it stands, what is allowed there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import AliasChoices, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from speedkit_jupyter.optimizations import CATALOG, find
from speedkit_jupyter.plans.fields import ALONE, FromCatalog, Origin, Path_
from speedkit_jupyter.support import yaml_lines
from speedkit_jupyter.support.exceptions import did_you_mean


def allowed_keys(key: str) -> str:
    """What is allowed instead of this one, with the nearest."""
    names = [*(entry.name for entry in CATALOG), ALONE]
    aliases = [alias for entry in CATALOG for alias in entry.aliases]
    return f"allowed: {', '.join(names)}.{did_you_mean(key, [*names, *aliases])}"


def problems_of(
    error: ValidationError, origin: Origin, variables: Mapping[str, str]
) -> Iterator[str]:
    """One line for each key that pydantic refuses: where, what was given, what is allowed."""
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
    known = [*allowed.split(", "), *([] if unknown else _bare_words(path))]
    hint = did_you_mean(word, known) if isinstance(word, str) else ""
    if not unknown and (field := _field_of(path, word)):
        name = path[0].replace("_", "-")
        hint = f" It is a value of {path[0]}.{field} (--{name}-{field})."
    mistake = "unknown key" if unknown else f"{yaml_lines.shown(word)} is not allowed"
    return f"{mistake}; allowed: {allowed}.{hint}"


def _bare_words(path: Path_) -> list[str]:
    """The words of other fields, which stand for the first one too: `compile: blocks`."""
    optimization = find(path[0])
    if optimization is None or list(path[1:]) != [*optimization.fields][:1]:
        return []
    return [word.partition(":")[2] for word in optimization.changes() if ":" in word]


def _field_of(path: Path_, word: object) -> str | None:
    """Another field of the same entry that takes this word: `compile: aot_eager`."""
    optimization = find(path[0])
    fields = {} if optimization is None else optimization.fields
    return next(
        (
            name
            for name, info in fields.items()
            if name not in path[1:] and str(word) in _described(info).split(", ")
        ),
        None,
    )


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
    return path, _described(FromCatalog.model_fields[optimization.name])


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
