"""Real workers: two processes, gloo. One set serves all tests, and some end it."""

from __future__ import annotations

import os
import signal
import threading
import time
from importlib import import_module

import psutil
import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, launch
from speedkit_jupyter.extras.processes import workers
from speedkit_jupyter.extras.processes.launching import Launch
from speedkit_jupyter.extras.processes.workers import RankError
from speedkit_jupyter.support.exceptions import SpeedKitError

pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def fit(model, optimizer, steps=2):
    """Each rank has its own samples, and all have the mean of the gradients."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else None
    data = torch.arange(24.0).view(2, 3, 4) / 24
    wrapped = model if rank is None else nn.parallel.DistributedDataParallel(model)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = wrapped(data if rank is None else data[rank]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_a_model_is_trained_by_two_as_by_one_and_comes_back_into_the_same_object():
    alone, mine = made(), made()
    fit(*alone)
    weight = mine[0].weight
    losses = launch(fit, *mine)
    assert len(losses) == 2
    assert mine[0].weight is weight
    torch.testing.assert_close(weight, alone[0].weight)
    assert mine[1].state[weight]["step"] == 2
    assert len(launch(fit, *mine)) == 2
    assert mine[1].state[weight]["step"] == 4


def test_what_a_function_finds_around_it_comes_back_too():
    model, optimizer = made()
    before = model.weight.detach().clone()

    def step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    launch(step)
    assert not torch.equal(model.weight, before)
    assert optimizer.state[model.weight]["step"] == 1


def test_an_error_on_one_rank_is_that_ranks_and_ends_the_wait_of_the_other():
    def bad():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError("only here")
        dist.barrier()

    with pytest.raises(RankError, match="rank 1: ValueError: only here") as caught:
        launch(bad)
    assert "only here" in "".join(caught.value._render_traceback_())
    assert launch(lambda: 7) == 7


def test_a_module_that_workers_do_not_find_is_one_line(tmp_path, monkeypatch):
    launch(lambda: 0)  # they have the path of now
    (tmp_path / "later_found.py").write_text("class Kept:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept = import_module("later_found").Kept()
    with pytest.raises(RankError, match="'later_found'") as caught:
        launch(lambda: kept)
    _, line = caught.value._render_traceback_()
    assert "No module named 'later_found': install it; if sys.path has changed" in line
    assert launch(lambda: 7) == 7


def test_an_interrupt_ends_a_collective_and_the_workers_stay():
    launch(lambda: 0)
    pids = list(workers.current().pids)

    def stuck():
        import time

        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(600)
        dist.barrier()

    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(stuck)
    assert time.monotonic() - began < 60  # not the sleep's six hundred
    assert workers.current().pids == pids
    assert launch(lambda: 7) == 7


def test_what_a_cell_prints_last_and_its_value_are_shown_also_before_an_error():
    *_, shown = Launch("print('last')\n40 + 2", {}).run(lambda text: None)
    assert shown == {0: "last\n42", 1: "last\n42"}
    states = []
    with pytest.raises(RankError, match="ZeroDivisionError"):
        states.extend(Launch("print('last')\n1 / 0", {}).run(lambda text: None))
    assert "last" in states[-1][0]


def test_the_ranks_listen_on_loopback_only():
    def listening():
        every = psutil.Process().net_connections("tcp")
        return {one.laddr.ip for one in every if one.status == psutil.CONN_LISTEN}

    assert launch(listening) == {"127.0.0.1"}


def test_a_collective_that_one_rank_leaves_out_ends_with_its_line():
    cell = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()"
    with pytest.raises(RankError, match="another rank has not entered") as caught:
        list(Launch(cell, {}).run(lambda text: None))
    assert "barrier" in "".join(caught.value._render_traceback_())
    assert launch(lambda: 7) == 7


def test_a_function_changes_what_it_is_given_whatever_holds_it():
    model, optimizer = made()
    before = model.weight.detach().clone()

    def step(models, *, optimizer):
        models[0](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return models

    (returned,) = launch(step, [model], optimizer=optimizer)
    assert returned is model
    assert not torch.equal(model.weight, before)


def test_a_line_of_a_magic_sees_and_binds_names_and_a_cell_may_await():
    names = {"number": 4}
    cell = """
get_ipython().run_line_magic('time', 'double = 2 * number')
import asyncio
await asyncio.sleep(0)
awaited = True
"""
    list(Launch(cell, names).run(lambda text: None))
    assert (names["double"], names["awaited"]) == (8, True)


def test_what_workers_alone_have_sees_what_has_changed_here():
    names = {"model": made()[0], "nn": nn, "torch": torch}
    list(Launch("ddp = nn.parallel.DistributedDataParallel(model)", names).run(lambda text: None))
    names["model"].weight.data.zero_()
    cell = "found = ddp(torch.ones(1, 4)).detach() - model.bias.detach()"
    list(Launch(cell.partition(" - ")[0], names).run(lambda text: None))
    torch.testing.assert_close(names["found"][0], names["model"].bias.detach())


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(SpeedKitError, match="can't be sent"):
        launch(lambda: lock.locked())


def test_a_plan_and_what_the_cell_binds_itself_are_left_out_where_they_cannot_be_sent():
    _, in_force = apply_speedups(nn.Linear(2, 2), SpeedConfig().alone())
    names = {"lock": threading.Lock(), "in_force": in_force}
    cell = "lock = 7\ntry:\n    in_force\nexcept NameError:\n    lock = 8"
    list(Launch(cell, names).run(lambda text: None))
    in_force.restore()
    assert names["lock"] == 8


def test_a_class_that_is_defined_anew_is_the_new_one():
    def of(number):
        class Net(nn.Module):
            def forward(self, x):
                return x + number

        return Net()

    ask = lambda net: float(net(torch.zeros(())))  # noqa: E731
    assert [launch(ask, of(1)), launch(ask, of(2))] == [1.0, 2.0]


def test_a_number_that_a_cell_binds_stays_each_ranks_own_until_the_notebook_changes_it():
    names = {}

    def cell(source):
        list(Launch(source, names).run(lambda text: None))

    cell("import torch.distributed as dist\nrank = dist.get_rank()")
    assert names["rank"] == 0
    every = "every = [None] * dist.get_world_size()\ndist.all_gather_object(every, rank)"
    cell(every)
    assert names["every"] == [0, 1]
    names["rank"] = 7
    cell(every)
    assert names["every"] == [7, 7]


def test_twenty_launches_leave_no_memory_file_or_thread():
    data = torch.zeros(1000)

    def held():
        """Of each process, and files of theirs: other programs have some there, too."""
        pids = [os.getpid(), *workers.current().pids]
        files = [name for name in os.listdir("/dev/shm") for pid in pids if f"_{pid}_" in name]
        every = [psutil.Process(pid) for pid in pids]
        return [
            *(one.num_fds() for one in every),
            *(one.num_threads() for one in every),
            len(files),
        ]

    launch(lambda x: x + 1, data)
    before = held()
    for _ in range(20):
        assert launch(lambda x: x + 1, data).sum() == 1000
    end = time.monotonic() + 60  # what has ended is gone a moment later
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < end, (held(), before)
        time.sleep(0.1)
