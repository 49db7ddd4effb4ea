"""Whether another thread is at work; one of a pool that waits for its next task is not."""

from __future__ import annotations

import sys
import threading
from typing import Any

from speedkit_jupyter.measure.undo.kinds.origin import INNER_MODULES, is_installed

# Of torch, what only hands on what others have made.
IDLE = (*INNER_MODULES, "torch.utils.data", "torch._utils")


def others_at_work() -> bool:
    """Whether another thread runs code of the user's, or torch's."""
    here = threading.get_ident()
    stacks = [frame for number, frame in sys._current_frames().items() if number != here]
    return any(map(_is_work, stacks))


def _is_work(frame: Any) -> bool:
    while frame is not None:
        home = str(frame.f_globals.get("__name__"))
        root = home.partition(".")[0]
        if not is_installed(root) or (root == "torch" and not home.startswith(IDLE)):
            return True
        frame = frame.f_back
    return False
