"""Which of the notebook's objects a line names, and the plan that a model has or would get."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from keyword import iskeyword
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, plan
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import lookup, messages
from speedkit_jupyter.support.exceptions import ConfigError, SpeedKitError
from speedkit_jupyter.support.wrappers import is_optimizer, unwrapped
from speedkit_jupyter.tuning import learning

if TYPE_CHECKING:
    import torch

Space = Mapping[str, Any]
# Of a longer list nobody wants every element as a suggestion.
MOST_PARTS = 32
# Not those of `models['a,b']`.
AT_COMMAS = re.compile(r",(?![^\[]*\])")


def models(names: Space) -> dict[str, torch.nn.Module]:
    """Return the models in a namespace, each once, by the first of its names."""
    return _each_once(_of_kind(_public(names), "nn.Module"))


def optimizers(names: Space) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers in a namespace, each once, by the first of its names."""
    found = _of_kind(_public(names), "optim.Optimizer")
    return _each_once((name, unwrapped(optimizer)) for name, optimizer in found)


def loaders(names: Space) -> dict[str, Any]:
    """Return the DataLoaders in a namespace, each once, by the first of its names."""
    return _each_once(_of_kind(_public(names), "utils.data.DataLoader"))


def functions(names: Space) -> dict[str, Any]:
    """Return the notebook's own functions."""
    return {
        name: value
        for name, value in _public(names)
        if type(value) is FunctionType
        and not str(value.__globals__.get("__name__", "")).startswith("IPython")
    }


def inside_others(names: Space, kind: str = "nn.Module") -> dict[str, Any]:
    """Return what lists, dictionaries and the user's own objects hold of a kind (a class of torch),
    by the words that find it.
    """
    parts = (
        (f"{name}{word}", value)
        for name, owner in _public(names)
        if name not in ("In", "Out") and not lookup.is_a(owner, ModuleType | type)
        for word, value in _parts_of(owner)
    )
    return _each_once(_of_kind(parts, kind))


def models_to_name(names: Space) -> list[str]:
    """Return the notebook's models, or those that its lists and objects hold."""
    return list(models(names) or inside_others(names))


def _public(names: Space) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(names.items()) if name[:1] != "_"]


def _of_kind(entries: Iterable[tuple[str, Any]], kind: str) -> Iterator[tuple[str, Any]]:
    """Without torch there is nothing of it, and Tab must not wait for its import."""
    cls: Any = sys.modules.get("torch")
    for part in kind.split(".") if cls is not None else ():
        cls = getattr(cls, part)
    return ((n, value) for n, value in entries if cls is not None and lookup.is_a(value, cls))


def _each_once(entries: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[int, tuple[str, Any]] = {}
    for name, value in entries:
        found.setdefault(id(value), (name, value))
    return dict(found.values())


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """One level, read and not computed."""
    if type(owner) in {list, tuple} and len(owner) <= MOST_PARTS:
        yield from ((f"[{number}]", part) for number, part in enumerate(owner))
    elif type(owner) is dict and len(owner) <= MOST_PARTS:
        plain = ((key, part) for key, part in list(owner.items()) if type(key) in {str, int})
        yield from ((f"[{key!r}]", part) for key, part in plain)
    else:
        inside = list(lookup.attributes_of(owner).items())
        yield from ((f".{key}", part) for key, part in inside if str(key)[:1] != "_")


def _find(names: Space, text: str, kind: str, known: Iterable[str], cls: Any) -> Any:
    """What the user's word stands for; raises UsageError where it is nothing, or no `cls`."""
    try:
        value = lookup.value_of(names, text, list(known), kind)
    except SpeedKitError as error:
        raise UsageError(str(error)) from None
    if not lookup.is_a(unwrapped(value), cls):
        word = type(value).__name__
        hint = f": name a {kind}, and the step by --step {text}" if word == "function" else ""
        raise UsageError(f"{text} is no {kind}, but of class {word}{hint}")
    return value


def find_model(names: Space, name: str | None) -> tuple[str, torch.nn.Module]:
    """Return the model of that name (`net`, `trainer.model`, `models['lm']`), or the only one.

    Raises UsageError.
    """
    import torch

    known = models(names)
    if name is not None:
        return lookup.canonical(name), _find(names, name, "model", known, torch.nn.Module)
    whole = _whole(known) or _whole(inside_others(names)) or known
    if not whole:
        raise UsageError("there is no model in this notebook yet: define one first")
    if len(whole) > 1:
        raise UsageError(f"which model? {', '.join(whole)}")
    return next(iter(whole.items()))


def _whole(candidates: Mapping[str, Any]) -> dict[str, Any]:
    """Without loss functions and others that have no parameters, and what lies in a model."""
    inside = {id(part) for model in candidates.values() for part in [*model.modules()][1:]}
    whole = {name: model for name, model in candidates.items() if id(model) not in inside}
    return {n: m for n, m in whole.items() if next(m.parameters(), None) is not None}


def find_models(names: Space, words: str | None) -> dict[str, torch.nn.Module]:
    """Find the models of a list with commas, as `find_model` does: `encoder,decoder`."""
    parts = [None] if words is None else [part for part in AT_COMMAS.split(words) if part]
    return dict(find_model(names, part) for part in parts or [words])


def words_of_models(names: Space, wanted: Sequence[torch.nn.Module]) -> tuple[str, ...]:
    """Return the words by which `find_models` finds these; none where one has no name."""
    known = models(names) | inside_others(names)
    words = {id(unwrapped(model)): name for name, model in reversed(known.items())}
    ids = {id(unwrapped(model)) for model in wanted}
    spoken = tuple(name for name in known if any(words.get(key) == name for key in ids))
    return spoken if len(spoken) == len(ids) else ()


def find_optimizers(
    names: Space, wanted: Sequence[str] | None, model: torch.nn.Module
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of those names, or all that hold a parameter of the model."""
    parameters = {id(p) for p in model.parameters()}
    candidates = optimizers(names) if wanted is None else named_optimizers(names, wanted)
    holding = {
        name: optimizer
        for name, optimizer in candidates.items()
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
    }
    if wanted and (idle := [name for name in candidates if name not in holding]):
        raise UsageError(f"{idle[0]} holds no parameter of this model")
    return holding


def named_optimizers(names: Space, wanted: Sequence[str]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of those names; raises UsageError."""
    from torch.optim import Optimizer

    known = optimizers(names)
    return {
        lookup.canonical(name): unwrapped(_find(names, name, "optimizer", known, Optimizer))
        for name in wanted
    }


def words_for(names: Space, members: Sequence[Any]) -> dict[str, Any]:
    """Return optimizers by the names that they have in the notebook."""
    known = inside_others(names, "optim.Optimizer") | optimizers(names)
    words = {id(unwrapped(optimizer)): name for name, optimizer in known.items()}
    return {words.get(id(one), f"optimizer_{i}"): one for i, one in enumerate(members, 1)}


def find_function(names: Space, name: str) -> Any:
    """Return the function or method of that name (`train`, `trainer.step`); raises UsageError."""
    return _find(names, name, "function", functions(names), FunctionType | MethodType | partial)


def find_loader(names: Space, name: str | None) -> Any:
    """Return the DataLoader of that name (`train_loader`, `data['train']`); None without a name."""
    from torch.utils.data import DataLoader

    return name and _find(names, name, "DataLoader", loaders(names), DataLoader)


def check_result_name(name: str | None, names: Space) -> None:
    """Raise UsageError where the result can't get this name."""
    if name is None:
        return
    import torch

    if not name.isidentifier() or iskeyword(name) or hasattr(builtins, name):
        raise UsageError(f"-v {name or repr(name)}: this is no name for a variable of yours")
    value = names.get(name)
    if lookup.is_a(value, torch.nn.Module) or is_optimizer(value):
        kind = type(value).__name__
        raise UsageError(f"-v {name}: the result would replace your {kind}: give another name")


def planned_for(
    names: Space,
    session: Session,
    name: str | None,
    wanted: Mapping[str, torch.optim.Optimizer] | None = None,
) -> tuple[str, SpeedContext | None, Plan]:
    """Return the model that a line is about, its context in force, and its plan, or the plan that
    apply would make, with these optimizers or those of the notebook.

    Without a name it is the only model with a plan, or the only one. Raises UsageError.
    """
    applied = dict(session.applied(names))
    if name is None and len(applied) > 1:
        raise UsageError(f"which model? {', '.join(applied)}")
    if name is None and applied:
        (name,) = applied
    if name in applied:
        return name, applied[name], applied[name].plan
    name, model = find_model(names, name)
    if name in applied:
        return name, applied[name], applied[name].plan
    mapping = find_optimizers(names, None, model) if wanted is None else wanted
    held = list(mapping.values())
    config = or_learned(session.config, model, held)
    return name, None, plan(config, facts=Facts.read(model, held))


def planned_or_plain(names: Space, session: Session, name: str | None) -> tuple[Plan, str]:
    """Return the plan in force or to come, with its model's name.

    Without a model, or where there are several and none was named, it is that of any model here.
    """
    if name is None and len(session.applied(names)) != 1 and len(models(names)) != 1:
        return plan(session.config), "a float32 model"
    chosen, _, found = planned_for(names, session, name)
    return found, f"`{chosen}`"


def or_learned(config: SpeedConfig, model: Any, optimizers: list[Any]) -> SpeedConfig:
    """Return the learned plan of one model or several, else the config.

    Says where the store can't be read. Raises ConfigError where SPEEDKIT_HARDWARE names no machine.
    """
    try:
        return learning.or_learned(config, model, optimizers)
    except ConfigError:  # no plan can be made
        raise
    except SpeedKitError as error:  # then by rules, as without a store
        messages.note(str(error))
        return config
