"""A worker that is killed: it ends the set, so this file is the last one."""

from __future__ import annotations

import psutil
import pytest

from speedkit_jupyter import launch
from speedkit_jupyter.processes import workers
from speedkit_jupyter.processes.workers import RankLost
from speedkit_jupyter.report.processes_report import workers_report

pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def test_a_killed_rank_is_named_and_the_next_launch_starts_anew():
    def die():
        import os
        import signal

        import torch.distributed as dist

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankLost, match="rank 1 of 2 was killed"):
        launch(die)
    assert workers.current() is None
    assert psutil.Process().children(recursive=True) == []


def test_a_rank_that_died_between_two_cells_is_named_and_the_next_launch_starts_anew():
    assert launch(lambda: 1, n=2) == 1
    running = workers.current()
    killed = psutil.Process(running.pids[0])
    killed.kill()
    killed.wait(10)
    assert "has ended" in workers_report(running).to_text()
    with pytest.raises(RankLost, match="rank 0 of 2 was killed"):
        launch(lambda: 1)
    assert workers.current() is None
    assert psutil.Process().children(recursive=True) == []
