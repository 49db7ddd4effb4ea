"""Errors, argument checks, units, the database, and other helpers for all folders."""

import os
from contextlib import suppress

__version__ = "0.1.0"
# Environment variable that, if 1, starts `%speedkit auto` with the extension.
AUTO = "SPEEDKIT_AUTO"
# The working directory at import: a relative SPEEDKIT_DATA refers to it, even after a `%cd`.
START = ""
with suppress(OSError):  # the working directory was deleted
    START = os.getcwd()
