"""What loops wait for is data: those of a cell, and the user's own generators and iterators."""

from __future__ import annotations

import ast
import builtins
import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from speedkit_jupyter.measure.undo.ownership import is_the_users_function
from speedkit_jupyter.profiling.recorder import Recorder

# What is at hand already makes nobody wait; torch's loaders are seen wherever they are used.
AT_HAND = (range, list, tuple, dict, set, frozenset, str)


class Loops:
    """Every `for` of the code that is `rewritten` goes through this object's call.

    It is found among Python's built-in names, while the code runs: nothing is added to the user's.
    """

    name = "_speedbench_waits"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def rewritten(self, tree: ast.Module) -> ast.Module:
        """Return the same code, line by line; the loops of functions that it defines, too."""
        for node in ast.walk(tree):
            if isinstance(node, ast.For):
                called = ast.Call(ast.Name(self.name, ast.Load()), [node.iter], [])
                node.iter = ast.copy_location(called, node.iter)
        return ast.fix_missing_locations(tree)

    @contextmanager
    def told_to(self, recorder: Recorder | None) -> Iterator[None]:
        """Let the code run in the block; the recorder, if there is one, learns of the waits."""
        self._recorder = recorder
        setattr(builtins, self.name, self)
        try:
            yield
        finally:
            self._recorder = None
            delattr(builtins, self.name)

    def __call__(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """Return what the loop goes through in place of this."""
        is_at_hand = isinstance(iterable, AT_HAND) or hasattr(type(iterable), "__array__")
        if self._recorder is None or is_at_hand:
            return iterable
        return _waited(self._recorder, iterable)


def _waited(recorder: Recorder, iterable: Iterable[Any]) -> Iterator[Any]:
    with recorder.within("data"):
        draws = iter(iterable)
    while True:
        try:
            with recorder.within("data"):
                drawn = next(draws)
        except StopIteration:
            return
        yield drawn


class _WaitedGenerator(Generator[Any, Any, Any]):
    """A generator whose draws are told to the split; all else is its own."""

    def __init__(self, recorder: Recorder, generator: Generator[Any, Any, Any]) -> None:
        self._recorder, self._generator = recorder, generator
        self._here = threading.get_ident()

    def __next__(self) -> Any:
        if threading.get_ident() != self._here:
            return next(self._generator)
        with self._recorder.within("data"):
            return next(self._generator)

    def send(self, value: Any) -> Any:
        """Pass on: what drives a generator by values is no loop."""
        return self._generator.send(value)

    def throw(self, *error: Any) -> Any:
        """Pass on."""
        return self._generator.throw(*error)

    def close(self) -> None:
        """Pass on."""
        self._generator.close()


def generator_functions(objects: Iterable[Any]) -> list[FunctionType]:
    """Return functions among these, of the user's, that make generators or give an iterator's next
    value; not those that context managers are made of.
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
def generators_told_to(recorder: Recorder, functions: Iterable[FunctionType]) -> Iterator[None]:
    """Let the recorder learn in the block how long these are waited for.

    A `for` over a generator asks its type, where nothing can be hooked in. So the functions get
    another code, which calls the original one.
    """
    codes = [(function, function.__code__) for function in functions]
    try:
        for function, _ in codes:
            function.__code__ = _calling(_telling(recorder, _copy(function)), function.__code__)
        yield
    finally:
        for function, code in codes:
            function.__code__ = code


def _telling(recorder: Recorder, original: FunctionType) -> Callable[..., Any]:
    is_next, here = not inspect.isgeneratorfunction(original), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:  # another thread's training draws by it, too
            return original(*args, **kwargs)
        if is_next:
            with recorder.within("data"):
                return original(*args, **kwargs)
        return _WaitedGenerator(recorder, original(*args, **kwargs))

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
    """Return code that a function can have in place of its own: with as many closure variables."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return "the call".call(*args, **kwargs)  # type: ignore[attr-defined]

    code = stand_in.__code__
    constants = tuple(_Called(call) if value == "the call" else value for value in code.co_consts)
    return code.replace(
        co_consts=constants, co_freevars=instead_of.co_freevars, co_name=instead_of.co_name
    )
