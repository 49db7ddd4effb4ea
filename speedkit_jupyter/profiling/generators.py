"""The user's own generators and iterators: waiting for what they give is data.

A `for` over them asks their type, where nothing can be hooked in. So their functions get another
code for as long as the step runs, which calls the original one and tells the split.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.origin import is_the_users_function
from speedkit_jupyter.profiling.outside_modules import Outside


class Waited(Generator[Any, Any, Any]):
    """A generator whose draws are told to the split; all else is its own."""

    def __init__(self, outside: Outside, generator: Generator[Any, Any, Any]) -> None:
        self._outside, self._generator = outside, generator
        self._here = threading.get_ident()

    def __next__(self) -> Any:
        if threading.get_ident() != self._here:
            return next(self._generator)
        with self._outside.within("data"):
            return next(self._generator)

    def send(self, value: Any) -> Any:
        """What drives a generator by values is no loop."""
        return self._generator.send(value)

    def throw(self, *error: Any) -> Any:
        """As it is."""
        return self._generator.throw(*error)

    def close(self) -> None:
        """As it is."""
        self._generator.close()


def sources(objects: Iterable[Any]) -> list[FunctionType]:
    """Functions among these, of the user's, that make generators or give an iterator's next value.

    Not those that context managers are made of.
    """
    functions = [value for value in objects if type(value) is FunctionType]
    wrapped = {id(getattr(function, "__wrapped__", None)) for function in functions}
    return [
        function
        for function in functions
        if id(function) not in wrapped
        and is_the_users_function(function)
        and (inspect.isgeneratorfunction(function) or function.__name__ == "__next__")
    ]


@contextmanager
def told_to(outside: Outside, functions: Iterable[FunctionType]) -> Iterator[None]:
    """In the block the split learns how long these are waited for."""
    codes = [(function, function.__code__) for function in functions]
    try:
        for function, _ in codes:
            function.__code__ = _calling(_telling(outside, _copy(function)), function.__code__)
        yield
    finally:
        for function, code in codes:
            function.__code__ = code


def _telling(outside: Outside, original: FunctionType) -> Callable[..., Any]:
    is_next, here = not inspect.isgeneratorfunction(original), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:  # another thread's training draws by it, too
            return original(*args, **kwargs)
        if is_next:
            with outside.within("data"):
                return original(*args, **kwargs)
        return Waited(outside, original(*args, **kwargs))

    return call


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Called:
    """Stands among the constants of a code, where anything may."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


def _calling(call: Callable[..., Any], instead_of: CodeType) -> CodeType:
    """Code that a function can have in place of its own: with as many variables of closures."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return "the call".call(*args, **kwargs)  # type: ignore[attr-defined]

    code = stand_in.__code__
    constants = tuple(_Called(call) if value == "the call" else value for value in code.co_consts)
    return code.replace(
        co_consts=constants, co_freevars=instead_of.co_freevars, co_name=instead_of.co_name
    )
