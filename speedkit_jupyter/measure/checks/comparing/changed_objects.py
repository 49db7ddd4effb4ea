"""What a step leaves in the user's objects, beside the models: metrics, a list that grew."""

from __future__ import annotations

import numbers
from collections import deque
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.handlers.arrays import Arrays
from speedkit_jupyter.measure.undo.handlers.base import StateHandler, attribute_dict
from speedkit_jupyter.measure.undo.handlers.containers import Dicts, Lists, Sets
from speedkit_jupyter.measure.undo.handlers.instances import Slots
from speedkit_jupyter.measure.undo.handlers.names import Cells, NamesHandler
from speedkit_jupyter.measure.undo.handlers.tensors import Tensors
from speedkit_jupyter.measure.undo.handlers.values import Buffers

if TYPE_CHECKING:
    from speedkit_jupyter.measure.subject.step import Step
    from speedkit_jupyter.measure.undo.isolation import State

VALUES = (Tensors, Arrays, Buffers)
# Attributes that torch.compile gives to parameters and functions: no word of the step's.
COMPILERS = ("_dynamo", "_torchdynamo")
HOLDERS = (Dicts, Lists, Sets, Slots, Cells, NamesHandler)


def left_in(start: State, step: Step) -> list[Any]:
    """The new values in objects that the step reached when it began, and in names it assigns."""
    values = list(step.results())
    for kind, item, memory in start.changed():
        if isinstance(kind, VALUES):
            values.append(item)
        elif isinstance(kind, HOLDERS) and not _is_inner(start, item):
            old = set(map(id, _held(kind, memory)))
            values += [value for value in _held(kind, kind.glance(item)) if id(value) not in old]
    return [value for value in values if _is_plain(value)]


def _held(kind: StateHandler, memory: Any) -> list[Any]:
    """The objects in a memory of what holds others."""
    if isinstance(kind, Dicts):
        pairs = zip(memory[0], memory[1], strict=True)
        return [v for key, v in pairs if not (type(key) is str and key.startswith(COMPILERS))]
    if isinstance(kind, Slots):
        return [value for _, value in memory]
    if isinstance(kind, Cells):
        return [memory]
    return list(memory if isinstance(kind, Lists) else memory.values())


def _is_plain(value: Any) -> bool:
    """Numbers, words and what consists of them; not an object that does something of its own."""
    import torch

    plain = (numbers.Number, str, bytes, torch.Tensor, list, tuple, dict, set, frozenset, deque)
    return isinstance(value, plain) or type(value).__module__.partition(".")[0] == "numpy"


def _is_inner(start: State, item: Any) -> bool:
    """Optimizers' and scalers' own, and the dicts in which a module has its parts and hooks."""
    import torch

    before = start.walk.before
    holders = [holder := before(item), holder := before(holder), before(holder)]
    if any(isinstance(owner, (torch.optim.Optimizer, torch.amp.GradScaler)) for owner in holders):
        return True
    own = attribute_dict(holders[1]) if isinstance(holders[1], torch.nn.Module) else None
    if own is None or own is not holders[0]:
        return False
    return any(value is item and name.startswith("_") for name, value in own.items())
