"""Child processes that end with the notebook. Loads no torch, which such a process may not need."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress

import psutil


def end_with(notebook: int, folder: str) -> None:
    """Start a thread: when process `notebook` ends, remove `folder` and kill this process tree."""

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(notebook).wait()
        shutil.rmtree(folder, ignore_errors=True)
        own = psutil.Process()
        for one in [*own.children(recursive=True), own]:
            with suppress(psutil.Error):
                one.kill()

    threading.Thread(target=watch, daemon=True).start()
