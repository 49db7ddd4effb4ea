"""Optimizers in generated code: their names, and how they are made anew or switched."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen.script import TAKEN, Block, Script, comment, keywords
from speedkit_jupyter.codegen.training_loop import INDENT
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import each_once, unwrapped

if TYPE_CHECKING:
    import torch

    Optimizers = Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]

# What a fused kernel takes the place of.
KERNELS = ("fused", "foreach")


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return them as they were handed over, wrappers and all."""
    return list(optimizers.values() if isinstance(optimizers, Mapping) else optimizers)


def named(plan: Plan, optimizers: Optimizers) -> dict[str, torch.optim.Optimizer | None]:
    """Return them by name: the user's own, `optimizer`, or `optimizer_1` and so on."""
    number = len(plan.facts.optimizers)
    if not isinstance(optimizers, Mapping):
        optimizers = each_once(optimizers)
    if optimizers and len(optimizers) != number:
        raise SpeedKitError(f"the plan was made with {number} optimizers, not {len(optimizers)}")
    if isinstance(optimizers, Mapping):
        return {_variable(name): unwrapped(optimizer) for name, optimizer in optimizers.items()}
    names = ["optimizer"] if number == 1 else [f"optimizer_{i + 1}" for i in range(number)]
    values: Sequence[torch.optim.Optimizer | None] = optimizers or [None] * number
    return dict(zip(names, values, strict=True))


def words_of(optimizers: Optimizers, names: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the user's word for each that has one, by the code's name for it.

    `names` is the notebook, where that is known: what it does not have has no word.
    """
    words = {}
    for name in optimizers if isinstance(optimizers, Mapping) else ():
        with suppress(SpeedKitError):  # no word, or none of anything here
            word = lookup.canonical(name)
            if names is not None:
                lookup.value_of(names, name)
            words[_variable(name)] = word
    return words


def _variable(name: str) -> str:
    """Return a variable for it: the name itself, where it is one (`os_` is not `os`)."""
    if _is_variable(name):
        return name
    word = re.sub(r"\W+", "_", name).strip("_")
    return word if _is_variable(word) else f"optimizer_{word}".rstrip("_")


def _is_variable(name: str) -> bool:
    """Return whether Python lets it be one, and the code means nothing else by it."""
    return name.isidentifier() and not iskeyword(name) and name not in TAKEN


def taken_as_they_are(script: Script, given: Mapping[str, str]) -> frozenset[str]:
    """Return the `given` optimizers, those that the plan changes nothing about, and those that one
    line can't make.
    """
    return frozenset(
        name
        for name in script.optimizers
        if name in given or not keywords_of(script, name) or not makeable(script, name)
    )


def is_made(script: Script, name: str) -> bool:
    """Return whether the code makes this optimizer, and does not take the user's own."""
    return name not in script.own


def makeable(script: Script, name: str) -> bool:
    """Return whether one line makes it: torch's own class, all parameters in one group."""
    import torch

    optimizer = script.optimizers[name]
    if optimizer is None:
        return hasattr(torch.optim, _class_name(script, name))
    kind, groups = type(optimizer), optimizer.param_groups
    own = kind.__module__.startswith("torch.optim") and hasattr(torch.optim, kind.__name__)
    size = sum(parameter.numel() for group in groups for parameter in group["params"])
    return own and len(groups) == 1 and size == script.plan.facts.parameters


def making(script: Script) -> Block:
    """Return the lines that make every optimizer, or switch those that only the user can make."""
    lines = script.reasons("optimizers")
    for name in script.optimizers:
        lines += _made(script, name) if is_made(script, name) else _switched(script, name)
    return lines


def keywords_of(script: Script, name: str) -> dict[str, str]:
    """Return what the plan adds to one optimizer."""
    index = list(script.optimizers).index(name)
    every = [snippet.optimizers[index] for snippet in script.snippets if snippet.optimizers]
    return {key: value for added in every for key, value in added.items()}


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return those that differ from the class's own; as they were before any scheduler."""
    group = optimizer.param_groups[0]
    if "initial_lr" in group:  # a scheduler's; one that moves betas, too, leaves the defaults
        group = optimizer.defaults | {"lr": group["initial_lr"]}
    values = {}
    for name, parameter in signature(type(optimizer)).parameters.items():
        if name in group and name != "params" and not _same(group[name], parameter.default):
            values[name] = group[name]
    return values


def _made(script: Script, name: str) -> Block:
    optimizer, extra = script.optimizers[name], keywords_of(script, name)
    hint = [] if optimizer else comment("With your own learning rate and the rest.")
    values = {} if optimizer is None else _hyperparameters(optimizer)
    replaced = KERNELS if "fused" in extra else ()
    own = {key: _source(value) for key, value in values.items() if key not in replaced}
    arguments = ", ".join(["model.parameters()", *keywords(own | extra)])
    return [*hint, f"{name} = torch.optim.{_class_name(script, name)}({arguments})"]


def _switched(script: Script, name: str) -> Block:
    """Switch the user's own in place."""
    extra = keywords_of(script, name)
    if not extra:
        return []
    kind, index = _class_name(script, name), list(script.optimizers).index(name)
    optimizer = script.optimizers[name]
    has_begun = optimizer is not None and bool(optimizer.state)
    when = "" if has_begun else "before its first step and "
    lines = comment(f"This switches `{name}` ({kind}), {when}again after load_state_dict().")
    if True in script.plan.facts.optimizers[index].foreach:
        extra["foreach"] = "False"
    lines.append(f"for group in ({name}.defaults, *{name}.param_groups):")
    lines += [f'{INDENT}group["{key}"] = {value}' for key, value in extra.items()]
    if has_begun and script.plan.facts_after.device_type != "cpu":
        lines += comment("Its counts of steps go where the fused kernel wants them.")
        lines.append(f"{name}.load_state_dict({name}.state_dict())")
    if script.plan["grad_scaler"].active:
        lines += comment("Else the scaler would wait for the device before every step.")
        lines.append(f"{name}._step_supports_amp_scaling = True")
    return lines


def _class_name(script: Script, name: str) -> str:
    optimizer = script.optimizers[name]
    if optimizer is not None:
        return type(optimizer).__name__
    return script.plan.facts.optimizers[list(script.optimizers).index(name)].name


def _same(value: Any, default: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return False
    return bool(value == default)


def _source(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"torch.tensor({value.item()!r})"
    if isinstance(value, tuple):
        inside = ", ".join(map(_source, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)
