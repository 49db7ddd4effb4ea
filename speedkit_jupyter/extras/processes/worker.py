"""What runs in a worker: an ipyparallel engine that is a rank of torch.distributed's group."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import loky
import psutil
import torch

from speedkit_jupyter.catalog.properties.sharding import dtensor, is_sharded, whole
from speedkit_jupyter.extras.processes.packing import Parcel, Reader, Space, remember
from speedkit_jupyter.extras.processes.returning import Received, written
from speedkit_jupyter.plans.context import abandon, hidden, planned
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import private as torch_private

# Between two looks whether the notebook's kernel is alive.
WATCH_S = 1.0
# What Python code needs to stop by itself; after that a collective is taken to wait for others.
PATIENCE_S = 1.0
# How long a rank is idle in a collective that another rank has left out before the wait is ended.
ALONE_S = 10.0
ALONE = "this rank waits in a collective that another rank has not entered: all ranks have to"
# Between two looks whether the other ranks have ended the cell.
LOOK_S = 0.005
CANT_IMPORT = "{}: install it; if sys.path has changed, `%speedkit processes stop`, and start anew"


@dataclass
class Outcome:
    """What a rank reports of a cell: its error as IPython shows it, or rank 0's results."""

    rank: int
    error: str = ""
    lines: Sequence[str] = ()
    ended_s: float = 0.0
    results: Parcel | None = None
    stays: Sequence[str] = ()  # what can't leave the workers


@dataclass
class LaunchedCell:
    """A cell that ranks run, all of them or one, as number `launch`. It binds the names `bound`; of
    those that it does bind, `only` return.
    """

    launch: int
    by_all: bool
    bound: Sequence[str] = ()
    only: Sequence[str] | None = None
    collectives: int = 0  # entered before it
    is_alone: bool = False  # waits in a collective that another rank has not entered


@dataclass
class _Worker:
    rank: int
    size: int
    is_here: bool  # on the notebook's host
    wakeup: int  # the descriptor that Python writes the numbers of signals to
    store: Any = None
    sockets: set[int] = field(default_factory=set)  # those that are not the group's
    objects: MutableMapping[Any, Any] = field(default_factory=WeakValueDictionary)  # by key
    reply: Parcel | None = None
    cell: LaunchedCell | None = None


# State at module level, on purpose: a process is one rank.
_WORKERS: list[_Worker] = []


def begin(rank: int, hosts: Sequence[str], is_here: bool) -> int:
    """Set up this process as one of the ranks on these hosts; return its process id."""
    local_rank, on_this = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    torch.set_num_threads(max(1, loky.cpu_count() // on_this))
    place = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": local_rank}
    place["LOCAL_WORLD_SIZE"] = on_this
    os.environ |= {name: str(value) for name, value in place.items()}
    # torchrun's word for a rendezvous that is served already: nobody listens on the port anew.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if is_here and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    _WORKERS[:] = [_Worker(rank, len(hosts), is_here, writes)]
    threading.Thread(target=_end_waits, args=[reads, _WORKERS[0]], daemon=True).start()
    # A scheduler that was sent does not know again the optimizer's method that it has marked.
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    _shell().loop_runner = _awaited
    _shell().run_line_magic("load_ext", "speedkit_jupyter")
    return os.getpid()


def serve(host: str) -> int:
    """Open the rendezvous on a free port of this address, in rank 0; return the port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = socket.create_server((host, 0))  # torch itself would listen on all addresses
    port: int = server.getsockname()[1]
    _WORKERS[0].store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
    return port


def join(host: str, port: int, backend: str) -> None:
    """Meet the other ranks in a new process group; whatever group there was is left."""
    import torch.distributed as dist

    worker = _WORKERS[0]
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
        for model in filter(is_sharded, planned()):
            abandon(model)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if worker.rank:
        worker.store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
    worker.store.set(f"here/{worker.rank}", "")
    worker.store.wait([f"here/{rank}" for rank in range(worker.size)])
    worker.sockets = {one.fd for one in _connections()}  # the store's own with them
    nccl = backend == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else None
    given = {"store": worker.store, "rank": worker.rank, "world_size": worker.size}
    dist.init_process_group(backend, device_id=device, **given)
    dist.barrier()


def warm_up() -> None:
    """Take a step with a tiny model: torch loads at the first one what takes seconds."""
    device = torch.accelerator.current_accelerator() if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng():
        tiny = torch.nn.Linear(1, 1, device=device)
    model = torch.nn.parallel.DistributedDataParallel(tiny)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.zeros(1, 1, device=device)).sum().backward()
    optimizer.step()


def run(parcel: Parcel, source: str, cell: LaunchedCell) -> Outcome:
    """Run a cell with the objects sent along."""
    worker, shell = _WORKERS[0], _shell()
    if worker.reply is not None:
        worker.reply.close()
        worker.reply = None
    outcome, error = Outcome(worker.rank), None
    lines: list[str] = []
    shown = shell._showtraceback
    # IPython's own hook for whoever shows errors elsewhere.
    shell._showtraceback = lambda kind, value, text: lines.extend(text)
    signal.set_wakeup_fd(worker.wakeup, warn_on_full_buffer=False)
    cell.collectives = torch_private.collectives(_group())
    worker.cell = cell
    try:
        received = _received(worker, parcel, shell.user_ns)
        before = dict(shell.user_ns)
        done = shell.run_cell(source, store_history=False)
        error = done.error_before_exec or done.error_in_exec
        if error is None and cell.by_all:
            bound = _bound(before, shell.user_ns, cell)
            _reply(outcome, bound, received if cell.only is None else Received(), parcel)
    except BaseException as caught:
        if isinstance(caught, ImportError):  # of what was sent: a cell's errors are returned
            lines.append(CANT_IMPORT.format(caught))
        else:
            shell.showtraceback()
        error = caught
    finally:
        worker.cell = None
        shell._showtraceback = shown
    outcome.ended_s = time.time()
    if cell.is_alone:
        lines.append(ALONE)
        outcome.error, outcome.lines = ALONE, lines
    elif error is not None:
        outcome.error, outcome.lines = f"{type(error).__name__}: {error}", lines
    return outcome


def _shell() -> Any:
    """Return the engine's own shell: an engine is IPython's kernel."""
    return sys.modules["IPython"].get_ipython()


def _group() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD


def _awaited(coroutine: Any) -> Any:
    """Run a cell with `await` in an event loop of its own: the engine's runs around it."""
    outer, loop = asyncio.get_running_loop(), asyncio.new_event_loop()
    asyncio._set_running_loop(None)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        asyncio._set_running_loop(outer)
        loop.close()


# --- objects ---


def _received(worker: _Worker, parcel: Parcel, space: Space) -> Received:
    """Bind what was sent; return it.

    Plans that are in force step aside meanwhile, for which all ranks have to be there.
    """
    reader, models = Reader(parcel, space, worker.objects), planned()
    if worker.cell and not worker.cell.by_all:
        if any(map(is_sharded, models)):
            raise SpeedKitError("a plan has a model in parts: run the cell on all ranks")
        models = []
    with hidden(*models):
        named = dict(reader.read())
    space.update(named)
    return Received(named, reader.known())


def _bound(before: Space, space: Space, cell: LaunchedCell) -> dict[str, Any]:
    """Return what the cell has bound; functions, classes and modules stay."""
    return {
        name: value
        for name, value in space.items()
        if name in cell.bound or (name[:1] != "_" and value is not before.get(name, space))
        if cell.only is None or name in cell.only
        if not isinstance(value, ModuleType | FunctionType | type)
    }


def _reply(outcome: Outcome, bound: dict[str, Any], received: Received, parcel: Parcel) -> None:
    """Gather what the cell changed or bound, once all ranks are here; rank 0 packs it."""
    worker, space = _WORKERS[0], _shell().user_ns
    assert worker.cell is not None
    parts = {name: _parts(value) for name, value in bound.items()}
    said = _all_ended(worker, worker.cell, parts)
    for name in bound:  # what is on some ranks only is not gathered: others would wait for them
        if parts[name] and all(one.get(name) == parts[name] for one in said):
            bound[name] = torch_private.tree_map(whole, bound[name])
    with hidden(*planned()):
        every = received.sent.objects.values()
        models = (one for one in every if isinstance(one, torch.nn.Module))
        values = {
            id(model): torch_private.tree_map(whole, model.state_dict())
            for model in _in_parts(models)
        }
        memory = {} if outcome.rank else _as_sent(parcel, received.sent.memory)
        pickler, new, outcome.stays = written(bound, received, values, memory, space)
    for (name, number), value in new.items():
        remember(worker.objects, (worker.cell.launch, name, number), value)
    if outcome.rank == 0:
        outcome.results = worker.reply = pickler.sealed(worker.is_here)


def _parts(value: Any) -> list[list[int]]:
    """Return the shapes of the sharded tensors in a value."""
    every = torch_private.tree_leaves(value) if dtensor() else []
    return [list(one.shape) for one in every if isinstance(one, dtensor())]


def _in_parts(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the models in parts, without their layers."""
    sharded = [model for model in models if is_sharded(model)]
    inner = {id(part) for model in sharded for part in [*model.modules()][1:]}
    return [model for model in sharded if id(model) not in inner]


def _as_sent(parcel: Parcel, memory: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return which memory, by address, has the bytes of the parcel still."""
    if parcel.descriptor < 0 or not memory:
        return {}
    stored = torch.load(parcel.path, "cpu", mmap=True, weights_only=False)[1]
    return {
        torch_private.address(now.untyped_storage()): number
        for number, (now, then) in enumerate(zip(memory, stored, strict=True))
        if now.untyped_storage().nbytes() == len(then) and torch.equal(now.cpu(), then)
    }


def _all_ended(worker: _Worker, cell: LaunchedCell, said: Any) -> list[Any]:
    """Wait until all ranks have ended the cell; return what each of them said."""
    own = torch_private.collectives(_group())
    worker.store.set(f"{cell.launch}/{worker.rank}", json.dumps([own, said]))
    while len(ended := _ended(worker, cell)) < worker.size:
        time.sleep(LOOK_S)
    return [one for _, one in ended]


def _ended(worker: _Worker, cell: LaunchedCell) -> list[Any]:
    """Return of each rank that has ended the cell its number of collectives, and what it said."""
    keys = [f"{cell.launch}/{rank}" for rank in range(worker.size)]
    return [json.loads(worker.store.get(key)) for key in keys if worker.store.check([key])]


# --- interrupts, and the notebook's end ---


def _end_waits(signals: int, worker: _Worker) -> None:
    """End a cell's wait for other ranks after SIGINT, where Python's own handler runs after the
    wait, and a wait that can't end.
    """
    alone_s, before_s = 0.0, time.process_time()
    while True:
        signaled, *_ = select.select([signals], [], [], WATCH_S)
        cell, now_s = worker.cell, time.process_time()
        if signaled and os.read(signals, 1)[0] == signal.SIGINT and cell is not None:
            time.sleep(PATIENCE_S)
            if worker.cell is cell:
                leave_collectives()
        elif not signaled:
            idle = now_s - before_s < WATCH_S / 10 or torch.cuda.is_available()
            alone_s = alone_s + WATCH_S if idle and cell and _is_alone(worker, cell) else 0.0
            if alone_s >= ALONE_S and cell and not cell.is_alone:
                cell.is_alone = True
                leave_collectives()
        before_s = now_s


def _is_alone(worker: _Worker, cell: LaunchedCell) -> bool:
    """Return whether this rank has entered a collective that one which ended its cell has not."""
    own = torch_private.collectives(_group())
    try:
        others = [one for one, _ in _ended(worker, cell)] if cell.by_all else [cell.collectives]
    except RuntimeError:  # the rank that has the store is gone
        return False
    return any(other < own for other in others)


def leave_collectives() -> None:
    """Break this rank's connections to the others: what waits for them raises, here and there."""
    import torch.distributed as dist

    if dist.group.WORLD is not None and dist.get_backend() == "nccl":
        dist.group.WORLD.abort()
        return
    for one in _connections():  # gloo can't abort by itself
        if one.fd not in _WORKERS[0].sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> list[Any]:
    every = psutil.Process().net_connections("tcp")
    return [one for one in every if one.status == psutil.CONN_ESTABLISHED]


def end_with(notebook: int, folder: str) -> None:
    """End this process and its children, and remove the folder, once the notebook's is gone."""

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            other = psutil.Process(notebook)
            while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
                time.sleep(WATCH_S)
        shutil.rmtree(folder, ignore_errors=True)
        own = psutil.Process()
        for one in [*own.children(recursive=True), own]:
            with suppress(psutil.Error):
                one.kill()

    threading.Thread(target=watch, daemon=True).start()
