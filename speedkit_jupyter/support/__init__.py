"""Errors, arguments, units and the store: the base of all other folders."""

import os
from contextlib import suppress

__version__ = "0.1.0"
# Relative folders of the user's start here, wherever the notebook goes later.
START = ""
with suppress(OSError):  # it was deleted
    START = os.getcwd()
