"""Everything that is said beside results: notes, warnings, and what helps to find a fault.

It goes through Python's logger "speedkit_jupyter", to a program's own handlers where it has some.
SPEEDKIT_VERBOSITY says how much is shown: `quiet` warnings, `normal` notes too, `debug` everything.
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
    """Shows notes where `print` would at that time: a measured cell's output is redirected."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def note(text: str) -> None:
    """Say something that may matter to the user; nothing is wrong."""
    _ready().info(text)


def important(text: str) -> None:
    """Say what nobody may miss: what a measurement can't put back, say."""
    _ready().warning(text)


def debug(text: str) -> None:
    """Say what helps to find a fault of ours."""
    _ready().debug(text)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Raise a Python warning that points to the user's line, so that its filters decide."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def verbosity() -> str:
    """Return how much is shown: what was chosen, else the environment's, else `normal`."""
    level = _ready().level
    return next((word for word, one in LEVELS.items() if one == level), "normal")


def choose(word: str) -> None:
    """Show this much from now on, in this process."""
    _ready().setLevel(LEVELS[word])


def _ready() -> logging.Logger:
    """The logger, with a handler of ours unless a program has one of its own."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_Shown())
        LOGGER.propagate = False
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(LEVELS.get(os.environ.get(VARIABLE, "normal"), logging.INFO))
    return LOGGER
