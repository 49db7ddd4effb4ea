"""A plan that is applied to a model, and undone exactly."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.flags import Change
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.asked_of_context import STANDING_IN, Asked
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.leaving import Exit, ExitMethod, or_restored, surely
from speedkit_jupyter.plans.observed import observed
from speedkit_jupyter.plans.planning import Plan, plan
from speedkit_jupyter.support import interrupts
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.listeners import Listeners
from speedkit_jupyter.support.registry import Registry
from speedkit_jupyter.support.wrappers import unwrapped

if TYPE_CHECKING:
    import torch

# Told with the model after a plan was applied to it or restored; a benchmark's own plans are not.
CHANGES = Listeners()


def restore_all() -> int:
    """Restore every context in this process; returns how many there were."""
    contexts = [context for context in _LIVE if not context.restored]
    for context in contexts[::-1]:
        context.restore()
    return len(contexts)


def _restore_all_at_exit() -> None:
    """Before Python shuts down: what is undone while it does can import nothing any more."""
    atexit.unregister(restore_all)
    atexit.register(restore_all)


class SpeedContext(Asked):
    """An applied plan. As a context manager it restores at the end of the block.

    Besides the plan it knows what was found out later (`notes`) and what changed (`changes()`).
    `facts` are those of the original state. `asked` notes what code has called on it: `autocast`,
    `grad_scaler`.
    """

    facts: Facts
    # Who holds a context holds its model, until it lets go of it. What lies on the model, for as
    # long as that lives, is the context's __dict__, which holds no model: `_contexts` makes a
    # context of it again.
    __slots__ = ("__dict__", "__weakref__", "_held")

    def __init__(
        self,
        model: torch.nn.Module,
        config: SpeedConfig,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._held: torch.nn.Module | None = model
        self._self = weakref.ref(self)
        self._key = id(unwrapped(model))  # a plan on a model is one with that of its wrapper
        self.config = config
        self.target = Target(model, optimizers)
        self.restored = False
        self.asked: set[str] = set()
        self._entered = False
        self._leaving: Callable[[], Exit | None] | None = None
        self._stack: ExitStack | None = None
        self._before: dict[str, Any] = {}
        self._around: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
        self._thread = 0  # that measures under it
        self._prepared = False
        self._planned: Plan

    @property
    def model(self) -> torch.nn.Module:
        """The user's own model object. Raises SpeedKitError once it is gone."""
        model: torch.nn.Module | None = self.target.model if self._held is None else self._held
        if model is None:
            raise SpeedKitError("the model of this context is gone, and its plan with it")
        return model

    def let_go(self) -> None:
        """Keep the model alive no longer: the plan ends with it."""
        self._held = None

    @property
    def plan(self) -> Plan:
        """The plan; inside a measured step the variant's, as for `autocast()`."""
        return self._planned if self._prepared else self._acting._planned

    @property
    def active(self) -> bool:
        """Whether this plan is in force (not restored, and not hidden by a newer one)."""
        return self._stack is not None

    @property
    def notes(self) -> dict[str, str]:
        """What was found out after planning, by optimization."""
        return self.target.notes

    @property
    def kept(self) -> tuple[str, ...]:
        """The flags that the user changed meanwhile, and that were therefore left alone."""
        return tuple(dict.fromkeys(self.target.kept))

    @property
    def autocast_entered(self) -> bool:
        """Whether `autocast()` has been used since the plan was applied."""
        return self.target.memo.autocast_entered

    @property
    def before(self) -> dict[str, Any]:
        """The flags and the state of model and optimizers as they were found, by name."""
        return dict(self._before)

    def changes(self) -> tuple[Change, ...]:
        """The flags and the state of model and optimizers, before and now, where they differ."""
        return flags.diff(self._before, observed(self.target))

    @interrupts.one_in_a_row
    def restore(self) -> None:
        """Put everything back around the values. Calling it again does nothing.

        An interrupt waits until that is done.
        """
        if self.restored:
            return
        interrupts.finished(self._restore)
        CHANGES.tell(self.model)

    def _restore(self) -> None:
        if self.restored:
            return
        contexts = contexts_on(self.model)
        on_top = bool(contexts) and contexts[-1] is self
        try:
            self._deactivate()
        finally:  # a part that can't be undone must not keep the rest from it
            self._finish()
            if on_top and not self._entered:
                _finish_plain(contexts[:-1])
            left = contexts_on(self.model)
            if on_top and left:
                left[-1]._activate()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A prepared context, applied for the block; it keeps no record of what it changed.

        Every other context of the model stands for it meanwhile: a step that calls the one which
        `apply` made runs under the plan that is measured, and in a baseline under none.
        """
        around = {k: context for k, context in STANDING_IN.items() if k == self._key}

        def leave() -> None:
            STANDING_IN.pop(self._key, None)
            STANDING_IN.update(around)
            self._deactivate()

        with surely(leave):
            with interrupts.undisturbed():
                self._activate(observe=False)
                self._thread = threading.get_ident()
                STANDING_IN[self._key] = self
            yield

    def __enter__(self) -> SpeedContext:
        if self.restored:
            raise SpeedKitError("this context was restored: apply_speedups() makes a new one")
        with or_restored(self):
            self._entered = True
            leaving = self._leaving and self._leaving()
            if leaving:
                leaving.awaited = True
            return self

    __exit__ = ExitMethod()

    def __repr__(self) -> str:
        state = "restored" if self.restored else "applied" if self.active else "waiting"
        on = [f"{d.name}={d.value}" for d in self._planned if d.active] or ["nothing to change"]
        return f"<SpeedContext {state}: {', '.join(on)}>"

    def _start(self, hidden: list[SpeedContext]) -> tuple[torch.nn.Module, SpeedContext]:
        """Hide the plans that are in force, plan from the original state, and apply."""
        try:
            with interrupts.undisturbed():
                hidden += contexts_on(self.model)
                if hidden:
                    hidden[-1]._deactivate()
                self._plan()
                self._activate()
                _ON.put(unwrapped(self.model), self.__dict__)
                _restore_all_at_exit()
            CHANGES.tell(self.model)
            if hidden and not hidden[-1]._entered:
                _finish_plain(hidden[:-1])  # they can't come back: it does not return to them
            return self.model, self
        except BaseException:  # also an interrupt that was held back until all was applied
            interrupts.finished(partial(self._withdraw, hidden))
            CHANGES.tell(self.model)
            raise

    def _withdraw(self, hidden: Sequence[SpeedContext]) -> None:
        """As if it had never been applied."""
        self._deactivate()
        self._finish()
        if hidden and not hidden[-1].active:
            hidden[-1]._activate()

    def _plan(self) -> None:
        facts = Facts.read(self.model, self.target.optimizers).stepped_by(self.target.made)
        self.facts = replace(facts, optimizers_later=self.target.search)
        self._planned = plan(self.config, Hardware.current(), self.facts)

    def _activate(self, observe: bool = True) -> None:
        with self.target.searched_once(), ExitStack() as stack:
            if observe:
                self._before = observed(self.target)
            for decision in self._planned:
                if decision.active:
                    optimization = named(decision.name)
                    stack.enter_context(optimization.applied(decision, self.target))
            self._around = {
                d.name: named(d.name).around_forward(d, self.target) for d in self._planned
            }
            self._stack = stack.pop_all()

    def _deactivate(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            with self.target.searched_once():
                stack.close()

    def _finish(self) -> None:
        """Take this context off its model for good."""
        self.restored = True
        _ON.take(unwrapped(self.model), self.__dict__)
        memo = self.target.memo
        memo.compiled_call = memo.graphed = memo.twins = None
        self.target.let_go()


def _finish_plain(contexts: Sequence[SpeedContext]) -> None:
    """End the newest plans, down to the first that a `with` block returns to."""
    for context in [*contexts][::-1]:
        if context._entered:
            break
        context._finish()


def contexts_on(model: torch.nn.Module) -> list[SpeedContext]:
    """The contexts on one model, the one in force last."""
    return [_context(model, state) for state in _ON.on(unwrapped(model))]


def _context(model: torch.nn.Module, state: dict[str, Any]) -> SpeedContext:
    """The context that is still held somewhere, or a new one of the same state."""
    context: SpeedContext | None = state["_self"]()
    if context is None:
        context = SpeedContext.__new__(SpeedContext)
        context._held, context.__dict__ = model, state
        state["_self"] = weakref.ref(context)
    return context


def _end(states: list[dict[str, Any]]) -> None:
    """The model is gone: what its plans set elsewhere goes back."""

    for state in states:
        state["restored"] = True
        state["target"].let_go()

    def close() -> None:
        for state in states[::-1]:
            stack, state["_stack"] = state["_stack"], None
            if stack is not None:
                stack.close()

    interrupts.soon(close)


# State at module level, on purpose: a plan lies on its model wherever that is used.
_ON: Registry[dict[str, Any]] = Registry(_end)


class _Live:
    """Every context that is in force or waiting; holds none of them alive."""

    def __iter__(self) -> Iterator[SpeedContext]:
        return (_context(model, state) for model, state in _ON)


_LIVE = _Live()
