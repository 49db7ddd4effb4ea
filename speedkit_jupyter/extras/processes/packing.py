"""Send objects between the notebook and workers, as one object graph.

One cloudpickle stream has all objects of a cell, so shared objects stay shared. The storages of
tensors follow, each once. Both sides number the objects in the same order. The reply refers to
objects by number. It has the new content of each object that is still reachable on rank 0; the
content is written into the notebook's own objects.
"""

from __future__ import annotations

import functools
import pickle  # noqa: TID251  (reads only streams written here)
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np
import torch

from speedkit_jupyter.extras.processes.sharding import dtensor
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue import private as torch_private

Space = MutableMapping[str, Any]
CONTAINERS = (list, dict, set, deque, bytearray)
VALUES = (str, bytes, int, float, complex)
# Names that IPython binds in each process; they are not sent.
OWN = {"In", "Out", "get_ipython", "exit", "quit", "open", "display"}


class CellGlobals(dict[str, Any]):
    """A placeholder for the globals of a cell's functions; the reader substitutes its namespace."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that writes `known` objects by number; `goes(name)` selects the globals to send."""

    def __init__(
        self,
        space: Space,
        goes: Callable[[str], bool] = lambda name: name not in OWN,
        known: Mapping[int, Any] | None = None,
    ) -> None:
        self._file = BytesIO()
        super().__init__(self._file, 5)
        self.globals_ref[id(space)] = CellGlobals()
        self._space, self._goes = space, goes
        every = (known or {}).items()
        self._numbers = {id(one): number for number, one in every if not isinstance(one, VALUES)}
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._owners: dict[int, Any] = {}  # arrays and storages by memory address
        self.reached: dict[int, None] = {}  # numbers of the known objects found so far
        groups = torch.nn.parallel.DistributedDataParallel, torch.distributed.ProcessGroup
        self._of_a_process = (*groups, *dtensor(), SpeedContext, TextIOWrapper)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, CellGlobals):
            return ("globals",)
        if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
            storage, dtype = torch_private.untyped(value)
            self._claim(storage.data_ptr(), storage)
            new = len(self._storages), storage
            number, _ = self._storages.setdefault(torch_private.address(storage), new)
            return "storage", number, dtype
        if self.reach(value):
            return "known", self._numbers[id(value)]
        if isinstance(value, np.ndarray) and value.nbytes:
            base = value
            while isinstance(base.base, np.ndarray):
                base = base.base
            self._claim(base.__array_interface__["data"][0], value)
        return None

    def _claim(self, address: int, owner: Any) -> None:
        """Register the owner of an address; raise TypeError if a NumPy array shares the memory."""
        held = self._owners.setdefault(address, owner)
        if address and held is not owner and np.ndarray in (type(held), type(owner)):
            raise TypeError("it shares memory with another array or tensor that is sent")

    def reach(self, value: Any) -> bool:
        """Mark a known object's content for sending; return False if the object is not known."""
        number = self._numbers.get(id(value))
        if number is not None:
            self.reached[number] = None
        return number is not None

    def reducer_override(self, value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        if isinstance(value, self._of_a_process) or (is_tensor and value.is_quantized):
            raise TypeError(f"a {'quantized ' * is_tensor}{type(value).__name__} can't be sent")
        if is_tensor or isinstance(value, torch.optim.Optimizer):
            return reduced(value)
        made = super().reducer_override(value)
        own = value.__wrapped__ if isinstance(value, functools._lru_cache_wrapper) else value
        if isinstance(own, FunctionType) and own.__globals__ is self._space:
            if own is not value:
                return functools.lru_cache(**value.cache_parameters()), (own,)
            read = made[2][1]["__globals__"] if isinstance(made, tuple) else {}
            for name in [name for name in read if not self._goes(name)]:
                del read[name]
        return made

    def objects(self) -> dict[int, Any]:
        return dict(self.memo.copy().values())

    def save(self, path: Path) -> None:
        """Write the stream and the storages to a file."""
        torch.save((self._file.getvalue(), [one for _, one in self._storages.values()]), path)


def written(
    make: Callable[[], Pickler],
    units: Callable[[Pickler], Iterable[Any]],
    value_of: Callable[[Any], Any],
) -> tuple[Pickler, dict[Any, str]]:
    """Pickle the value of each unit (a name or number); return the pickler, and errors by unit."""
    failed: dict[Any, str] = {}
    while True:
        pickler, count = make(), len(failed)
        for unit in units(pickler):
            if unit in failed:
                continue
            try:
                pickler.dump((unit, value_of(unit)))
            except Exception as error:  # an object's own pickling may raise anything
                failed[unit] = in_a_line(error)
                break  # a partly written object corrupts the stream: start again
        if len(failed) == count:
            pickler.dump((None, None))
            return pickler, failed


def reduced(value: Any) -> Any:
    """Return a value's pickle reduction, without a tensor's autograd graph or optimizer hooks."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        value = value.detach()
    reduce = cloudpickle.Pickler.dispatch_table.get(type(value))
    made = reduce(value) if reduce else value.__reduce_ex__(5)
    if isinstance(value, torch.optim.Optimizer) and isinstance(made[2], dict):
        every = vars(value).items()
        own = {name: one for name, one in every if not callable(one) and "hook" not in name}
        return *made[:2], own | made[2]
    return made


class Reader(pickle.Unpickler):
    """An unpickler that gives functions `space` as globals, and looks up numbers in `known`."""

    def __init__(self, path: Path, space: Space, known: Mapping[int, Any] | None = None) -> None:
        stream, self._storages = torch.load(path, _here, weights_only=False)
        super().__init__(BytesIO(stream))
        self._space, self._known = space, known or {}

    def persistent_load(self, given: Any) -> Any:
        kind, *place = given
        if kind == "globals":
            return self._space
        if kind == "known":
            return self._known[place[0]]
        return torch_private.typed(torch_private.untyped(self._storages[place[0]])[0], place[1])

    def read(self) -> dict[Any, Any]:
        """Return the values by unit: a name, or the number of a known object."""
        return dict(iter(self.load, (None, None)))


def _here(storage: Any, location: str) -> Any:
    """Return a storage on this process's device of the same kind, or on the CPU."""
    kind = location.partition(":")[0] if torch.accelerator.is_available() else "cpu"
    return torch.serialization.default_restore_location(storage, kind)


# --- the reply ---


def reply(path: Path, bound: dict[str, Any], sent: dict[int, Any], space: Space) -> dict[str, str]:
    """Write `bound` and the content of reachable `sent` objects; return failure reasons by name."""
    reached: dict[int, None] = {}  # includes numbers reached from objects that can't be sent

    def units(pickler: Pickler) -> Iterator[Any]:
        pickler.reached = reached
        yield from bound
        for value in space.values():
            pickler.reach(value)
        done: set[int] = set()
        while new := [number for number in reached if number not in done]:
            yield from new
            done.update(new)

    def value_of(unit: Any) -> Any:
        return bound[unit] if isinstance(unit, str) else content(sent[unit])

    pickler, failed = written(lambda: Pickler(space, known=sent), units, value_of)
    pickler.save(path)
    named = {unit: name_of(sent[unit], space) for unit in failed if unit in sent}
    return {named.get(unit, unit): reason for unit, reason in failed.items()}


def content(value: Any) -> tuple[Any, ...] | None:
    """Return `put` and its arguments: `put(old, *arguments)` writes the content into `old`.

    `put` is None if only inner objects can change. Classes and objects pickled by name give None.
    """
    if isinstance(value, CONTAINERS):
        return put_items, [*value.items()] if isinstance(value, dict) else [*value]
    if isinstance(value, tuple | frozenset):
        return None, [*value]
    if isinstance(value, FunctionType):
        held: list[Any] = [value.__defaults__, value.__kwdefaults__]
        with suppress(ValueError):  # an empty closure cell
            held += [cell.cell_contents for cell in value.__closure__ or ()]
        return None, held
    if isinstance(value, torch.Tensor):
        return put_array, value.detach(), value.requires_grad
    if type(value) is np.ndarray:
        return put_array, value.copy()
    if isinstance(value, type) or isinstance(made := reduced(value), str):
        return None
    return (put_state, made[2]) if len(made) > 2 and made[2] is not None else (None, made[1])


def put_items(old: Any, items: list[Any]) -> None:
    old.clear()
    old.update(items) if isinstance(old, dict | set) else old.extend(items)


def put_array(old: Any, new: Any, requires_grad: bool = False) -> None:
    """Copy `new` into a writable array, or into a tensor, and set the tensor's `requires_grad`."""
    if isinstance(old, np.ndarray):
        if old.flags.writeable:
            old[...] = new
        return
    is_alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    with torch.inference_mode(old.is_inference()), torch.no_grad():
        if not is_alike:
            old.data = new
        elif old.layout != torch.strided or not torch.equal(old, new):
            old.copy_(new)
    if old.is_leaf and old.requires_grad != requires_grad:
        old.requires_grad_(requires_grad)


def put_state(old: Any, state: Any) -> None:
    if hasattr(type(old), "__setstate__"):
        old.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(old).update(attributes)
    for name, one in (slots or {}).items():
        object.__setattr__(old, name, one)


def taken(path: Path, sent: dict[int, Any], space: Space) -> tuple[dict[str, Any], dict[str, str]]:
    """Write a reply's contents into the sent objects; return bound values and failures by name."""
    units, failed = Reader(path, space, sent).read(), dict[str, str]()
    contents = [(sent[n], *one) for n, one in units.items() if n in sent and one and one[0]]
    for old, put, *given in sorted(contents, key=lambda one: one[1] is not put_items):
        try:
            put(old, *given)
        except Exception as error:  # an object's own `__setstate__` may raise anything
            failed[name_of(old, space)] = in_a_line(error)
    return {name: value for name, value in units.items() if isinstance(name, str)}, failed


def name_of(value: Any, space: Space) -> str:
    """Return the name of a variable that holds `value`, or words for its class: `a list`."""
    names = (name for name, one in space.items() if one is value and name[:1] != "_")
    return next(names, f"a {type(value).__name__}")
