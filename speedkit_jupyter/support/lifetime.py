"""Child processes that end with the notebook. Loads no torch, for processes that don't need it."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress

import psutil


def end_with(notebook: int, folder: str) -> None:
    """Once the notebook's process has ended, remove the folder and end this process."""

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(notebook).wait()
        shutil.rmtree(folder, ignore_errors=True)
        own = psutil.Process()
        for one in [*own.children(recursive=True), own]:
            with suppress(psutil.Error):
                one.kill()

    threading.Thread(target=watch, daemon=True).start()
