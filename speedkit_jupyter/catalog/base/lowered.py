"""Calls of a model under autocast, with results in float32."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch

from speedkit_jupyter.catalog.base.target import Memo, Target
from speedkit_jupyter.catalog.properties.calls import Call
from speedkit_jupyter.torchglue.modules import module_table
from speedkit_jupyter.torchglue.private import current_node, tree_leaves, tree_map

OWN = "the code around the model has an autocast of its own, which stays"


class Inside(threading.local):
    """Whether a call of the model is under way in this thread."""

    model = False


class Lowered(Call):
    """A call under autocast. An autocast of the user's own code takes precedence.

    A layer on a part acts where a method of the model calls the part and the model is not called.
    """

    order = 1  # compiled code is called, and calls are recorded, under autocast

    def __init__(
        self,
        module: torch.nn.Module,
        target: Target,
        block: tuple[str, torch.dtype],
        inside: Inside,
        is_part: bool,
    ) -> None:
        super().__init__(module, target.notes, target.only_in)
        self._block, self._inside, self._is_part = block, inside, is_part
        self._memo: Memo = target.memo
        self._acted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the call in float32."""
        if torch.compiler.is_compiling():  # code that the user compiles around the model
            if self._is_part or torch.compiler.is_exporting():
                return self.below(*args, **kwargs)
            with torch.autocast(*self._block):
                return in_float32(self.below(*args, **kwargs), self._block[1])
        # A checkpoint recomputes in the backward pass: a part as it computed in the forward pass.
        follows = self._is_part and not self._acted and current_node() is not None
        if self._inside.model or not self.acts() or follows:
            return self.below(*args, **kwargs)
        if torch.is_autocast_enabled(self._block[0]):
            if not self._memo.autocast_entered:
                self.notes["precision"] = OWN
            return self.below(*args, **kwargs)
        self._acted = True
        dtype = torch.get_autocast_dtype(self._block[0])
        try:
            try:
                self._inside.model = True
                torch.set_autocast_dtype(*self._block)
                torch.set_autocast_enabled(self._block[0], True)
                result = self.below(*args, **kwargs)
            finally:
                self._leave(dtype)
        finally:  # again: Ctrl-C may interrupt the first line of the inner `finally`
            self._leave(dtype)
        return in_float32(result, self._block[1])

    def _leave(self, dtype: torch.dtype) -> None:
        """Switch autocast off, as it was found."""
        torch.set_autocast_enabled(self._block[0], False)
        torch.set_autocast_dtype(self._block[0], dtype)
        torch.clear_autocast_cache()
        self._inside.model = False


def layers(target: Target, dtype: torch.dtype) -> list[Call]:
    """Return the layers for a model, and for its parts where it has methods that call them."""
    model, inside = target.model, Inside()
    parameter = next(model.parameters(), None)
    block = ("cpu" if parameter is None else parameter.device.type, dtype)
    parts = [*_parts(model)] if _has_methods(type(model)) else []
    return [Lowered(one, target, block, inside, one is not model) for one in (model, *parts)]


def in_float32(results: Any, dtype: torch.dtype) -> Any:
    """Return results whose tensors of the lowered `dtype` are float32, of the same structure.

    One object stays one object, and what holds no such tensor stays itself.
    """
    known: dict[int, tuple[Any, Any]] = {}  # the value, which keeps its id its own, and the result

    def raised(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = value, value  # for what refers to itself
            known[id(value)] = value, _raised(value)
        return known[id(value)][1]

    def _raised(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float() if value.dtype is dtype else value
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        names = [one.name for one in dataclasses.fields(value) if hasattr(value, one.name)]
        parts = {name: getattr(value, name) for name in names}
        changed = {name: tree_map(raised, part) for name, part in parts.items()}
        if all(_same(changed[name], part) for name, part in parts.items()):
            return value
        result = copy.copy(value)
        for name, part in changed.items():
            object.__setattr__(result, name, part)
        return result

    return tree_map(raised, results)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values have the same objects as leaves."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(left is right for left, right in pairs)


def _has_methods(kind: type) -> bool:
    """Return whether the user's class has public methods next to `forward`."""
    own = (one for one in kind.__mro__ if not one.__module__.startswith("torch."))
    names = {name for one in own if one is not object for name in vars(one)}
    methods = (name for name in names - {"forward"} if not name.startswith("_"))
    return any(callable(getattr(kind, name, None)) for name in methods)


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the children, with the children of containers, which have no call of their own."""
    for child in module_table(module).values():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _parts(child)
        elif child is not None:
            yield child
