"""The user's own catalog entries: functions that replace the `forward` of a module class."""

from __future__ import annotations

import re
from collections.abc import Callable
from keyword import iskeyword
from types import FunctionType
from typing import Any, TypeVar

import torch
from pydantic.fields import FieldInfo

from speedkit_jupyter.catalog import CATALOG, add, find
from speedkit_jupyter.catalog.base.own_kernel import OwnKernel
from speedkit_jupyter.plans.config import ALONE, FromCatalog, SpeedConfig
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import hide_internal_frames

F = TypeVar("F", bound=Callable[..., Any])
NAME = re.compile(r"[a-z][a-z0-9_]*")
# Reserved names: variants, and other options of `%speedkit apply`.
TAKEN = {"baseline", "current", "auto", ALONE, "model", "optimizer", "config", "rules", "likely"}
# Called with each new entry, because the options of magics are created once.
WHEN_ADDED: list[Callable[[OwnKernel], None]] = []


@hide_internal_frames
def optimization(name: str, *, replaces: type[torch.nn.Module]) -> Callable[[F], F]:
    """Return a decorator that registers a function as an optimization of this name.

    The function gets a module of the class `replaces` and the inputs of its call, and returns the
    result of the module's `forward`. For inputs that it can't take it returns
    `nn.LayerNorm.forward(module, x)`; `module(x)` would call the function again. A C++ or Triton
    kernel needs `torch.library.register_autograd` for gradients.

    The optimization works like all others: `%speedkit apply --my_layernorm true`, `--tune`,
    `SpeedConfig(my_layernorm=True)`. Running the cell again replaces the function; a plan in force
    keeps the earlier one.

    Args:
        name: The name in configs, options and variants: lower-case letters, digits and _.
        replaces: The class of modules whose `forward` the function replaces.

    Returns:
        A decorator, which returns the function itself.

    Raises:
        ArgumentError: The name is taken or invalid, `replaces` is not a class of modules, or the
            decorated object is not a function.

    Example::

        @optimization("my_layernorm", replaces=nn.LayerNorm)
        def fast_layernorm(module, x):
            return my_kernel(x, module.weight, module.bias, module.eps)
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or iskeyword(name):
        example = "lower-case letters, digits and _, as in 'my_layernorm'"
        raise ArgumentError(f"{arguments.shown(name)} can't name an optimization: take {example}")
    is_word = any(name in entry.changes() for entry in CATALOG)
    is_taken = is_word or find(name) or name in TAKEN or hasattr(SpeedConfig, name)
    if is_taken and not isinstance(find(name), OwnKernel):
        raise ArgumentError(f"the name {name!r} is taken: choose another, as 'my_{name}'")
    if not (isinstance(replaces, type) and issubclass(replaces, torch.nn.Module)):
        given = arguments.shown(replaces)
        raise ArgumentError(f"replaces must be a class of modules, as nn.LayerNorm, not {given}")

    def register(function: F) -> F:
        if not isinstance(function, FunctionType):
            kind = type(function).__name__
            raise ArgumentError(f"{name}: decorate a function of (module, *inputs), not {kind}")
        forget(name)
        _add(OwnKernel.made(name, function, replaces))
        return function

    return register


def _add(entry: OwnKernel) -> None:
    """Add an entry to the catalog, and its field to all configs, including existing ones."""
    add(entry)
    options: Any = entry.Options
    for model in (FromCatalog, SpeedConfig):
        made = FieldInfo.from_annotated_attribute(options, entry.default)
        model.model_fields[entry.name] = made
        model.model_rebuild(force=True)
    setattr(SpeedConfig, entry.name, entry.default)
    for call in WHEN_ADDED:
        call(entry)


def forget(name: str) -> None:
    """Remove the user's function from the catalog; built-in optimizations stay."""
    entry = find(name)
    if isinstance(entry, OwnKernel):
        CATALOG.remove(entry)
        delattr(SpeedConfig, name)
        for model in (FromCatalog, SpeedConfig):
            del model.model_fields[name]
            model.model_rebuild(force=True)
