"""The variables of a notebook that hold contexts, and the words by which it finds models."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import named, public
from speedkit_jupyter.support.wrappers import unwrapped

# The variable that a context gets.
CTX = "ctx"
# State at module level, on purpose: the contexts in force, with the word that the user typed for
# the model, as plans belong to the process.
_NAMED: list[tuple[str, SpeedContext]] = []


def applied(names: Mapping[str, Any]) -> list[tuple[str, SpeedContext]]:
    """Return the contexts in force by the words of their models, marked where these changed."""
    contexts = [(word, applied_to(one)) for word, one in named(names, torch.nn.Module).items()]
    by_id = {id(one): (word, one) for word, one in contexts if one is not None}
    by_id |= {id(one): (word, one) for word, one in _NAMED if not one.restored}
    return [
        (word if _means(names, word, one.model) else f"{word} (an earlier model)", one)
        for word, one in by_id.values()
    ]


def keep(names: MutableMapping[str, Any] | None, name: str, context: SpeedContext) -> str:
    """Remember an applied plan; return the variable of the notebook that its context gets."""
    variable = _variable_for(names or {}, name, context.model)
    others = [one for one in _NAMED if one[1].model is not context.model and not one[1].restored]
    _NAMED[:] = [*others, (name, context)]
    if names is not None:
        names[variable] = context
    return variable


def forget() -> None:
    """Forget the words of all contexts; those in force stay in force."""
    _NAMED.clear()


def _variable_for(names: Mapping[str, Any], name: str, model: torch.nn.Module) -> str:
    """Return `ctx` where it is free: another model's context and the user's variables stay."""
    own = "_".join([CTX, *re.findall(r"\w+", name)])
    if not is_free(names.get(CTX), model):
        gc.collect()  # an earlier model without a name may be waiting for it
    tried = itertools.chain((CTX, own), (f"{own}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in tried if is_free(names.get(candidate), model))


def variable_of(names: Mapping[str, Any] | None, context: SpeedContext) -> str:
    """Return the name that a context has in the notebook."""
    return next((name for name, value in public(names) if value is context), CTX)


def name_of(
    names: Mapping[str, Any] | None, model: torch.nn.Module, otherwise: str = "model"
) -> str:
    """Return the word by which the notebook finds a model: `net`, `models['lm']`."""
    words = named(names, torch.nn.Module).items()
    whole = unwrapped(model)
    return next((word for word, one in words if unwrapped(one) is whole), otherwise)


def is_free(value: Any, model: torch.nn.Module) -> bool:
    """Whether a variable may hold a new context of this model: nothing, or one that it replaces."""
    if type(value) is SpeedContext:
        return value.restored or value.model is model
    return value is None


def _means(names: Mapping[str, Any], word: str, model: torch.nn.Module) -> bool:
    try:
        return unwrapped(lookup.value_of(names, word)) is unwrapped(model)
    except SpeedKitError:  # a method's own variable, as `self.net`
        return "." in word
