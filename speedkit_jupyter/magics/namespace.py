"""Which of the notebook's objects a line names, and the plan that a model has or would get."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
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

# Of a longer list nobody wants every element as a suggestion.
MOST_PARTS = 32
# Not those of `models['a,b']`.
AT_COMMAS = re.compile(r",(?![^\[]*\])")


def models(names: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Return the models in a namespace, each once, by the first of its names."""
    import torch

    return _instances(names, torch.nn.Module)


def optimizers(names: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers in a namespace, each once, by the first of its names."""
    import torch

    entries: dict[int, tuple[str, Any]] = {}
    for name, optimizer in _instances(names, torch.optim.Optimizer).items():
        entries.setdefault(id(unwrapped(optimizer)), (name, unwrapped(optimizer)))
    return dict(entries.values())


def functions(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook's own functions."""
    return {
        name: value
        for name, value in list(names.items())
        if type(value) is FunctionType
        and name[:1] != "_"
        and not str(value.__globals__.get("__name__", "")).startswith("IPython")
    }


def loaders(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DataLoaders in a namespace, each once, by the first of its names."""
    from torch.utils.data import DataLoader

    return _instances(names, DataLoader)


def whole_models(names: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Return the models that are no part of another one and have parameters."""
    return _whole(models(names))


def inside_others(names: Mapping[str, Any], kind: type | None = None) -> dict[str, Any]:
    """Return what lists, dictionaries and the user's own objects hold of a kind (models), by the
    words that find it.
    """
    import torch

    kind = torch.nn.Module if kind is None else kind
    entries: dict[int, tuple[str, Any]] = {}
    for name, owner in list(names.items()):
        if name.startswith("_") or name in ("In", "Out") or lookup.is_a(owner, ModuleType | type):
            continue
        for word, value in _parts_of(owner):
            if lookup.is_a(value, kind):
                entries.setdefault(id(value), (f"{name}{word}", value))
    return dict(entries.values())


def find_model(names: Mapping[str, Any], name: str | None) -> tuple[str, torch.nn.Module]:
    """Return the model of that name (`net`, `trainer.model`, `models['lm']`), or the only one.

    Raises UsageError.
    """
    import torch

    candidates = models(names)
    if name is None:
        whole = _whole(candidates) or _whole(inside_others(names)) or candidates
        if len(whole) == 1:
            return next(iter(whole.items()))
        if not whole:
            raise UsageError("there is no model in this notebook yet: define one first")
        raise UsageError(f"which model? {', '.join(whole)}")
    value = _looked_up(names, name, list(candidates), "model")
    if not isinstance(value, torch.nn.Module):
        raise UsageError(f"{name} is of class {type(value).__name__}, not a torch.nn.Module")
    return lookup.canonical(name), value


def find_models(names: Mapping[str, Any], words: str | None) -> dict[str, torch.nn.Module]:
    """Find the models of a list with commas, as `find_model` does: `encoder,decoder`."""
    parts = [None] if words is None else [part for part in AT_COMMAS.split(words) if part]
    return dict(find_model(names, part) for part in parts or [words])


def chosen_by(names: Mapping[str, Any], wanted: Sequence[torch.nn.Module]) -> tuple[str, ...]:
    """Return the words by which `find_models` finds these; none where it needs, or has, none."""
    known = models(names) | inside_others(names)
    words = {id(unwrapped(model)): name for name, model in reversed(known.items())}
    ids = {id(unwrapped(model)) for model in wanted}
    spoken = tuple(name for name in known if any(words.get(key) == name for key in ids))
    try:
        alone = len(wanted) == 1 and unwrapped(find_model(names, None)[1]) is unwrapped(wanted[0])
    except UsageError:
        alone = False
    return () if alone or len(spoken) < len(ids) else spoken


def find_optimizers(
    names: Mapping[str, Any], wanted: list[str] | None, model: torch.nn.Module
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of those names, or all that hold a parameter of the model."""
    parameters = {id(p) for p in model.parameters()}
    candidates = optimizers(names) if wanted is None else named_optimizers(names, wanted)
    holding = {
        name: optimizer
        for name, optimizer in candidates.items()
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
    }
    for name in candidates if wanted else ():
        if name not in holding:
            raise UsageError(f"{name} holds no parameter of this model")
    return holding


def named_optimizers(
    names: Mapping[str, Any], wanted: Sequence[str]
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of those names; raises UsageError."""
    result = {}
    for name in wanted:
        value = _looked_up(names, name, list(optimizers(names)), "optimizer")
        if not is_optimizer(value):
            kind = type(value).__name__
            raise UsageError(f"{name} is of class {kind}, not a torch.optim.Optimizer")
        result[lookup.canonical(name)] = unwrapped(value)
    return result


def words_for(names: Mapping[str, Any], members: Sequence[Any]) -> dict[str, Any]:
    """Return optimizers by the names that they have in the notebook."""
    import torch

    known = inside_others(names, torch.optim.Optimizer) | optimizers(names)
    words = {id(unwrapped(optimizer)): name for name, optimizer in known.items()}
    return {words.get(id(one), f"optimizer_{i}"): one for i, one in enumerate(members, 1)}


def find_function(names: Mapping[str, Any], name: str, command: str) -> Any:
    """Return the function or method of that name (`train`, `trainer.step`); raises UsageError."""
    try:
        value = lookup.value_of(names, name, list(functions(names)), "function")
    except SpeedKitError as error:
        raise UsageError(f"{command}: {error}") from None
    if not lookup.is_a(value, FunctionType | MethodType | partial):
        kind = type(value).__name__
        raise UsageError(f"{command}: {name} is no function but of class {kind}")
    return value


def named_loader(names: Mapping[str, Any], name: str | None, command: str) -> Any:
    """Return the DataLoader of that name (`train_loader`, `data['train']`); None without a name."""
    from torch.utils.data import DataLoader

    if name is None:
        return None
    value = _looked_up(names, name, list(loaders(names)), "DataLoader")
    if not lookup.is_a(value, DataLoader):
        kind = type(value).__name__
        hint = f": name a loader, and the step by --step {name}" if kind == "function" else ""
        raise UsageError(f"{command}: {name} is no DataLoader but of class {kind}{hint}")
    return value


def is_variable(name: str) -> bool:
    """Whether a variable of the user's may be called so: not a keyword, nor one of Python's own."""
    return name.isidentifier() and not iskeyword(name) and not hasattr(builtins, name)


def check_result_name(command: str, name: str | None, names: Mapping[str, Any]) -> None:
    """Raise UsageError where the result can't get this name."""
    import torch

    if name is None:
        return
    if not is_variable(name):
        raise UsageError(
            f"{command}: -v {name or repr(name)}: this is no name for a variable of yours"
        )
    value = names.get(name)
    if lookup.is_a(value, torch.nn.Module) or is_optimizer(value):
        kind = "a model" if lookup.is_a(value, torch.nn.Module) else "an optimizer"
        raise UsageError(
            f"{command}: -v {name}: {name} is {kind}, which the result would replace: "
            "give another name"
        )


def named(names: Mapping[str, Any], applied: Mapping[str, SpeedContext], name: str | None) -> str:
    """Return the model that a line is about: the named one, the only one with a plan, or at all."""
    if name is None and len(applied) == 1:
        return next(iter(applied))
    if name is None and len(applied) > 1:
        raise UsageError(f"which model? {', '.join(applied)}")
    if name is not None and name in applied:
        return name
    return find_model(names, name)[0]


def planned(
    names: Mapping[str, Any],
    config: SpeedConfig,
    name: str,
    optimizers: Mapping[str, Any] | None = None,
) -> Plan:
    """Return what apply would do to a model that has no plan yet."""
    _, model = find_model(names, name)
    mapping = find_optimizers(names, None, model) if optimizers is None else optimizers
    listed = list(mapping.values())
    return plan(or_learned(config, model, listed), facts=Facts.read(model, listed))


def planned_or_plain(
    names: Mapping[str, Any], session: Session, name: str | None
) -> tuple[Plan, str]:
    """Return the plan in force or to come, with its model's name.

    Without a model, or where there are several and none was named, it is that of any model here.
    """
    applied = dict(session.applied(names))
    if name is None and len(applied) != 1 and len(models(names)) != 1:
        return plan(session.config), "a float32 model"
    chosen = named(names, applied, name)
    if chosen in applied:
        return applied[chosen].plan, f"`{chosen}`"
    return planned(names, session.config, chosen), f"`{chosen}`"


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


def _instances(names: Mapping[str, Any], kind: type) -> dict[str, Any]:
    entries: dict[int, tuple[str, Any]] = {}
    for name, value in list(names.items()):
        if not name.startswith("_") and lookup.is_a(value, kind):
            entries.setdefault(id(value), (name, value))
    return dict(entries.values())


def _whole(candidates: Mapping[str, Any]) -> dict[str, Any]:
    """Without loss functions and others that have no parameters, and what lies in a model."""
    inside = {id(part) for model in candidates.values() for part in [*model.modules()][1:]}
    whole = {name: model for name, model in candidates.items() if id(model) not in inside}
    return {n: m for n, m in whole.items() if next(m.parameters(), None) is not None}


def _looked_up(names: Mapping[str, Any], text: str, known: list[str], kind: str) -> Any:
    try:
        return lookup.value_of(names, text, known, kind)
    except SpeedKitError as error:
        raise UsageError(str(error)) from None
