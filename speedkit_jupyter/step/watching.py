"""Report the events of a running step to a watcher, and compare the work of its first calls.

A repeated step may do less work, for example because data is exhausted. The counts of model calls
and backward passes show this. Times don't, because a first call is slow for many reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.reachable import holds
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.private import is_transforming, without_dispatch_modes


class Watcher:
    """Callbacks for the events of a step; subclasses override them.

    `called(args, kwargs, result)` follows an outermost call of a model. `differentiated(gradients)`
    follows `torch.autograd.grad`. `before_backward(tensors)` and `after_backward()` surround
    `torch.autograd.backward`. `before_step(optimizer, with_closure)` and `after_step(optimizer)`
    surround an optimizer's step. `before_zero_grad()` precedes an optimizer's or model's zero_grad.
    """

    def ignored(self, *given: Any, **named: Any) -> None:
        """Do nothing."""

    called = differentiated = before_backward = after_backward = ignored
    before_step = after_step = before_zero_grad = ignored


def unwatched(method: Callable[..., None]) -> Callable[..., None]:
    """Make a watcher's method run without gradients, function modes and dispatch modes.

    Inside transforms of `torch.func`, the method does nothing.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        if is_transforming():
            return
        with torch.DisableTorchFunction(), without_dispatch_modes(), torch.no_grad():
            method(*args, **kwargs)

    return call


@contextmanager
def watching(models: Sequence[torch.nn.Module], watcher: Watcher) -> Iterator[None]:
    """Report this thread's events to `watcher`. Calls of modules outside `models` are left out.
    Model calls are observed at `Module.__call__`, because hooks would disable fused kernels and
    recompile the model.
    """
    calls = _around(
        after=lambda a, k, result: watcher.called(a[1:], k, result), only=set(map(id, models))
    )
    passes = _around(
        lambda a, k: watcher.before_backward(a[0] if a else k["tensors"]),
        lambda *_: watcher.after_backward(),
    )
    grads = _around(after=lambda a, k, result: watcher.differentiated(result))
    clears = _around(lambda a, k: watcher.before_zero_grad())

    def steps(optimizer: Any, args: Any, kwargs: Any) -> None:
        watcher.before_step(optimizer, any(map(callable, (*args, *kwargs.values()))))

    with (
        patched(torch.nn.Module, "__call__", calls),
        patched(torch.autograd, "backward", passes),
        patched(torch.autograd, "grad", grads),
        patched(torch.nn.Module, "zero_grad", clears),
        patched(torch.optim.Optimizer, "zero_grad", clears),
        optimizer_hooks(steps, lambda optimizer, *_: watcher.after_step(optimizer)),
    ):
        yield


def _around(
    before: Callable[[Any, Any], None] = lambda *_: None,
    after: Callable[[Any, Any, Any], None] = lambda *_: None,
    only: Collection[int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that calls `before` and `after` around each outermost call of a function.

    If `only` is given, it has the ids of the first arguments of calls to report. If a call raises,
    `after` isn't called. Nested calls, such as calls of submodules, are not reported.
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        depth = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if only is not None and id(args[0]) not in only:
                return function(*args, **kwargs)
            if not depth:
                before(args, kwargs)
            depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                after(args, kwargs, result)
            return result

        return call

    return make


# --- the first calls ---


@dataclass
class StepWork(Watcher):
    """Counts of a step's outermost calls of models or of their parts, and of backward passes."""

    calls: int = 0
    passes: int = 0

    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        self.calls += 1

    def before_backward(self, tensors: Any) -> None:
        self.passes += 1

    differentiated = before_backward


@dataclass(frozen=True)
class Repeats:
    """The difference of later calls from the first call; `line`, if any, is shown to the user."""

    afresh: bool = False  # True if each measured call must start from the user's state
    alone: bool = False  # True if a later call fails
    line: str = ""


# The value until later calls are compared with the first call.
UNCOMPARED = Repeats()


@dataclass(frozen=True)
class StepFacts:
    """The facts that the first calls of a step reveal.

    Attributes:
        asked: The parts of a plan that the code requests from its context, such as "autocast".
            None before the first call.
        made: The facts of optimizers that the step creates.
        repeats: How the work of later calls differs from the work of the first call.
        leaves: True if a call changes state, draws random numbers or reaches an iterator.
    """

    asked: frozenset[str] | None = None
    made: tuple[OptimizerFacts, ...] = ()
    repeats: Repeats = UNCOMPARED
    leaves: bool = True


def is_suspicious(first_s: float, later_s: float) -> bool:
    """Return whether the first call took over 1.5 times as long as a later call."""
    return first_s > 1.5 * later_s


def ended(error: Exception) -> Repeats:
    """Return the Repeats of a step that can't be repeated, because a later call raised `error`."""
    raised = f"a call that follows others raises {in_a_line(error)}"
    return Repeats(True, True, f"{raised}; each measured call starts from your state")


def compared_runs(
    models: Sequence[torch.nn.Module],
    start: Snapshot,
    run: Callable[[], object],
    in_force: Callable[[], AbstractContextManager[object]] = nullcontext,
    warm: Snapshot | None = None,
) -> Repeats:
    """Compare the work of a later call with the work of a call from the user's state `start`.

    The later call begins at `warm` or, by default, at the current state. If the call from `start`
    does more than twice the work, each measured call must begin at `start`.
    """
    parts, later, first = [p for model in models for p in model.modules()], StepWork(), StepWork()
    for work in (later, first):
        with in_force():
            if work is later and warm is not None:
                warm.restore()
            start.restore_randomness()  # because random numbers may decide the work
            with watching(parts, work):
                run()
        if work is later:
            start.restore()
    unit, most, least = "backward passes", first.passes, later.passes
    if not most:
        unit, most, least = "model calls", first.calls, later.calls
    if least >= most:
        return Repeats()
    does = f"a call that follows another does less ({least} instead of {most} {unit})"
    if 2 * least < most:
        return Repeats(afresh=True, line=f"{does}: each measured call starts from your state")
    return Repeats(line=f"{does}: later calls are timed")


@contextmanager
def optimizers_made(models: Sequence[torch.nn.Module]) -> Iterator[list[OptimizerFacts]]:
    """Yield a list; each optimizer that the block creates for the models adds its facts once."""
    kinds: list[OptimizerFacts] = []

    def make(begin: Any) -> Callable[..., None]:
        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            if holds(optimizer, models):
                facts = OptimizerFacts.read(optimizer, models)
                if facts not in kinds:
                    kinds.append(facts)

        return noted

    with patched(torch.optim.Optimizer, "__init__", make):
        yield kinds
