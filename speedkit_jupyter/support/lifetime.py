"""End a child process with the notebook. Imports no torch, which the child may not need."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress

import psutil


def end_with(notebook: int, folder: str) -> None:
    """Start a thread that removes `folder` and kills this process tree once `notebook` ends."""

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(notebook).wait()
        shutil.rmtree(folder, ignore_errors=True)
        own = psutil.Process()
        for one in [*own.children(recursive=True), own]:
            with suppress(psutil.Error):
                one.kill()

    threading.Thread(target=watch, daemon=True).start()
