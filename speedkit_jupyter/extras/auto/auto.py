"""The context manager `auto()`: find the loops of a thread, and race plans on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.extras.auto.discovery import Discovery
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.extras.auto.raced_loop import RacedLoop
from speedkit_jupyter.extras.auto.report import is_short, summary
from speedkit_jupyter.extras.auto.steps import Remaining
from speedkit_jupyter.extras.auto.tracebacks import hide_when_interrupted
from speedkit_jupyter.plans.registry import is_measuring
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.busy_machine import BUSY, SELDOM, Interruptions
from speedkit_jupyter.step.reachable import holding
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.exceptions import ArgumentError, in_a_line
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.interrupts import interrupts_delayed, uninterrupted

# Default limit on the cost of races, as a share of the run's time. In addition, ADDING_S seconds
# may be spent on adding loops: some tasks make a new optimizer every few steps (Reptile, FedAvg).
OVERHEAD, ADDING_S = 0.02, 0.2
# The active `Auto` objects of all threads; a global, because torch's hooks are process-wide.
RUNNING: list[Auto] = []


@contextmanager
def auto(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    overhead: float = OVERHEAD,
    evaluation: str = "plan",
    say: Callable[[str], None] | None = None,
) -> Iterator[Auto]:
    """Race plans (sets of optimizations) on this thread's loops; use plans that are proven faster.

    Loops are found as the block calls models and steps optimizers; each step trains exactly once.
    A proven plan is stored, and later runs begin with it. The end of the block restores every
    flag and object, and keeps the trained parameters.

    Args:
        model: Race only on loops that call this model or a part of the model (default: all loops).
        optimizer: Race only on loops that step this optimizer (default: all loops).
        overhead: The share of the run's time that the races may cost, from 0 to 1 (default 0.02).
        evaluation: The plan for a training loop's calls without gradients (evaluation): the winner
            (`"plan"`, the default) or no plan (`"exact"`).
        say: Called with each line for the user (default: the logger `speedkit_jupyter`).

    Yields:
        An `Auto`, which holds the races. A nested block has no effect and yields the outer `Auto`.

    Raises:
        ArgumentError: `model` is not a module, `optimizer` not an optimizer, `overhead` not from 0
            to 1, or `evaluation` not `"plan"` or `"exact"`.

    Example::

        with speedkit_jupyter.auto():
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
    """
    arguments.model("model must be", model, optional=True)
    arguments.of_kind("optimizer", optimizer, torch.optim.Optimizer)
    if around := [one for one in RUNNING if one.thread == threading.get_ident()]:
        yield around[0]  # the outer block races on these loops already
        return
    running = Auto(overhead, evaluation, say or messages.note)
    running.only = model, optimizer
    running.begin()
    try:
        running.begin_cell()
        yield running
    finally:
        try:
            for line in running.end_cell(in_notebook=False):
                (say or messages.note)(line)
        finally:
            running.end()


class Auto:
    """The races of plans on the loops of one thread: the thread that creates this object.

    A cell lasts from `begin_cell` to `end_cell`. `say` is called with each line for the user, and
    `changed` with a loop after its optimizers' steps. `busy` is a warning if other programs used
    over 10 % of the CPU in the last cell, else empty.
    """

    def __init__(
        self,
        overhead: float = OVERHEAD,
        evaluation: str = "plan",
        say: Callable[[str], None] = print,
        changed: Callable[[RacedLoop], None] = lambda loop: None,
    ) -> None:
        if not isinstance(overhead, int | float) or not 0 <= overhead <= 1:
            raise ArgumentError(f"overhead is a share from 0 to 1, as 0.02, not {overhead!r:.40}")
        if evaluation not in ("plan", "exact"):
            raise ArgumentError(f'evaluation is "plan" or "exact", not {evaluation!r:.40}')
        self.loops: list[RacedLoop] = []
        self._over: list[RacedLoop] = []  # ended, because a later loop of this cell uses the model
        self.latest: RacedLoop | None = None
        self.refused: dict[str, None] = {}
        self._remaining = Remaining()
        self._options = overhead, evaluation == "exact", say, self._remaining
        self.changed = changed
        self.thread = threading.get_ident()
        self._stack = ExitStack()
        self._discovery = Discovery(self._predicts, self._is_known)
        self._ignored: set[int] = set()
        self.is_paused, self.busy = True, ""
        self._adding_s = self._began_s = 0.0
        self._load = Interruptions()
        # Only loops of this model and this optimizer race; None means all.
        self.only: tuple[torch.nn.Module | None, torch.optim.Optimizer | None] = None, None

    def begin(self) -> None:
        """Hook into optimizers, backward() and data loaders; races start with `begin_cell`."""
        RUNNING.append(self)
        self._stack.callback(RUNNING.remove, self)
        hooks = optimizer_hooks(after=self._after), self._remaining.watching()
        for one in (*hooks, patched(torch.autograd, "backward", self._noting_loss)):
            self._stack.enter_context(one)

    def end(self) -> None:
        """Remove the hooks; restore every flag and object, and keep the trained parameters."""
        with interrupts_delayed(), self._stack:
            self._discovery.end()
            for loop in self.loops:
                loop.end()
            self.loops.clear()
            self.latest = None

    def begin_cell(self) -> None:
        """Reset totals and refusals; watch the known loops again, and look for new loops."""
        self.refused.clear()
        for loop in self.loops:
            loop.begin_cell()
        self._ignored.clear()
        self.is_paused, self._load = False, Interruptions()
        self._adding_s, self._began_s = 0.0, clock.now()
        self._discovery.begin()

    def end_cell(self, in_notebook: bool = True) -> list[str]:
        """Stop racing until the next cell; the winner of each loop, if any, stays in force.

        Return a summary of each loop that isn't short, then the reasons for refused loops.
        """
        if why := self._discovery.obstacle():
            self._refuse([], why)
        self.is_paused = True
        with interrupts_delayed():
            self._discovery.end()
            for loop in self.loops:
                loop.pause()
        share = self._load.others_share()
        self.busy = f"{BUSY}: other programs used {share:.0%} of the CPU" if share > SELDOM else ""
        loops = [loop for loop in (*self._over, *self.loops) if not is_short(loop)]
        self._over.clear()
        return [*(summary(loop, in_notebook, self.busy) for loop in loops), *self.refused]

    # The hooks.

    def _noting_loss(self, backward: Any) -> Callable[..., Any]:
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # hides this frame in errors of the user's model
            backward(tensors, *args, **kwargs)
            self._differentiated(tensors)

        return call

    @hide_when_interrupted
    def _differentiated(self, tensors: Any) -> None:
        if self.is_paused:
            return
        self._discovery.differentiated()
        for loop in [*self.loops]:
            self._safely(loop, partial(loop.differentiated, tensors))

    @hide_when_interrupted
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_paused or id(optimizer) in self._ignored:
            return
        loop = next((one for one in self.loops if optimizer in one.plans.optimizers), None)
        if loop is None:
            for over in [one for one in self.loops if one.trains and not len(one.plans.optimizers)]:
                self._end(over)  # the optimizer was deleted, as when a cell runs again
            plans = (one.plans for one in self.loops if not one.plans.is_applied)
            if not is_measuring() or any(one.in_force != BASELINE for one in plans):
                self._discovered(optimizer)
            return
        self.latest = loop
        self._safely(loop, loop.stepped)
        self.changed(loop)

    def _safely(self, loop: RacedLoop, do: Callable[[], None]) -> None:
        """Call `do`; after an error, stop racing on the loop, which goes on without a plan."""
        try:
            do()
        except Exception as error:
            self._refuse(loop.plans.optimizers, f"{in_a_line(error)}, a bug in SpeedKit: report it")
            self._end(loop)

    def _end(self, loop: RacedLoop) -> None:
        self.loops.remove(loop)
        loop.end()

    # Discovery of new loops.

    def _discovered(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a new loop's optimizer step; add or refuse the loop once its period is known."""
        found, overhead = self._discovery, self._options[0]
        if self._adding_s > ADDING_S + overhead * (clock.now() - self._began_s):
            return self._refuse([optimizer], "new optimizers come too often for races to pay off")
        found.begin()
        found.stepped(optimizer)
        if (period := found.period) is None:
            return None
        optimizers = list({id(one): one for one in found.optimizers}.values())
        repeated = (one for one in found.models.values() if found.times[id(one)] > 1)
        models = [one for one in repeated if holding(optimizers, one)]
        if not period:
            self._refuse(optimizers, "its optimizers step in no regular order")
        elif not models:
            self._refuse(optimizers, "its model's calls are not seen (compiled?), or it has none")
        else:
            begun_s = clock.now()
            self._add(models, optimizers, period, found)
            self._adding_s += clock.now() - begun_s
        found.end()
        return None

    def _predicts(self, model: torch.nn.Module) -> None:
        """Add the loop of a model that only predicts, unless it has one or a measurement runs."""
        if not is_measuring() and not self._is_known(model):
            self._add([model], [], 0)

    def _is_known(self, model: torch.nn.Module) -> bool:
        return any(one is model for loop in self.loops for one in loop.plans.live_models)

    def _add(self, models: Any, optimizers: Any, period: int, found: Any = None) -> None:
        model, optimizer = self.only
        parts = models if model is None else [*model.modules()]
        has_model = any(one is part for one in models for part in parts)
        if not has_model or (optimizer is not None and optimizer not in optimizers):
            self._ignored.update(map(id, optimizers))
            return None
        if any(Facts.read(model).compiled != "no" for model in models):
            return self._refuse(optimizers, "its model is compiled already")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return self._refuse(optimizers, "several processes train it together")
        try:
            for known in [*self.loops]:
                if known.race.proof is not None:  # for a new model like it, as in cross-validation
                    known.plans.store(known.race.leader, known.race.proof)
                if any(one is model for one in known.plans.live_models for model in models):
                    self._end(known)  # a model has one loop: the known loop predicts or is over
                    self._over += [known] if known.trains else []
            keep = ("precision",) if found is not None and found.has_autocast else ()
            with uninterrupted():  # else Ctrl-C could leave the loop's wrappers on models
                loop = RacedLoop(models, optimizers, period, *self._options, keep=keep)
                self.loops.append(loop)
        except Exception as error:
            return self._refuse(optimizers, in_a_line(error))
        if found is not None:
            loop.totals.steps[BASELINE] = len(found.optimizers) // period
            loop.totals.seconds[BASELINE] = found.seconds
        self.latest = loop
        return None

    def _refuse(self, optimizers: Iterable[Any], why: str) -> None:
        self._ignored.update(map(id, optimizers))
        self.refused[f"auto leaves this loop as it is: {why}."] = None
