"""Name contexts and models in the notebook: `ctx` for a context, `net` for a model."""

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
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.registry import planned_models
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import by_expression, is_a, value_of
from speedkit_jupyter.support.wrappers import unwrapped

# The default variable for a context.
CTX = "ctx"
# The expression that named each context's model. A global, because plans belong to the process.
_TYPED = weakref.WeakKeyDictionary[SpeedContext, str]()


def applied(names: Mapping[str, Any]) -> list[tuple[str, SpeedContext]]:
    """Return a pair (expression, newest context) for each living model with a plan."""
    contexts = [context for model in planned_models() if (context := applied_to(model)) is not None]
    return [(_word(names, context), context) for context in contexts]


def _word(names: Mapping[str, Any], context: SpeedContext) -> str:
    model, typed = context.model, _TYPED.get(context, "")
    with suppress(SpeedKitError):  # no expression, or one local to a method, such as `self.net`
        if unwrapped(value_of(names, typed)) is unwrapped(model):
            return typed
    return name_of(names, model, f"{type(model).__name__} without a variable")


def assign(names: MutableMapping[str, Any] | None, name: str, context: SpeedContext) -> str:
    """Assign a context to a free variable in `names`, if given; return the variable's name.

    For the `name` `net`, it is the first free variable of `ctx`, `ctx_net`, `ctx_net_2` and so on.
    """
    model, own = context.model, "_".join([CTX, *re.findall(r"\w+", name)])
    space = {} if names is None else names
    if not _is_free(space.get(CTX), model):
        gc.collect()  # an earlier, deleted model may be waiting for garbage collection
    tried = itertools.chain((CTX, own), (f"{own}_{number}" for number in itertools.count(2)))
    variable = next(one for one in tried if _is_free(space.get(one), model))
    space[variable], _TYPED[context] = context, name
    return variable


def name_of(names: Mapping[str, Any] | None, model: torch.nn.Module, other: str = "model") -> str:
    """Return the notebook's expression for a model, such as `net`, or `other` if there is none."""
    words = by_expression(names, torch.nn.Module).items()
    return next((word for word, one in words if unwrapped(one) is unwrapped(model)), other)


def _is_free(value: Any, model: torch.nn.Module) -> bool:
    """Return whether a variable with this value may get a new context of the model."""
    if is_a(value, SpeedContext):
        return value.restored or value.model is model
    return value is None
