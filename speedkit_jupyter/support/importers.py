"""Importers in `sys.meta_path` that raise: whatever is imported next fails then, ours too."""

from __future__ import annotations

from types import FrameType

# What Python asks of an importer. Below the last two the module's own code runs.
FINDING = ("find_spec", "find_module", "find_loader", "find_distributions", "create_module")
RUNNING = ("exec_module", "load_module")
# Python's own machinery, and where it asks.
OWN = ("importlib", "_frozen_importlib")
ASKING = ("_find_spec", "find_spec")


def in_the_way(error: BaseException) -> str:
    """A line for an error that an importer has raised; nothing for every other error."""
    entry = error.__traceback__ if isinstance(error, Exception) else None
    is_asked = False
    while entry is not None:
        frame, is_last = entry.tb_frame, entry.tb_next is None
        name, is_own = frame.f_code.co_name, _home(frame).startswith(OWN)
        if not is_own and (is_asked or name in FINDING or (name in RUNNING and is_last)):
            return (
                f"an importer in sys.meta_path is in the way: {_word(frame)} raises "
                f"{_summary(error)}; take it out, or mend it"
            )
        is_asked = is_own and name in ASKING
        entry = entry.tb_next
    return ""


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _word(frame: FrameType) -> str:
    """`Broken.find_spec`."""
    code = frame.f_code
    own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    cls = own if isinstance(own, type) else type(own)
    is_method = own is not None and code.co_name in dir(cls)
    return f"{cls.__name__}.{code.co_name}" if is_method else code.co_name


def _summary(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.100}".rstrip(": ")
