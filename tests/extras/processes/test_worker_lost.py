"""A worker that is killed: it ends the set, so this file is the last one."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys

import psutil
import pytest
import torch
from torch import nn

from speedkit_jupyter import launch
from speedkit_jupyter.codegen.torchrun import Checkpoint
from speedkit_jupyter.extras.processes import workers
from speedkit_jupyter.extras.processes.launching import Launch
from speedkit_jupyter.extras.processes.workers import RankLost

pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

STEPS, KILLED, EVERY = 6, 5, 2
CELL = """
first = checkpoint.load(model, optimizer)
for step in range(first, STEPS):
    if step == KILLED and not first:
        kill()
    train(model, optimizer, step)
    if (step + 1) % EVERY == 0:
        checkpoint.save(step + 1, model, optimizer)
"""


def train(model, optimizer, step):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.full((2, 4), step / 10)), torch.ones(2, 2)).backward()
    optimizer.step()


def kill():
    """Kill rank 1 while rank 0 waits for it."""
    import os
    import signal

    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.fixture
def taken_port(monkeypatch):
    """A port that another program has, where the environment says that ranks meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield port


def test_a_killed_rank_goes_on_from_its_last_checkpoint_and_without_one_is_named(
    tmp_path, left_processes, taken_port
):
    def made():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}

    alone = made()
    for step in range(STEPS):
        train(*alone.values(), step)
    names = made() | {"train": train, "kill": kill}
    names |= {"STEPS": STEPS, "KILLED": KILLED, "EVERY": EVERY}
    weight, folder = names["model"].weight, str(tmp_path / "saved")
    run = Launch(CELL, names, restarts=1, extra={"checkpoint": Checkpoint(folder)})
    drawn = random.getstate()
    list(run.run(lambda text: None))
    assert random.getstate() == drawn  # also by what starts workers anew
    assert names["first"] == KILLED - KILLED % EVERY
    assert names["model"].weight is weight
    torch.testing.assert_close(weight, alone["model"].weight)
    assert names["optimizer"].state[weight]["step"] == STEPS
    assert os.listdir(folder) == [str(STEPS)]
    assert taken_port != int(launch(os.getenv, "MASTER_PORT"))

    with pytest.raises(RankLost, match="rank 1 of 2 was killed"):
        launch(kill)
    assert workers.current() is None
    assert left_processes() == []


@pytest.mark.thorough
def test_a_start_and_a_stop_leave_no_thread_and_no_descriptor_in_a_kernel():
    async def held():  # a kernel's event loop runs, for which ipyparallel makes a thread
        started = workers.Workers(1)
        started.start(lambda _: None)
        started.stop()
        return psutil.Process().num_threads(), psutil.Process().num_fds()

    first, *others = (asyncio.run(held()) for _ in range(3))
    assert all(one <= first for one in others)


@pytest.mark.thorough
def test_a_profile_of_ipyparallel_starts_workers_too_and_draws_nothing(
    tmp_path, monkeypatch, left_processes
):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    workers.stop()  # those of other tests
    started = workers.Workers(1, "speedkit")
    drawn = random.getstate()
    started.start(lambda _: None)
    try:
        assert random.getstate() == drawn
        assert started.dead() == []
        assert started._call(os.getpid) == started.pids
    finally:
        started.stop()
    assert left_processes() == []
