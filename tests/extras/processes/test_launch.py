"""Test launch() with gloo on two real worker processes, which most tests share."""

import ast
import asyncio
import os
import random
import signal
import threading
import time
from importlib import import_module

import psutil
import pytest
import torch
from torch import nn

from speedkit_jupyter import launch
from speedkit_jupyter.extras.processes import workers
from speedkit_jupyter.extras.processes.launching import Launch
from speedkit_jupyter.extras.processes.workers import RankError
from speedkit_jupyter.support.exceptions import SpeedKitError

pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def fit(model, optimizer, steps=2):
    """Train on this rank's samples, or on all if not distributed; return the losses."""
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
    assert len(launch(fit, *mine)) == 2
    assert mine[0].weight is weight
    torch.testing.assert_close(weight, alone[0].weight)
    assert mine[1].state[weight]["step"] == 2


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


def test_an_object_that_workers_cannot_read_is_one_line(tmp_path, monkeypatch):
    class Recurses:
        def __init__(self):
            self.inner = 1

        def __getattr__(self, name):
            return getattr(self.inner, name)

    launch(lambda: 0)  # workers start with sys.path as it is now
    (tmp_path / "later_found.py").write_text("class Kept:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept = import_module("later_found").Kept()
    for value, reason in (kept, "No module named 'later_found'"), (Recurses(), "RecursionError"):
        with pytest.raises(RankError, match=reason) as caught:
            launch(lambda value: value, value)
        _, line = caught.value._render_traceback_()
        assert reason in line
    assert launch(lambda: 7) == 7


def test_an_interrupt_ends_a_collective():
    launch(lambda: 0)

    def stuck():
        import time

        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(600)
        dist.barrier()

    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(stuck)
    assert time.monotonic() - began < 60  # the sleep would take 600 s
    assert launch(lambda: 7) == 7


def test_an_error_of_all_ranks_and_exit_leave_the_workers():
    launch(lambda: 0)
    pids = list(workers.current().pids)
    for cell, error in (("1 / 0", "ZeroDivisionError"), ("exit()", "SystemExit")):
        with pytest.raises(RankError, match=error):
            list(Launch(cell, {}).run(lambda text: None))
        assert launch(lambda: 7) == 7
    assert workers.current().pids == pids


def test_the_last_output_of_a_cell_and_its_value_are_shown_also_before_an_error():
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


AT_ONCE = "from speedkit_jupyter.extras.processes import rank\nrank.ALONE_S = 1.0\n"
ONE_RANK = "import time, torch.distributed as dist\nif dist.get_rank() == 0:\n    "
SHARDED = """
from speedkit_jupyter import SpeedConfig, apply_speedups
apply_speedups(model, SpeedConfig(distributed="fsdp2"))
"""


@pytest.mark.parametrize(
    ("before", "line"),
    [
        pytest.param(AT_ONCE, "dist.barrier()", id="barrier"),
        pytest.param(
            SHARDED, "best = model.weight.full_tensor()", id="fsdp2", marks=pytest.mark.thorough
        ),
    ],
)
def test_a_collective_that_one_rank_leaves_out_ends_with_its_line(before, line):
    with pytest.raises(RankError, match="another rank has not entered") as caught:
        list(Launch(before + ONE_RANK + line, {"model": made()[0]}).run(lambda text: None))
    shown = "".join(caught.value._render_traceback_())
    assert f"    {line}\n" in shown
    assert "interactiveshell" not in shown
    assert workers.current() is None
    assert launch(lambda: 7) == 7


@pytest.mark.thorough
def test_an_error_of_one_rank_with_a_sharded_model_is_shown():
    cell = SHARDED + ONE_RANK + "1 / 0\nmodel.weight.full_tensor()"
    with pytest.raises(RankError, match="rank 0: ZeroDivisionError"):
        list(Launch(cell, {"model": made()[0]}).run(lambda text: None))


def test_a_rank_that_computes_longer_than_another_is_not_ended():
    for cell in (
        AT_ONCE + ONE_RANK + "time.sleep(2.5)\ndist.barrier()",
        ONE_RANK + "time.sleep(2.5)",
    ):
        list(Launch(f"{cell}\nended = True", names := {}).run(lambda text: None))
        assert names["ended"]
    launch(exec, AT_ONCE.replace("1.0", "10.0"))


def test_a_line_of_a_magic_sees_and_binds_names():
    names = {"number": 4}
    cell = "get_ipython().run_line_magic('time', 'double = 2 * number')"
    list(Launch(cell, names).run(lambda text: None))
    assert names["double"] == 8


def test_a_cell_starts_from_the_notebooks_objects_alone():
    names = {"model": made()[0], "nn": nn}
    run = Launch("ddp = nn.parallel.DistributedDataParallel(model)\nlayer = model", names)
    list(run.run(lambda text: None))
    assert [*run.stays] == ["ddp"]
    assert names["layer"] is names["model"]
    with pytest.raises(RankError, match="NameError"):
        list(Launch("ddp(1)", names).run(lambda text: None))
    assert [one for one in os.scandir(workers.current().folder) if one.name[:3] == "tmp"] == []


def test_an_object_that_cannot_be_sent_is_named_unless_the_cell_binds_its_name():
    lock = threading.Lock()
    with pytest.raises(SpeedKitError, match="the function can't be sent"):
        launch(lambda: lock.locked())
    names = {"lock": lock}
    with pytest.raises(SpeedKitError, match="`lock` can't be sent"):
        list(Launch("lock.locked()", names).run(lambda text: None))
    list(Launch("lock = 7", names).run(lambda text: None))
    assert names["lock"] == 7


def test_a_class_that_is_defined_anew_is_the_new_one():
    def of(number):
        class Net(nn.Module):
            def forward(self, x):
                return x + number

        return Net()

    ask = lambda net: float(net(torch.zeros(())))  # noqa: E731
    assert [launch(ask, of(1)), launch(ask, of(2))] == [1.0, 2.0]


def test_a_number_that_differs_by_rank_is_refused_until_it_is_bound_again():
    names = {}

    def cell(source):
        list(Launch(source, names).run(lambda text: None))

    bind = "import torch.distributed as dist\nrank = dist.get_rank()\nsize = dist.get_world_size()"
    every = "every = [None] * size\ndist.all_gather_object(every, rank)"
    cell(bind)
    assert names["rank"] == 0
    with pytest.raises(SpeedKitError, match="`rank` differs by rank"):
        cell(every)
    cell(f"{bind}\n{every}")
    assert names["every"] == [0, 1]
    names["rank"] = 7
    cell(every)
    assert names["every"] == [7, 7]


def test_a_seed_of_the_notebook_repeats_a_cell_and_its_process_group_stays():
    def draw():
        import torch.distributed as dist

        every = [None, None]
        dist.all_gather_object(every, (random.random(), float(torch.rand(()))))
        dist.destroy_process_group()  # as at the end of a script
        return every

    found = [(torch.manual_seed(seed), launch(draw))[1] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_twenty_launches_leave_no_file_or_thread():
    data = torch.zeros(1000)

    def held():
        every = [psutil.Process(pid) for pid in (os.getpid(), *workers.current().pids)]
        return [*(one.num_fds() for one in every), *(one.num_threads() for one in every)]

    launch(lambda x: x + 1, data)
    before = held()
    for _ in range(20):
        assert launch(lambda x: x + 1, data).sum() == 1000
    end = time.monotonic() + 60  # an ended thread may be listed a moment longer
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < end, (held(), before)
        time.sleep(0.1)


def test_a_killed_rank_is_named_and_the_next_launch_starts_anew(left_processes):
    def kill():
        import os
        import signal

        import torch.distributed as dist

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    drawn = random.getstate()
    with pytest.raises(SpeedKitError, match="rank 1 of 2 was killed"):
        launch(kill)
    assert workers.current() is None
    assert left_processes() == []
    assert launch(lambda: 7) == 7
    ended = psutil.Process(workers.current().pids[0])  # while no cell runs
    ended.kill()
    ended.wait(60)
    assert launch(lambda: 8) == 8
    assert random.getstate() == drawn  # although ipyparallel draws random names


@pytest.mark.thorough
def test_a_start_and_a_stop_leave_no_thread_and_no_descriptor_in_a_kernel():
    async def held():  # with an event loop, as in a kernel, ipyparallel starts a thread
        started = workers.Workers(1)
        started.start()
        started.stop()
        return psutil.Process().num_threads(), psutil.Process().num_fds()

    first, *others = (asyncio.run(held()) for _ in range(3))
    assert all(one <= first for one in others)


START = "%load_ext speedkit_jupyter\n%speedkit processes start 2"
BUSY = "import time, torch\nx = torch.ones(10)\ntime.sleep(600)"
ASKED = """
import psutil
from speedkit_jupyter.extras.processes import workers
running = workers.current()
every = [process.pid for process in psutil.Process().children(recursive=True)]
print((running.pids, every, running.folder))
"""


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.parametrize("ends", ["closed", "killed", "killed while all ranks run"])
def test_a_kernel_that_ends_leaves_no_process_and_no_file(ends):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=300, kernel_name="python3")
    printed = []
    hook = lambda message: printed.append(message["content"].get("text", ""))  # noqa: E731
    try:
        for cell in (START, ASKED):
            printed.clear()
            reply = client.execute_interactive(cell, timeout=120, output_hook=hook)
            assert reply["content"]["status"] == "ok", reply["content"]
        ranks, every, folder = ast.literal_eval("".join(printed))
        assert len(ranks) == 2
        assert {*ranks} < {*every}
        assert os.path.isdir(folder)
        if "while" in ends:
            client.execute(f"%%speedkit launch\n{BUSY}")
            time.sleep(2)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=ends != "closed")
    deadline = time.monotonic() + 60
    while (alive := [*filter(psutil.pid_exists, every)]) or os.path.exists(folder):
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
