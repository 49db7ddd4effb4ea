"""Python's own settings."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from speedkit_jupyter.measure.undo.kinds.process import python_registries
from speedkit_jupyter.measure.undo.kinds.settings import (
    Setting,
    attribute,
    calls,
    contents,
    owner_of,
)

# Attributes: of which module or class, and their names.
ATTRIBUTES = {
    "sys": (
        "stdin stdout stderr excepthook displayhook unraisablehook breakpointhook tracebacklimit "
        "dont_write_bytecode pycache_prefix ps1 ps2"
    ),
    "threading": "excepthook _profile_hook _trace_hook",
    "tempfile": "tempdir",
    "multiprocessing.context:_default_context": "_actual_context",
    "warnings": "showwarning _showwarnmsg_impl formatwarning defaultaction",
}
# Lists, dicts and sets; where an import may add to them, what code spells that does it itself.
CONTENTS = (
    ("sys", "path", "path"),
    ("sys", "argv", ""),
    ("sys", "meta_path", "meta_path"),
    ("sys", "path_hooks", "path_hooks"),
    ("sys", "warnoptions", ""),
    ("gc", "callbacks", "callbacks"),
    ("copyreg", "dispatch_table", "copyreg dispatch_table"),
    ("copyreg", "_extension_registry", "copyreg"),
    ("copyreg", "_inverted_registry", "copyreg"),
    ("pickle:_Pickler", "dispatch", "_Pickler"),
    ("pickle:_Unpickler", "dispatch", "_Unpickler"),
    ("multiprocessing.reduction:ForkingPickler", "_extra_reducers", "register"),
    ("shutil", "_ARCHIVE_FORMATS", "shutil"),
    ("shutil", "_UNPACK_FORMATS", "shutil"),
)
# How it is called, the module, what reads and what writes it.
CALLS = (
    ("the recursion limit", "sys", "getrecursionlimit", "setrecursionlimit"),
    ("the switch interval", "sys", "getswitchinterval", "setswitchinterval"),
    ("sys.set_int_max_str_digits", "sys", "get_int_max_str_digits", "set_int_max_str_digits"),
    ("sys.setdlopenflags", "sys", "getdlopenflags", "setdlopenflags"),
    ("sys.settrace", "sys", "gettrace", "settrace"),
    ("sys.setprofile", "sys", "getprofile", "setprofile"),
    ("the stack size of threads", "threading", "stack_size", "stack_size"),
    ("the time-out of sockets", "socket", "getdefaulttimeout", "setdefaulttimeout"),
    ("the first day of the week", "calendar", "firstweekday", "setfirstweekday"),
    ("gc's debugging", "gc", "get_debug", "set_debug"),
)
CONTEXTS = ("getcontext()", "DefaultContext", "BasicContext", "ExtendedContext")
DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def settings() -> Iterator[Setting]:
    """All of them."""
    for path, names in ATTRIBUTES.items():
        yield from (attribute(path, name) for name in names.split())
    yield from (contents(*row) for row in CONTENTS)
    yield from (calls(*row) for row in CALLS)
    yield Setting("gc", lambda: (gc.get_threshold(), gc.isenabled()), _write_gc)
    yield _frozen()
    yield Setting(
        "warnings' filters",
        lambda: [*sys.modules["warnings"].filters],
        _write_filters,
        "warnings simplefilter filterwarnings resetwarnings filters",
    )
    yield from python_registries.settings()
    yield from (_decimal(name) for name in CONTEXTS)
    yield Setting("csv's dialects", _dialects, _write_dialects)
    yield Setting("asyncio's policy", _policy, _write_policy)
    yield Setting("atexit", lambda: owner_of("atexit")._ncallbacks(), None, "atexit")
    yield Setting("faulthandler", lambda: owner_of("faulthandler").is_enabled(), _write_faults)
    yield Setting("tracemalloc", lambda: owner_of("tracemalloc").is_tracing(), _write_tracing)


def _write_gc(value: tuple[tuple[int, int, int], bool]) -> None:
    gc.set_threshold(*value[0])
    (gc.enable if value[1] else gc.disable)()


def _frozen() -> Setting:
    """Only where nothing was frozen: which of them were so before nobody can tell, and counting a
    million takes long.
    """
    return Setting("gc.freeze", lambda: _was_frozen() or gc.get_freeze_count() > 0, _unfreeze)


@cache
def _was_frozen() -> bool:
    return gc.get_freeze_count() > 0


def _unfreeze(value: bool) -> None:
    if not value:
        gc.unfreeze()


def _write_filters(value: list[Any]) -> None:
    warnings: Any = sys.modules["warnings"]
    warnings.filters[:] = value
    getattr(warnings, "_filters_mutated", getattr(warnings, "_filters_mutated_lock_held", int))()


def _decimal(name: str) -> Setting:
    """Into the same object: the present one is a context variable's value."""

    def found() -> Any:
        module = owner_of("decimal")
        return module.getcontext() if name == CONTEXTS[0] else getattr(module, name)

    def read() -> Any:
        context = found()
        return (
            id(context), [getattr(context, part) for part in DECIMAL],
            dict(context.flags), dict(context.traps),
        )  # fmt: skip

    before = found() if "decimal" in sys.modules else None

    def write(value: Any) -> None:
        if name == CONTEXTS[0] and found() is not before:
            owner_of("decimal").setcontext(before)
        context = found()
        for part, was in zip(DECIMAL, value[1], strict=True):
            setattr(context, part, was)
        context.flags.update(value[2])
        context.traps.update(value[3])

    return Setting(f"decimal.{name}", read, write)


def _dialects() -> dict[str, Any]:
    csv = owner_of("csv")
    return {name: csv.get_dialect(name) for name in csv.list_dialects()}


def _write_dialects(value: dict[str, Any]) -> None:
    csv, now = owner_of("csv"), _dialects()
    for name in now.keys() - value.keys():
        csv.unregister_dialect(name)
    for name, dialect in value.items():
        if now.get(name) is not dialect:
            csv.register_dialect(name, dialect)


def _policy() -> Any:
    """None where it is the usual one, which is made when it is first asked for."""
    events = owner_of("asyncio.events")
    policy = events._event_loop_policy
    usual = getattr(owner_of("asyncio"), "DefaultEventLoopPolicy", None)
    return None if type(policy) is usual else policy


def _write_policy(value: Any) -> None:
    owner_of("asyncio.events")._event_loop_policy = value


def _write_faults(value: bool) -> None:
    """Where it wrote to is not known."""
    if not value:
        owner_of("faulthandler").disable()


def _write_tracing(value: bool) -> None:
    tracemalloc = owner_of("tracemalloc")
    (tracemalloc.start if value else tracemalloc.stop)()
