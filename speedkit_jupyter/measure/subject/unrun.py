"""Steps whose call runs none of their code: it makes a coroutine or a generator, and that is all.

Measured as they are, all variants would take the same few nanoseconds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from itertools import islice
from types import CoroutineType, GeneratorType
from typing import Any

from speedkit_jupyter.measure.subject.lazy import uses_of_models, would_use_models
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a

PLAIN = "write the step as a plain function"
THROUGH = "give a function that goes through it, as lambda: list({name}())"
# Of a longer result the first ones tell what it is.
MOST = 16


def refuse_unrun_function(step: Callable[..., object]) -> None:
    """Raises StepError for an async or generator function, however it is wrapped, and a class."""
    function: Any = step
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        raise StepError(
            f"the step must be a function, not the class {function.__name__}, of which a call "
            "makes an object: give a function that does one step"
        )
    name = getattr(function, "__name__", "") or type(function).__name__
    for code in (function, inspect.getattr_static(type(function), "__call__", None)):
        if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
            raise StepError(f"{name} is an async function: calling it runs none of it; {PLAIN}")
        if inspect.isgeneratorfunction(code):
            through = THROUGH.format(name=name)
            raise StepError(
                f"{name} is a generator function: calling it runs none of it; {through}"
            )


def refuse_unrun_result(result: Any) -> None:
    """Raises StepError for what a step has made and nobody ran.

    Not for a generator expression, which most often goes through what the step has computed.
    """
    is_new = is_a(result, GeneratorType) and (
        inspect.getgeneratorstate(result) == inspect.GEN_CREATED
    )
    if is_new and result.gi_code.co_name != "<genexpr>":
        through = THROUGH.format(name=getattr(result, "__name__", "step"))
        raise StepError(f"the step returns a generator that nobody runs; {through}")
    if is_a(result, Awaitable | AsyncGenerator):
        if is_a(result, CoroutineType):
            result.close()  # Python would warn that nobody awaited it
        kind = type(result).__name__
        raise StepError(f"the step returns something to await ({kind}) that nobody runs; {PLAIN}")


def refuse_lazy_results(results: Sequence[Any], again: Callable[[], object]) -> None:
    """Raises StepError where what the step leaves would use a model once somebody goes through it,
    and the step, run `again`, uses none.
    """
    parts = (part for result in results for part in _parts(result))
    lazy = next((part for part in parts if is_a(part, Iterator) and would_use_models(part)), None)
    if lazy is None:
        return
    with uses_of_models() as used:
        again()
    if not used:
        kind = "generator expression" if is_a(lazy, GeneratorType) else type(lazy).__name__
        through = THROUGH.format(name="step")
        raise StepError(f"the step leaves a {kind} that nobody runs; {through}")


def _parts(result: Any) -> list[Any]:
    """Itself, or what it consists of."""
    if type(result) is list or type(result) is tuple:
        return [*islice(result, MOST)]
    return [*islice(result.values(), MOST)] if type(result) is dict else [result]
