"""Copy and restore the objects that a walk found, and the process's settings."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from speedkit_jupyter.catalog.malloc import HEAP
from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.state.handlers.arrays_and_generators import (
    Arrays,
    Buffers,
    Generators,
    comparable,
)
from speedkit_jupyter.state.handlers.base import MOST_COPIED_BYTES, CopyBudget, StateHandler
from speedkit_jupyter.state.handlers.containers import Dicts, Lists, Sets
from speedkit_jupyter.state.handlers.tensors import Tensors
from speedkit_jupyter.state.walk import HANDLERS, Leading, Walk, handlers_of
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.modules import COMPILED_CALL, buffer_table, parameter_table

# Only the first FIRST restores of a snapshot and every ALL_EVERYth restore compare all objects.
# Other restores skip objects of the base that have never changed.
FIRST, ALL_EVERY = 2, 16
Key = tuple[int, StateHandler]
# Handlers of the objects that `ModuleState` copies. Copying takes 75 µs per object, so MOST_HELD
# limits their number.
CONTENTS = (Dicts, Lists, Sets, Arrays, Buffers, Generators, Tensors)
MOST_HELD = 1000
OF_MODULES = frozenset(vars(torch.nn.Module())) | {COMPILED_CALL}
# Settings that are attributes of modules, in addition to the flags of `machines.flags`.
ATTRIBUTES = {
    "torch.backends.cudnn": "enabled benchmark_limit",
    "torch.backends.mkldnn": "enabled deterministic",
    "torch.backends.opt_einsum": "enabled strategy",
    "torch.backends.quantized": "engine",
    "torch.utils.deterministic": "fill_uninitialized_memory",
}


class Snapshot:
    """A copy of a walk's objects and of the process's settings at one moment.

    Copies of tensors are on the tensors' device, or in main memory with `off_device`. Unchanged
    tensors and arrays share the copies of an earlier `base`. With `for_timing`, changed large float
    tensors do too, because their values don't affect time. `failed` has the reason why an object or
    setting can't be copied or restored, by name. `too_large` names objects that were not copied.
    """

    def __init__(
        self,
        walk: Walk,
        off_device: bool = False,
        base: Snapshot | None = None,
        for_timing: bool = False,
    ) -> None:
        self.walk, self._for_timing = walk, for_timing
        self.failed: dict[str, str] = {}
        self._changing: set[Key] = set() if base is None else base._changing
        self._of_base: dict[Key, tuple[Any, Any]] = {} if base is None else base._memories
        self._restored = 0
        self._settings = ProcessSettings(computation_settings())
        self._random = ProcessSettings(generators())
        copies = CopyBudget(off_device, _owned(walk))
        self._memories: dict[Key, tuple[Any, Any]] = self._copied(copies)
        self.too_large = [f"{walk.name(o)} ({type(o).__name__})" for o in copies.too_large]

    def _copied(self, copies: CopyBudget) -> dict[Key, tuple[Any, Any]]:
        """Return the objects with their copies, in the order of restoring; record failures."""
        memories: dict[Key, tuple[Any, Any]] = {}
        with torch.DisableTorchFunctionSubclass():
            for instance in self.walk.found.values():
                for handler in self.walk.handlers(instance):
                    if not handler.has_state:
                        continue
                    try:
                        memory = self._shared(handler, instance)
                        memory = handler.copy(instance, copies) if memory is None else memory
                        memories[id(instance), handler] = instance, memory
                    except Exception as error:
                        name = self.walk.name(instance)
                        self.failed[name] = f"can't be copied ({in_a_line(error)})"
        return dict(sorted(memories.items(), key=lambda one: HANDLERS.index(one[0][1])))

    def _shared(self, handler: StateHandler, instance: Any) -> Any:
        """Return the base's copy of a tensor or array if it can be shared, else None."""
        key = (id(instance), handler)
        if not handler.bulky or key not in self._of_base:
            return None
        memory = self._of_base[key][1]
        if self._for_timing and handler.takes_as_long(instance, memory):
            return memory
        return memory if key not in self._changing and handler.same(instance, memory) else None

    def restore(self) -> None:
        """Restore the copied state and record failures in `failed`. Delay Ctrl-C until the end."""
        self._restored += 1
        # Settings come first, because the operations that restore tensors may depend on them.
        self.failed.update(self._settings.restore())
        stopped: BaseException | None = None
        with torch.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
            for key, (instance, memory) in list(self._due()):
                try:
                    self._put_back(key, instance, memory)
                except Exception as error:
                    why = f"could not be put back ({in_a_line(error)})"
                    self.failed[self.walk.name(instance)] = why
                except BaseException as error:  # Ctrl-C: finish first
                    stopped = stopped or error
        self.failed.update(self._random.restore(compares=False))
        if stopped is not None:
            raise stopped

    def let_go(self) -> None:
        """Drop the copies of objects: later calls restore only settings and random states."""
        self._memories, self._of_base = {}, {}

    def _due(self) -> Iterator[tuple[Key, tuple[Any, Any]]]:
        """Yield (key, (object, copy)) for objects that this restore compares; see FIRST."""
        is_whole = self._restored <= FIRST or self._restored % ALL_EVERY == 0
        for key, found in self._memories.items():
            if is_whole or key in self._changing or key not in self._of_base:
                yield key, found

    def _put_back(self, key: Key, instance: Any, memory: Any) -> None:
        handler = key[1]
        changes = handler.bulky and key in self._changing  # comparing costs as much as copying
        if changes or not handler.same(instance, memory):
            self._changing.add(key)
            handler.put_back(instance, memory)

    @property
    def has_changed(self) -> bool:
        """Return whether a restore of this snapshot, or one with the same base, found changes."""
        return bool(self._changing)

    def draws(self) -> bool:
        """Return whether the process's random states have changed, or the walk found iterators."""
        kinds = map(type, self.walk.found.values())
        return self._random.changed() or any(hasattr(kind, "__next__") for kind in kinds)

    def restore_randomness(self) -> None:
        """Restore only the random generators of the process and of the walk."""
        self.failed.update(self._random.restore(compares=False))
        for (_, handler), (instance, memory) in self._memories.items():
            if isinstance(handler, Generators):
                handler.put_back(instance, memory)

    def adopt_randomness(self) -> None:
        """Replace the copied states of the process's random generators with the current states."""
        self._random = ProcessSettings(generators())

    def changed(self, names: Mapping[int, str]) -> str:
        """Return the name of a changed object or setting, else ''. `names` has names by id."""
        if self._settings.changed():
            return "torch's settings"
        found = (names.get(id(one)) or self.walk.name(one) for _, one in self._differing())
        return next((name for name in found if name not in self.failed), "")

    def _differing(self) -> list[tuple[StateHandler, Any]]:
        """Return pairs of handler and object whose values changed; strides don't count."""
        found = []
        with torch.DisableTorchFunctionSubclass():
            for (_, handler), (instance, memory) in self._memories.items():
                with suppress(Exception):
                    same = handler.same_values if handler.bulky else handler.same
                    if not same(instance, memory):
                        found.append((handler, instance))
        return found


def _owned(walk: Walk) -> Iterator[int]:
    """Yield ids of the models' and optimizers' tensors and gradients, which have no size limit."""
    for instance in walk.found.values():
        tensors: list[Any] = []
        if issubclass(type(instance), torch.nn.Module):
            tensors = [*parameter_table(instance).values(), *buffer_table(instance).values()]
        elif issubclass(type(instance), torch.optim.Optimizer):
            tensors = [p for group in instance.param_groups for p in group["params"]]
            states = getattr(instance, "state", {}).values()  # wrappers may lack `state`
            tensors += [value for s in states if isinstance(s, dict) for value in s.values()]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                yield id(tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    yield id(tensor.grad)


# --- settings of the process ---


class Setting(NamedTuple):
    """A process setting, with functions to read, write and compare it; messages show `name`."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    same: Callable[[Any, Any], bool] = lambda now, saved: bool(comparable(now) == comparable(saved))


class ProcessSettings:
    """The values of settings at one moment, without settings that can't be read."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._values: list[tuple[Setting, Any]] = []
        for setting in settings:
            with suppress(Exception):  # missing in this version of torch, or on this machine
                self._values.append((setting, setting.read()))

    def changed(self) -> bool:
        """Return whether a setting has changed."""
        return any(not setting.same(setting.read(), value) for setting, value in self._values)

    def restore(self, compares: bool = True) -> Iterator[tuple[str, str]]:
        """Restore changed settings, or all if not `compares`; yield (name, reason) of failures."""
        for setting, value in self._values:
            try:
                if not (compares and setting.same(setting.read(), value)):
                    setting.write(value)
            except Exception as error:
                yield setting.name, f"could not be put back ({in_a_line(error)})"


def computation_settings() -> Iterator[Setting]:
    """Yield the settings that affect a step's results; each `Snapshot.restore` restores them."""
    yield Setting("torch's flags", _flags, flags.restore, lambda a, b: not flags.diff(b, a))
    yield Setting("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled)
    write_device = lambda one: torch.set_default_device(None if one.type == "cpu" else one)  # noqa: E731
    yield Setting("the default device", torch.get_default_device, write_device)
    debugging = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield Setting("deterministic algorithms", *debugging)
    anomaly = torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled
    write_anomaly: Any = torch.autograd.set_detect_anomaly
    yield Setting("anomaly mode", lambda: [one() for one in anomaly], lambda v: write_anomaly(*v))
    for path, names in ATTRIBUTES.items():
        module = sys.modules.get(path)
        for name in names.split():
            read, write = partial(getattr, module, name), partial(setattr, module, name)
            yield Setting(f"{path}.{name}", read, write)


def _flags() -> dict[str, Any]:
    # Steps don't set the heap's flag, and writing it is slow.
    return {name: value for name, value in flags.snapshot().items() if name != HEAP}


def surroundings() -> Iterator[Setting]:
    """Yield the settings that are restored only when a measurement pauses or ends."""
    yield Setting("os.environ", os.environ.copy, _write_environment)
    yield Setting("the working directory", os.getcwd, os.chdir)
    yield Setting("warnings.filters", lambda: list(warnings.filters), _write_filters)


def _write_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():  # no `clear()`: other threads read os.environ
        del os.environ[name]
    # Unchanged variables are not written, because C++ threads read the environment, too.
    os.environ.update({name: v for name, v in value.items() if os.environ.get(name) != v})


def _write_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def generators() -> Iterator[Setting]:
    """Yield the random states of the process and of accelerators; comparing them is slow."""
    yield Setting("Python's random numbers", random.getstate, random.setstate)
    yield Setting("torch's random numbers", torch.get_rng_state, torch.set_rng_state)
    yield Setting("NumPy's random numbers", np.random.get_state, np.random.set_state)
    for kind in devices.in_use():
        yield Setting(f"{kind.name}'s random numbers", *kind.generators())


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the process's random generators at the end of the block."""
    found = ProcessSettings(generators())
    try:
        yield
    finally:
        list(found.restore(compares=False))


class ModuleState:
    """A copy of modules' attributes and buffers, without parameters and hooks.

    Raises ValueError for too much data: see `held_objects`.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        parts = [part for model in models for part in model.modules()]
        self._attributes = [(part, dict(vars(part))) for part in parts]
        buffers = [one for model in models for one in model.buffers()]
        copies, self._contents = CopyBudget(required=map(id, buffers)), list[Any]()
        every: list[Any] = [one for _, one in held_objects(models)]
        every += [*map(buffer_table, parts), *buffers]
        kinds = {cls: handlers_of(cls) for cls in {*map(type, every)}}
        for one in every:
            for kind in (each for each in kinds[type(one)] if isinstance(each, CONTENTS)):
                with suppress(Exception):  # a tensor without memory, for example
                    self._contents.append((kind, one, kind.copy(one, copies)))

    def restore(self) -> None:
        for part, found in self._attributes:
            for name in (vars(part).keys() | found.keys()) - {COMPILED_CALL}:
                if name not in found:
                    del vars(part)[name]
                elif vars(part).get(name) is not found[name]:
                    vars(part)[name] = found[name]
        with torch.no_grad():
            for handler, one, memory in self._contents:
                with suppress(Exception):  # an array with views can't be resized
                    if not handler.same(one, memory):
                        handler.put_back(one, memory)


@contextmanager
def module_state_kept(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore modules' states and the process's random states at the end of the block."""
    state = ModuleState(models)
    try:
        with generators_kept():
            yield
    finally:
        state.restore()


def held_objects(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield names and objects of modules' attributes: containers, arrays, tensors, generators.

    The contents of containers are included, but not the parameters and buffers of `models`.
    Raises ValueError after MOST_HELD objects or MOST_COPIED_BYTES.
    """
    named = [pair for model in models for pair in model.named_modules()]
    tensors = (one for model in models for one in (*model.parameters(), *model.buffers()))
    seen = {*map(id, tensors), *(id(part) for _, part in named)}
    waiting = [
        (f"{where}.{name}".lstrip("."), value)
        for where, part in named
        for name, value in vars(part).items()
        if name not in OF_MODULES
    ]
    handled, count, size = dict[type, bool](), 0, 0
    while waiting:
        name, one = waiting.pop()
        cls = type(one)
        if cls not in handled:
            handled[cls] = any(isinstance(each, CONTENTS) for each in handlers_of(cls))
        if id(one) in seen or not (handled[cls] or issubclass(cls, (tuple, torch.nn.Module))):
            continue
        seen.add(id(one))
        if isinstance(one, torch.nn.Module):  # in a container, where `modules()` does not look
            waiting += [(name, part) for part in one.modules()]
            waiting.append((name, vars(one)))
            continue
        count, size = count + 1, size + getattr(one, "nbytes", 0)
        if count > MOST_HELD or size > MOST_COPIED_BYTES:
            raise ValueError(f"`{name}` of the model holds too much to put back after a repetition")
        yield name, one
        for handler in handlers_of(cls):
            if isinstance(handler, (*CONTENTS, Leading)):
                with suppress(Exception):
                    waiting += [(name, child) for child in handler.children(one)]
