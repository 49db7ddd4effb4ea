"""An error that goes on to the user shows the user's lines, and keeps nothing of ours alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from types import CodeType, TracebackType
from typing import ParamSpec, TypeVar

from speedkit_jupyter.support import importers
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError

P = ParamSpec("P")
R = TypeVar("R")
PACKAGE = __name__.partition(".")[0]
# Code of ours that calls the user's: what is raised below is the user's error, not one of ours.
# And that of `lets_go`, below which nothing of ours is left then.
_DOORS: set[CodeType] = set()
_GATES: set[CodeType] = set()


def door(function: Callable[P, R]) -> Callable[P, R]:
    """What it calls is the user's own code. The function stays as it is, and as fast."""
    _DOORS.add(function.__code__)  # type: ignore[attr-defined]
    return function


def is_door(code: CodeType) -> bool:
    """Whether this is code of ours that calls the user's."""
    return code in _DOORS


def lets_go(function: Callable[P, R]) -> Callable[P, R]:
    """Where it raises, our own frames lose their variables: models, and copies of their state.

    A notebook keeps the last traceback, and with it the variables of every frame, until the next
    error. The user's own frames keep theirs, for a debugger; of an error of the user's only they
    are left, and of one that we raise on purpose none of ours: it says what to do.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            # Its own frame is still at work, so that it lets go by itself.
            del args, kwargs
            line = importers.in_the_way(error)
            _clear(error)
            if _leave_the_users(error):  # a plain `raise` would bring the whole traceback back
                raise error.with_traceback(error.__traceback__)  # noqa: B904
            if line:
                raise StepError(line) from None
            if isinstance(error, SpeedKitError) and all(
                map(_is_ours, _entries(error.__traceback__))
            ):
                raise error.with_traceback(None)  # noqa: B904
            raise

    _GATES.add(call.__code__)  # type: ignore[attr-defined]
    return call


def users_part(error: BaseException) -> TracebackType | None:
    """The frames of the user's own error that `lets_go` left; None for an error of ours."""
    ours = [entry for entry in _entries(error.__traceback__) if _is_ours(entry)]
    return ours[-1].tb_next if ours and ours[-1].tb_frame.f_code in _GATES else None


def _leave_the_users(error: BaseException) -> bool:
    """Take our frames out of an error of the user's, and of those that it came from."""
    below = list(_entries(error.__traceback__))
    while below and below[0].tb_frame.f_code not in _DOORS:
        del below[0]
    if all(map(_is_ours, below)):
        return False
    error.with_traceback(_chained(below))
    for reason in _reasons(error):
        if reason is not error:
            reason.with_traceback(_chained(_entries(reason.__traceback__)))
    return True


def _is_all_ours(error: BaseException) -> bool:
    return all(map(_is_ours, _entries(error.__traceback__)))


def _chained(entries: Iterable[TracebackType]) -> TracebackType | None:
    """A traceback of these entries without ours: a new one, as Python holds on to the old."""
    chain = None
    for entry in reversed([entry for entry in _straight(entries) if not _is_ours(entry)]):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain


def _straight(entries: Iterable[TracebackType]) -> list[TracebackType]:
    """Without the way that torch takes to a mode of ours, and comes back by to where it was."""
    kept: list[TracebackType] = []
    for entry in entries:
        if _is_ours(entry) and entry.tb_frame.f_code.co_name == "__torch_function__":
            asked = len(kept)
            while kept and _module(kept[-1]) == "torch.overrides":
                kept.pop()
            if len(kept) < asked and kept and _module(kept[-1]).partition(".")[0] == "torch":
                kept.pop()
        kept.append(entry)
    return kept


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """The error, every one that it came from, and those that a group of them holds."""
    ids, waiting = set[int](), [error]
    while waiting:
        reason = waiting.pop()
        if id(reason) not in ids:
            ids.add(id(reason))
            yield reason
            waiting += [more for more in (reason.__cause__, reason.__context__) if more is not None]
            waiting += _members(reason)


def _members(error: BaseException) -> list[BaseException]:
    """Of an ExceptionGroup, which Python 3.10 does not have."""
    members = getattr(error, "exceptions", ())
    return [m for m in members if isinstance(m, BaseException)] if type(members) is tuple else []


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_ours(entry: TracebackType) -> bool:
    return _module(entry).partition(".")[0] == PACKAGE


def _module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))


def _clear(error: BaseException) -> None:
    for reason in _reasons(error):
        for entry in _entries(reason.__traceback__):
            if _is_ours(entry):
                with suppress(RuntimeError):  # still at work
                    entry.tb_frame.clear()
