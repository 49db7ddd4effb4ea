"""Find the objects that a magic's line names, and the plan of a model."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from keyword import iskeyword
from types import FunctionType, MethodType
from typing import Any

import torch
from IPython.core.error import UsageError
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans import naming
from speedkit_jupyter.plans.applying import applied_to, trained_by
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, plan
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.reachable import holds, outermost
from speedkit_jupyter.support import lookup, messages
from speedkit_jupyter.support.exceptions import ConfigError, SpeedKitError
from speedkit_jupyter.support.lookup import by_expression, public
from speedkit_jupyter.support.wrappers import (
    PROPERTY,
    is_optimizer,
    may_hold_models,
    models_in,
    unwrapped,
)

Space = Mapping[str, Any]
# Functions that return models and DataLoaders by variable, also for Tab completion.
models = partial(by_expression, kind=torch.nn.Module, inside=False)
loaders = partial(by_expression, kind=torch.utils.data.DataLoader, inside=False)


def words_of_models(names: Space) -> list[str]:
    """Return the expressions of models, and the variables that hold models."""
    found = by_expression(names, torch.nn.Module)
    others = (name for name, value in public(names) if name not in found and may_hold_models(value))
    return [*dict.fromkeys([*_and_holders(found), *others])]


def _and_holders(words: Iterable[str]) -> list[str]:
    return [*dict.fromkeys([*words, *(re.split(r"[.\[]", word)[0] for word in words)])]


def optimizers(names: Space, inside: bool = False) -> dict[str, torch.optim.Optimizer]:
    """Return unwrapped optimizers by expression. If `inside`, also look inside other objects."""
    found = by_expression(names, torch.optim.Optimizer, inside)
    return {name: unwrapped(optimizer) for name, optimizer in found.items()}


def functions(names: Space) -> dict[str, Any]:
    return {
        name: value
        for name, value in public(names)
        if type(value) is FunctionType
        and not str(value.__globals__.get("__name__", "")).startswith("IPython")
    }


def whole_models(names: Space) -> dict[str, torch.nn.Module]:
    """Return the models that have parameters and are not part of another model."""
    found = by_expression(names, torch.nn.Module)
    wholes = set(map(id, outermost(found.values())))
    return {name: model for name, model in found.items() if id(model) in wholes}


def default_models(names: Space) -> dict[str, torch.nn.Module]:
    """Return the default models: whole models that are variables, else all whole models."""
    whole = whole_models(names)
    own = models(names)
    return {word: model for word, model in whole.items() if word in own} or whole


def _value(names: Space, text: str, kind: str, known: Iterable[str]) -> Any:
    """Return the object of the user's expression; raises UsageError."""
    try:
        return lookup.value_of(names, text, list(known), kind)
    except SpeedKitError as error:
        raise UsageError(str(error)) from None


def _find(names: Space, text: str, kind: str, known: Iterable[str], cls: Any) -> Any:
    """Return an expression's object; raises UsageError unless the object is or wraps a `cls`."""
    value = _value(names, text, kind, known)
    if not lookup.is_a(unwrapped(value), cls):
        article = "an" if kind[0] in "aeiou" else "a"
        raise UsageError(f"{text} is not {article} {kind}: its class is {type(value).__name__}")
    return value


def find_models(names: Space, name: str | None) -> dict[str, torch.nn.Module]:
    """Return models by name: the model `name`, or the models that the object `name` holds.

    Without a name, return the only default model. Raises UsageError if no or several models fit.
    """
    known = models(names)
    if name is not None:
        value, word = _value(names, name, "model", known), lookup.canonical(name)
        if lookup.is_a(value, torch.nn.Module):
            return {word: value}
        if found := models_in(value):
            return {f"{word}{part}": model for part, model in found.items()}
        later = hasattr(type(value), PROPERTY)
        hint = "; before its first run, name the model itself" if later else ""
        kind = type(value).__name__
        raise UsageError(f"{name} is not a model, and holds none: its class is {kind}{hint}")
    whole = default_models(names) or known
    if not whole:
        raise UsageError("this notebook has no model yet: define one first")
    if len(whole) > 1:
        raise UsageError(f"which model? {', '.join(_and_holders(whole))}")
    return whole


def find_model(names: Space, name: str | None) -> tuple[str, torch.nn.Module]:
    """Return the name and model that `find_models` finds; raises UsageError for none or several."""
    found = find_models(names, name)
    if len(found) > 1:
        raise UsageError(f"which model? {', '.join(found)}")
    return next(iter(found.items()))


def find_optimizers(
    names: Space, wanted: Sequence[str] | None, model: torch.nn.Module, is_only: bool = True
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers (all, or only `wanted` ones) that hold a parameter of the model.

    Raises UsageError for an unknown name. If `is_only`, a wanted optimizer must hold a parameter.
    """
    is_mine = not trained_by(model, names)  # in the user's own loop, also look inside objects
    found = optimizers(names, is_mine) if wanted is None else named_optimizers(names, wanted)
    holding = {name: one for name, one in found.items() if holds(one, [model])}
    if wanted and is_only and (idle := [name for name in found if name not in holding]):
        raise UsageError(f"{idle[0]} holds no parameter of this model")
    return holding


def named_optimizers(names: Space, wanted: Sequence[str]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers with these names, unwrapped. Raises UsageError for other objects."""
    known = optimizers(names)
    return {
        lookup.canonical(name): unwrapped(_find(names, name, "optimizer", known, Optimizer))
        for name in wanted
    }


def words_for(names: Space, members: Sequence[Any]) -> dict[str, Any]:
    """Return the optimizers in `members` by notebook expression, or else as `optimizer_1`, …"""
    found = by_expression(names, torch.optim.Optimizer)
    words = {id(unwrapped(one)): name for name, one in reversed(found.items())}
    return {words.get(id(one), f"optimizer_{i}"): one for i, one in enumerate(members, 1)}


def find_function(names: Space, name: str) -> Any:
    """Return the function, method or partial of a name (`trainer.step`); raises UsageError."""
    return _find(names, name, "function", functions(names), FunctionType | MethodType | partial)


def find_loader(names: Space, name: str | None) -> Any:
    """Return the DataLoader of `name` (`data['train']`), None without a name; raises UsageError."""
    return name and _find(names, name, "DataLoader", loaders(names), DataLoader)


def check_result_name(name: str | None, names: Space) -> None:
    """Raise UsageError if `name` is not a valid variable, or holds a model or an optimizer."""
    if name is None:
        return
    if not name.isidentifier() or iskeyword(name) or hasattr(builtins, name):
        raise UsageError(f"-v {name or repr(name)}: not a valid variable name")
    value = names.get(name)
    if lookup.is_a(value, torch.nn.Module) or is_optimizer(value):
        kind = type(value).__name__
        raise UsageError(f"-v {name}: the result would replace your {kind}: give another name")


def planned_for(
    names: Space, name: str | None, asked: Sequence[str] | None = None
) -> tuple[str, SpeedContext | None, Plan]:
    """Return a model's name, context and plan; without a context, the plan `apply` would make.

    The default is the only model with a plan, or else the only model. Raises UsageError otherwise.
    """
    applied = dict(naming.applied(names))
    if name is None and len(applied) > 1:
        raise UsageError(f"which model? {', '.join(applied)}")
    name = next(iter(applied)) if name is None and applied else name
    if name in applied:
        return name, applied[name], applied[name].plan
    name, model = find_model(names, name)
    if (context := applied_to(model)) is not None:
        return name, context, context.plan
    held = list(find_optimizers(names, asked, model).values())
    config = proven_config([model], held) or SpeedConfig()
    return name, None, plan(config, facts=replace(Facts.read(model, held), optimizers_later=True))


def words_of_plans(names: Space, name: str | None) -> list[Any]:
    """Return the name of each model that `name` means; [None] for None, the default model."""
    if name is None or name in dict(naming.applied(names)):
        return [name]
    return [*find_models(names, name)]


def plans_of(names: Space, name: str | None) -> dict[str, Plan]:
    """Return the plans of the named or default models; without models, one for a float32 model."""
    wanted = [*default_models(names)] if name is None else words_of_plans(names, name)
    found = [planned_for(names, one) for one in wanted]
    return {f"`{word}`": plan for word, _, plan in found} or {
        "a float32 model": plan(SpeedConfig())
    }


def proven_config(models: Sequence[Any], optimizers: Sequence[Any]) -> SpeedConfig | None:
    """Return the config proven in this process, or learned in an earlier one, or None.

    Show a note if the store can't be read. Raises ConfigError for an invalid SPEEDKIT_HARDWARE.
    """
    found = MEMORY.of(models[0])
    if found and found.helped and found.is_of(models) and not (found.is_stored or found.learned):
        return found.config
    try:
        learned = learning.newest(models, optimizers, Hardware.current())
        return None if learned is None else learning.config_of(learned)
    except ConfigError:  # planning is impossible
        raise
    except SpeedKitError as error:  # plan by rules
        messages.note(str(error))
        return None
