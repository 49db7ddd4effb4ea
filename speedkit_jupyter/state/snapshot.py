"""The state that a step changes, copied and put back byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from speedkit_jupyter.state import process
from speedkit_jupyter.state.handlers.base import CopyBudget, StateHandler
from speedkit_jupyter.state.handlers.registry import HANDLERS
from speedkit_jupyter.state.handlers.values import Generators
from speedkit_jupyter.state.process import ProcessSettings
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.modules import buffer_table, parameter_table

# A variant's warm state is put back wholly at first and at times, otherwise only what steps were
# seen to change.
FIRST, ALL_EVERY = 2, 16
Key = tuple[int, StateHandler]


class Snapshot:
    """A copy of all that a walk found, at one moment.

    `restore` writes the copied values into the same objects. Copies of tensors are on the device of
    the originals, or in main memory if `off_device`. A snapshot with a `base`, taken earlier,
    shares the copies of objects that did not change since; one `for_timing` also copies of large
    tensors that did, since their values take no time. `failed` has reasons by the names of
    objects that can't be copied or put back; `too_large` has the names of data that was not copied.
    """

    def __init__(
        self,
        walk: Walk,
        off_device: bool = False,
        base: Snapshot | None = None,
        for_timing: bool = False,
    ) -> None:
        self.walk, self._base, self._for_timing = walk, base, for_timing
        self.failed: dict[str, str] = {}
        self._changing: set[Key] = set() if base is None else base._changing
        self._restored = 0
        self._settings = ProcessSettings(process.switches())
        self._random = ProcessSettings(process.generators())
        copies = CopyBudget(off_device, _owned(walk))
        self._memories = self._copied(copies)
        self.too_large = [f"{walk.name(o)} ({type(o).__name__})" for o in copies.too_large]

    def _copied(self, copies: CopyBudget) -> dict[Key, tuple[Any, Any]]:
        """Return each object with its memory, in the order in which they are put back."""
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
        """Return the base's copy of bulky values that serves as well; None if there is none."""
        key = (id(instance), handler)
        base = {} if self._base is None else self._base._memories
        if not handler.bulky or key not in base:
            return None
        memory = base[key][1]
        if self._for_timing and handler.takes_as_long(instance, memory):
            return memory
        return memory if key not in self._changing and handler.same(instance, memory) else None

    def restore(self) -> None:
        """Put everything back; a failure is noted, and keeps nothing else from being put back."""
        self._restored += 1
        # Switches first: in inference mode, say, nothing else could be put back.
        self.failed.update(self._settings.restore())
        stopped: BaseException | None = None
        with torch.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
            for key, (instance, memory) in list(self._due()):
                try:
                    self._put_back(key, instance, memory)
                except Exception as error:
                    why = f"could not be put back ({in_a_line(error)})"
                    self.failed[self.walk.name(instance)] = why
                except BaseException as error:  # Ctrl-C: all else first
                    stopped = stopped or error
        self.failed.update(self._random.restore())
        if stopped is not None:
            raise stopped

    @property
    def has_changed(self) -> bool:
        """Return whether anything but random numbers and settings had ever to be put back."""
        return bool(self._changing)

    def draws(self) -> bool:
        """Return whether random numbers were drawn since the copy, or there are iterators."""
        kinds = map(type, self.walk.found.values())
        return self._random.moved() or any(hasattr(kind, "__next__") for kind in kinds)

    def restore_randomness(self) -> None:
        """Put back only what random numbers are drawn from."""
        self.failed.update(self._random.restore())
        for (_, handler), (instance, memory) in self._memories.items():
            if isinstance(handler, Generators):
                handler.put_back(instance, memory)

    def adopt_randomness(self) -> None:
        """Have the random generators of the process come back to what they are now."""
        self._random = ProcessSettings(process.generators())

    def _due(self) -> Iterator[tuple[Key, tuple[Any, Any]]]:
        """Yield all; or what is known to change, and what is new since the base."""
        is_whole = self._restored <= FIRST or self._restored % ALL_EVERY == 0
        known = {} if self._base is None or is_whole else self._base._memories
        for key, found in self._memories.items():
            if key in self._changing or key not in known:
                yield key, found

    def _put_back(self, key: Key, instance: Any, memory: Any) -> None:
        handler = key[1]
        changes = handler.bulky and key in self._changing  # to compare costs as much as to copy
        if changes or not handler.same(instance, memory):
            self._changing.add(key)
            handler.put_back(instance, memory)

    def overwritten(self) -> list[Any]:
        """Return the tensors and arrays that do not hold the copied values any more."""
        with torch.DisableTorchFunctionSubclass():
            return [
                instance
                for (_, handler), (instance, memory) in self._memories.items()
                if handler.bulky and not handler.same_values(instance, memory)
            ]

    def changed(self, names: Mapping[int, str]) -> str:
        """Return the name, by id in `names` or the walk's, of what is not as it was copied."""
        if self._settings.changed():
            return "torch's settings"
        with torch.DisableTorchFunctionSubclass():
            for (_, handler), (instance, memory) in self._memories.items():
                # A plan that is shown and hidden again lays tensors elsewhere.
                same = handler.same_values if handler.bulky else handler.same
                with suppress(Exception):
                    if not same(instance, memory) and self.walk.name(instance) not in self.failed:
                        return names.get(id(instance)) or self.walk.name(instance)
        return ""


def _owned(walk: Walk) -> Iterator[int]:
    """Yield the ids of tensors that are copied whatever their size: a step's own, not its data."""
    for instance in walk.found.values():
        tensors: list[Any] = []
        if issubclass(type(instance), torch.nn.Module):
            tensors = [*parameter_table(instance).values(), *buffer_table(instance).values()]
        elif issubclass(type(instance), torch.optim.Optimizer):
            tensors = [p for group in instance.param_groups for p in group["params"]]
            states = getattr(instance, "state", {}).values()  # a wrapper may have none
            tensors += [value for s in states if isinstance(s, dict) for value in s.values()]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                yield id(tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    yield id(tensor.grad)
