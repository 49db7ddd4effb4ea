"""The user's words for objects: `net`, `trainer.model`, `models["lm"]`, `layers[0]`.

Names, attributes and constant subscripts are followed; nothing else is evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean

# torch's own names for a part of a Sequential: `model.0.weight`.
PART = re.compile(r"\.(\d+)(?=[.\[]|$)")
# Longer ones are no names; Python's parser would recurse over their brackets.
LONGEST = 200
# So many keys fit into a message.
MOST_KEYS = 8


def canonical(text: str) -> str:
    """Return the same word as Python writes it. Raises SpeedKitError for what is no such word."""
    return ast.unparse(_parsed(text))


def value_of(names: Mapping[str, Any], text: str, known: Sequence[str] = (), kind: str = "") -> Any:
    """Return what the word stands for. Raises SpeedKitError with the nearest that is `known`."""
    node, steps = _parsed(text), []
    while not isinstance(node, ast.Name):
        steps.append(node)
        node = node.value  # type: ignore[attr-defined]
    if node.id not in names:
        here = f" Here: {', '.join(known)}." if known else ""
        hint = did_you_mean(text, known) or did_you_mean(node.id, known)
        raise SpeedKitError(f"there is no {kind or 'name'} {text!r}.{hint}{here}")
    value = names[node.id]
    for step in reversed(steps):
        owner = value
        try:
            if isinstance(step, ast.Attribute):
                value = getattr(owner, step.attr)
            else:
                value = owner[ast.literal_eval(step.slice)]  # type: ignore[attr-defined]
        except Exception as error:  # a property or an index of the user's own may raise anything
            raise SpeedKitError(_why(error, step, owner)) from None
    return value


def _parsed(text: str) -> ast.expr:
    try:
        if len(text) > LONGEST:
            raise ValueError
        tree = node = ast.parse(PART.sub(r"[\1]", text.strip()), mode="eval").body
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Subscript):
                ast.literal_eval(node.slice)  # raises ValueError for what is no constant
            elif not isinstance(node, ast.Attribute):
                raise ValueError
            node = node.value
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpeedKitError(
            f"{text!r} is no name: write `net`, `trainer.model`, `models['lm']` or `layers[0]`"
        ) from None
    return tree


def _why(error: Exception, node: Any, owner: Any) -> str:
    word = ast.unparse(node.value)
    if not isinstance(error, AttributeError | LookupError):
        return f"{ast.unparse(node)} raises {type(error).__name__}"
    if isinstance(node, ast.Attribute):
        there = [*getattr(owner, "_modules", {}), *getattr(owner, "__dict__", {})]
        return f"{word} has no attribute {node.attr!r}.{did_you_mean(node.attr, there)}"
    key, keys = ast.literal_eval(node.slice), [*owner] if isinstance(owner, Mapping) else []
    if isinstance(error, IndexError):
        return f"{word} has no element {key!r}: there are {len(owner)}"
    here = f" Here: {', '.join(map(repr, keys[:MOST_KEYS]))}." if keys else ""
    return f"{word} has no key {key!r}.{did_you_mean(key, keys) or here}"


def is_a(value: Any, kind: Any) -> bool:
    """Return as `isinstance` does; False for a stranger whose own `__class__` fails."""
    try:
        return isinstance(value, kind)
    except Exception:
        return False


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's own attributes, as it gives them; none where it can't."""
    try:
        attributes: Any = getattr(value, "__dict__", None)
    except Exception:
        return {}
    return attributes if is_a(attributes, dict) else {}
