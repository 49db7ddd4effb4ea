"""What threads share and wait for: locks, events, semaphores; and what each has for itself."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind, attribute_dict
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_class, is_the_users_function

Lock, RLock = type(threading.Lock()), type(threading.RLock())
SHARED = (threading.Event, threading.Semaphore, threading.Barrier, threading.Condition)
# A lock that another thread holds for a moment is not held.
MOMENT_S = 0.02


class Locals(Kind):
    """`threading.local`: the attributes that it has in this thread."""

    has_state = False
    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Python's own, and derived from it."""
        return issubclass(cls, threading.local)

    def children(self, instance: Any) -> Iterable[Any]:
        """The dictionary."""
        return (threading.local.__getattribute__(instance, "__dict__"),)


class Locks(Kind):
    """Locks, events, semaphores, barriers: held or not, set or not, how many are left.

    Put back where no other thread of the user's runs: it may wait for them, or hold them.
    """

    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Those of `threading`, and what other processes share."""
        return issubclass(cls, (Lock, RLock, *SHARED)) or cls in _of_processes()

    def children(self, instance: Any) -> Iterable[Any]:
        """The locks inside; who waits for them is no one else's."""
        attributes = attribute_dict(instance) or {}
        return [value for value in attributes.values() if isinstance(value, (Lock, RLock, *SHARED))]

    def copy(self, instance: Any, copies: Copies) -> Any:
        """How often it is held; or the plain attributes."""
        if issubclass(type(instance), Lock):
            return _is_held(instance)
        if issubclass(type(instance), RLock):
            return int(re.findall(r"count=(\d+)", repr(instance))[0]) if instance._is_owned() else 0
        if type(instance) in _of_processes():
            return instance._get_value()
        attributes = attribute_dict(instance) or {}
        return {name: value for name, value in attributes.items() if type(value) in {bool, int}}

    def same(self, instance: Any, memory: Any) -> bool:
        """By value."""
        return bool(self.copy(instance, Copies()) == memory)

    def put_back(self, instance: Any, memory: Any) -> None:
        """Raises RuntimeError where another thread may be concerned."""
        if others_run() or type(instance) in _of_processes():
            raise RuntimeError("others may hold it or wait for it")
        if isinstance(memory, dict):
            (attribute_dict(instance) or {}).update(memory)
            return
        for _ in range(int(self.copy(instance, Copies())), int(memory)):
            instance.acquire(blocking=False)
        for _ in range(int(memory), int(self.copy(instance, Copies()))):
            instance.release()


def _is_held(lock: Any) -> bool:
    if not lock.acquire(timeout=MOMENT_S):
        return True
    lock.release()
    return False


def _of_processes() -> tuple[type, ...]:
    """Where the user has loaded multiprocessing's."""
    module: Any = sys.modules.get("_multiprocessing")
    return (module.SemLock,) if hasattr(module, "SemLock") else ()


def others_run() -> bool:
    """Whether a thread beside this one runs code of the user's, or what is handed to it."""
    threads = (
        thread for thread in threading.enumerate() if thread is not threading.current_thread()
    )
    return any(is_the_users_class(type(thread)) or _runs_the_users(thread) for thread in threads)


def _runs_the_users(thread: Any) -> bool:
    target = getattr(thread, "_target", None)
    target = getattr(target, "__func__", target)
    if type(target) is not FunctionType:
        return target is not None
    home = str(target.__globals__.get("__name__"))
    return home.startswith(("concurrent.", "multiprocessing.")) or is_the_users_function(target)
