"""Register the contexts of this process by model, for applied plans and for measured blocks.

The dicts are global, because a plan acts wherever its model is used. Their keys are ids, because
models may define `==`. Only `plans/context.py` changes the dicts.
"""

from __future__ import annotations

from typing import Any

import torch

from speedkit_jupyter.support.weak import Listeners
from speedkit_jupyter.support.wrappers import unwrapped

# Each model's contexts that are in force or hidden, the newest last; keys are `key_of(model)`.
APPLIED: dict[int, list[Any]] = {}
# The thread of a measured block, and the context in force there; keys are `key_of(model)`.
MEASURED: dict[int, tuple[int, Any]] = {}
# Functions called with the model after a plan is applied or restored, except by a benchmark.
CHANGES = Listeners()


def key_of(model: torch.nn.Module) -> int:
    """Return the key of a model. A model and its wrapper share one key, and therefore one plan."""
    return id(unwrapped(model))


def contexts_of(model: torch.nn.Module) -> list[Any]:
    """Return a model's contexts that are not restored, the newest last."""
    return [*APPLIED.get(key_of(model), ())]


def planned_models() -> list[torch.nn.Module]:
    """Return the living models with a plan."""
    every = (context.model for contexts in APPLIED.values() for context in contexts)
    return list({id(model): model for model in every if model is not None}.values())


def is_measuring() -> bool:
    """Return whether a plan is in force for a measurement."""
    return bool(MEASURED)
