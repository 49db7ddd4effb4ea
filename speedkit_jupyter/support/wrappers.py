"""Unwrap models and optimizers that frameworks wrap, and find the models that an object holds.

Unwrapping lets plans change and count each model only once. Wrappers are recognized by their
tensors, parameter groups or methods, not by class. Objects such as pipelines may hold models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from speedkit_jupyter.support.lookup import attributes_of, is_a, parts_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# Attributes in which wrappers keep models; the model is the first with all the wrapper's tensors.
PARTS = ("_original_module", "_orig_mod", "module")
# The property that returns the model if no attribute holds it, as in Lightning's Trainer.
PROPERTY = "model"
# The list of the models that Accelerate's Accelerator has prepared.
PREPARED = "_models"


def unwrapped(value: T) -> T:
    """Return the torch module or optimizer inside wrappers; any other object unchanged."""
    return layers(value)[-1]


def layers(value: T) -> list[T]:
    """Return the object and the objects that it wraps, the outermost first."""
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
    """Return the distinct unwrapped objects, in order of first appearance."""
    return [*{id(value): value for value in map(unwrapped, values)}.values()]


def is_optimizer(value: Any) -> bool:
    """Return whether the unwrapped object is a torch optimizer."""
    import torch

    return is_a(unwrapped(value), torch.optim.Optimizer)


def _wrapped_model(model: torch.nn.Module) -> Any:
    """Return the submodule with all tensors of its wrapper; None if `model` is not a wrapper."""
    parts = model.__dict__.get("_modules")
    named = [parts.get(name) for name in PARTS] if isinstance(parts, dict) else []
    own = _tensors(model) if any(part is not None for part in named) else []
    return next((part for part in named if part is not None and _tensors(part) == own), None)


def _tensors(model: torch.nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*model.parameters(), *model.buffers())]


def _wrapped_optimizer(value: Any) -> Any:
    """Return the optimizer that `value` wraps; None if `value` is not a wrapper."""
    import torch

    attributes = {} if issubclass(type(value), type) else attributes_of(value)
    inner = [one for one in list(attributes.values()) if is_a(one, torch.optim.Optimizer)]
    if is_a(value, torch.optim.Optimizer):
        return next((one for one in inner if one.param_groups is value.param_groups), None)
    passes_on = all(callable(getattr(type(value), name, None)) for name in ("step", "zero_grad"))
    return inner[0] if len(inner) == 1 and passes_on else None


def models_in(holder: Any) -> dict[str, torch.nn.Module]:
    """Return the top-level models that an object holds, in order, by suffix: `.unet`, `['lm']`.

    Parts of other models and modules without parameters are left out. A model and its wrappers
    count once. Private attributes, such as caches, are not read, except Accelerate's `_models`.
    """
    import torch

    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for word, value in (*parts_of(holder), *_property_of(holder)):
        if is_a(value, torch.nn.Module) and next(iter(value.parameters()), None) is not None:
            found.setdefault(id(unwrapped(value)), (word, value))
    inner = {id(part) for _, model in found.values() for part in list(model.modules())[1:]}
    return {word: model for word, model in found.values() if id(model) not in inner}


def may_hold_models(value: Any) -> bool:
    """Return whether an object may hold models; False for models, Python modules and classes."""
    import torch

    is_ours = type(value).__module__.startswith("speedkit_jupyter.")  # such as `ctx`
    if is_ours or is_a(value, torch.nn.Module | ModuleType | type):
        return False
    is_kind = PREPARED in attributes_of(value) or has_model_property(value)  # no property is read
    return is_kind or any(is_a(part, torch.nn.Module) for _, part in parts_of(value))


def has_model_property(holder: Any) -> bool:
    return isinstance(getattr(type(holder), PROPERTY, None), property)


def _property_of(holder: Any) -> Iterator[tuple[str, Any]]:
    prepared = attributes_of(holder).get(PREPARED)
    for number, model in enumerate(prepared if type(prepared) is list else ()):
        yield f".{PREPARED}[{number}]", model
    if has_model_property(holder):
        with suppress(Exception):  # a library's object may have no model yet
            yield f".{PROPERTY}", getattr(holder, PROPERTY)
