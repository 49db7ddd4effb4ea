"""What a cell and other threads print and log while it is measured."""

from __future__ import annotations

import io
import logging
import sys
import threading

from speedkit_jupyter.magics.cell import Cell


def test_another_threads_prints_are_not_swallowed_by_a_measured_cell(shell, monkeypatch):
    cell = Cell(shell.ip, "print('of the cell')")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    for _ in range(2):
        with cell.quiet():
            cell.run()
            thread = threading.Thread(target=lambda: print("of the thread"))
            thread.start()
            thread.join()
    assert shown.getvalue().splitlines() == ["of the cell", "of the thread", "of the thread"]


def test_a_measured_cell_logs_once_and_other_threads_log_on(shell, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    logger = logging.getLogger("of_a_library")
    handler = logging.StreamHandler()  # with the stream of this moment, as libraries make theirs
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    shell.ip.user_ns["logger"] = logger
    cell = Cell(shell.ip, "logger.warning('of the cell')")
    for _ in range(2):
        with cell.quiet():
            cell.run()
            cell.run()
            thread = threading.Thread(target=logger.warning, args=("of the thread",))
            thread.start()
            thread.join()
    logger.warning("after it")
    assert handler.filters == []
    expected = ["of the cell", "of the thread", "of the thread", "after it"]
    assert shown.getvalue().splitlines() == expected
