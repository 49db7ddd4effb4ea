"""What all else stands on, and what knows nothing of plans."""

import os
from contextlib import suppress

__version__ = "0.1.0"
# Relative folders of the user's are meant from here, wherever the notebook goes later.
START = ""
with suppress(OSError):  # it was deleted
    START = os.getcwd()
