"""The torch object behind a framework's wrapper, which plans switch and count once.

Wrappers are known by the tensors or groups that they share with the object, not by their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from speedkit_jupyter.support.lookup import attributes_of, is_a

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# Attributes in which wrappers keep the wrapped model; the first one counts.
PARTS = ("_original_module", "_orig_mod", "module")


def unwrapped(value: T) -> T:
    """Return the innermost torch optimizer or module; any other object itself."""
    return layers(value)[-1]


def layers(value: T) -> list[T]:
    """Return the object, the object that it wraps, and so on."""
    import torch

    every = [value]
    while True:
        outer: Any = every[-1]
        is_model = is_a(outer, torch.nn.Module)
        inner = _wrapped_model(outer) if is_model else _wrapped_optimizer(outer)
        if inner is None or any(inner is layer for layer in every):
            return every
        every.append(inner)


def each_once(values: Iterable[T]) -> list[T]:
    """Return the unwrapped objects, each once, in the order of their first appearance."""
    return [*{id(value): value for value in map(unwrapped, values)}.values()]


def is_optimizer(value: Any) -> bool:
    """Return whether the unwrapped object is a torch optimizer."""
    import torch

    return is_a(unwrapped(value), torch.optim.Optimizer)


def _wrapped_model(model: torch.nn.Module) -> Any:
    """Return the part that has all tensors of a wrapper; None for a module with its own tensors."""
    parts = model.__dict__.get("_modules")
    named = [parts.get(name) for name in PARTS] if isinstance(parts, dict) else []
    own = _tensors(model) if any(part is not None for part in named) else []
    return next((part for part in named if part is not None and _tensors(part) == own), None)


def _tensors(model: torch.nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*model.parameters(), *model.buffers())]


def _wrapped_optimizer(value: Any) -> Any:
    """Return the optimizer with the same groups, or the only one of an object that steps it."""
    import torch

    attributes = {} if issubclass(type(value), type) else attributes_of(value)
    inner = [one for one in list(attributes.values()) if is_a(one, torch.optim.Optimizer)]
    if is_a(value, torch.optim.Optimizer):
        return next((one for one in inner if one.param_groups is value.param_groups), None)
    passes_on = all(callable(getattr(type(value), name, None)) for name in ("step", "zero_grad"))
    return inner[0] if len(inner) == 1 and passes_on else None
