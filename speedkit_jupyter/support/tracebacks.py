"""Show only the user's lines in tracebacks, and release the objects of SpeedKit's frames.

A notebook keeps the last traceback, and with it the models and copies in SpeedKit's frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from itertools import dropwhile
from types import CodeType, TracebackType
from typing import ParamSpec, TypeVar

from speedkit_jupyter.support import source_lines
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.source_lines import is_user_code_boundary, place, source, user_spot
from speedkit_jupyter.support.source_lines import user_code_boundary as user_code_boundary

P = ParamSpec("P")
R = TypeVar("R")
# Code objects of the wrappers that `hide_internal_frames` makes. Errors leave the package there.
_GATES: set[CodeType] = set()


def hide_internal_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public function to hide SpeedKit's frames in errors, except in SpeedKit's own bugs."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            del args, kwargs  # this frame is active and can't be cleared
            reasons = _reasons(error, [])
            _shorten(error, reasons)
            del reasons
            # A plain `raise` restores the old traceback (Python 3.10), or omits this frame.
            raise error.with_traceback(error.__traceback__)  # noqa: B904

    _GATES.add(call.__code__)  # type: ignore[attr-defined]
    return call


def users_part(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first frame on; None if SpeedKit's code raised."""
    ours = [entry for entry in _entries(error) if _is_ours(entry)]
    return ours[-1].tb_next if ours and ours[-1].tb_frame.f_code in _GATES else None


def _shorten(error: BaseException, reasons: list[BaseException]) -> None:
    """Clear SpeedKit's frames, and hide them except in bugs. Show a SpeedKitError as a message."""
    for entry in (entry for reason in reasons for entry in _entries(reason) if _is_ours(entry)):
        with suppress(RuntimeError):  # the frame is still active
            entry.tb_frame.clear()
    entries = [*dropwhile(lambda e: not is_user_code_boundary(e.tb_frame.f_code), _entries(error))]
    if not all(map(_is_ours, entries)):
        for reason in reasons:
            chain = None  # a new traceback, because Python keeps references to the old one
            for entry in reversed(entries if reason is error else [*_entries(reason)]):
                if not _is_ours(entry):
                    chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            reason.with_traceback(chain)
    elif isinstance(error, SpeedKitError) and all(map(_is_ours, _entries(error))):
        error.with_traceback(None)
        at = f"\n{place(spot)}: `{source(*spot)}`" if (spot := user_spot()) else ""
        lines = [f"{type(error).__name__}: {error}{at}"]
        # IPython calls this function; a reference to the error would create a cycle.
        vars(error)["_render_traceback_"] = partial(list, lines)


def _reasons(error: BaseException | None, seen: list[BaseException]) -> list[BaseException]:
    """Add an error and all its causes and contexts to `seen`; return `seen`."""
    if error is not None and all(error is not reason for reason in seen):
        seen.append(error)
        _reasons(error.__cause__, seen)
        _reasons(error.__context__, seen)
    return seen


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_ours(entry: TracebackType) -> bool:
    """Return whether a frame is in SpeedKit, or in `runpy`, which SpeedKit uses to run scripts."""
    code, name = entry.tb_frame.f_code, entry.tb_frame.f_globals.get("__name__")
    return code.co_filename.startswith(source_lines.OURS) or name == "runpy"
