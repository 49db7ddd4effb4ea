"""In which thread code runs, and who began that."""

from __future__ import annotations

import threading


def is_here(here: int) -> bool:
    """Return whether this is the thread of that number."""
    return threading.get_ident() == here


def is_pythons() -> bool:
    """Return whether Python code began this thread: autograd's own, on a GPU, are none of these."""
    here = threading.get_ident()
    return any(
        thread.ident == here and not isinstance(thread, threading._DummyThread)
        for thread in threading.enumerate()
    )
