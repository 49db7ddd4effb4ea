"""What a page shows of workers that are dead, or loud."""

from __future__ import annotations

import subprocess
import sys

import pytest

from speedkit_jupyter.extras.processes.packing import Parcel
from speedkit_jupyter.extras.processes.report import MOST, printed_report, workers_report
from speedkit_jupyter.extras.processes.workers import RankLost, Workers


def test_a_rank_that_died_between_two_cells_is_named_before_the_next_is_sent():
    ended, running = subprocess.Popen([sys.executable, "-c", ""]), Workers(1)
    ended.wait()
    running.pids = [ended.pid]
    assert "has ended" in workers_report(running).to_text()
    with pytest.raises(RankLost, match="rank 0 of 1 was killed"):
        next(running.run([0], Parcel(0), ""))


def test_of_what_floods_the_page_the_end_is_shown():
    shown = printed_report("Ran", {0: "first\n" + "x" * MOST + "last"}).to_text()
    assert len(shown) < 2 * MOST
    assert "first" not in shown
    assert shown.rstrip().endswith("last")
