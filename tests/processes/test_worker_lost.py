"""A worker that is killed: it ends the set, so this file is the last one."""

from __future__ import annotations

import os
import sys

import pytest

from speedkit_jupyter import launch
from speedkit_jupyter.processes import workers
from speedkit_jupyter.processes.workers import RankLost

pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def test_a_killed_rank_is_named_and_the_next_launch_starts_anew(left_processes):
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
    assert left_processes() == []


@pytest.mark.thorough
def test_a_profile_of_ipyparallel_starts_workers_too(tmp_path, monkeypatch, left_processes):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    started = workers.Workers(1, "speedkit")
    started.start(lambda _: None)
    try:
        assert started.memory_bytes() == [0]
        assert started._call(os.getpid) == started.pids
    finally:
        started.stop()
    assert left_processes() == []
