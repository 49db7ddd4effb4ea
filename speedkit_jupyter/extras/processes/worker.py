"""What runs in a worker: an ipyparallel engine that is a rank of torch.distributed's group."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import loky
import psutil
import torch

from speedkit_jupyter.extras.processes import packing
from speedkit_jupyter.extras.processes.packing import Parcel, pack, refused, unpack
from speedkit_jupyter.torchglue.private import version

# Between two looks whether the notebook's kernel is alive.
WATCH_S = 1.0
# What Python code needs to stop by itself; after that a collective is taken to wait for others.
PATIENCE_S = 1.0
CANT_IMPORT = "{}: install it; if sys.path has changed, `%speedkit processes stop`, and start anew"


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
    is_here: bool  # on the notebook's host
    wakeup: int  # the descriptor that Python writes the numbers of signals to
    store: Any = None
    sockets: set[int] = field(default_factory=set)  # those that are not the group's
    sent: Parcel | None = None
    cell: Outcome | None = None  # of the one that runs


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
    _WORKERS[:] = [_Worker(is_here, writes)]
    threading.Thread(target=_end_waits, args=[reads, _WORKERS[0]], daemon=True).start()
    # A scheduler that was sent does not know again the optimizer's method that it has marked.
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
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

    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    _WORKERS[0].sockets = {one.fd for one in _connections()}
    nccl = backend == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else None
    dist.init_process_group(backend, device_id=device)
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


def run(parcel: Parcel, source: str, assigned: Sequence[str], gathers: bool) -> Outcome:
    """Run a cell with the objects sent along; `gathers` where all ranks run it."""
    worker, shell = _WORKERS[0], _shell()
    if worker.sent is not None:
        worker.sent.close()
        worker.sent = None
    outcome, error = Outcome(int(os.environ["RANK"])), None
    lines: list[str] = []
    shown = shell._showtraceback
    # IPython's own hook for whoever shows errors elsewhere.
    shell._showtraceback = lambda kind, value, text: lines.extend(text)
    signal.set_wakeup_fd(worker.wakeup, warn_on_full_buffer=False)
    worker.cell = outcome
    try:
        names = _taken(parcel, shell.user_ns)
        done = shell.run_cell(source, store_history=False)
        error = done.error_before_exec or done.error_in_exec
        if error is None and gathers:
            _collect(outcome, worker, shell.user_ns, names, assigned)
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
    stateful = {name: value for name, value in new.items() if packing.has_state(value)}
    # What a function was passed is reached by its arguments, not by name: there all is new.
    are_known = all(name in before and name[:1] != "_" for name in stateful)
    if are_known and all(packing.fits(before[name], one) for name, one in stateful.items()):
        for name, value in stateful.items():
            packing.put_state(before[name], packing.state_of(value))
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
    results: dict[str, Any] = {}
    stays: list[str] = []
    for name in dict.fromkeys((*sent, *assigned)):
        value = space.get(name)
        is_own = value is sent.get(name, space)
        if isinstance(value, ModuleType | FunctionType | type) or name not in space:
            continue
        if packing.has_state(value) and is_own:
            results[name] = packing.state_of(value)
        elif packing.is_wrapped(value):
            stays.append(name)
        elif not is_own or isinstance(value, packing.CONTAINERS):
            results[name] = packing.gathered(value)
        elif isinstance(value, torch.Tensor) and version(value):
            results[name] = value
    if outcome.rank:
        return
    try:
        worker.sent = pack(results, space, worker.is_here)
    except Exception:  # whatever an object's own pickling raises
        stays += refused(results, space)
        results = {name: value for name, value in results.items() if name not in stays}
        worker.sent = pack(results, space, worker.is_here)
    outcome.results, outcome.stays = worker.sent, stays


# --- interrupts, and the notebook's end ---


def _end_waits(signals: int, worker: _Worker) -> None:
    """End a cell's wait for other ranks after SIGINT: Python's own handler runs after the wait."""
    while number := os.read(signals, 1):
        cell = worker.cell
        if number[0] == signal.SIGINT and cell is not None:
            time.sleep(PATIENCE_S)
            if worker.cell is cell:
                leave_collectives()


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
