"""What runs in a worker: an ipyparallel engine that is a rank of torch.distributed's group."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import psutil

from speedkit_jupyter.processes import merging
from speedkit_jupyter.processes.packing import Parcel, pack, unpack
from speedkit_jupyter.support.torch_private import version

# Between two looks whether the notebook's kernel is alive.
WATCH_S = 1.0
# What Python code needs to stop by itself; after that a collective is taken to wait for others.
PATIENCE_S = 1.0
# Until a rank that never arrives is an error: the group's own default.
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass
class Place:
    """Where a worker stands among the others, as it was told when it started."""

    rank: int
    size: int
    local_rank: int
    is_here: bool  # on the notebook's host
    backend: str
    path: Sequence[str]
    threads: int
    notebook: int = 0  # process to watch, where that is on this host
    folder: str = ""  # removed with the notebook
    controller: int = 0


@dataclass
class Outcome:
    """What a rank reports of a cell: its error as IPython shows it, or rank 0's results."""

    rank: int
    error: str = ""
    lines: Sequence[str] = ()
    ended_s: float = 0.0
    results: Parcel | None = None
    stays: Sequence[str] = ()  # names whose values can't leave the workers


@dataclass
class _Worker:
    place: Place
    store: Any = None
    sockets: set[int] = field(default_factory=set)  # those that are not the group's
    sent: Parcel | None = None


# State at module level, on purpose: a process is one rank.
_WORKERS: list[_Worker] = []


def begin(place: Place) -> int:
    """Set up this process as a rank; return its process id."""
    sys.path[:] = place.path or sys.path  # that of another host is its own
    import torch

    torch.set_num_threads(place.threads)
    local = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    os.environ |= {name: str(value) for name, value in local.items()}
    # torchrun's word for a rendezvous that is served already: nobody listens on the port anew.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if place.is_here and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    _WORKERS[:] = [_Worker(place)]
    _shell().run_line_magic("load_ext", "speedkit_jupyter")
    if place.notebook:
        threading.Thread(target=_end_with_the_notebook, args=[place], daemon=True).start()
    return os.getpid()


def serve(host: str) -> int:
    """Open the rendezvous on a free port, in rank 0; return the port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    worker = _WORKERS[0]
    size = worker.place.size
    worker.store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    return int(worker.store.port)


def join(host: str, port: int, generation: int) -> None:
    """Meet the other ranks in a new process group; whatever group there was is left."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    worker = _WORKERS[0]
    place = worker.place
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    if worker.store is None:
        worker.store = TCPStore(host, port, place.size, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    worker.sockets = {one.fd for one in _connections()}
    store = PrefixStore(f"group {generation}", worker.store)
    nccl = place.backend == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else None
    dist.init_process_group(
        place.backend,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=TIMEOUT,
        device_id=device,
    )
    dist.barrier()


def run(parcel: Parcel, source: str, assigned: Sequence[str], gathers: bool) -> Outcome:
    """Run a cell with the objects sent along; `gathers` where all ranks run it."""
    worker, shell = _WORKERS[0], _shell()
    if worker.sent is not None:
        worker.sent.close()
        worker.sent = None
    outcome = Outcome(worker.place.rank)
    lines: list[str] = []
    shown = shell._showtraceback
    # IPython's own hook for whoever shows errors elsewhere.
    shell._showtraceback = lambda kind, value, text: lines.extend(text)
    with _collectives_end_on_interrupt():
        try:
            try:
                names = _taken(parcel, shell.user_ns)
                done = shell.run_cell(source, store_history=False)
                error = done.error_before_exec or done.error_in_exec
                if error is None and gathers:
                    _collect(outcome, worker, shell.user_ns, names, assigned)
            except BaseException as caught:
                shell.showtraceback()
                error = caught
        finally:
            shell._showtraceback = shown
    outcome.ended_s = time.time()
    if error is not None:
        outcome.error, outcome.lines = f"{type(error).__name__}: {error}", lines
    return outcome


def _shell() -> Any:
    """Return the engine's own shell: an engine is IPython's kernel."""
    return sys.modules["IPython"].get_ipython()


# --- objects ---


def _taken(parcel: Parcel, space: dict[str, Any]) -> dict[str, Any]:
    """Bind what was sent; return it by name. Models that wrap others here stay the same objects."""
    before = dict(space)
    sent = unpack(parcel, space)
    space.update(sent)
    new = {name: value for name, value in space.items() if before.get(name) is not value}
    stateful = {name: value for name, value in new.items() if merging.has_state(value)}
    # What a function was passed is reached by its arguments, not by name: there all is new.
    are_known = all(name in before and name[:1] != "_" for name in stateful)
    if are_known and all(merging.fits(before[name], one) for name, one in stateful.items()):
        for name, value in stateful.items():
            state = merging.State(value.state_dict(), getattr(value, "training", None))
            merging.put_state(before[name], state)
            space[name] = before[name]
    return {name: space[name] for name in new if name[:2] != "__"}


def _collect(
    outcome: Outcome,
    worker: _Worker,
    space: dict[str, Any],
    sent: Mapping[str, Any],
    assigned: Sequence[str],
) -> None:
    """Gather what the cell changed or bound; rank 0 packs it."""
    import torch

    results: dict[str, Any] = {}
    stays: list[str] = []
    for name in dict.fromkeys((*sent, *assigned)):
        value = space.get(name)
        is_own = value is sent.get(name, space)
        if isinstance(value, ModuleType | FunctionType | type) or name not in space:
            continue
        if merging.has_state(value) and is_own:
            results[name] = merging.state_of(value)
        elif merging.is_wrapped(value):
            stays.append(name)
        elif not is_own or isinstance(value, merging.CONTAINERS):
            results[name] = merging.whole(value)
        elif isinstance(value, torch.Tensor) and version(value):
            results[name] = value
    if worker.place.rank:
        return
    packed = {}
    for name, value in results.items():
        try:
            pack(value, space).close()
            packed[name] = value
        except Exception:  # whatever an object's own pickling raises
            stays.append(name)
    worker.sent = outcome.results = pack(packed, space, worker.place.is_here)
    outcome.stays = stays


# --- interrupts, and the notebook's end ---


@contextmanager
def _collectives_end_on_interrupt() -> Iterator[None]:
    """End a wait for other ranks when SIGINT arrives: Python's own handler runs after the wait.

    The signal's number reaches a thread, by the descriptor that Python writes it to.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    over = threading.Event()

    def listen() -> None:
        while number := os.read(reads, 1):
            if number[0] == signal.SIGINT and not over.wait(PATIENCE_S):
                leave_collectives()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writes)
        thread.join()
        os.close(reads)


def leave_collectives() -> None:
    """Break this rank's connections to the others: what waits for them raises, here and there."""
    import torch.distributed as dist

    if _WORKERS[0].place.backend == "nccl":
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        return
    port = int(os.environ["MASTER_PORT"])  # of the rendezvous, which all meet at again
    for one in _connections():  # gloo can't abort by itself
        is_rendezvous = port in (one.laddr.port, one.raddr.port)
        if one.fd not in _WORKERS[0].sockets and not is_rendezvous:
            with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> list[Any]:
    every = psutil.Process().net_connections("tcp")
    return [one for one in every if one.status == psutil.CONN_ESTABLISHED]


def _end_with_the_notebook(place: Place) -> None:
    """End this process, and the controller, once the notebook's kernel is gone without a word."""
    notebook = psutil.Process(place.notebook)
    while notebook.is_running() and notebook.status() != psutil.STATUS_ZOMBIE:
        time.sleep(WATCH_S)
    with suppress(psutil.Error):
        psutil.Process(place.controller).terminate()
    shutil.rmtree(place.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
