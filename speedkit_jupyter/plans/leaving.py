"""How a block ends: what it changed goes back, also where interrupts come in a row."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from speedkit_jupyter.support import interrupts

if TYPE_CHECKING:
    from speedkit_jupyter.plans.context import SpeedContext


@contextmanager
def surely(action: Callable[[], None]) -> Iterator[None]:
    """`action` at the end of the block, also where interrupts come in a row; it may run twice."""
    try:
        try:
            yield
        finally:
            interrupts.finished(action)
    except BaseException:  # an interrupt's, or that of any other signal's handler: a time-out
        interrupts.finished(action)
        raise


@contextmanager
def or_restored(context: SpeedContext) -> Iterator[None]:
    """A `with` statement that an interrupt keeps from being entered ends there."""
    try:
        yield
    except BaseException:
        context.restore()
        raise


def _leave(context: SpeedContext, *exception: object) -> None:
    context.restore()


class Exit(partial[None]):
    """What a `with` statement calls at its end, and drops after it.

    An interrupt on the way into the call ends it before its first line. Then this restores.
    """

    awaited = False  # whether a `with` statement holds it

    def __del__(self) -> None:
        if self.awaited and not self.args[0].restored:
            _leave(self.args[0])


class ExitMethod:
    """`__exit__`, which a `with` statement looks up before it enters."""

    def __get__(self, context: SpeedContext | None, owner: type) -> Callable[..., None]:
        if context is None:
            return _leave
        with or_restored(context):
            method = Exit(_leave, context)
            context._leaving = weakref.ref(method)
            return method
