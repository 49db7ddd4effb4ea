"""End a child process when its notebook ends. Does not import torch: a child may not need it."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress

import psutil


def end_with(notebook: int, folder: str) -> None:
    """Start a thread that removes `folder` and kills this process tree once PID `notebook` ends."""

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(notebook).wait()
        shutil.rmtree(folder, ignore_errors=True)
        own = psutil.Process()
        for one in [*own.children(recursive=True), own]:
            with suppress(psutil.Error):
                one.kill()

    threading.Thread(target=watch, daemon=True).start()
