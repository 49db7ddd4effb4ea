"""Start a notebook's worker processes, run cells on them, interrupt and stop them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import torch

from speedkit_jupyter.extras.processes.rank import Outcome, begin, join, run
from speedkit_jupyter.state.snapshot import generators_kept
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.support.units import count
from speedkit_jupyter.support.weak import at_unload

# Longest time in seconds between reads of output, and the wait before an interrupt.
POLL_S = 0.2
# Seconds to wait for processes to start: on a busy machine, loading torch takes a minute.
START_S = 600.0
# After Ctrl-C or an error, ranks are interrupted, and killed if they run INTERRUPT_S seconds later.
# Killed processes and ipyparallel's thread have EXIT_S seconds to end.
INTERRUPT_S, EXIT_S = 3.0, 3.0
# Longest wait in seconds for the rest of a finished rank's output; milliseconds are usual.
OUTPUT_S = 10.0
# Configuration of ipyparallel's controller and engines. The controller finds new engines only at a
# heartbeat, every 300 ms. Missed heartbeats are allowed: process ids tell which ranks are dead.
CONFIG = """\
import sys
sys.path[:] = {path!r}
from speedkit_jupyter.support.lifetime import end_with
end_with({notebook}, {folder!r})
c = get_config()
c.IPEngine.enable_nanny = False
c.IPEngine.wait_for_url_file = 60
c.HeartMonitor.period = 300
c.HeartMonitor.max_heartmonitor_misses = 10**6
c.IPEngine.max_heartbeat_misses = 0
"""


class RankError(RuntimeError):
    """An error in the code of a rank, with the traceback that IPython showed there."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"rank {outcome.rank}: {outcome.error}")
        self.rank, self._lines = outcome.rank, list(outcome.lines)

    def _render_traceback_(self) -> list[str]:
        return [f"Rank {self.rank} raised:", *self._lines]


class Workers:
    """The `size` worker processes of a notebook, on this host: the ranks of one process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_alive = False
        nccl = torch.cuda.is_available() and torch.cuda.device_count() >= size
        self.backend = "nccl" if nccl and torch.distributed.is_nccl_available() else "gloo"
        self.pids: list[int] = []
        self._client: Any = None
        self._cluster: Any = None
        # A temporary folder, so that the user's IPython profiles don't apply and no file remains.
        self.folder = tempfile.mkdtemp(prefix="speedkit-")

    @generators_kept()  # ipyparallel draws random names
    def start(self) -> None:
        """Start processes and their process group; on failure, stop all and raise SpeedKitError."""
        try:
            self._connect()
            ranks = range(self.size)
            begun = [self._client[rank].apply_async(begin, rank, self.size) for rank in ranks]
            self.pids = self._gathered(begun)
            self._join()
        except BaseException as error:
            self.stop()
            if not isinstance(error, Exception):
                raise
            raise SpeedKitError(f"the processes did not start: {in_a_line(error)}") from None
        self.is_alive = True

    def _connect(self) -> None:
        try:
            from ipyparallel import Cluster
            from traitlets.config import Config
        except ImportError:
            raise SpeedKitError("run pip install 'speedkit-jupyter[processes]'") from None
        log = logging.getLogger("speedkit_jupyter.ipyparallel")
        log.setLevel(logging.CRITICAL)
        config = CONFIG.format(path=sys.path, notebook=os.getpid(), folder=self.folder)
        Path(self.folder, "ipcontroller_config.py").write_text(config)
        Path(self.folder, "ipengine_config.py").write_text(config)
        settings: dict[str, Any] = {"n": self.size, "delay": 0.0, "log": log, "config": Config()}
        settings |= {"profile_dir": self.folder, "load_profile": False, "shutdown_atexit": False}
        # The default cluster id would draw from Python's random generator.
        settings |= {"cluster_id": uuid4().hex, "send_engines_connection_env": False}
        self._cluster = Cluster(**settings)
        self._cluster.start_cluster_sync()
        self._client = self._cluster.connect_client_sync(timeout=START_S)
        self._client.wait_for_engines(self.size, interactive=False, timeout=START_S)

    def _join(self) -> None:
        self._gathered(self._sent(join, os.path.join(self.folder, uuid4().hex), self.backend))

    def _sent(self, function: Any, *given: Any) -> list[Any]:
        return [self._client[rank].apply_async(function, *given) for rank in range(self.size)]

    def _gathered(self, sent: Sequence[Any]) -> list[Any]:
        list(self._waiting(sent))
        return [one.get() for one in sent]

    def _waiting(self, sent: Sequence[Any]) -> Iterator[None]:
        """Yield until all ranks have finished. Raises an error if a rank fails or dies."""
        while not (failed := self._failed(sent)):
            if not (running := [one for one in sent if not one.ready()]):
                return
            yield
            wait(running, POLL_S, FIRST_COMPLETED)
        raise failed

    def _failed(self, sent: Sequence[Any]) -> Exception | None:
        if dead := self.dead():
            ranks = " and ".join(f"rank {rank}" for rank in dead)
            return SpeedKitError(f"{ranks} of {self.size} was killed or crashed: run it again")
        for one in sent:
            if one.ready() and not one.successful():
                return SpeedKitError(f"a worker failed: {in_a_line(one.exception())}")
            if one.ready() and getattr(one.get(), "error", ""):
                return RankError(one.get())
        return None

    def run(
        self, folder: Path, source: str, bound: Collection[str], seed: int
    ) -> Generator[tuple[Mapping[int, str], list[Outcome]], None, None]:
        """Run a cell. Yield each rank's output so far with [], and at the end with the outcomes.

        An error or Ctrl-C is raised after the ranks have formed a new group, or were stopped.
        """
        sent = self._sent(run, folder, source, bound, seed)
        try:
            for _ in self._waiting(sent):
                yield _printed(sent), []
        except BaseException as error:
            self._recover(sent)
            if not isinstance(error, GeneratorExit):
                yield _printed(sent, OUTPUT_S if self.is_alive else 0.0), []
            raise
        yield _printed(sent, OUTPUT_S), [one.get() for one in sent]

    def dead(self) -> list[int]:
        return [rank for rank, pid in enumerate(self.pids) if not _runs(pid)]

    def _recover(self, sent: list[Any]) -> None:
        """Interrupt all ranks and create a new process group; if that fails, stop the workers."""
        with suppress(BaseException):  # including another Ctrl-C
            wait(sent, POLL_S)  # ranks may end by themselves
            for pid, one in zip(self.pids, sent, strict=True):
                if not one.ready():
                    os.kill(pid, signal.SIGINT)
            if not wait(sent, INTERRUPT_S).not_done and not self.dead():
                self._join()
                return
        self.stop()

    def stop(self) -> None:
        """Kill all processes, and remove their files."""
        self.is_alive = False
        client, cluster = self._client, self._cluster
        self._client = self._cluster = None
        ours = _started_from(self.folder)
        with suppress(Exception):
            client.close()
        for process in ours:  # first, because ipyparallel waits for each process
            with suppress(psutil.Error):
                process.kill()
        with suppress(Exception):
            cluster.stop_cluster_sync()
            if thread := cluster._async_thread:  # ipyparallel leaves this thread running
                cluster._thread_loop.add_callback(cluster._thread_loop.stop)
                thread.join(EXIT_S)
                cluster._thread_loop.close()
        psutil.wait_procs(ours, timeout=EXIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def _started_from(folder: str) -> list[psutil.Process]:
    """Return ipyparallel's processes with this profile folder: controller, engines, children."""
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


def _printed(sent: Sequence[Any], wait_s: float = 0.0) -> dict[int, str]:
    """Return each rank's output so far; wait up to `wait_s` for the rest from finished ranks."""
    printed = {}
    for rank, result in enumerate(sent):
        if wait_s and result.ready():
            result.wait_for_output(wait_s)
        every = [*(result.outputs or ()), result.execute_result or {}]
        shown = [str(one.get("data", {}).get("text/plain", "")) for one in every]
        text = f"{result.stdout or ''}{result.stderr or ''}".rstrip()
        printed[rank] = "\n".join(filter(None, [text, *shown]))
    return printed


# A global, because a notebook has one set of workers.
_CURRENT: list[Workers] = []


def current() -> Workers | None:
    """Return the running workers of this notebook, or None."""
    return _CURRENT[0] if _CURRENT and _CURRENT[0].is_alive else None


def started(size: int | None, say: Callable[[str], object]) -> Workers:
    """Return `size` running workers (default: as many as run now, or 2), started if necessary."""
    running = current()
    wanted = size or (running.size if running else 2)
    if running and running.size == wanted and not running.dead():
        return running
    stop()
    say(f"starting {count(wanted, 'worker')}")
    workers = Workers(wanted)
    workers.start()
    _CURRENT[:] = [workers]
    at_unload(stop)
    return workers


def stop() -> None:
    if running := current():
        running.stop()
    _CURRENT.clear()
