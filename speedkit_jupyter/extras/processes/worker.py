"""Functions that run in a worker: an ipyparallel engine that is a rank of a process group."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import loky
import psutil
import torch

from speedkit_jupyter.catalog.properties.sharding import is_sharded
from speedkit_jupyter.extras.processes.packing import OWN, Reader, reply
from speedkit_jupyter.plans.context import SpeedContext, abandon, planned, restore_all
from speedkit_jupyter.support.exceptions import in_a_line


@dataclass
class Outcome:
    """A rank's report of a cell."""

    rank: int
    error: str = ""
    lines: list[str] = field(default_factory=list)  # the error as IPython shows it
    values: dict[str, str] = field(default_factory=dict)  # numbers and texts, by name
    stays: dict[str, str] = field(default_factory=dict)  # the reason, by the name


def begin(rank: int, size: int) -> int:
    """Set up this process as a rank; return its process id."""
    torch.set_num_threads(max(1, loky.cpu_count() // size))
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in place.items()}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # A scheduler that was sent does not recognize the optimizer's method that it has marked.
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    _shell().user_ns.update(exit=sys.exit, quit=sys.exit)  # IPython's would end the worker
    _shell().run_line_magic("load_ext", "speedkit_jupyter")
    return os.getpid()


def join(path: str, backend: str) -> None:
    """Meet the other ranks in a new process group, by a file; leave the group of before."""
    import torch.distributed as dist

    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=size, device_id=device
    )
    dist.barrier()


def run(sent: str, back: str, source: str, bound: Collection[str]) -> Outcome:
    """Run a cell with the objects of a file; rank 0 writes their changes, and the bound names.

    The names of the cell, and its plans, end with it.
    """
    shell, outcome = _shell(), Outcome(int(os.environ["RANK"]))
    space, shown = shell.user_ns, shell._showtraceback
    before = dict(space)
    # IPython's own hook for front ends that show errors elsewhere.
    shell._showtraceback = lambda kind, value, text: outcome.lines.extend(text)
    try:
        reader = Reader(sent, space)
        space.update(reader.read())
        given = dict(space)
        done = shell.run_cell(source, store_history=False)
        if error := done.error_before_exec or done.error_in_exec:
            outcome.error = f"{type(error).__name__}: {error}"
        else:
            restore_all()
            changed = (n for n in space if n[:1] != "_" and space[n] is not given.get(n, space))
            names = {*changed, *bound} & space.keys() - OWN
            made = {n: space[n] for n in names if not isinstance(space[n], SpeedContext)}
            values = ((n, one) for n, one in made.items() if isinstance(one, int | float | str))
            outcome.values = {name: repr(one) for name, one in values}
            if outcome.rank == 0:
                outcome.stays = reply(back, made, reader.memo.copy(), space)
    except BaseException as error:  # of an object on its way, or Ctrl-C
        outcome.error = in_a_line(error)
        outcome.lines.append(outcome.error)
    finally:
        shell._showtraceback = shown
        for model in filter(is_sharded, planned()):
            abandon(model)
        restore_all()
        for name in space.keys() - before.keys():
            del space[name]
        space.update(before)
    return outcome


def _shell() -> Any:
    """Return the engine's own shell: an engine is IPython's kernel."""
    return sys.modules["IPython"].get_ipython()


def end_with(notebook: int, folder: str) -> None:
    """End this process and its children, and remove the folder, once the notebook's is gone."""

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(notebook).wait()
        shutil.rmtree(folder, ignore_errors=True)
        own = psutil.Process()
        for one in [*own.children(recursive=True), own]:
            with suppress(psutil.Error):
                one.kill()

    threading.Thread(target=watch, daemon=True).start()
