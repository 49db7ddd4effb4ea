"""Steps whose call runs none of their code: it makes a coroutine or a generator, and that is all.

Measured as they are, all variants would take the same few nanoseconds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import CoroutineType, GeneratorType
from typing import Any

from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a

PLAIN = "write the step as a plain function"
THROUGH = "give a function that goes through it, as lambda: list({name}())"


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
