"""Find or evaluate expressions for objects: `net`, `trainer.model`, `models["lm"]`, `nets[0]`."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean

# A part of a Sequential as torch names it: `model.0.weight`.
PART = re.compile(r"\.(\d+)(?=[.\[]|$)")
# Maximum length of an expression: Python's parser could recurse too deeply in longer texts.
LONGEST = 200
# Maximum length of a list or dict whose elements get expressions.
MOST_PARTS = 32
# Containers whose items get expressions.
ITEMS = frozenset({list, tuple, dict, OrderedDict, defaultdict})


def canonical(text: str) -> str:
    """Return an expression in normal form: `model[0]` for `model.0`. Raises SpeedKitError."""
    return ast.unparse(_parsed(text))


def value_of(names: Mapping[str, Any], text: str, known: Sequence[str] = (), kind: str = "") -> Any:
    """Return the value of an expression. Raises SpeedKitError, which may suggest a `known` name."""
    tree = _parsed(text)
    root = next(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    if root not in names:
        here = f" Here: {', '.join(known)}." if known else ""
        hint = did_you_mean(text, known) or did_you_mean(root, known)
        raise SpeedKitError(f"there is no {kind or 'name'} {text!r}.{hint}{here}")
    return _evaluated(tree, names)


def _evaluated(node: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names[node.id]
    owner = _evaluated(node.value, names)
    try:
        is_attribute = isinstance(node, ast.Attribute)
        return getattr(owner, node.attr) if is_attribute else owner[ast.literal_eval(node.slice)]
    except Exception as error:  # the user's properties and indexes may raise anything
        raise SpeedKitError(_why(error, node, owner)) from None


def _parsed(text: str) -> ast.expr:
    try:
        if len(text) > LONGEST:
            raise ValueError
        tree = node = ast.parse(PART.sub(r"[\1]", text.strip()), mode="eval").body
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Subscript):
                ast.literal_eval(node.slice)  # raises ValueError unless the index is a literal
            elif not isinstance(node, ast.Attribute):
                raise ValueError
            node = node.value
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpeedKitError(
            f"{text!r} is not a name: write `net`, `trainer.model`, `models['lm']` or `layers[0]`"
        ) from None
    return tree


def _why(error: Exception, node: Any, owner: Any) -> str:
    word, there = ast.unparse(node.value), list[str]()
    if isinstance(node, ast.Attribute) and isinstance(error, AttributeError):
        with suppress(Exception):  # the user's `__dir__` may fail
            there = [name for name in dir(owner) if name[:1] != "_"]
        return f"{word} has no attribute {node.attr!r}.{did_you_mean(node.attr, there)}"
    if isinstance(node, ast.Subscript) and isinstance(error, LookupError):
        keys = [*owner] if isinstance(owner, Mapping) else range(len(owner))
        key = ast.literal_eval(node.slice)
        here = f" Here: {', '.join(map(repr, keys))}." if 0 < len(keys) <= MOST_PARTS else ""
        return f"{word} has no element {key!r}.{did_you_mean(key, keys) or here}"
    return f"{ast.unparse(node)} raises {type(error).__name__}"


def is_a(value: Any, kind: Any) -> bool:
    """Return `isinstance(value, kind)`; False if the object's own `__class__` raises an error."""
    try:
        return isinstance(value, kind)
    except Exception:
        return False


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's `__dict__`; empty if it can't be read or is not a dict."""
    try:
        attributes: Any = getattr(value, "__dict__", None)
    except Exception:
        return {}
    return attributes if is_a(attributes, dict) else {}


def public(names: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Return names and values of a namespace, without private names, `In` and `Out`."""
    every = list((names or {}).items())
    return [pair for pair in every if pair[0][:1] != "_" and pair[0] not in ("In", "Out")]


def by_expression(names: Any, kind: type, inside: bool = True) -> dict[str, Any]:
    """Return distinct objects of a class by expression: variables and, if `inside`, their parts."""
    entries = public(names)
    parts = (
        (f"{name}{word}", value)
        for name, owner in entries
        if inside and not is_a(owner, ModuleType | type)
        for word, value in parts_of(owner)
    )
    found: dict[int, tuple[str, Any]] = {}
    for name, value in itertools.chain(entries, parts):
        if is_a(value, kind):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the suffix (`.net`, `['lm']`) and value of each part, then of items in these parts."""
    parts = list(_direct_parts(owner))
    yield from parts
    for word, part in parts:
        if type(part) in ITEMS:
            yield from ((word + inner, item) for inner, item in _direct_parts(part))


def _direct_parts(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield suffixes and values: items of a short list, tuple or dict, else public attributes."""
    kind = type(owner)
    if kind in {list, tuple} and len(owner) <= MOST_PARTS:
        yield from ((f"[{number}]", part) for number, part in enumerate(owner))
    elif kind in ITEMS and len(owner) <= MOST_PARTS:
        plain = ((key, part) for key, part in list(owner.items()) if type(key) in {str, int})
        yield from ((f"[{key!r}]", part) for key, part in plain)
    else:
        attributes = list(attributes_of(owner).items()) or list(_fields_of(owner))
        yield from ((f".{key}", part) for key, part in attributes if str(key)[:1] != "_")


def _fields_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass with slots, or of a named tuple."""
    with suppress(Exception):  # the user's attributes may raise anything
        for name in getattr(type(owner), "__dataclass_fields__", ()) or type(owner)._fields:
            yield name, getattr(owner, name)


def notebook() -> MutableMapping[str, Any] | None:
    """Return the variables of the running notebook; None in a script."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return None if shell is None else shell.user_ns  # type: ignore[no-any-return]
