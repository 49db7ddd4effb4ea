"""What a step changes beside models and optimizers: containers, schedulers, counters, iterators."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import FunctionType
from typing import Any

from speedkit_jupyter.wrappers import is_wrapper

Restore = Callable[[], None]
# Larger tensors and arrays are data: they are not copied, and a step is trusted not to write them.
MOST_BYTES = 2**28
# Iterators that copy.copy makes independent of one another.
COPYABLE: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")))


def states_of(objects: Sequence[Any]) -> list[Restore]:
    """How to put these objects back to what they are now."""
    return [restore for restore in map(_state_of, objects) if restore is not None]


def _state_of(found: Any) -> Restore | None:
    """None where there is nothing to do.

    Containers get their elements back, tensors and arrays their values, schedulers and the like
    their `state_dict`, generators their state, instances of the user's classes their attributes.
    """
    import numpy as np
    import torch

    if isinstance(found, list | dict | set | deque | bytearray):
        return _container_state(found)
    if isinstance(found, torch.optim.Optimizer) and is_wrapper(found):
        own = {name: one for name, one in vars(found).items() if not callable(one)}
        return lambda: vars(found).update(own)  # state and groups are those of what it wraps
    if isinstance(found, torch.Tensor):
        return _tensor_state(found)
    if isinstance(found, np.ndarray) and found.nbytes <= MOST_BYTES and found.flags.writeable:
        values = found.copy()
        return lambda: np.copyto(found, values)
    generator = _generator_state(found)
    if generator is not None:
        return generator
    if callable(getattr(found, "state_dict", None)) and hasattr(found, "load_state_dict"):
        saved = copy.deepcopy(found.state_dict())
        return lambda: found.load_state_dict(copy.deepcopy(saved))
    if _is_plain_instance(found) or isinstance(found, FunctionType):
        attributes = dict(vars(found))
        return lambda: _fill(vars(found), attributes)
    return None


def _container_state(found: Any) -> Restore:
    saved = found.copy()

    def restore() -> None:
        if len(found) == len(saved) and all(map(operator.is_, _parts(found), _parts(saved))):
            return
        if isinstance(found, list | bytearray):
            found[:] = saved
        else:
            found.clear()
            found.extend(saved) if isinstance(found, deque) else found.update(saved)

    return restore


def _parts(container: Any) -> Any:
    """Elements, and for a dict its keys and values, by identity."""
    if isinstance(container, dict):
        return itertools.chain(container.keys(), container.values())
    return container


def _tensor_state(found: Any) -> Restore | None:
    """A tensor counts the changes in place (`_version`), so that most are never written back."""
    import torch

    if found.is_inference() or found.layout != torch.strided or found.is_meta:
        return None
    if found.numel() * found.element_size() > MOST_BYTES:
        return None
    saved, version = found.detach().clone(), found._version

    def restore() -> None:
        nonlocal version
        if found._version != version:
            with torch.no_grad():
                found.detach().copy_(saved)
            version = found._version

    return restore


def _generator_state(found: Any) -> Restore | None:
    """Random generators that the user made: Python's, numpy's, torch's."""
    import random

    import numpy as np
    import torch

    if isinstance(found, random.Random):
        python = found.getstate()
        return lambda: found.setstate(python)
    if isinstance(found, np.random.Generator):
        bits = copy.deepcopy(found.bit_generator.state)
        return lambda: setattr(found.bit_generator, "state", bits)
    if isinstance(found, np.random.RandomState):
        legacy = found.get_state()
        return lambda: found.set_state(legacy)
    if isinstance(found, torch.Generator):
        state = found.get_state()

        def restore() -> None:
            found.set_state(state)

        return restore
    return None


def _is_plain_instance(found: Any) -> bool:
    return hasattr(found, "__dict__") and type(found).__module__ == "__main__"


def _fill(attributes: MutableMapping[str, Any], saved: dict[str, Any]) -> None:
    for name in [name for name in attributes if name not in saved]:
        del attributes[name]
    attributes.update(saved)


class Replay:
    """An iterator whose first draws are repeated at every step, so that all do the same work.

    `next()` begins anew at the end, since a step that is timed draws more often than the notebook
    would; a loop over it ends there.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._drawn, self._position = source, [], 0  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self._draw()
            except StopIteration:
                return

    def __next__(self) -> Any:
        try:
            return self._draw()
        except StopIteration:
            if not self._drawn:
                raise
            self.rewind()
            return self._draw()

    def _draw(self) -> Any:
        if self._position == len(self._drawn):
            self._drawn.append(next(self._source))
        self._position += 1
        return self._drawn[self._position - 1]

    def rewind(self) -> None:
        """The next step draws the same again."""
        self._position = 0

    def as_found(self) -> Iterator[Any]:
        """An iterator that gives what the source would have given."""
        return itertools.chain(self._drawn, self._source) if self._drawn else self._source


class Lent:
    """An iterator of the user's for a while; it knows whether anything was drawn from it."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self.used = source, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.used = True
        return next(self._source)


class Replays:
    """The iterators of these names, in a namespace, replay their first draws.

    `hand_back` puts the user's into their place, `take` takes them away again.
    """

    def __init__(self, names: MutableMapping[str, Any], iterators: Sequence[str]) -> None:
        self._names = names
        self._found = {name: names[name] for name in iterators}
        self._replays = {name: Replay(_independent(one)) for name, one in self._found.items()}
        self._lent: dict[str, Any] = {}
        self._left: dict[str, int] = {}

    def rewind(self) -> None:
        """The next step draws the same again."""
        for replay in self._replays.values():
            replay.rewind()

    def take(self) -> None:
        """Put the replaying ones in place."""
        self._names.update(self._replays)

    def hand_back(self, for_good: bool = True) -> None:
        """Put the user's in place: untouched, or giving first what was drawn."""
        for name, replay in self._replays.items():
            found = self._found[name]
            if not isinstance(found, COPYABLE):
                found = replay.as_found() if for_good else Lent(replay.as_found())
            self._lent[name] = self._names[name] = found
            self._left[name] = operator.length_hint(found, -1)

    def used(self) -> bool:
        """Whether one that was handed back was drawn from, or its name means something else."""
        return any(
            self._names.get(name) is not lent
            or getattr(lent, "used", False)
            or operator.length_hint(lent, -1) != self._left[name]
            for name, lent in self._lent.items()
        )


def _independent(iterator: Iterator[Any]) -> Iterator[Any]:
    """A copy that draws for itself, where Python has one: the iterator then stays where it is."""
    return copy.copy(iterator) if isinstance(iterator, COPYABLE) else iterator
