"""Find modules with transformers' `generate()`, and say why no plan for generation fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from speedkit_jupyter.catalog.facts.model import Facts

MIXIN = "GenerationMixin"
NONE = "no part of the model has the generate() of transformers"


def generates(kind: type) -> bool:
    """Return whether a class has the `generate()` of transformers."""
    return any(base.__name__ == MIXIN for base in kind.__mro__) and hasattr(kind, "generate")


def generating_parts(model: torch.nn.Module) -> Sequence[Any]:
    """Return the outermost modules with transformers' `generate()`."""
    found, inside = list[Any](), set[int]()
    for module in model.modules():  # outer modules first
        if generates(type(module)) and id(module) not in inside:
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    return found


def why_not_generating(facts: Facts) -> str:
    """Return the reason why no plan for generation fits the model; empty if a plan may fit."""
    if not any(map(generates, facts.classes)):
        return NONE
    if facts.optimizers:
        names = ", ".join(dict.fromkeys(optimizer.name for optimizer in facts.optimizers))
        return f"the step trains: {names} holds the model's parameters"
    return "the model is in training mode: model.eval()" if facts.training else ""
