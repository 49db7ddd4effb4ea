"""Results that do their work when somebody goes through them: generator expressions, `map`.

Most go through what the step has computed, and are nobody's concern. Some would compute it.
"""

from __future__ import annotations

import dis
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import GEN_CREATED, getgeneratorstate
from types import CodeType, GeneratorType
from typing import Any

from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks, patched
from speedkit_jupyter.measure.undo.handlers.iterators import KEPT_IN_C
from speedkit_jupyter.measure.undo.handlers.names import Names, global_names
from speedkit_jupyter.measure.undo.handlers.origin import is_installed
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.lookup import is_a

# Python's own that call what they were given.
CALLING = (
    map, filter, itertools.starmap, itertools.accumulate, itertools.takewhile,
    itertools.dropwhile, itertools.filterfalse, itertools.groupby,
)  # fmt: skip
# So many of them one inside another.
DEPTH = 8


def would_use_models(result: Any) -> bool:
    """Whether going through it calls something, with a model or an optimizer in reach.

    Nothing is run, and nothing is drawn from it.
    """
    import torch

    parts = list(_parts(result))
    for found in Walk(parts).near if parts else ():
        if issubclass(type(found), torch.optim.Optimizer):
            return True
        if issubclass(type(found), torch.nn.Module) and next(found.parameters(), None) is not None:
            return True
    return False


@contextmanager
def uses_of_models() -> Iterator[list[Any]]:
    """The models with parameters that this thread calls in the block, and the optimizers that it
    steps.
    """
    import torch

    used: list[Any] = []

    def make(call: Any) -> Callable[..., Any]:
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            if next(module.parameters(), None) is not None:
                used.append(module)
            return call(module, *args, **kwargs)

        return noted

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        used.append(optimizer)

    with patched(torch.nn.Module, "__call__", make), optimizer_hooks(stepped):
        yield used


def _parts(iterator: Any, calls: bool = False, depth: int = DEPTH) -> Iterator[Any]:
    """What it works on by calls: its own, or those of one that draws from it."""
    inside: list[Any] = []
    if depth and is_a(iterator, GeneratorType):
        frame = iterator.gi_frame
        if getgeneratorstate(iterator) == GEN_CREATED and not _is_a_librarys(frame):
            calls = calls or _has_calls(iterator.gi_code)
            names = Names(frame.f_globals, global_names(iterator.gi_code)[0])
            inside = [*frame.f_locals.values(), names]
    elif depth and type(iterator).__module__ in KEPT_IN_C:
        calls = calls or type(iterator) in CALLING
        for referent in gc.get_referents(iterator):
            inside += referent if type(referent) is tuple else [referent]
    for part in inside:
        if is_a(part, Iterator):
            yield from _parts(part, calls, depth - 1)
        elif calls:
            yield part


def _is_a_librarys(frame: Any) -> bool:
    return is_installed(str(frame.f_globals.get("__name__")).partition(".")[0])


def _has_calls(code: CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    calls = (instruction.opname.startswith("CALL") for instruction in dis.get_instructions(code))
    return any(calls) or any(map(_has_calls, inner))
