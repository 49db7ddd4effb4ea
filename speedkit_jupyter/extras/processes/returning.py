"""What a cell made and changed, on its way back into the notebook's own objects.

The stream has what the cell bound, by name, and then the content of each object that was sent, by
its number. What can't leave the workers is left out, and named.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from speedkit_jupyter.extras.processes.packing import (
    CONTAINERS,
    Keys,
    Known,
    Parcel,
    Pickler,
    Reader,
    Space,
    read_by,
    reduced,
    set_state,
)
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.storage import is_in_memory

# What nothing is written into.
FIXED = (str, bytes, int, float, complex, type, FunctionType, type(None))


def content(value: Any) -> tuple[Any, ...] | None:
    """Return a function, and what else it needs to write the content into another object."""
    if isinstance(value, CONTAINERS):
        items = [*value.items()] if isinstance(value, dict) else [*value]
        return put_items, items, getattr(value, "__dict__", None)
    if isinstance(value, FIXED):
        return None
    if isinstance(value, torch.Tensor) and (is_lazy(value) or not is_in_memory(value)):
        return None
    made, numpy = reduced(value), sys.modules.get("numpy")
    if isinstance(value, torch.Tensor) or (numpy and type(value) is numpy.ndarray):
        return put_array, *made[:3]
    if isinstance(made, str):
        return None
    has_state = len(made) > 2 and made[2] is not None
    kind = type(value) if isinstance(value, torch.nn.Module) else None  # lazy ones change it
    return (set_state, made[2], kind) if has_state else (keep, made[1])


def keep(old: Any, items: Sequence[Any]) -> None:
    """Write nothing into what does not change: what is in it comes for itself."""


def put_items(old: Any, items: Sequence[Any], attributes: Any) -> None:
    """Write these items into a container."""
    old.clear()
    if isinstance(old, dict):
        for name, value in items:
            old[name] = value
    else:
        old.update(items) if isinstance(old, set) else old.extend(items)
    if attributes:
        vars(old).update(attributes)


def put_array(old: Any, make: Callable[..., Any], given: Any, state: Any = None) -> None:
    """Write into a tensor, or NumPy's array, what pickle makes; equal values stay untouched."""
    new = make(*given)
    if state is not None:
        new.__setstate__(state)
    if not isinstance(old, torch.Tensor):
        if old.flags.writeable:
            old[...] = new
        return
    if is_lazy(old):
        old.materialize(new.shape, dtype=new.dtype)
    if old.is_nested and new.is_nested:
        old, new = old.values(), new.values()
    is_alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    with torch.inference_mode(old.is_inference()), torch.no_grad():
        if not is_alike:
            old.data = new
        elif old.layout != torch.strided or not torch.equal(_bits(old), _bits(new)):
            old.copy_(new)
    if old.is_leaf and old.requires_grad != new.requires_grad:
        old.requires_grad_(new.requires_grad)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def items_of(value: Any) -> list[Any] | None:
    """Return what lies in a container or a tuple, None for anything else."""
    if not isinstance(value, (*CONTAINERS, tuple, frozenset)):
        return None
    values = value.values() if isinstance(value, dict) else ()
    return [*value, *values, *getattr(value, "__dict__", {}).values()]


class Received:
    """What a worker was sent for a cell: by name, and as both sides have it."""

    def __init__(self, named: Mapping[str, Any] | None = None, sent: Known | None = None) -> None:
        self.named, self.sent = named or {}, sent or Known()
        self._items = {number: items_of(value) for number, value in self.sent.objects.items()}

    def changed(self, number: int, pickler: Pickler) -> bool:
        """Return whether an object may have changed; reach what lies in an unchanged container."""
        now, then = items_of(self.sent.objects[number]), self._items[number] or ()
        if now is None or len(now) != len(then) or not all(map(operator.is_, now, then)):
            return True
        for one in now:
            pickler.reach(one)
        return False


def written(
    bound: Mapping[str, Any],
    received: Received,
    values: Mapping[int, Any],
    memory: Mapping[int, int],
    space: Space,
) -> tuple[Pickler, dict[Any, Any], list[str]]:
    """Return the stream, what it has of new objects, and the names of what can't leave.

    `values` are those of models in parts, by `id()`; `memory` is that which is as it was sent, by
    address.
    """
    objects = received.sent.objects
    numbers = {id(value): number for number, value in objects.items()}
    layers = [p for one in objects.values() if id(one) in values for p in one.modules()]
    inside = {id(one) for part in layers for one in (part, *vars(part).values())}
    skipped: set[Any] = {numbers.get(one) for one in inside - values.keys()}
    first = [*received.named.values(), *_held(received.sent, space)]
    stays = dict[str, None]()

    def content_of(unit: Any) -> Any:
        value = bound[unit] if isinstance(unit, str) else objects[unit]
        if isinstance(unit, str):
            return value
        whole = values.get(id(value))
        return content(value) if whole is None else (torch.nn.Module.load_state_dict, whole)

    while True:
        pickler, new = Pickler(space, numbers=numbers, sent=memory), dict[Any, Any]()
        names = [name for name in bound if name not in skipped]
        order = _order(names, pickler, new, first, skipped, received)
        if not (failed := pickler.write(order, content_of)):
            return pickler, new, list(stays)
        first += [objects[number] for number in pickler.reached]  # also by what failed
        for unit in failed:
            skipped.add(unit)
            stays[unit if isinstance(unit, str) else name_of(objects[unit], space)] = None


def _order(
    names: Sequence[str],
    pickler: Pickler,
    new: dict[Any, Any],
    first: Sequence[Any],
    skipped: set[Any],
    received: Received,
) -> Iterator[Any]:
    """Yield what to write: names, noting the `new` objects of each, and then numbers, from the
    `first` objects on to all that are reached.
    """
    start = 0
    for name in names:
        yield name
        made = pickler.memo.copy().values()
        new |= {(name, place - start): one for place, one in made if place >= start}
        start = len(made)
    for value in first:
        pickler.reach(value)
    for number in pickler.reached:  # which grows
        if number not in skipped and received.changed(number, pickler):
            yield number


def _held(sent: Known, space: Space) -> Iterator[Any]:
    """Yield what functions and classes hold that were sent."""
    for value in sent.objects.values():
        if isinstance(value, type):
            yield from vars(value).values()
        elif isinstance(value, FunctionType):
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            with suppress(ValueError):  # an empty cell
                yield from [cell.cell_contents for cell in value.__closure__ or ()]
            yield from [space[name] for name in read_by(value.__code__) if name in space]


def name_of(value: Any, space: Space) -> str:
    """Return the name of an object, or its kind where it has none."""
    names = (name for name, one in space.items() if one is value and name[:1] != "_")
    return next(names, f"a {type(value).__name__}")


def taken(
    parcel: Parcel, sent: Known, space: Space, keys: Keys, launch: int
) -> tuple[dict[str, Any], list[str]]:
    """Write what came back into the objects that were sent; return what the cell bound, by name,
    and what could not be written, with the reason.
    """
    bound, failed = dict[str, Any](), list[str]()
    contents, before = list[Any](), 0
    reader = Reader(parcel, space, sent=sent)
    for unit, value in reader.read():
        if reader.missing is not None:
            name = unit if isinstance(unit, str) else name_of(sent.objects[unit], space)
            failed.append(f"{name} ({in_a_line(reader.missing)})")
            reader.missing = None
        elif isinstance(unit, str):
            bound[unit], made = value, reader.known().objects
            for number in range(before, len(made)):
                keys.note(made[number], (launch, unit, number - before))
            before = len(made)
        elif value is not None:
            contents.append((sent.objects[unit], *value))
    for old, put, *given in sorted(contents, key=lambda one: one[1] is not put_items):
        try:
            put(old, *given)
        except Exception as error:  # whatever an object says to its new state
            failed.append(f"{name_of(old, space)} ({in_a_line(error)})")
    return bound, failed
