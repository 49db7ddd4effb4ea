"""Denormal numbers, the smallest that there are, taken for zero: each thread's own setting.

`torch.set_flush_denormal` sets the thread that calls it. A thread begins with what the one has that
starts it, and so do those that share the work of an operator; but they are mostly there already.
Where they are libgomp's (torch's own on Linux) they are told as well; LLVM's and Intel's ask the
thread that they work for, on x86.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from speedkit_jupyter.machines.flags import Layer, OverrideStack, Switch
from speedkit_jupyter.support import interrupts

NAME = "flush_denormal"
# Processors whose setting torch knows, as Python and the systems call them.
ARCHITECTURES = ("x86_64", "AMD64", "i386", "i686", "aarch64", "arm64", "ARM64")
ELSEWHERE = (
    "flush_denormals was applied in a thread and taken back in another one, which can't set it "
    "there: that thread takes denormal numbers for zero until it ends"
)


def switch() -> Switch:
    """This thread's."""
    import torch

    return Switch(is_flushed, torch.set_flush_denormal, (True,))


def is_flushed() -> bool:
    """Whether this thread takes denormal numbers for zero: it can't be asked, but it shows."""
    return sys.float_info.min / 2 == 0.0


class _Thread:
    """One thread: the plans in force in it, and what its helpers had before the first of them."""

    def __init__(self) -> None:
        self.number, self.process = threading.get_ident(), os.getpid()
        self.stack, self.plans, self.helpers = OverrideStack(), 0, 1
        self.found: Mapping[int, bool] = {}

    @property
    def is_this(self) -> bool:
        """Whether it runs this, in the process that it began in."""
        return (self.number, self.process) == (threading.get_ident(), os.getpid())

    @property
    def is_main(self) -> bool:
        """Whether it is this process's main thread."""
        main = threading.main_thread().ident
        return (self.number, self.process) == (main, os.getpid())


# State at module level, on purpose: the setting belongs to the whole thread.
_HERE = threading.local()
_PROCESS = os.getpid()


def _this_thread() -> _Thread:
    thread: _Thread | None = getattr(_HERE, "thread", None)
    if thread is None or not thread.is_this:  # a process that was forked off begins anew
        thread = _HERE.thread = _Thread()
    return thread


@contextmanager
def flushed(on: bool, kept: list[str]) -> Iterator[None]:
    """This thread takes denormal numbers for zero, or doesn't, and with it those that share the
    work of its operators; then each has what it had. `kept` gets the switch's name where the user
    has set it meanwhile, which stays.
    """
    import torch

    thread = _this_thread()
    if not thread.plans:
        thread.found = _of_helpers(thread)
    layer = thread.stack.push((NAME,), lambda: torch.set_flush_denormal(on))
    thread.plans += 1
    try:
        _tell_helpers(thread, {})
        yield
    finally:
        _leave(thread, layer, kept)


def _leave(thread: _Thread, layer: Layer, kept: list[str]) -> None:
    """Take a plan back in the thread that it was applied in, be it that of another plan's end.

    Whatever lets go of a model ends its plan, and the garbage collector runs in any thread.
    """
    if not thread.is_this and thread.is_main:
        leave = partial(_leave, thread, layer, kept)
        return _in_the_main_thread(partial(interrupts.soon, leave))
    thread.plans -= 1
    if thread.is_this:
        kept += thread.stack.pop(layer)
        return _tell_helpers(thread, {} if thread.plans else thread.found)
    thread.stack.forget(layer)
    if layer.values.get(NAME) and thread.process == os.getpid():
        warnings.warn(ELSEWHERE, stacklevel=2)
    return None


_Call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_CALLS: list[Any] = []  # until they have run


def _in_the_main_thread(act: Callable[[], None]) -> None:
    """Run it there between two of its lines."""

    def call(_: Any) -> int:
        act()
        _CALLS.remove(function)
        return 0

    function = _Call(call)
    _CALLS.append(function)
    ctypes.pythonapi.Py_AddPendingCall(function, None)


def _of_helpers(thread: _Thread) -> dict[int, bool]:
    """What each of them does, by its number."""
    found: dict[int, bool] = {}

    def look() -> None:
        found[threading.get_native_id()] = is_flushed()

    _in_each(thread, look)
    return found


def _tell_helpers(thread: _Thread, wishes: Mapping[int, bool]) -> None:
    """What each of them is to do; those of which nothing is said do as this thread does."""
    import torch

    this, ours = threading.get_native_id(), is_flushed()

    def write() -> None:
        number = threading.get_native_id()
        if number != this:
            torch.set_flush_denormal(wishes.get(number, ours))

    _in_each(thread, write)


def _in_each(thread: _Thread, act: Callable[[], None]) -> None:
    """Run it in each thread that shares the work of this one's operators, and in this one.

    Also in those that have no work any more, since torch was told to use fewer. Not in a process
    that was forked off: there are none there, and libgomp would wait for them for ever.
    """
    import torch

    thread.helpers = max(thread.helpers, torch.get_num_threads())
    region = _parallel_region()
    if thread.helpers > 1 and region is not None and os.getpid() == _PROCESS:
        region(_Body(lambda _: act()), None, thread.helpers, 0)


_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _parallel_region() -> Any:
    """`#pragma omp parallel` of the OpenMP that torch's operators use; None where it has none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "GOMP_parallel", None)
