"""A plan in force on a model, and how it is undone exactly."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts, OptimizerFacts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.flags import Change
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.planning import Plan, plan
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.weak import Listeners
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue import heap, interrupts

# Told with the model after a plan was applied to it or restored; a benchmark's own plans are not.
CHANGES = Listeners()


class Entering(ContextDecorator):
    """`make()` at every entry; a decorator too, made once and entered often, nested, in threads.

    So code that keeps one, or decorates a function with it, gets the plan in force by then.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        # The blocks that are open in each thread, the innermost last.
        self._open: dict[int, list[AbstractContextManager[Any]]] = defaultdict(list)

    def __enter__(self) -> Any:
        chosen = self._make()
        result = chosen.__enter__()
        self._open[threading.get_ident()].append(chosen)
        return result

    def __exit__(self, *exception: Any) -> bool | None:
        return self._open[threading.get_ident()].pop().__exit__(*exception)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entering:
        return Entering(self._make)  # of the same context, for a copy of a module that keeps it


class SpeedContext:
    """An applied plan. As a context manager it restores at the end of the block.

    `apply_speedups` returns it. It does not keep the model or the optimizers alive. The plan ends
    when the model is deleted; `model` is None then.

    Attributes:
        plan: The decisions, with their reasons and later results.
        facts: The facts of the model before the plan; `facts_of` has those of each optimizer.
        notes: Later results in words, by optimization.
        before: Flags, and the state of model and optimizers, before the plan.
        asked: The names of the parts, `autocast` and `grad_scaler`, that the user's code has used.

    Example::

        model, ctx = apply_speedups(model, optimizer=optimizer)
        with ctx:
            train(model)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: SpeedConfig,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        made: Sequence[OptimizerFacts] | None = None,
    ) -> None:
        """Plan for a model in its original state.

        A context for measuring has `made`, the optimizers that the measured code will make, perhaps
        none, and looks for no others.
        """
        heap.settle()  # as in every process that is measured
        self.config = config
        self.target = Target(model, optimizers, search=made is None, made=tuple(made or ()))
        self.notes = self.target.notes
        self.before: dict[str, Any] = {}
        self.asked: set[str] = set()
        self.restored = False
        facts = Facts.read(model, self.target.optimizers)
        self.facts_of = weakref.WeakKeyDictionary(
            dict(zip(self.target.optimizers, facts.optimizers, strict=True))
        )
        facts = facts.stepped_by(self.target.made)
        self.facts = replace(facts, optimizers_later=self.target.search)
        self.own_plan = plan(config, Hardware.current(), self.facts)
        self._entered = False
        self._stack: ExitStack | None = None
        self._around: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
        self._disabled_scaler = torch.amp.GradScaler(enabled=False)
        self._key = id(unwrapped(model))  # a model and its wrapper have one plan
        self._thread = 0  # that measures under it

    @property
    def model(self) -> torch.nn.Module:
        """The user's own model object; None once it is deleted."""
        return self.target.model

    @property
    def plan(self) -> Plan:
        """The plan with its results; inside a measured step the plan of the variant."""
        acting = self._acting if self.target.search else self
        return acting.own_plan.noted(acting.notes)

    @property
    def active(self) -> bool:
        """True if this plan is in force (not restored, and not hidden by a newer one)."""
        return self._stack is not None

    @property
    def kept(self) -> tuple[str, ...]:
        """The flags that the user changed under the plan, and that `restore()` left alone."""
        return tuple(dict.fromkeys(self.target.kept))

    def changes(self) -> tuple[Change, ...]:
        """Return the flags, and the state of model and optimizers, that differ from before."""
        now = self.before if self.model is None else observed(self.target)
        return flags.diff(self.before, now)

    # For a training step.

    @property
    def device(self) -> torch.device:
        """The current device of the model; move batches there."""
        parameter = None if self.model is None else next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for the forward pass: the plan's autocast.

        It does nothing once the plan is restored.
        """
        return Entering(self._autocast)

    def sdpa(self) -> AbstractContextManager[Any]:
        """Return a context manager that sets the plan's attention kernel, until the restore."""
        return Entering(self._sdpa)

    def _autocast(self) -> AbstractContextManager[Any]:
        acting = self._acting if _MEASURED else self  # at every step: one call less
        acting.asked.add("autocast")
        if acting._stack is None:
            return nullcontext()
        acting.target.memo.autocast_entered = True
        return acting._around["precision"]()

    def _sdpa(self) -> AbstractContextManager[Any]:
        acting = self._acting
        return acting._around["sdpa"]() if acting.active else nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager in which ranks don't exchange gradients, to accumulate them.

        Use it for all but the last forward and backward pass, which then exchanges the sums.
        """
        from speedkit_jupyter.catalog.distributed import no_sync

        return no_sync(self.model)

    @property
    def grad_scaler(self) -> torch.amp.GradScaler:
        """The plan's GradScaler on the model's device; a disabled one if the plan has none."""
        acting = self._acting
        acting.asked.add("grad_scaler")
        return acting.target.memo.scaler or acting._disabled_scaler

    @property
    def _acting(self) -> SpeedContext:
        """The context under which the model is measured now, or any measurement of this thread."""
        measured = _MEASURED.get(self._key)
        if measured is None and _MEASURED:
            here = threading.get_ident()
            measured = next((one for one in _MEASURED.values() if one._thread == here), None)
        return self if measured is None else measured

    # Applying and undoing the plan.

    def __enter__(self) -> SpeedContext:
        if self.model is None:
            raise SpeedKitError("the model of this context is gone: keep a name for it")
        if self.restored:
            raise SpeedKitError("this context was restored: apply_speedups() makes a new one")
        self._entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def put_in_force(self) -> None:
        """Apply the plan in place of the hidden one on its model."""
        model, below = self.model, contexts_on(self.model)
        with interrupts.uninterrupted():
            self._activate()
            _ON.setdefault(self._key, []).append(self)
            weakref.finalize(unwrapped(model), _end, self._key).atexit = False
            if below and not below[-1]._entered:
                _finish_plain(below[:-1])  # no `with` block returns to these
        CHANGES.tell(model)

    def withdraw(self) -> None:
        """Undo `put_in_force`, also if it was interrupted: the earlier plan is in force again."""
        self._entered = True
        self.restore()

    def restore(self) -> None:
        """Undo the plan, and keep the trained values. A second call does nothing."""
        model = self.model
        if self.restored or model is None:
            return
        with interrupts.uninterrupted():
            contexts = contexts_on(model)
            on_top = contexts[-1:] == [self]
            try:
                self._deactivate()
            finally:  # a part that can't be undone must not keep the rest from it
                self._finish()
                if on_top and not self._entered:
                    _finish_plain(contexts[:-1])
                if on_top and (left := contexts_on(model)):
                    left[-1]._activate()
        CHANGES.tell(model)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Apply a plan for the block, to measure it, without a record of its changes.

        A step that uses another context of the model runs under this plan in the block.
        """
        around = _MEASURED.get(self._key)
        try:
            with interrupts.uninterrupted():
                self._activate(observe=False)
                self._thread = threading.get_ident()
                _MEASURED[self._key] = self
            yield
        finally:
            with interrupts.uninterrupted():
                _MEASURED.pop(self._key, None)
                if around is not None:
                    _MEASURED[self._key] = around
                self._deactivate()

    def _activate(self, observe: bool = True) -> None:
        with self.target.searched_once(), ExitStack() as stack:
            if observe:
                self.before = observed(self.target)
            for decision in self.own_plan:
                if decision.active:
                    stack.enter_context(named(decision.name).applied(decision, self.target))
            self._around = {
                d.name: named(d.name).around_forward(d, self.target) for d in self.own_plan
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
        left = [other for other in _ON.pop(self._key, ()) if other is not self]
        if left:
            _ON[self._key] = left
        self.target.memo.let_go()

    def __repr__(self) -> str:
        state = "restored" if self.restored else "applied" if self.active else "waiting"
        on = [f"{d.name}={d.value}" for d in self.own_plan if d.active] or ["nothing to change"]
        return f"<SpeedContext {state}: {', '.join(on)}>"


# State at module level, on purpose: a plan is on its model wherever that is used. By the model's
# id, since a model may compare as it likes: the plans on it, and the one that is being measured.
_ON: dict[int, list[SpeedContext]] = {}
_MEASURED: dict[int, SpeedContext] = {}


def is_measuring() -> bool:
    """Return whether a plan is in force for a measurement at present."""
    return bool(_MEASURED)


def observed(target: Target) -> dict[str, Any]:
    """Return every flag, and the state that the catalog may change, by name."""
    values = dict(flags.snapshot())
    for optimization in CATALOG:
        values.update(optimization.observe(target))
    return values


def contexts_on(model: torch.nn.Module) -> list[SpeedContext]:
    return [*_ON.get(id(unwrapped(model)), ())]


def planned() -> list[torch.nn.Module]:
    """Return the models that plans are in force on."""
    every = (context.model for contexts in _ON.values() for context in contexts)
    return list({id(model): model for model in every if model is not None}.values())


def abandon(model: torch.nn.Module) -> None:
    """End the plans on a model without undoing them: its process group is gone."""
    for context in contexts_on(model):
        context._finish()


@contextmanager
def hidden(*models: torch.nn.Module) -> Iterator[None]:
    """Hide all plans on the models in the block: the models are in their original state."""
    with ExitStack() as stack:
        for top in [context for model in models for context in contexts_on(model)[-1:]]:
            stack.callback(show, top)
            hide(top)
        yield


def hide(context: SpeedContext) -> None:
    """Undo the plan of a context until `show`; no optimizer may be made until then."""
    with interrupts.uninterrupted():
        context.target.remember = True
        context._deactivate()


def show(context: SpeedContext) -> None:
    """Put a hidden plan into force, unless it was restored or the model has a newer plan."""
    with interrupts.uninterrupted():
        model = context.model
        if not context.active and model is not None and contexts_on(model)[-1:] == [context]:
            context._activate()
        context.target.forget()


def restore_all() -> int:
    """Undo every plan in this process, the newest first; return the number of plans."""
    contexts = [context for every in _ON.values() for context in every]
    for context in contexts[::-1]:
        context.restore()
    return len(contexts)


def _finish_plain(contexts: Sequence[SpeedContext]) -> None:
    """End the newest plans, except those from the last one that a `with` block entered down."""
    for context in takewhile(lambda context: not context._entered, reversed(contexts)):
        context._finish()


def _end(key: int) -> None:
    """End the plans of a model that is gone: flags and optimizers go back."""
    contexts = _ON.pop(key, [])

    def close() -> None:
        for context in contexts[::-1]:
            context._deactivate()
            context.target.memo.let_go()

    for context in contexts:
        context.restored = True
    interrupts.run_when_safe(close)


atexit.register(restore_all)
