"""Parts of a compiled model that run as plain PyTorch, since they can't be compiled.

A part's own `forward` is left out; what that calls is compiled where torch can.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from speedkit_jupyter.catalog.properties.overrides import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)
from speedkit_jupyter.support.source_lines import Spot

FORWARD = "forward"
# What torch says of the graph break before such a part: this one is known.
LEFT_OUT = "SpeedKit has left it out, since it can't be compiled"
Forward = Callable[..., Any]


class Forwards(Property):
    """A module's own `forward`, in place of its class's: copies bind it to the copy."""

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> Any:
        return thing.__dict__.get(FORWARD, MISSING)

    def holds(self, thing: torch.nn.Module, override: Forward) -> bool:
        return getattr(thing.__dict__.get(FORWARD), "__func__", None) is override

    def put(self, thing: torch.nn.Module, override: Forward, optimizers: Optimizers) -> None:
        thing.__dict__[FORWARD] = types.MethodType(override, thing)

    def put_back(self, thing: Any, original: Any, override: Any, optimizers: Optimizers) -> None:
        if self.holds(thing, override):
            put_back_entries(thing.__dict__, {FORWARD: original})


# State at module level, on purpose: what lies on a module is known to the process.
FORWARDS = Forwards()


class EagerParts:
    """The parts of some models that one plan leaves uncompiled: those of some classes' `forward`.

    An error that names a line of one names the class. Else half of the classes is left out, then
    the other half, until as few as possible are: one more attempt at each call. Where both halves
    of all have one that fails, nothing is compiled.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models, self._in_force = models, ExitStack()
        self._plain: dict[Forward, Forward] = {}  # by what it stands in for
        self._named: list[Forward] = []
        self._works: list[Forward] = []  # known to be enough, if all of them are left out
        self._tried: list[Forward] = []
        self._waiting: list[list[Forward]] = []  # to be tried next
        self._is_searched = False

    @property
    def names(self) -> str:
        """Return what is left out: `Block.forward`."""
        return ", ".join(f"`{one.__qualname__}`" for one in (*self._named, *self._tried))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Leave them out for the block, and what is found in it."""
        try:
            self._put()
            yield
        finally:
            self._in_force.close()

    def blame(self, lines: Iterable[Spot]) -> Spot | None:
        """Leave out the innermost part that has one of these lines; return the line."""
        left = self._left()
        for line in lines:
            for forward in left:
                if _has(forward, line):
                    self._named.append(forward)
                    self._put()
                    return line
        return None

    def try_next(self) -> bool:
        """Leave out others after an error that names no line; False where nothing is left to try.

        Leaving out every class would leave nothing to compile.
        """
        if not self._is_searched:
            self._is_searched, self._waiting = True, _halves(self._left())
        if self._waiting:
            self._tried = self._waiting.pop()
        elif self._works and self._tried != self._works:  # it takes both halves
            self._tried = self._works
        else:
            return False
        self._put()
        return True

    def narrow(self) -> bool:
        """Return whether fewer may be enough, now that it works: these are to be tried."""
        if self._tried == self._works or not self._tried:
            return False
        self._works, self._waiting = self._tried, _halves(self._tried)
        return bool(self._waiting) and self.try_next()

    def _left(self) -> list[Forward]:
        every = dict.fromkeys(type(part).forward for part in self.every())
        return [forward for forward in every if forward not in self._named]

    def every(self) -> Iterator[torch.nn.Module]:
        """Yield the models and all of their parts."""
        for model in self._models:
            yield from model.modules()

    def _put(self) -> None:
        """Put plain calls in the places of these, and take back all others."""
        self._in_force.close()
        out = {*self._named, *self._tried}
        for forward in out - self._plain.keys():
            disabled = torch.compiler.disable(forward, recursive=False, reason=LEFT_OUT)
            self._plain[forward] = disabled
        parts = (part for part in self.every() if type(part).forward in out)
        plain = [(part, self._plain[type(part).forward]) for part in parts]
        self._in_force.enter_context(FORWARDS.overriding(plain))


def _halves(forwards: list[Forward]) -> list[list[Forward]]:
    """Return the second and the first half; none of what can't be halved."""
    middle = len(forwards) // 2
    return [forwards[middle:], forwards[:middle]] if middle else []


def _has(forward: Forward, line: Spot) -> bool:
    code = getattr(forward, "__code__", None)
    if code is None or code.co_filename != line.file:
        return False
    numbers = [number for *_, number in code.co_lines() if number]
    return bool(min(numbers) <= line.number <= max(numbers))
