"""What an error of a measured cell shows of it: the notebook's number of the cell, of its lines,
and the names that its code has without the magic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError

MAGIC = "# %%speedbench"
# What the code of a plain cell is called, by the version of IPython.
OF_A_CELL = ("<module>", "<cell line")
# What Python and IPython raise for text that can't be code, beside SyntaxError.
NO_CODE = (ValueError, OverflowError, RecursionError, MemoryError)


def numbered(shell: Any, source: str, line: str) -> str:
    """The cell as Python, with the magic as its first line and every line at its place.

    IPython drops empty lines at the beginning of what it transforms.
    """
    dropped = _empty(source)
    try:
        code: str = shell.transform_cell(source)
    except SyntaxError as error:  # a line that fits no indentation
        error.lineno = error.lineno and error.lineno + 1 + dropped
        raise
    return f"{MAGIC} {line}".rstrip() + "\n" * (1 + dropped - _empty(code)) + code


def cached(shell: Any, code: str) -> str:
    """A name under which tracebacks find the lines, and the number of the cell that runs now.

    As a shell in a terminal names cells: a kernel's name is that of a file which isn't there, and
    of those some versions of IPython show the wrong lines within classes and comprehensions, and
    of an error's reasons.
    """
    # A newer IPython has counted on while a cell runs, and knows by which name each was compiled;
    # in older ones, which don't, the count is the cell's.
    numbers = getattr(shell.compile, "_filename_map", {})
    number = _running(numbers, shell.execution_count)
    name = str(CachingCompiler().cache(code, number))
    numbers[name] = number
    return name


def _running(numbers: Mapping[str, int], count: int) -> int:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith(OF_A_CELL) and code.co_filename in numbers:
            return numbers[code.co_filename]
        frame = frame.f_back
    return count


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """What can't be compiled for another reason than its syntax: null bytes, brackets too deep."""
    try:
        yield
    except SyntaxError:
        raise
    except NO_CODE as error:
        raise UsageError(f"%%speedbench: the cell can't be compiled: {error}") from None


@contextmanager
def at_the_end_of_the_line(line: str, code: str) -> Iterator[None]:
    """For set-up code: a SyntaxError points to where it stands behind the magic."""
    try:
        yield
    except SyntaxError as error:
        if error.lineno == 1:
            begin = len(f"{MAGIC} {line}") - len(code)
            error.offset = error.offset and error.offset + begin
            error.end_offset = error.end_offset and error.end_offset + begin
        raise


def unnested(code: CodeType, function: str) -> CodeType:
    """The code of a function as that of a cell: nothing in it is called `function.<locals>.net`."""
    prefix = f"{function}.<locals>."
    names: dict[str, Any] = {}
    if sys.version_info >= (3, 11):
        whole = code.co_qualname == function
        names["co_qualname"] = "<module>" if whole else code.co_qualname.removeprefix(prefix)
    if code.co_name == function:
        names["co_name"] = "<module>"
    constants = tuple(_unnested(constant, function, prefix) for constant in code.co_consts)
    return code.replace(co_consts=constants, **names)


def _unnested(constant: Any, function: str, prefix: str) -> Any:
    if isinstance(constant, CodeType):
        return unnested(constant, function)
    # Names of classes, and in Python 3.10 of functions.
    return constant.removeprefix(prefix) if type(constant) is str else constant


def _empty(text: str) -> int:
    """The number of empty lines that it begins with."""
    lines = text.splitlines()
    return next((count for count, line in enumerate(lines) if line.strip()), len(lines))
