"""What a cell prints and logs while it is measured."""

from __future__ import annotations

import io
import logging
import sys

from speedkit_jupyter.magics.cell import Cell


def test_a_measured_cell_prints_and_logs_once(shell, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    logger = logging.getLogger("of_a_library")
    handler = logging.StreamHandler()  # with the stream of this moment, as libraries make theirs
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    shell.ip.user_ns["logger"] = logger
    cell = Cell(shell.ip, "print('printed'); logger.warning('logged')")
    for _ in range(2):
        with cell.quiet():
            cell.run()
            cell.run()
    logger.warning("after it")
    assert handler.filters == []
    assert shown.getvalue().splitlines() == ["printed", "logged", "after it"]
