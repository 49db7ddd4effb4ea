"""Graphs of autograd that were there before a step: what it uses of them can't be put back.

A tensor's history can't be written. A backward pass frees what a graph saved, and what is written
into a tensor with a graph becomes part of it. Gradients of the leaves behind a graph can be put
back: `Walk` goes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.kinds.base import attribute_dict
from speedkit_jupyter.measure.undo.kinds.code.names import Names
from speedkit_jupyter.measure.undo.kinds.code.names_read import Key, Uses

if TYPE_CHECKING:
    from speedkit_jupyter.measure.undo.walk import Walk

# Of so many graphs, so many nodes of each are asked what they have saved.
MOST_TRIED = 200
FREED = "lost what its graph had saved to a backward pass"
OTHER = "has another graph now"


class Graphs:
    """The graphs of the tensors that a walk has found, at one moment."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._found = [
            (tensor, tensor.grad_fn, still_saved(tensor.grad_fn) if n < MOST_TRIED else None)
            for n, tensor in enumerate(walk.graphs)
        ]

    def used(self, codes: Iterable[CodeType]) -> list[str]:
        """The names of the tensors whose graph the step may change."""
        if not self._found:
            return []
        known = Uses(list(codes))
        names = _names(self._walk)
        return [
            f"{self._walk.name(tensor)} ({type(tensor).__name__})"
            for tensor, _, _ in self._found
            if _is_used(tensor, self._walk, known, names)
        ]

    def beyond(self) -> list[str]:
        """The names of those whose graphs were too large."""
        return [self._walk.name(tensor) for tensor in self._walk.leaves.beyond]

    def changed(self) -> Iterator[tuple[str, str]]:
        """The names of those that have lost something, and what."""
        for tensor, history, saved in self._found:
            if tensor.grad_fn is not history:
                yield self._walk.name(tensor), OTHER
            elif saved is not None and not _is_saved(*saved):
                yield self._walk.name(tensor), FREED

    def forget(self) -> None:
        """A node would keep the leaves behind it alive."""
        self._found = []


def _names(walk: Walk) -> dict[int, list[str]]:
    """By what names code knows objects, whoever's they are."""
    names: dict[int, list[str]] = {}
    for holder in walk.found.values():
        if type(holder) is Names:
            for name in holder.all:
                names.setdefault(id(holder.space.get(name)), []).append(name)
        elif type(holder) is FunctionType:
            for name, cell in zip(
                holder.__code__.co_freevars, holder.__closure__ or (), strict=False
            ):
                with suppress(ValueError):  # no value yet
                    names.setdefault(id(cell.cell_contents), []).append(name)
    return names


def _is_used(part: Any, walk: Walk, known: Uses, names: dict[int, list[str]]) -> bool:
    """Whether code goes from each holder to the next one, up to the tensor."""
    for _ in range(24):
        holder = walk.before(part)
        if holder is None or isinstance(holder, Names | CellType):
            called = names.get(id(part), [])
            return not called or any(known.leads_on(Key("name", name)) for name in called)
        if isinstance(holder, dict):
            owner = walk.before(holder)
            key = next((k for k, v in dict.items(holder) if v is part), None)
            if attribute_dict(owner) is holder:
                if not _is_an_attribute_used(owner, key, known):
                    return False
                holder = owner
            elif Key("item", key) in known.binds:
                return False
        part = holder
    return True


def _is_an_attribute_used(owner: Any, name: Any, known: Uses) -> bool:
    """By the user's code, or by the methods of its own class."""
    import torch

    if isinstance(owner, torch.nn.Module) and owner._forward_pre_hooks:  # as `weight_norm` does it
        return False
    key = Key("attribute", name)
    values = [value for cls in type(owner).__mro__ for value in vars(cls).values()]
    own = Uses([value.__code__ for value in values if type(value) is FunctionType])
    return (known.leads_on(key) or own.leads_on(key)) and key not in {*known.binds, *own.binds}


def still_saved(node: Any) -> tuple[Any, str] | None:
    """A node of a graph that has saved something, and what it is called there."""
    waiting, seen = [node], set[int]()
    while waiting and len(seen) < MOST_TRIED:
        node = waiting.pop(0)
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        for name in dir(node):
            if name.startswith("_raw_saved_") and _is_saved(node, name):
                return node, name
        waiting += [parent for parent, _ in node.next_functions]
    return None


def _is_saved(node: Any, name: str) -> bool:
    """Whether it is still there; what unpacks it is not asked."""
    try:
        saved = getattr(node, name)
        return saved is not None and getattr(saved, "data", saved) is not None
    except (RuntimeError, AttributeError):
        return False
