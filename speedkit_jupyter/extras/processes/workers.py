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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import torch

from speedkit_jupyter.extras.processes.packing import Keys, Parcel
from speedkit_jupyter.extras.processes.worker import (
    LaunchedCell,
    Outcome,
    begin,
    join,
    run,
    serve,
    warm_up,
)
from speedkit_jupyter.state.process import generators_kept
from speedkit_jupyter.support.at_unload import at_unload
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.support.units import count

LOOPBACK = "127.0.0.1"
# Between two looks at what the ranks print; front ends draw no more often.
POLL_S = 0.2
# Until workers that a queue of jobs has to place are missed, and an answer of the controller.
START_S, ANSWER_S = 600.0, 60.0
# From Ctrl-C, or another rank's error, to the end of a rank that does not stop by itself: on a busy
# machine one that does needs some seconds.
STOP_S = 10.0
# From a rank's result to the last of what it has printed: some milliseconds, unless the machine is
# busy.
OUTPUT_S = 10.0
# In which a rank that was killed is seen as dead, after others lost their connection to it: on this
# host, and elsewhere, where ipyparallel's controller tells of it.
DEATH_S, DEATH_THERE_S = 0.4, 1.5
# Of ipyparallel's controller and engines on this host. An engine loads torch while the controller
# starts, and needs no process that watches it: its pid is known here. It counts as there from the
# controller's next heartbeat, of which it may miss thousands: pids tell who is dead.
CONFIG = """\
import sys
sys.path[:] = {path!r}
from speedkit_jupyter.extras.processes.worker import end_with
end_with({notebook}, {folder!r})
c = get_config()
c.IPEngine.enable_nanny = False
c.IPEngine.wait_for_url_file = 60
c.HeartMonitor.period = 300
c.HeartMonitor.max_heartmonitor_misses = 10**6
c.IPEngine.max_heartbeat_misses = 0
"""
# What does not change by itself: a rank's own number, say, is not replaced by that of rank 0.
PLAIN = (bool, int, float, complex, str, bytes)
MISSING = "needs ipyparallel: pip install 'speedkit-jupyter[processes]'"


class RankError(RuntimeError):
    """An error in the code that a rank ran. It is shown as IPython showed it there."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"rank {outcome.rank}: {outcome.error}")
        self.rank, self._lines = outcome.rank, list(outcome.lines)

    def _render_traceback_(self) -> list[str]:
        return [f"Rank {self.rank} raised:", *self._lines]


class RankLost(SpeedKitError):
    """A rank's process has ended, and the state of the workers with it."""


# What each rank has printed and shown so far.
Printed = Mapping[int, str]


class Workers:
    """`size` workers; with a profile of ipyparallel it says where and how they start."""

    def __init__(self, size: int, profile: str | None = None) -> None:
        self.size, self.profile = size, profile
        self.is_here = profile is None
        self.is_alive = False
        self.backend = "gloo"
        self.pids: list[int] = []
        self.own: dict[str, Any] = {}  # what cells have bound, as rank 0 has it
        self.keys, self.launches = Keys(), 0
        self.names, self.stays = dict[str, None](), set[str]()  # that both have, or only workers
        self._client: Any = None
        self._cluster: Any = None
        self._folder, self._host = "", LOOPBACK
        self._warming: list[Any] = []

    @generators_kept()  # ipyparallel draws names
    def start(self, say: Callable[[str], object]) -> None:
        """Start the processes and their group; raises SpeedKitError, and then nothing is left."""
        atexit.register(self.stop)
        try:
            say(f"starting {count(self.size, 'worker')}")
            self._connect()
            say("connecting the ranks")
            self._begin()
            self._join()
        except BaseException as error:
            self.stop()
            if isinstance(error, SpeedKitError | KeyboardInterrupt):
                raise
            raise SpeedKitError(f"the processes did not start: {in_a_line(error)}") from None
        self.is_alive = True
        self._warming = self._sent(warm_up)

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
            folder, given = Path(self._folder), {"notebook": os.getpid(), "folder": self._folder}
            config = CONFIG.format(path=sys.path, **given)
            (folder / "ipcontroller_config.py").write_text(config)
            (folder / "ipengine_config.py").write_text(f"{config}import torch\n")
            more = {"profile_dir": self._folder, "load_profile": False, "config": Config()}
            more |= {"send_engines_connection_env": False, "shutdown_atexit": False}
        more["cluster_id"] = uuid4().hex  # its own comes from Python's generator, the user's
        self._cluster = Cluster(n=self.size, delay=0.0, log=log, **more)
        self._cluster.start_cluster_sync()
        self._client = self._cluster.connect_client_sync(timeout=ANSWER_S)
        self._client.wait_for_engines(self.size, interactive=False, timeout=START_S)

    def _begin(self) -> None:
        hosts = self._call(socket.gethostname)
        nccl = torch.cuda.is_available() and torch.cuda.device_count() >= self.size
        self.backend = "nccl" if nccl and torch.distributed.is_nccl_available() else "gloo"
        ranks = range(self.size)
        begun = [self._sent(begin, rank, hosts, self.is_here, ranks=[rank])[0] for rank in ranks]
        self.pids = self._gathered(begun)
        if not self.is_here:
            self._host = self._call(socket.gethostbyname, hosts[0], ranks=[0])[0]

    def _join(self) -> None:
        port = self._call(serve, self._host, ranks=[0])[0]
        self._call(join, self._host, port, self.backend)

    def _sent(self, function: Any, *given: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        every = range(self.size) if ranks is None else ranks
        return [self._client[rank].apply_async(function, *given) for rank in every]

    def _call(self, function: Any, *given: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        return self._gathered(self._sent(function, *given, ranks=ranks))

    def _gathered(self, sent: Sequence[Any]) -> list[Any]:
        """Return what every rank returned. The first error of any, or a dead rank, is raised."""
        for _ in self._waiting(sent):
            pass
        return [one.get() for one in sent]

    def _waiting(self, sent: Sequence[Any]) -> Iterator[None]:
        """Yield until all have ended; raises the first error of a rank, or RankLost."""
        while running := [one for one in sent if not one.ready()]:
            yield
            if self.dead() or _errors(sent):
                break
            wait(running, POLL_S, FIRST_COMPLETED)
        deadline = time.monotonic() + (DEATH_S if self.is_here else DEATH_THERE_S)
        while _errors(sent) and not self.dead() and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
        if self.dead():
            raise self._lost()
        if errors := _errors(sent):
            first = min(errors, key=lambda one: getattr(one, "ended_s", 0.0))
            if isinstance(first, Outcome):
                raise RankError(first)
            raise SpeedKitError(f"a worker failed: {in_a_line(first)}")

    # --- running ---

    def run(
        self,
        ranks: Sequence[int],
        parcel: Parcel,
        source: str,
        bound: Sequence[str] = (),
        only: Any = None,
    ) -> Generator[tuple[Printed, list[Outcome]], None, None]:
        """Run a cell on these ranks; yield what they print, and at last their outcomes.

        Raises RankError with the first error, RankLost for a killed process, KeyboardInterrupt:
        then the group is a new one, and the workers' objects are as the cell left them.
        """
        if self.dead():  # since the last cell
            error = self._lost()
            self.stop()
            raise error
        warming, self._warming = self._warming, []
        self._gathered(warming)
        self.launches += 1
        cell = LaunchedCell(self.launches, len(ranks) == self.size, bound, only)
        sent = dict(zip(ranks, self._sent(run, parcel, source, cell, ranks=ranks), strict=True))
        try:
            for _ in self._waiting([*sent.values()]):
                yield _printed(sent), []
        except BaseException as error:
            self._recover(sent)
            if not isinstance(error, GeneratorExit):
                yield _printed(sent, OUTPUT_S if self._client else 0.0), []
            raise
        yield _printed(sent, OUTPUT_S), [one.get() for one in sent.values()]

    def _lost(self) -> RankLost:
        return RankLost(
            f"{' and '.join(f'rank {rank}' for rank in self.dead())} of {self.size} was killed "
            "or has crashed; the workers' state is lost: run the cell again, or "
            "with --checkpoint DIR and --restarts 1 from its last checkpoint"
        )

    def is_own(self, name: str, value: Any) -> bool:
        """Return whether each rank has its own value of a name, which is still the notebook's."""
        return name in self.own and self.own[name] is value and isinstance(value, PLAIN)

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        if not self.is_here:
            return sorted(set(range(self.size)) - set(self._client.ids))
        return [rank for rank, pid in enumerate(self.pids) if not _runs(pid)]

    def _recover(self, sent: dict[int, Any]) -> None:
        """End what still runs and make the group anew; stop all where that can't be done."""
        with suppress(BaseException):  # another Ctrl-C, too
            waiting = [rank for rank, one in sent.items() if not one.ready()]
            if self.is_here:
                for rank in waiting:
                    os.kill(self.pids[rank], signal.SIGINT)
            else:
                self._client.send_signal(signal.SIGINT, waiting, block=False)
            deadline = time.monotonic() + STOP_S
            while waiting and not self.dead() and time.monotonic() < deadline:
                time.sleep(POLL_S / 2)
                waiting = [rank for rank in waiting if not sent[rank].ready()]
            if not waiting and not self.dead():
                self._join()
                return
        self.stop()

    def stop(self) -> None:
        """End all processes, and remove what they have left."""
        atexit.unregister(self.stop)
        self.is_alive = False
        client, cluster = self._client, self._cluster
        self._client = self._cluster = None
        ours = _started_from(self._folder) if self._folder else []
        with suppress(Exception):
            client.close()
        for process in ours:  # before ipyparallel, which would wait for each
            with suppress(psutil.Error):
                process.kill()
        with suppress(Exception):
            cluster.stop_cluster_sync()
            if thread := cluster._async_thread:  # ipyparallel lets it run on, in a kernel
                cluster._thread_loop.add_callback(cluster._thread_loop.stop)
                thread.join(STOP_S)
                cluster._thread_loop.close()
        psutil.wait_procs(ours, timeout=STOP_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _started_from(folder: str) -> list[psutil.Process]:
    """Return the processes of a profile's folder: controller, engines, and what these began."""
    found = list[psutil.Process]()
    for one in psutil.Process().children():
        with suppress(psutil.Error):
            if one.environ().get("IPP_PROFILE_DIR") == folder:
                found += [one, *one.children(recursive=True)]
    return found


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _errors(sent: Sequence[Any]) -> list[Outcome | Exception]:
    """Return the outcomes with an error, and ipyparallel's own errors of an engine."""
    found: list[Outcome | Exception] = []
    for one in sent:
        if one.ready() and not one.successful():
            found.append(one.exception())
        elif one.ready() and getattr(one.get(), "error", ""):
            found.append(one.get())
    return found


def _printed(sent: Mapping[int, Any], wait_s: float = 0.0) -> Printed:
    """Return what has arrived of each rank so far; ipyparallel's own thread receives it."""
    printed = {}
    for rank, result in sent.items():
        if wait_s and result.ready():
            result.wait_for_output(wait_s)
        every = [*(result.outputs or ()), result.execute_result or {}]
        shown = [str(one.get("data", {}).get("text/plain", "")) for one in every]
        text = f"{result.stdout or ''}{result.stderr or ''}".rstrip()
        printed[rank] = "\n".join(filter(None, [text, *shown]))
    return printed


# State at module level, on purpose: a notebook has one set of workers.
_CURRENT: list[Workers] = []


def current() -> Workers | None:
    """Return the workers of this notebook; None where none run."""
    return _CURRENT[0] if _CURRENT and _CURRENT[0].is_alive else None


def started(size: int | None, say: Callable[[str], object], profile: str | None = None) -> Workers:
    """Return the workers: `size` of them, or those that run (else two).

    Another number or profile stops those that run.
    """
    running = current()
    wanted = size or (running.size if running else 2)
    if running and running.size == wanted and profile in (None, running.profile):
        return running
    stop()
    workers = Workers(wanted, profile)
    workers.start(say)
    _CURRENT[:] = [workers]
    at_unload(stop)
    return workers


def stop() -> int:
    """Stop the workers; return how many ran."""
    running = current()
    if running is not None:
        running.stop()
    _CURRENT.clear()
    return running.size if running else 0
