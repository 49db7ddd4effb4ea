"""Python's logging: loggers one by one, and what all of them share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from speedkit_jupyter.measure.undo.kinds.origin import is_installed
from speedkit_jupyter.measure.undo.kinds.settings import Setting, attribute, contents

WORDS = (
    "logging addHandler removeHandler addFilter removeFilter setLevel propagate basicConfig "
    "dictConfig fileConfig disabled set_verbosity getLogger"
)
# What a new logger is like.
NEW: tuple[Any, ...] = ([], [], logging.NOTSET, True, False)


def settings() -> Iterator[Setting]:
    """Loggers that the step made stay, as new ones are."""
    yield Setting("loggers", _loggers, _write_loggers, WORDS)
    for name in ("raiseExceptions", "lastResort", "_loggerClass", "_logRecordFactory"):
        yield attribute("logging", name, title=f"logging.{name}")
    yield attribute("logging", "_warnings_showwarning", title="logging.captureWarnings")
    yield attribute("logging:root.manager", "disable", title="logging.disable")
    yield contents("logging", "_levelToName", "addLevelName", "names of levels")
    yield contents("logging", "_nameToLevel", "addLevelName", "levels of names")


class _Loggers(dict[str, Any]):
    """By name; one that is not there is the same as a new one."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Loggers):
            return NotImplemented
        new = [name for name in self.keys() ^ other.keys() if not _is_a_librarys(name)]
        names = [*(self.keys() & other.keys()), *new]
        return all(self.get(name, NEW) == other.get(name, NEW) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _is_a_librarys(name: str) -> bool:
    """A logger that came with a library that was imported meanwhile is as the library made it."""
    return is_installed(name.partition(".")[0])


def _all() -> dict[str, logging.Logger]:
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    return {name: logger for name, logger in loggers.items() if isinstance(logger, logging.Logger)}


def _loggers() -> _Loggers:
    """Handlers and filters, level, whether it passes on, whether it is disabled."""
    return _Loggers(
        (
            name,
            (
                [*logger.handlers],
                [*logger.filters],
                logger.level,
                logger.propagate,
                bool(logger.disabled),
            ),
        )
        for name, logger in _all().items()
    )


def _write_loggers(value: _Loggers) -> None:
    now = _loggers()
    for name, logger in _all().items():
        saved = value.get(name, NEW)
        if now[name] == saved or (name not in value and _is_a_librarys(name)):
            continue
        handlers, filters, level, logger.propagate, logger.disabled = saved
        logger.handlers[:], logger.filters[:] = handlers, filters
        if logger.level != level:
            logger.setLevel(level)
