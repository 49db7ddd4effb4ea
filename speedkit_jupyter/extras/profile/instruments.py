"""Time the parts of a step with patched functions, and sample lines of code with a timer.

Python code is not traced: patched functions report where parts begin and end.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.profile.profile import PARTS, LineSample, Part, Split
from speedkit_jupyter.rounds import budget, clock
from speedkit_jupyter.state.handlers.names import Replay
from speedkit_jupyter.support.source_lines import Spot, is_users, user_spot
from speedkit_jupyter.torchglue import dynamo
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import loader_iterator

# Inner parts that count as the part around them, by outer part. A module call in a data set's
# transform counts as data, and a forward pass that checkpointing repeats counts as backward.
_EVERY = frozenset(PARTS)
_HIDDEN: dict[Part, frozenset[Part]] = {
    "data": _EVERY, "host to device": _EVERY, "synchronizations": _EVERY, "compiling": _EVERY,
    "forward": frozenset(["forward", "data"]),
    "backward": frozenset(["forward", "backward", "host to device", "data"]),
    "optimizer": frozenset(["optimizer"]),
    "rest": frozenset(), "overhead": frozenset(),
}  # fmt: skip
# Methods that wait for the device to compute the tensor.
WAITING = (
    "item", "tolist", "numpy", "nonzero", "__array__", "__bool__", "__float__", "__int__",
    "__index__", "__format__", "__repr__",
)  # fmt: skip
MOVING = ("to", "cuda", "cpu")
# Seconds between two samples of lines. A sample takes about 10 µs, 1 % of the time.
SAMPLE_EVERY_S = 0.001


# Whole parts of a step. Other parts, such as waits, are measured within a whole part or the rest.
WHOLE = frozenset[Part](["data", "forward", "backward", "optimizer", "compiling"])


class Recorder:
    """A stopwatch for the parts of a step, in the thread that creates the Recorder.

    Each `run()` fills a new `split`. Its parts and the overhead sum to the duration of the run.
    """

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self.split = Split()
        self.now = now
        self._here = threading.get_ident()
        self._inside: list[tuple[Part, Part]] = []
        self._since_s = 0.0
        self._mode: Any = None

    @property
    def part(self) -> Part:
        return self._inside[-1][1] if self._inside else "overhead"

    @contextmanager
    def run(self) -> Iterator[Split]:
        """Fill a new split with the time of the block; unclaimed time counts as "rest"."""
        self.split, self._inside, self._since_s = Split(), [("rest", "rest")], self.now()
        try:
            yield self.split
        finally:
            self._lap()
            self._inside = []

    def begin(self, part: Part) -> tuple[int, Any] | None:
        """Begin a part; return the token for `end`. The time of `begin` and `end` is overhead.

        Returns None, and begins no part, in another thread, between two runs (an iterator may
        outlive the step), or if the current part hides the new part (_HIDDEN).
        """
        inside = self._inside
        if not inside or part in _HIDDEN[inside[-1][1]] or threading.get_ident() != self._here:
            return None
        depth, around, mode = len(inside), inside[-1][0], self._mode
        self._lap()
        inside.append((around, "overhead"))
        if mode is not None and torch_private.innermost_function_mode() is mode:
            mode.__exit__(None, None, None)
        else:  # the innermost mode is the user's
            mode = None
        self._lap()
        inside.append((part if part in WHOLE else around, part))
        return depth, mode

    def end(self, begun: tuple[int, Any] | None) -> None:
        """End a part, and inner parts left open, such as a failed compilation. None is ignored."""
        if begun is None:
            return
        depth, mode = begun
        self._lap()
        del self._inside[depth + 1 :]
        if mode is not None:
            mode.__enter__()
        self._lap()
        del self._inside[depth:]

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        begun = self.begin(part)
        try:
            yield
        finally:
            self.end(begun)

    def mark(self) -> float:
        self._lap()
        return self.split.pieces[self._inside[-1]]

    def moved(self, mark: float, part: Part) -> None:
        """Reassign the time since `mark` to `part`, unless the current part hides `part`."""
        around, present = self._inside[-1]
        if part not in _HIDDEN[present]:
            took_s = self.mark() - mark
            self.split.pieces[around, present] -= took_s
            self.split.pieces[around, part] += took_s

    def note(self, spot: Spot | None, method: str, seconds: float) -> None:
        if spot is not None:
            self.split.waits[spot, method].append(seconds)

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Time torch functions that the block calls outside of other parts, with a function mode.

        A function counts as forward if its result requires grad (a loss), else as rest (a metric).
        Other parts switch the mode off, because it would cause compiled models to recompile.
        """
        recorder = self
        # torch passes the replacement of a patched method; the mode must call the original.
        methods = {
            method: method.stands_in_for
            for method in vars(torch.Tensor).values()
            if hasattr(method, "stands_in_for")
        }

        class FunctionTimer(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                function, kwargs = methods.get(function, function), kwargs or {}
                if recorder.part != "rest":
                    return function(*args, **kwargs)
                mark, seen = recorder.mark(), len(recorder.split.samples)
                result = function(*args, **kwargs)
                is_forward = isinstance(result, torch.Tensor) and result.requires_grad
                if is_forward:
                    recorder.moved(mark, "forward")
                for sample in recorder.split.samples[seen:]:
                    sample.in_torch = True
                    if is_forward and sample.part == "rest":
                        sample.part = "forward"
                return result

        self._mode = mode = FunctionTimer()
        mode.__enter__()
        try:
            yield
        finally:
            self._mode = None
            if torch_private.innermost_function_mode() is mode:  # Ctrl-C can leave the mode off
                mode.__exit__(None, None, None)

    def _lap(self) -> None:
        now_s = self.now()
        if self._inside:
            self.split.pieces[self._inside[-1]] += now_s - self._since_s
        self._since_s = now_s


@contextmanager
def installed(recorder: Recorder, within: bool = True) -> Iterator[None]:
    """Patch functions that are whole parts of a step, so that the recorder times their calls.

    With `within`, also patch methods that wait or copy. Use one block for many calls of the step:
    Python 3.13 stops caching method look-ups of a class that was changed a thousand times.
    """
    whole: list[tuple[Any, str, Part]] = [
        (DataLoader, "__iter__", "data"),
        (loader_iterator(), "__next__", "data"),
        (Replay, "_draw", "data"),
        (torch.autograd, "backward", "backward"),
        (torch.autograd, "grad", "backward"),
        (torch.optim.Optimizer, "zero_grad", "optimizer"),
        (torch.nn.Module, "__call__", "forward"),
        *((torch.amp.GradScaler, name, "optimizer") for name in ("step", "unscale_", "update")),
        *((home, "clip_grad_norm_", "optimizer") for home in (clip_grad, torch.nn.utils)),
    ]
    patches = [(owner, name, partial(_counted, recorder, part)) for owner, name, part in whole]
    if within:
        moving = MOVING if torch.accelerator.is_available() else ()
        methods = [*((name, _waiting) for name in WAITING), *((name, _moving) for name in moving)]
        patches += [(torch.Tensor, name, partial(one, recorder, name)) for name, one in methods]
    # torch caches tables of its functions; tables created in the block contain the patches.
    before = {id(table): table.cache_info().misses for table in dynamo.override_caches()}
    try:
        with ExitStack() as stack:
            for owner, name, record in patches:
                stack.enter_context(patched(owner, name, partial(partial, record)))
            yield
    finally:
        for table in dynamo.override_caches():
            if table.cache_info().misses > before.get(id(table), 0):
                table.cache_clear()


@contextmanager
def recorded(recorder: Recorder, sees_functions: bool) -> Iterator[None]:
    """Record compilations, optimizer steps, and functions outside of other parts, in the block.

    Functions count as rest without `sees_functions`, or once Dynamo has compiled a graph.
    """
    with ExitStack() as stack:
        open_compilations: list[Any] = []
        stack.callback(
            dynamo.on_compiling(
                lambda _: open_compilations.append(recorder.begin("compiling")),
                lambda _: recorder.end(open_compilations.pop() if open_compilations else None),
            )
        )
        if sees_functions and not budget.graphs():
            stack.enter_context(recorder.functions())
        stack.enter_context(_optimizer_steps(recorder))
        yield


def _counted(recorder: Recorder, part: Part, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    begun = recorder.begin(part)
    try:
        return original(*args, **kwargs)
    finally:
        recorder.end(begun)


def _waiting(recorder: Recorder, name: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `original` and record its wait, except inside data, compiling or CPU library code."""
    if recorder.part in ("synchronizations", "data", "compiling", "overhead") or (
        args[0].device.type == "cpu" and not is_users(sys._getframe(2).f_code.co_filename)
    ):
        return original(*args, **kwargs)
    with recorder.within("overhead"):
        spot = user_spot(2)
        begun = recorder.begin("synchronizations")
        mark = recorder.mark()
        try:
            return original(*args, **kwargs)
        finally:
            waited_s = recorder.mark() - mark
            recorder.end(begun)
            recorder.note(spot, name, waited_s)


def _moving(recorder: Recorder, name: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Record copies to a device as "host to device", copies to the CPU as synchronizations."""
    if recorder.part == "overhead":
        return original(*args, **kwargs)
    mark, begun_s = recorder.mark(), recorder.now()
    result = original(*args, **kwargs)
    before, after = args[0].device.type, result.device.type
    if after == "cpu" != before:
        recorder.moved(mark, "synchronizations")
        recorder.note(user_spot(2), name, recorder.now() - begun_s)
    elif after != before:
        recorder.moved(mark, "host to device")
    return result


def _optimizer_steps(recorder: Recorder) -> AbstractContextManager[None]:
    """Return a context manager that times and counts optimizer steps; nested steps count once."""
    under_way: list[tuple[int, Any]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        under_way.append((id(optimizer), recorder.begin("optimizer")))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        key, begun = under_way.pop()
        recorder.end(begun)
        if key not in dict(under_way):
            recorder.split.stepped[key] += 1

    return optimizer_hooks(before, after)


@contextmanager
def sampled(recorder: Recorder) -> Iterator[None]:
    """Sample the running line of user code with a timer; add samples to the recorder's split.

    The timer sends SIGALRM, whose handler runs in the interrupted thread between two bytecode
    instructions. (Reading frames of another thread may crash Python.) A sample counts for the time
    since the last sample, so a long operation counts for its own line or the next one. Each sample
    starts the timer for the next one: on a busy machine a sample may take longer than the interval.
    Nothing is sampled outside the main thread, on Windows, or if the timer or SIGALRM is in use.
    """
    if not _has_free_timer():
        yield
        return
    before_s, is_on = 0.0, True

    def sample(*_: object) -> None:
        nonlocal before_s
        now_s = time.perf_counter()
        if recorder.part != "overhead":
            found = LineSample(user_spot(2), recorder.part, now_s - before_s)
            recorder.split.samples.append(found)
        before_s = now_s  # also between two calls, so that the first sample has normal weight
        if is_on:
            signal.setitimer(signal.ITIMER_REAL, SAMPLE_EVERY_S)

    def stop() -> None:
        nonlocal is_on
        is_on = False  # first, because a late sample would restart the timer
        signal.setitimer(signal.ITIMER_REAL, 0)

    def without_samples(set_handler: Callable[..., Any], number: int, handler: Any) -> Any:
        if number == signal.SIGALRM:  # a late signal would reach the user's handler
            stop()
        return set_handler(number, handler)

    handler = torch.compiler.disable(sample)  # Dynamo would trace the handler
    before, before_s = signal.signal(signal.SIGALRM, handler), time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SAMPLE_EVERY_S)
    try:
        with patched(signal, "signal", partial(partial, without_samples)):
            yield
    finally:
        if signal.getsignal(signal.SIGALRM) is handler:  # else the user's code has set one
            stop()
            signal.signal(signal.SIGALRM, before)


def _has_free_timer() -> bool:
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
        and not signal.getitimer(signal.ITIMER_REAL)[0]
    )
