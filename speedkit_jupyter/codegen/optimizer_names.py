"""The user's words for optimizers, and the names that generated code has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen.script import TAKEN
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import each_once, unwrapped

if TYPE_CHECKING:
    import torch

    Optimizers = Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """As they were handed over, wrappers and all."""
    return list(optimizers.values() if isinstance(optimizers, Mapping) else optimizers)


def in_order(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """The same, each once."""
    return list({id(unwrapped(optimizer)): optimizer for optimizer in listed(optimizers)}.values())


def named(plan: Plan, optimizers: Optimizers) -> dict[str, torch.optim.Optimizer | None]:
    """By name: the user's own, `optimizer`, or `optimizer_1` and so on."""
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
    """The user's word for each that has one, by the code's name for it.

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
    """A variable for it: the name itself, where it is one (`os_` is not `os`)."""
    if _is_variable(name):
        return name
    word = re.sub(r"\W+", "_", name).strip("_")
    return word if _is_variable(word) else f"optimizer_{word}".rstrip("_")


def _is_variable(name: str) -> bool:
    """Whether Python lets something be called so, and the code means nothing else by it."""
    return name.isidentifier() and not iskeyword(name) and name not in TAKEN
