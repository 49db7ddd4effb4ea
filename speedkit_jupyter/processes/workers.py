"""The workers of a notebook: started and stopped through ipyparallel, each a rank that stays."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from speedkit_jupyter.processes.worker import Outcome, Place, begin, join, run, serve
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import count

LOOPBACK = "127.0.0.1"
# Between two looks at what the ranks print; front ends draw no more often.
POLL_S = 0.1
# Until workers that a queue of jobs has to place are missed.
START_S = 600.0
# From Ctrl-C, or another rank's error, to the end of a rank that does not stop by itself.
STOP_S = 5.0
# In which the controller tells of a rank that was killed, after others lost their connection to it.
DEATH_S = 1.5
MISSING = "needs ipyparallel: pip install 'speedkit-jupyter[processes]'"
Ended = dict[int, "Outcome | BaseException"]


class RankError(RuntimeError):
    """An error in the code that a rank ran. It is shown as IPython showed it there."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"rank {outcome.rank}: {outcome.error}")
        self.rank, self._lines = outcome.rank, list(outcome.lines)

    def _render_traceback_(self) -> list[str]:
        return [f"Rank {self.rank} raised:", *self._lines]


class RankLost(SpeedKitError):
    """A rank's process has ended, and the state of the workers with it."""


@dataclass(frozen=True)
class Printed:
    """What a rank has printed and shown so far: text, and outputs as IPython's mime bundles."""

    rank: int
    text: str
    outputs: Sequence[dict[str, Any]] = ()


class Workers:
    """`size` workers; with a profile of ipyparallel it says where and how they start."""

    def __init__(self, size: int, profile: str | None = None) -> None:
        self.size, self.profile = size, profile
        self.is_here = profile is None
        self.is_alive = False
        self.backend = "gloo"
        self.pids: list[int] = []
        self._client: Any = None
        self._cluster: Any = None
        self._folder = ""
        self._port, self._host, self._generation = 0, LOOPBACK, 0

    def start(self, say: Callable[[str], object]) -> None:
        """Start the processes and their group; raises SpeedKitError, and then nothing is left."""
        atexit.register(self.stop)
        try:
            say(f"starting {count(self.size, 'worker')}")
            self._connect()
            say("loading torch in each")
            self._begin()
            say("connecting the ranks")
            self._port = self._call(serve, self._host, ranks=[0])[0]
            self._join()
        except BaseException as error:
            self.stop()
            if isinstance(error, SpeedKitError | KeyboardInterrupt):
                raise
            first = str(error).partition("\n")[0]
            raise SpeedKitError(
                f"the processes did not start: {type(error).__name__}: {first}"
            ) from None
        self.is_alive = True

    def _connect(self) -> None:
        try:
            from ipyparallel import Cluster
            from traitlets.config import Config
        except ImportError:
            raise SpeedKitError(MISSING) from None
        log = logging.getLogger("speedkit_jupyter.ipyparallel")
        log.setLevel(logging.CRITICAL)
        more: dict[str, Any] = {"profile": self.profile}
        if self.is_here:
            # A folder of its own: no profile of the user decides, and nothing is left in it.
            self._folder = tempfile.mkdtemp(prefix="speedkit-")
            more = {"profile_dir": self._folder, "load_profile": False, "config": Config()}
        self._cluster = Cluster(
            n=self.size, delay=0.0, log=log, shutdown_atexit=not self.is_here, **more
        )
        self._cluster.start_cluster_sync()
        self._client = self._cluster.connect_client_sync()
        self._client.wait_for_engines(self.size, interactive=False, timeout=START_S)

    def _begin(self) -> None:
        import torch

        hosts = self._call(socket.gethostname)
        nccl = torch.cuda.is_available() and torch.cuda.device_count() >= self.size
        self.backend = "nccl" if nccl and torch.distributed.is_nccl_available() else "gloo"
        cores = len(psutil.Process().cpu_affinity() or [1]) if psutil.LINUX else os.cpu_count() or 1
        controller = self._cluster.controller.process.pid if self.is_here else 0
        places = [
            Place(
                rank=rank,
                size=self.size,
                local_rank=hosts[:rank].count(host),
                is_here=self.is_here,
                backend=self.backend,
                path=list(sys.path) if self.is_here else [],
                threads=max(1, cores // hosts.count(host)),
                notebook=os.getpid() if self.is_here else 0,
                folder=self._folder,
                controller=controller,
            )
            for rank, host in enumerate(hosts)
        ]
        if not self.is_here:
            self._host = self._call(socket.gethostbyname, hosts[0], ranks=[0])[0]
        self.pids = self._gather([self._send(one.rank, begin, one) for one in places])

    def _join(self) -> None:
        self._generation += 1
        self._call(join, self._host, self._port, self._generation)

    def _send(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._client[rank].apply_async(function, *arguments)

    def _call(
        self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        every = range(self.size) if ranks is None else ranks
        return self._gather([self._send(rank, function, *arguments) for rank in every])

    def _gather(self, sent: Sequence[Any]) -> list[Any]:
        """Return what every rank returned. The first error of any is raised at once."""
        while not all(one.ready() for one in sent):
            failed = [one for one in sent if one.ready() and not one.successful()]
            if failed:
                failed[0].get()
            time.sleep(POLL_S / 5)
        return [one.get() for one in sent]

    def memory_bytes(self) -> list[int | None]:
        """Return the resident memory of each rank; 0 of one on another host, None once it ended."""
        if not self.is_here:
            return [0] * self.size
        return [psutil.Process(pid).memory_info().rss if _runs(pid) else None for pid in self.pids]

    # --- running ---

    def run(
        self, ranks: Sequence[int], *arguments: Any
    ) -> Generator[tuple[list[Printed], list[Outcome]], None, None]:
        """Run a cell on these ranks; yield what they print, and at last their outcomes.

        Raises RankError with the first error, RankLost for a killed process, KeyboardInterrupt:
        then the group is a new one, and the workers' objects are as the cell left them.
        """
        gathers = len(ranks) == self.size
        if dead := self.dead():  # since the last cell
            self.stop()
            raise self._lost(dead)
        sent = {rank: self._send(rank, run, *arguments, gathers) for rank in ranks}
        try:
            while not all(one.ready() for one in sent.values()):
                yield [_printed(rank, one) for rank, one in sent.items()], []
                if any(isinstance(o, BaseException) or o.error for o in _ended(sent).values()):
                    break
                time.sleep(POLL_S)
            self._check(sent)
        except BaseException:
            self._recover(sent)
            raise
        outcomes = [one.get() for one in sent.values()]
        yield [_printed(rank, one) for rank, one in sent.items()], outcomes

    def _check(self, sent: dict[int, Any]) -> None:
        """Raise the first error of a rank, or RankLost."""
        ended = _ended(sent)
        bad = {r: o for r, o in ended.items() if isinstance(o, BaseException) or o.error}
        if not bad:
            return
        # On this host a dead process is seen soon, though others may lose its connection before.
        is_soon = self.is_here and not any(isinstance(one, BaseException) for one in bad.values())
        deadline = time.monotonic() + (DEATH_S / 4 if is_soon else DEATH_S)
        while time.monotonic() < deadline and not self.dead():
            time.sleep(POLL_S)
        if dead := self.dead():
            raise self._lost(dead)
        first = min(bad.values(), key=lambda one: getattr(one, "ended_s", 0.0))
        if isinstance(first, BaseException):
            raise SpeedKitError(f"a worker failed: {type(first).__name__}: {first}") from None
        raise RankError(first)

    def _lost(self, dead: Sequence[int]) -> RankLost:
        return RankLost(
            f"{' and '.join(f'rank {rank}' for rank in dead)} of {self.size} was killed "
            "(out of memory?); the workers' state is lost: run the cell again, or "
            "with --checkpoint DIR and --restarts 1 from its last checkpoint"
        )

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        if not self.is_here:
            return sorted(set(range(self.size)) - set(self._client.ids))
        return [rank for rank, pid in enumerate(self.pids) if not _runs(pid)]

    def _recover(self, sent: dict[int, Any]) -> None:
        """End what still runs and make the group anew; stop all where that can't be done."""
        waiting = [rank for rank, one in sent.items() if not one.ready()]
        with suppress(Exception):
            self._client.send_signal(signal.SIGINT, waiting, block=False)
        deadline = time.monotonic() + STOP_S
        while any(not one.ready() for one in sent.values()) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
        if self.dead() or not all(one.ready() for one in sent.values()):
            self.stop()
            return
        try:
            self._join()
        except Exception:
            self.stop()

    def stop(self) -> None:
        """End all processes, and remove what they have left."""
        atexit.unregister(self.stop)
        self.is_alive = False
        client, cluster = self._client, self._cluster
        self._client = self._cluster = None
        ours = _descendants(cluster) if self.is_here else []
        with suppress(Exception):
            client.close()
        for process in ours:  # before ipyparallel, which would wait for each
            with suppress(psutil.Error):
                process.kill()
        with suppress(Exception):
            cluster.stop_cluster_sync()
        psutil.wait_procs(ours, timeout=STOP_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _descendants(cluster: Any) -> list[psutil.Process]:
    """Return the processes of a cluster on this host: controller, engines, and what these began."""
    own = [getattr(getattr(cluster, "controller", None), "process", None)]
    for engines in getattr(cluster, "engines", {}).values():
        own += [getattr(one, "process", None) for one in engines.launchers.values()]
    found = list[psutil.Process]()
    for one in filter(None, own):
        with suppress(psutil.Error):
            process = one if isinstance(one, psutil.Process) else psutil.Process(one.pid)
            found += [process, *process.children(recursive=True)]
    return found


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ended(sent: dict[int, Any]) -> Ended:
    ended: Ended = {}
    for rank, one in sent.items():
        if one.ready():
            try:
                ended[rank] = one.get()
            except Exception as error:  # ipyparallel's, of an engine that died
                ended[rank] = error
    return ended


def _printed(rank: int, result: Any) -> Printed:
    """Return what has arrived of a rank so far; ipyparallel's own thread receives it."""
    outputs = [one.get("data", {}) for one in result.outputs or ()]
    return Printed(rank, f"{result.stdout or ''}{result.stderr or ''}", outputs)


# State at module level, on purpose: a notebook has one set of workers.
_CURRENT: list[Workers] = []


def current() -> Workers | None:
    """Return the workers of this notebook; None where none run."""
    return _CURRENT[0] if _CURRENT and _CURRENT[0].is_alive else None


def started(
    size: int | None, say: Callable[[str], object], profile: str | None = None
) -> tuple[Workers, bool]:
    """Return the workers, and whether they are new: `size` of them, or those that run (else two).

    Another number or profile stops those that run.
    """
    running = current()
    wanted = size or (running.size if running else 2)
    if running and running.size == wanted and profile in (None, running.profile):
        return running, False
    stop()
    workers = Workers(wanted, profile)
    workers.start(say)
    _CURRENT[:] = [workers]
    return workers, True


def stop() -> int:
    """Stop the workers; return how many ran."""
    running = current()
    if running is not None:
        running.stop()
    _CURRENT.clear()
    return running.size if running else 0
