"""Objects on their way between the notebook and a worker, as one graph.

One stream of cloudpickle has all objects of a parcel, so what is one object here is one there,
whatever holds it; tensors' memory goes beside it, in memory that both processes share. What
functions of cells read by name is bound in the namespace of the other side.

An object of the notebook has a key, for which each worker keeps an object of its own: what is sent
is written into that one. Within a launch both sides number the objects of the parcel that was sent.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import pickle  # noqa: TID251  (nothing else writes what is read)
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO, TextIOWrapper
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import numpy as np
import torch

from speedkit_jupyter.catalog.properties.sharding import dtensor, is_sharded
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.modules import COMPILED_CALL

CONTAINERS = (list, dict, set, deque, bytearray)
PLAIN = (torch.Tensor, torch.nn.Parameter)
LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
Space = MutableMapping[str, Any]


@dataclass
class Parcel:
    """What was packed: in memory of process `pid`, or `inline` for another host or system."""

    pid: int
    descriptor: int = -1
    inline: bytes = b""

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def close(self) -> None:
        """Free the memory."""
        if self.descriptor >= 0 and self.pid == os.getpid():
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass
class Known:
    """What both sides have of a parcel: its objects by number, and the memory of its tensors."""

    objects: Mapping[int, Any] = field(default_factory=dict)
    memory: list[torch.Tensor] = field(default_factory=list)


class Keys:
    """The keys of the notebook's objects, which live no longer for it."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, weakref.ref[Any]]] = {}
        self._numbers = itertools.count()

    def of(self, value: Any) -> Any:
        """Return the key that an object was sent or came with, or a new one."""
        key, reference = self._of.get(id(value), (None, None))
        is_its = reference is not None and reference() is value
        return key if is_its else self.note(value, next(self._numbers))

    def note(self, value: Any, key: Any) -> Any:
        """Return `key`, by which the workers know an object from now on."""
        with suppress(TypeError):  # nothing refers to it weakly: it is sent as a new one each time
            self._of[id(value)] = key, weakref.ref(value)
        return key

    def forget_dead(self) -> None:
        self._of = {number: one for number, one in self._of.items() if one[1]() is not None}


class _Globals(dict[str, Any]):
    """The globals of functions of a cell, which are the other side's own there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _namespace, ()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes objects of a namespace. With `keys` they are sent; else what the other side has is
    only referred to: the objects of `numbers` (by `id()`), and memory of `sent` (by address).
    `goes` says which names a function takes along.
    """

    def __init__(
        self,
        space: Space,
        keys: Keys | None = None,
        goes: Callable[[str], bool] = bool,
        numbers: Mapping[int, int] | None = None,
        sent: Mapping[int, int] | None = None,
    ) -> None:
        self._file = BytesIO()
        super().__init__(self._file, 5)
        self.globals_ref[id(space)] = _Globals()
        self._space, self._goes, self._keys = space, goes, keys
        self._numbers, self._sent = numbers or {}, sent or {}
        self._memory: dict[int, tuple[int, torch.Tensor]] = {}
        self._arrays: dict[int, Any] = {}  # arrays and storages, by the address of their memory
        self.reached, self._seen = list[int](), set[int]()  # the numbers that were referred to
        self.moving = dict[str, None]()  # kinds of objects that change, and can't be written into
        groups = torch.nn.parallel.DistributedDataParallel, torch.distributed.ProcessGroup
        self._of_a_group = (*groups, *dtensor())

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
            storage, dtype = torch_private.untyped(value)
            address = torch_private.address(storage)
            self._alone(storage.data_ptr(), storage)
            if address in self._sent:
                return "sent", self._sent[address], dtype
            if address not in self._memory:
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self._memory[address] = len(self._memory), whole
            return "memory", self._memory[address][0], dtype
        number = self.reach(value)
        if number is None and isinstance(value, np.ndarray) and value.nbytes:
            self._alone(_memory_of(value), value)
        return None if number is None else ("known", number)

    def _alone(self, pointer: int, owner: Any) -> None:
        """Raise TypeError where a NumPy array's memory is another object's, too: it would be two.

        Tensors that share memory share a storage, which goes along once.
        """
        held = self._arrays.setdefault(pointer, owner)
        both = isinstance(held, np.ndarray), isinstance(owner, np.ndarray)
        if pointer and held is not owner and any(both):
            raise TypeError("it shares memory with another array or tensor that goes along")

    def reach(self, value: Any) -> int | None:
        """Return the number of an object that the other side has, and note it."""
        number = self._numbers.get(id(value))
        if number is not None and number not in self._seen:
            self._seen.add(number)
            self.reached.append(number)
        return number

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, self._of_a_group):
            raise TypeError(f"{type(value).__name__} belongs to its process group")
        if isinstance(value, TextIOWrapper):
            raise TypeError("it is an open file")
        if isinstance(value, torch.Tensor) and value.is_quantized:
            raise TypeError("it has quantized tensors")  # whose memory is no plain storage
        if isinstance(value, functools._lru_cache_wrapper):
            return _cached, (value.cache_parameters(),), value.__wrapped__, None, None, _wrap
        made = super().reducer_override(value)
        is_cells = isinstance(value, FunctionType) and value.__globals__ is self._space
        if is_cells and isinstance(made, tuple):
            read = made[2][1]["__globals__"]
            for name in [name for name in read if not self._goes(name)]:
                del read[name]
        if made is not NotImplemented or isinstance(value, type | FunctionType):
            return made
        if self._keys is None or isinstance(value, CONTAINERS):
            return reduced(value) if isinstance(value, torch.Tensor) else NotImplemented
        return self._keyed(value, self._keys)

    def _keyed(self, value: Any, keys: Keys) -> Any:
        """Return how the object of the same key is found, or else made, and what it is given."""
        made = reduced(value)
        if isinstance(value, torch.Tensor):
            # Neither lazy nor made of others, which `swap_tensors` exchanges: it allows no key.
            if type(value) not in PLAIN or value.layout != torch.strided:
                return made
            return _same_tensor, (keys.of(value), *made)
        if isinstance(made, str) or any(one is not None for one in made[3:]):
            return NotImplemented
        make, given, *state = made
        if isinstance(value, torch.optim.Optimizer) and state and isinstance(state[0], dict):
            state[0] = _own_attributes(value) | state[0]
        if not state or state[0] is None:
            if isinstance(value, Iterator):
                self.moving[type(value).__name__] = None
            return NotImplemented
        return _same, (keys.of(value), make, given), state[0], None, None, set_state

    def write(self, units: Iterable[Any], make: Callable[[Any], Any]) -> dict[Any, Exception]:
        """Write `make(unit)` for each; return the first that can't be written, with the reason."""
        for unit in units:
            try:
                self.dump((unit, make(unit)))
            except Exception as error:  # whatever an object's own pickling raises
                return {unit: error}
        self.dump((None, None))
        return {}

    def known(self) -> Known:
        """Return what the other side will have of what was written."""
        memory = [memory for _, memory in self._memory.values()]
        return Known(dict(self.memo.copy().values()), memory)

    def sealed(self, is_here: bool) -> Parcel:
        """Return what was written; `is_here` if it is read on this host."""
        parcel, value = Parcel(os.getpid()), (self._file.getvalue(), self.known().memory)
        if not (is_here and hasattr(os, "memfd_create")):
            file = BytesIO()
            torch.save(value, file)
            parcel.inline = file.getvalue()
            return parcel
        parcel.descriptor = os.memfd_create("speedkit")
        try:
            torch.save(value, parcel.path)
        except BaseException:
            parcel.close()
            raise
        return parcel


def _memory_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of the memory that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.__array_interface__["data"][0])


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer's class, which torch's pickling leaves out."""
    usual = vars(torch.optim.SGD([torch.zeros(1)])).keys()
    every = vars(optimizer).items()
    return {name: one for name, one in every if name not in usual and not callable(one)}


def reduced(value: Any) -> Any:
    """Return what pickle makes of an object; of a result of autograd the values alone."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        value = value.detach()
    reduce = cloudpickle.Pickler.dispatch_table.get(type(value))
    return reduce(value) if reduce else value.__reduce_ex__(5)


def steps_of(code: CodeType) -> Iterator[tuple[CodeType, dis.Instruction]]:
    """Yield each instruction of code and of the functions in it."""
    yield from ((code, step) for step in dis.get_instructions(code))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from steps_of(inner)


def read_by(code: CodeType) -> dict[str, None]:
    """Return the global names that code reads, in order."""
    return {step.argval: None for _, step in steps_of(code) if step.opname in LOADS}


# --- reading ---


class Reader(pickle.Unpickler):
    """Reads a parcel into a namespace; `objects` are those that exist here, by their keys."""

    def __init__(
        self,
        parcel: Parcel,
        space: Space,
        objects: MutableMapping[Any, Any] | None = None,
        sent: Known | None = None,
    ) -> None:
        file = parcel.path if parcel.descriptor >= 0 else BytesIO(parcel.inline)
        stream, self._memory = torch.load(file, _here, weights_only=False)
        super().__init__(BytesIO(stream))
        self.space, self._sent = space, sent or Known()
        self.missing: Exception | None = None
        self.why_missing: Exception | None = None
        self.objects = weakref.WeakValueDictionary() if objects is None else objects

    def persistent_load(self, given: Any) -> Any:
        kind, number, *dtype = given
        if kind == "known":
            return self._sent.objects[number]
        memory = self._memory if kind == "memory" else self._sent.memory
        return torch_private.typed(memory[number].untyped_storage(), *dtype)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            if not self._sent.objects:  # in a worker
                raise
            self.missing = self.why_missing = error
            return _Missing

    def read(self) -> Iterator[tuple[Any, Any]]:
        """Yield each unit that was written, and what was made of it. In the notebook `missing` is
        the last error of a unit that needs what there is only in the workers.
        """
        _READERS.append(self)
        try:
            while (read := self.load())[0] is not None:
                yield read
        finally:
            _READERS.remove(self)

    def known(self) -> Known:
        """Return what both sides have of what was read."""
        return Known(self.memo.copy(), self._memory)


class _Missing:
    """Stands for an object of a class that is not here, until its unit is dropped."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _READERS[-1].missing = _READERS[-1].why_missing
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...


# State at module level, on purpose: pickle passes nothing to what it calls. Of this process.
_READERS: list[Reader] = []


def _namespace() -> Space:
    return _READERS[-1].space


def _here(storage: Any, location: str) -> Any:
    """Return a storage on this process's device of its kind, or on the CPU where there is none."""
    kind = location.partition(":")[0]
    kind = kind if torch.accelerator.is_available() else "cpu"
    return torch.serialization.default_restore_location(storage, kind)


def remember(objects: MutableMapping[Any, Any], key: Any, value: Any) -> Any:
    """Return an object, which is that of a key from now on."""
    with suppress(TypeError):  # nothing can refer to it weakly
        objects[key] = value
    return value


def _same(key: Any, make: Callable[..., Any], given: Any) -> Any:
    """Return the object of a key, or a new one; a model in parts can't be written into."""
    objects = _READERS[-1].objects
    value = objects.get(key)
    is_fit = value is not None and not (isinstance(value, torch.nn.Module) and is_sharded(value))
    return value if is_fit else remember(objects, key, make(*given))


def _same_tensor(key: Any, make: Callable[..., Any], given: Any, state: Any = None) -> Any:
    """Return the tensor of a key, which takes the memory that was sent, or a new one."""
    objects, new = _READERS[-1].objects, make(*given)
    old = objects.get(key)
    if old is None or old.grad_fn is not None:
        return remember(objects, key, new)
    old.data = new
    return old.requires_grad_(new.requires_grad)


def set_state(value: Any, state: Any, kind: type | None = None) -> None:
    """Write what pickle has as an object's state; what it has no more is taken away."""
    if kind not in (None, type(value)):
        value.__class__ = kind
    own = getattr(type(value), "__getstate__", None)
    has_setter, held = hasattr(value, "__setstate__"), getattr(value, "__dict__", {})
    is_pair = not has_setter and isinstance(state, tuple) and len(state) == 2
    attributes, slots = state if is_pair else (state, None)
    usual = torch.nn.Module if isinstance(value, torch.nn.Module) else object
    if own is getattr(usual, "__getstate__", None) and (not has_setter or usual is not object):
        for name in held.keys() - (attributes or {}).keys() - {COMPILED_CALL}:
            del held[name]
    if has_setter:
        value.__setstate__(state)
        return
    if hasattr(value, "__dict__"):
        held.update(attributes or {})
    else:
        slots = {**(attributes or {}), **(slots or {})}
    for name, one in (slots or {}).items():
        object.__setattr__(value, name, one)


def _cached(parameters: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return cached.__wrapped__(*args, **kwargs)

    cached: Any = functools.lru_cache(**parameters)(call)
    return cached


def _wrap(cached: Any, function: Any) -> None:
    functools.update_wrapper(cached, function)
