"""Issue Python warnings, and messages through the logger "speedkit_jupyter".

SPEEDKIT_VERBOSITY is `quiet` (only important messages), `normal` (also notes) or `debug` (all).
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


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]  # generic from Python 3.11 on
    """A handler that writes to the current `sys.stdout`, which measured cells redirect."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def note(text: str) -> None:
    """Show a note, unless the verbosity is `quiet`."""
    _ready().info(text)


def important(text: str) -> None:
    """Show a message at every verbosity."""
    _ready().warning(text)


def debug(text: str) -> None:
    """Show a message for debugging SpeedKit, if the verbosity is `debug`."""
    _ready().debug(text)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a Python warning at the user's line, subject to the user's warning filters."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def verbosity() -> str:
    """Return the verbosity: from the logger's level, else the environment, else `normal`."""
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
