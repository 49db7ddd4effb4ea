"""Run a measurement between turns of the event loop, so that the notebook stays responsive."""

from __future__ import annotations

import _thread
import asyncio
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from typing import Any, Literal

from IPython import get_ipython

from speedkit_jupyter.notebook.progress import never_falling
from speedkit_jupyter.rounds.comparison import Progress
from speedkit_jupyter.state import measurement_guard
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.interrupts import interrupts_delayed

END = object()


class BackgroundRun:
    """Run a benchmark or search in the background; call `told(self)` at pauses and at the end.

    `message` says why the run failed, or that no round fitted. `result` is None until the end, and
    if the run has no results. Other tasks of the event loop find the user's state in place.
    """

    def __init__(self, engine: Any, told: Callable[[BackgroundRun], None]) -> None:
        self._told = told
        self.result: Any = None
        self.state: Literal["running", "done", "stopped", "failed"] = "running"
        self.progress = Progress(0.0, "starting")
        self.message = ""
        self._stopped = self._is_in_block = False
        self._lock = threading.Lock()
        self._blocks: Generator[None, None, None] = self._measure(engine)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start at the next turn of the event loop; if no loop is running, run to the end now."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            for _ in self._blocks:
                pass
        else:
            self._task = asyncio.ensure_future(self._in_turns())

    def stop(self) -> None:
        """Stop after the current block, and keep the results so far."""
        self._stopped = True

    def interrupt(self) -> None:
        """Stop the run from another thread; if a block runs, send SIGINT to the main thread."""
        with self._lock:
            self._stopped = True
            if self._is_in_block and hasattr(signal, "pthread_kill"):  # ends system calls, too
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            elif self._is_in_block:
                _thread.interrupt_main()

    async def _in_turns(self) -> None:
        try:
            interval_s, last = 0.0, time.perf_counter()
            while self._run_block():
                if time.perf_counter() - last >= interval_s:
                    handing_s = await self._give_up_turn()
                    last = time.perf_counter()
                    # At 20 turns a second a front end feels responsive. Handovers take at most a
                    # sixth of the time.
                    interval_s = max(0.05, 5 * handing_s)
        finally:
            self._blocks.close()

    def _run_block(self) -> bool:
        """Run the next block of the measurement; return False if none is left. Ctrl-C ends the run.

        Between cells a kernel ignores its stop button's SIGINT, so the block gets a handler.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
        try:
            with interrupts_delayed():
                self._is_in_block = is_main
                try:
                    return next(self._blocks, END) is not END
                finally:
                    with self._lock:
                        self._is_in_block = False
        except KeyboardInterrupt:  # the signal came in SpeedKit's part of the block
            self.stop()
            return True
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before)

    async def _give_up_turn(self) -> float:
        """Let other tasks run; return the overhead in seconds. Changes of state end the run."""
        start, given_s = time.perf_counter(), 0.0
        here = measurement_guard.in_progress()
        try:
            with nullcontext() if here is None else here.paused():
                begin = time.perf_counter()
                self._told(self)
                for _ in range(10):  # a button's message passes several callbacks before it arrives
                    await asyncio.sleep(0)
                given_s = time.perf_counter() - begin
        except measurement_guard.ChangedMeanwhile as error:
            with suppress(StopIteration):  # `_measure` has recorded the error and ended
                self._blocks.throw(error)
        return time.perf_counter() - start - given_s

    def _measure(self, engine: Any) -> Generator[None, None, None]:
        """Yield after each block; set result and state at the end, also after errors and Ctrl-C."""
        steps: Any = engine.run()
        end: Literal["done", "stopped", "failed"] = "stopped"  # also if the event loop is closed
        try:
            for self.progress in never_falling(steps):
                yield
                if self._stopped:
                    break
            else:
                end = "done"
        except KeyboardInterrupt:  # else Ctrl-C would end the event loop
            pass
        except Exception as error:
            of_step = f"the step raised {type(error).__name__}: {error}"
            end = "failed"
            self.message = str(error) if isinstance(error, SpeedKitError) else of_step
            traceback.clear_frames(error.__traceback__)  # frees the step's variables
            error.__traceback__ = None
        finally:
            steps.close()
            self.result = engine.result() if engine.has_results() else None
            if end == "done" and self.result is None:
                self.message = "No round fitted into the budget: Panel(model, budget_s=60)."
            self.state = end
            self._told(self)


def later_in_main_thread(call: Callable[[], object]) -> bool:
    """Schedule `call` in the main thread. In that thread, or without a kernel, return False.

    JupyterLab 4.5 and later send clicks to another thread, which also runs during a cell.
    """
    loop = getattr(getattr(get_ipython(), "kernel", None), "io_loop", None)
    if loop is None or threading.current_thread() is threading.main_thread():
        return False
    loop.add_callback(call)
    return True


def on_arrival(button: Any, call: Callable[[], None]) -> None:
    """Make each click run `call` in ipykernel's message thread, even while code runs.

    ipykernel 7.4 calls a method of the comm to choose the thread of each message. Without that
    method, a click waits until the kernel is idle.
    """
    route = getattr(button.comm, "_reply_subshell_for", None)
    if route is None:
        return

    def arrived(message: Any, *default: Any) -> Any:
        if isinstance(message, dict) and message.get("method") == "custom":
            call()
        return route(message, *default)

    button.comm._reply_subshell_for = arrived
