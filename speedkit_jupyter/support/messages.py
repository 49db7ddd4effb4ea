"""Notes, warnings and debugging messages, by Python's logger "speedkit_jupyter".

SPEEDKIT_VERBOSITY shows only warnings (`quiet`), notes too (`normal`), or everything (`debug`).
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TextIO

from speedkit_jupyter.support.source_lines import is_users

LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}
VARIABLE = "SPEEDKIT_VERBOSITY"
LOGGER = logging.getLogger("speedkit_jupyter")


class _Shown(logging.StreamHandler[TextIO]):
    """Writes to the present `sys.stdout`: the output of a measured cell is redirected."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def note(text: str) -> None:
    """Show a note: nothing is wrong."""
    _ready().info(text)


def important(text: str) -> None:
    """Show a text at every level."""
    _ready().warning(text)


def debug(text: str) -> None:
    """Show a text that helps to find a fault of SpeedKit's."""
    _ready().debug(text)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Raise a Python warning that points to the user's line, so that its filters decide."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def verbosity() -> str:
    """Return how much is shown: the logger's level, else the environment's, else `normal`."""
    level = _ready().level
    return next((word for word, one in LEVELS.items() if one == level), "normal")


def _ready() -> logging.Logger:
    """Return the logger, with SpeedKit's handler unless the program has added its own."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_Shown())
        LOGGER.propagate = False
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(LEVELS.get(os.environ.get(VARIABLE, "normal"), logging.INFO))
    return LOGGER
