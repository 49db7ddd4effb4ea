"""Put a plan in force on a model, and undo the plan exactly.

`_apply` changes the model, `_undo` undoes the changes. `plans/registry.py` has all contexts.

| state | begins with | ends with |
| --- | --- | --- |
| planned | `SpeedContext(model, config)` | `put_in_force` |
| in force | `put_in_force`, `show`, `restore` of a newer plan | `hide`, `restore` |
| hidden | `hide`: by a newer plan or a measurement | `show`, `restore`, `restore` of a newer plan |
| measured | the block `MeasuredContext.in_force` | the end of the block |
| restored | `restore`, `roll_back`, `abandon`, newer plans, deletion of the model | never |
"""

from __future__ import annotations

import atexit
import threading
import weakref
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
from speedkit_jupyter.plans.registry import APPLIED, CHANGES, MEASURED, contexts_of, key_of
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue import heap, interrupts


class OpenBlocks(threading.local):
    """The context managers that each thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.blocks = list[AbstractContextManager[Any]]()


class ReusableContext(ContextDecorator):
    """A context manager and decorator. Each use enters a new context manager from `make()`.

    It can be entered repeatedly, nested and in several threads.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._open = make, OpenBlocks()

    def __enter__(self) -> Any:
        block = self._make()
        result = block.__enter__()
        self._open.blocks.append(block)
        return result

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        return self._open.blocks.pop().__exit__(kind, error, trace)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReusableContext:
        return ReusableContext(self._make)  # a copied module follows the same plan


class SpeedContext:
    """An applied plan. In a `with` statement, the plan is undone at the end of the block.

    The context keeps neither model nor optimizers alive. The plan ends when the model is deleted.

    Attributes:
        plan: The decisions, with their reasons, and with `notes` as hints.
        facts: The facts of the model before the plan; `facts_of` has each optimizer's facts.
        notes: Remarks on events since the plan was applied, by optimization.
        before: Flags, and the state of model and optimizers, before the plan.
        asked: The attributes among `autocast` and `grad_scaler` that the user's code has used.

    Example::

        model, ctx = apply_speedups(model, optimizer=optimizer)
        with ctx:
            train(model)
    """

    _searches = True  # whether to find optimizers that were not passed

    def __init__(
        self,
        model: torch.nn.Module,
        config: SpeedConfig,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        made: Sequence[OptimizerFacts] = (),
    ) -> None:
        """Plan for a model in its original state. `made` describes optimizers created later."""
        heap.settle()  # so that glibc's thresholds are equal in all measured processes
        self.config = config
        self.target = Target(model, optimizers, search=self._searches, made=tuple(made))
        self.notes = self.target.notes
        self.before: dict[str, Any] = {}
        self.asked = self.target.memo.asked
        self.restored = False
        facts = Facts.read(model, self.target.optimizers)
        self.facts_of = weakref.WeakKeyDictionary(
            dict(zip(self.target.optimizers, facts.optimizers, strict=True))
        )
        facts = facts.stepped_by(self.target.made)
        self.facts = replace(facts, optimizers_later=self.target.search)
        self.own_plan = plan(config, Hardware.current(), self.facts)
        self._entered = False
        # Created once, because a training loop requests these context managers at every step.
        self._autocast_block = ReusableContext(self._autocast)
        self._sdpa_block = ReusableContext(self._sdpa)
        self._stack: ExitStack | None = None
        self._around: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
        self._key = key_of(model)

    @property
    def model(self) -> torch.nn.Module:
        """Return the user's model object; None once it is deleted."""
        return self.target.model

    @property
    def plan(self) -> Plan:
        """Return the plan with notes as hints; in a measured step, the measured variant's plan."""
        acting = self._acting
        return acting.own_plan.noted(acting.notes)

    @property
    def active(self) -> bool:
        """Return whether this plan is in force: neither restored nor hidden."""
        return self._stack is not None

    @property
    def kept(self) -> tuple[str, ...]:
        """Return names of flags that undoing did not reset, because the user had changed them."""
        return tuple(dict.fromkeys(self.target.kept))

    def changes(self) -> tuple[Change, ...]:
        """Return changes of flags, model and optimizers since `before`; none without the model."""
        now = self.before if self.model is None else observed(self.target)
        return flags.diff(self.before, now)

    def adopt_compiled(self, other: SpeedContext) -> None:
        """Reuse the compiled code of another context of the model. This plan must be hidden."""
        if other.target.memo.compiled_call is not None:
            self.target.memo.compiled_call = other.target.memo.compiled_call

    # For a training step.

    @property
    def device(self) -> torch.device:
        """Return the device for batches: the first non-meta parameter's device, or the CPU."""
        parameters = () if self.model is None else self.model.parameters()
        return next((one.device for one in parameters if not one.is_meta), torch.device("cpu"))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager: the plan's autocast, or a no-op if the plan isn't in force."""
        return self._autocast_block

    def sdpa(self) -> AbstractContextManager[Any]:
        """Return a context manager that sets the plan's attention kernel, if the plan is active."""
        return self._sdpa_block

    def _autocast(self) -> AbstractContextManager[Any]:
        acting = self._acting if MEASURED else self  # usually saves a property call at every step
        acting.asked.add("autocast")
        if acting._stack is None:
            return nullcontext()
        return acting._around["precision"]()

    def _sdpa(self) -> AbstractContextManager[Any]:
        acting = self._acting
        return nullcontext() if acting._stack is None else acting._around["sdpa"]()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager that accumulates gradients without reducing them across ranks.

        Use it for all but the last forward and backward pass, which reduces the sums.
        """
        with ExitStack() as stack:
            for optimization in CATALOG:
                stack.enter_context(optimization.no_sync(self.model))
            yield

    @property
    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the plan's GradScaler on the model's device, or else a disabled GradScaler."""
        acting = self._acting
        acting.asked.add("grad_scaler")
        return acting.target.memo.scaler or torch.amp.GradScaler(enabled=False)

    @property
    def _acting(self) -> SpeedContext:
        """Return the context measured for this model, or else in this thread, or else `self`."""
        here, own = threading.get_ident(), MEASURED.get(self._key)
        others = (context for thread, context in MEASURED.values() if thread == here)
        acting: SpeedContext = own[1] if own else next(others, self)
        return acting

    # Applying and undoing the plan.

    def __enter__(self) -> SpeedContext:
        if self.model is None:
            raise SpeedKitError("the model of this context was deleted: keep a variable for it")
        if self.restored:
            raise SpeedKitError("this context was restored: apply_speedups() makes a new one")
        self._entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def put_in_force(self) -> None:
        """Apply the plan and register the context; the model's earlier plan must be hidden."""
        model, earlier = self.model, contexts_of(self.model)
        with interrupts.uninterrupted():
            self._apply()
            APPLIED.setdefault(self._key, []).append(self)
            weakref.finalize(unwrapped(model), _restore_all_of, self._key).atexit = False
            if earlier and not earlier[-1]._entered:
                _remove_unreachable(earlier[:-1])
        CHANGES.tell(model)

    def roll_back(self) -> None:
        """Undo `put_in_force`, even if it was interrupted; put the earlier plan in force."""
        self._entered = True  # so that `restore` reapplies the earlier plan
        self.restore()

    def restore(self) -> None:
        """Undo the plan, but keep trained values and flags that the user changed under the plan.

        If this plan is the newest, an earlier plan is reapplied: the previous plan if this context
        was used in `with`, else the newest plan whose `with` block is still running.
        A restored context, or a context of a deleted model, changes nothing.
        """
        model = self.model
        if self.restored or model is None:
            return
        with interrupts.uninterrupted():
            contexts = contexts_of(model)
            is_newest = contexts[-1:] == [self]
            try:
                self._undo()
            finally:  # the context ends even if undoing a part fails
                self._remove()
                if is_newest and not self._entered:
                    _remove_unreachable(contexts[:-1])
                if is_newest and (rest := contexts_of(model)):
                    rest[-1]._apply()
        CHANGES.tell(model)

    @torch.inference_mode(False)  # else new memory of weights would be inference tensors
    def _apply(self, observe: bool = True) -> None:
        """Apply the plan; mark decisions without effect as declined. If `observe`, set `before`."""
        with self.target.searched_once(), ExitStack() as stack:
            plan, target = self.own_plan, self.target
            if observe:
                self.before = observed(target)
            for decision in plan:
                if decision.active:
                    stack.enter_context(named(decision.name).applied(decision, target))
            self.own_plan = plan = plan.without(target.declined)
            self._around = {d.name: named(d.name).around_forward(d, target) for d in plan}
            self._stack = stack.pop_all()

    @torch.inference_mode(False)
    def _undo(self) -> None:
        """Undo the plan's changes, if the plan is in force."""
        stack, self._stack = self._stack, None
        if stack is not None:
            with self.target.searched_once():
                stack.close()

    def _remove(self) -> None:
        """Unregister the context, mark it as restored, drop its compiled code and other caches."""
        self.restored = True
        others = [other for other in APPLIED.pop(self._key, ()) if other is not self]
        if others:
            APPLIED[self._key] = others
        self.target.memo.let_go()

    def __repr__(self) -> str:
        state = "restored" if self.restored else "applied" if self.active else "hidden"
        values = [f"{d.name}={d.value}" for d in self.own_plan if d.active]
        return f"<SpeedContext {state}: {', '.join(values) or 'nothing to change'}>"


class MeasuredContext(SpeedContext):
    """A plan for measured blocks only. In a block, the model's other contexts follow this plan."""

    _searches = False  # the step's optimizers are known

    @property
    def plan(self) -> Plan:
        return self.own_plan.noted(self.notes)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Apply the plan in the block, then undo it."""
        outer = MEASURED.get(self._key)
        try:
            with interrupts.uninterrupted():
                self._apply(observe=False)
                MEASURED[self._key] = threading.get_ident(), self
            yield
        finally:
            with interrupts.uninterrupted():
                MEASURED.pop(self._key, None)
                if outer is not None:
                    MEASURED[self._key] = outer
                self._undo()


def observed(target: Target) -> dict[str, Any]:
    """Return all flags, and the state that the catalog may change, by name."""
    values = dict(flags.snapshot())
    for optimization in CATALOG:
        values.update(optimization.observe(target))
    return values


def abandon(model: torch.nn.Module) -> None:
    """End a model's plans without undoing them, because its process group has ended."""
    for context in contexts_of(model):
        context._remove()


@contextmanager
def hidden(*models: torch.nn.Module) -> Iterator[None]:
    """Hide the models' plans in the block, and `show` them at the end of the block."""
    with ExitStack() as stack:
        for newest in [context for model in models for context in contexts_of(model)[-1:]]:
            stack.callback(show, newest)
            hide(newest)
        yield


def hide(context: SpeedContext) -> None:
    """Undo a context's plan until `show`; no optimizer may be created until then."""
    with interrupts.uninterrupted():
        context.target.remember = True
        context._undo()


def show(context: SpeedContext) -> None:
    """Put a hidden plan in force, unless it was restored or the model has a newer plan."""
    with interrupts.uninterrupted():
        model = context.model
        if not context.active and model is not None and contexts_of(model)[-1:] == [context]:
            context._apply()
        context.target.forget()


def restore_all() -> int:
    """Undo all plans of the process, each model's newest plan first; return how many there were."""
    contexts = [context for every in APPLIED.values() for context in every]
    for context in contexts[::-1]:
        context.restore()
    return len(contexts)


def _remove_unreachable(contexts: Sequence[SpeedContext]) -> None:
    """Remove contexts from the newest on; stop before one whose `with` block is still running."""
    for context in takewhile(lambda context: not context._entered, reversed(contexts)):
        context._remove()


def _restore_all_of(key: int) -> None:
    """Restore the flags and optimizers that the plans of a deleted model changed."""
    contexts = APPLIED.pop(key, [])

    def undo() -> None:
        for context in contexts[::-1]:
            context._undo()
            context.target.memo.let_go()

    for context in contexts:
        context.restored = True
    interrupts.run_when_safe(undo)


atexit.register(restore_all)
