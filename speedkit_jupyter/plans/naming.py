"""The variables of a notebook that hold contexts, and the words by which it finds models."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch

from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.context import SpeedContext, planned
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import named, value_of
from speedkit_jupyter.support.wrappers import unwrapped

# The variable that a context gets.
CTX = "ctx"
# State at module level, on purpose, as plans belong to the process: the user's words for models.
_TYPED = weakref.WeakKeyDictionary[SpeedContext, str]()


def applied(names: Mapping[str, Any]) -> list[tuple[str, SpeedContext]]:
    """Return the contexts in force by the words of their models."""
    contexts = [context for model in planned() if (context := applied_to(model)) is not None]
    return [(_word(names, context), context) for context in contexts]


def _word(names: Mapping[str, Any], context: SpeedContext) -> str:
    model, typed = context.model, _TYPED.get(context, "")
    with suppress(SpeedKitError):  # a method's own variable, as `self.net`
        if unwrapped(value_of(names, typed)) is unwrapped(model):
            return typed
    return name_of(names, model, f"{type(model).__name__} without a variable")


def keep(names: MutableMapping[str, Any] | None, name: str, context: SpeedContext) -> str:
    """Put a context into a variable of the notebook, and return the variable's name.

    `ctx` where it is free: another model's context and the user's variables stay.
    """
    model, own = context.model, "_".join([CTX, *re.findall(r"\w+", name)])
    space = {} if names is None else names
    if not _is_free(space.get(CTX), model):
        gc.collect()  # an earlier model without a name may be waiting for it
    tried = itertools.chain((CTX, own), (f"{own}_{number}" for number in itertools.count(2)))
    variable = next(one for one in tried if _is_free(space.get(one), model))
    space[variable], _TYPED[context] = context, name
    return variable


def name_of(
    names: Mapping[str, Any] | None, model: torch.nn.Module, otherwise: str = "model"
) -> str:
    """Return the word by which the notebook finds a model: `net`, `models['lm']`."""
    words = named(names, torch.nn.Module).items()
    whole = unwrapped(model)
    return next((word for word, one in words if unwrapped(one) is whole), otherwise)


def _is_free(value: Any, model: torch.nn.Module) -> bool:
    """Return whether a variable may hold a new context of this model."""
    if type(value) is SpeedContext:
        return value.restored or value.model is model
    return value is None
