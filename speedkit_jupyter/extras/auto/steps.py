"""The steps of a loop: their calls, kinds and times, and the estimate of the remaining time."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.catalog.model_changes.calls import Call
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.modules import COMPILED_CALL, plain_call
from speedkit_jupyter.torchglue.private import batches_given, is_transforming
from speedkit_jupyter.torchglue.storage import tensors_in

# Once more than this many different shapes of inputs were seen, inputs of new shapes are grouped by
# the number of tensors and the number of elements, rounded to a power of 2 ** 0.25.
MOST_KINDS = 8


class Beat(Call):
    """A model's outermost wrapper, which passes the calls of this thread to `made`.

    `made(module, below, args, kwargs)` must return the call's result; `below` runs the call itself.
    From `pass_calls` to `take`, calls with gradients skip `made`, to save time. Calls without
    gradients skip `made` while `is_plain()` is true: rollouts make many such calls.
    """

    order = 2  # outside all wrappers of plans

    def __init__(self, module: torch.nn.Module, made: Any, is_plain: Callable[[], bool]) -> None:
        super().__init__(module, only_in=threading.get_ident())
        self._made, self._is_plain, self._passes, self._passed = made, is_plain, False, 0

    def pass_calls(self, counted: bool) -> None:
        self._passes, module = True, self.module
        entries = vars(module) if module is not None else {}
        is_only = self.inner is None and entries.get(COMPILED_CALL) is self
        if is_only and not counted:  # the wrapper costs some 4 µs a call
            entries[COMPILED_CALL] = None

    def take(self) -> int:
        """Send calls to `made` again; return the number of counted calls that skipped `made`."""
        entries = vars(self.module) if self.module is not None else {}
        if self._passes and entries.get(COMPILED_CALL, self) is None:
            entries[COMPILED_CALL] = self
        passed, self._passed, self._passes = self._passed, 0, False
        return passed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # hides this frame in errors of the user's model
        if torch.compiler.is_compiling() or is_transforming() or not self.acts():
            return self.below(*args, **kwargs)
        has_gradients = torch.is_grad_enabled()
        if self._passes if has_gradients else self._is_plain():
            self._passed += has_gradients
            return (self.inner or plain_call(self.module))(*args, **kwargs)
        return self._made(self.module, self.below, args, kwargs)


class Kinds:
    """Classify calls by their inputs: calls of one kind do about the same amount of work.

    A kind is the tuple of the input tensors' shapes. If there are many shapes, as for sentences,
    the kind of new shapes is the number of tensors and the rough number of their elements.
    """

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._calls = 0

    @property
    def usual(self) -> Hashable:
        """Return the shapes of at least half of all calls; None if no shapes are that frequent."""
        kind, calls = self._seen.most_common(1)[0]
        return kind if 2 * calls >= self._calls else None

    def of(self, args: Any, kwargs: Any) -> Hashable:
        """Count a call, and return its kind."""
        self._calls += 1
        given = tensors_in((args, kwargs))
        shapes = tuple(tuple(one.shape) for one in given)
        if len(self._seen) <= MOST_KINDS or shapes in self._seen:
            self._seen[shapes] += 1
            return shapes
        return len(given), round(4 * math.log2(max(sum(one.numel() for one in given), 1)))


@dataclass
class Totals:
    """The number of steps in one cell, and their seconds, by plan."""

    steps: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    predictions: int = 0  # evaluation calls under a plan


class HostEvent:
    """A time on the CPU's clock, with the methods of a device's timing event."""

    def record(self) -> None:
        self._at_s = clock.now()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end._at_s - self._at_s)


class TimedStep:
    """A step that begins now; its `loss` and gradient `norm` are available once `ready` completes.

    `is_usual` is false if the step includes an examination; `why` is a reason to drop the plan.
    """

    def __init__(self, kind: Hashable, device: torch.device) -> None:
        self.kind, self.plan, self.is_usual, self.why = kind, BASELINE, True, ""
        self.loss: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        self.begin, self.end, self.ready = (event(device) for _ in range(3))
        self.begin.record()

    @property
    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1e3


def event(device: torch.device) -> Any:
    """Return a new timing event of the device; on a CPU, a HostEvent."""
    if device.type == "cpu":
        return HostEvent()
    return torch.get_device_module(device).Event(enable_timing=True)


class Remaining:
    """Estimate the remaining time of a loop from its data loaders and progress bars."""

    def __init__(self) -> None:
        self._loaders: dict[int, tuple[weakref.ref[Any], float, int]] = {}

    def watching(self) -> AbstractContextManager[None]:
        """Return a context manager that notes each DataLoader iteration that this thread begins."""
        return patched(DataLoader, "__iter__", self._noting)

    def _noting(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(loader: Any) -> Any:
            batches = begin(loader)
            with suppress(TypeError):  # a loader without a length
                self._loaders[id(loader)] = (weakref.ref(batches), clock.now(), len(loader))
            return batches

        return call

    def seconds(self, elapsed_s: float) -> float:
        """Return the longest estimate of the remaining seconds, at least the `elapsed_s` so far."""
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        runs: list[tuple[float, int, int]] = []  # seconds so far, items done, items in total
        for bar in [*getattr(tqdm, "_instances", ())]:
            runs.append((bar.format_dict["elapsed"], bar.n, bar.total or 0))
        for reference, begun_s, length in self._loaders.values():
            runs.append((clock.now() - begun_s, batches_given(reference()), length))
        remaining = (took_s * (total - done) / done for took_s, done, total in runs if done)
        return max([elapsed_s, *remaining])
