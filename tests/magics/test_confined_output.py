"""What other threads print while a cell is measured."""

from __future__ import annotations

import io
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
