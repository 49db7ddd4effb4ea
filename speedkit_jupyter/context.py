"""A plan that is applied to a model, and undone exactly."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from speedkit_jupyter import flags, interrupts
from speedkit_jupyter.config import SpeedConfig, nothing
from speedkit_jupyter.exceptions import SpeedKitError
from speedkit_jupyter.facts import Facts
from speedkit_jupyter.flags import Change
from speedkit_jupyter.hardware import Hardware
from speedkit_jupyter.listeners import Listeners
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base import Optimization, Target
from speedkit_jupyter.planning import Plan, plan
from speedkit_jupyter.wrappers import each_once, is_optimizer, unwrapped

if TYPE_CHECKING:
    import torch

# Where a model keeps the contexts that lie on it or on a wrapper of it. They live and die with it.
SLOT = "_speedkit_contexts"
# Every context that is in force or waiting, for `restore_all`; holds none of them alive.
_LIVE: WeakSet[SpeedContext] = WeakSet()
# The prepared context that is in force on a model, by the model's id: what it is measured under.
_STANDING_IN: dict[int, SpeedContext] = {}
# Told with the model after a plan was applied to it or restored; a benchmark's own plans are not.
CHANGES = Listeners()


def apply_speedups(
    model: torch.nn.Module,
    config: SpeedConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> tuple[torch.nn.Module, SpeedContext]:
    """Plan for this model on this machine and apply the plan, in place.

    Returns the same model object and its context. A model that has a plan already is planned
    anew from its original state. Raises TypeError for arguments of the wrong kind; whatever is
    raised, nothing is left half applied.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"apply_speedups needs a torch.nn.Module, not {type(model).__name__}")
    if config is not None and not isinstance(config, SpeedConfig):
        raise TypeError("config must be a SpeedConfig: SpeedConfig.from_dict({...}) makes one")
    context = SpeedContext(model, SpeedConfig() if config is None else config, _listed(optimizer))
    context._start()
    return model, context


def autocast_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """`context.autocast()`, as a function."""
    return context.autocast()


def sdp_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """`context.sdpa()`, as a function."""
    return context.sdpa()


def prepare(
    model: torch.nn.Module,
    config: SpeedConfig | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> SpeedContext:
    """A context that is planned and not applied, to be switched on and off by `in_force()`.

    Without a config the plan changes nothing. The model must be in its original state.
    """
    context = SpeedContext(model, nothing() if config is None else config, optimizers)
    context.target.search = False
    context._plan()
    return context


@contextmanager
def hidden(model: torch.nn.Module) -> Iterator[None]:
    """The model in its original state for the block; the plan in force returns after it.

    Not so where it was restored or replaced meanwhile.
    """
    top = in_force(model)
    try:  # around the first part too: an interrupt that was held back there arrives here
        with interrupts.held_back():
            if top is not None:
                top.target.remember = True
                hide(top)
        yield
    finally:
        with interrupts.held_back():
            if top is not None:
                show(top)
                top.target.forget()


def in_force(model: torch.nn.Module) -> SpeedContext | None:
    """The context whose plan is (or, inside `hidden`, would be) in force on the model."""
    contexts = _contexts(model)
    return contexts[-1] if contexts else None


def hide(context: SpeedContext) -> None:
    """Take its plan away for a while."""
    context._deactivate()


def show(context: SpeedContext) -> None:
    """Its plan returns, unless it was restored or another one lies on its model by now."""
    if not context.active and in_force(context.model) is context:
        context._activate()


def plan_in_force(model: torch.nn.Module) -> Plan | None:
    """The plan that is applied to the model now."""
    contexts = _contexts(model)
    return contexts[-1].plan if contexts else None


def restore_all() -> int:
    """Restore every context in this process; returns how many there were."""
    contexts = [context for context in _LIVE if not context.restored]
    for context in contexts:
        context.restore()
    return len(contexts)


def _restore_all_at_exit() -> None:
    """Before Python shuts down: what is undone while it does can import nothing any more."""
    atexit.unregister(restore_all)
    atexit.register(restore_all)


class SpeedContext:
    """An applied plan. As a context manager it restores at the end of the block.

    Besides the plan it knows what was found out later (`notes`) and what changed (`changes()`).
    `facts` are those of the original state. `asked` notes what code has called on it: `autocast`,
    `grad_scaler`.
    """

    plan: Plan
    facts: Facts

    def __init__(
        self,
        model: torch.nn.Module,
        config: SpeedConfig,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.config = config
        self.target = Target(model, optimizers)
        self.restored = False
        self.asked: set[str] = set()
        self._entered = False
        self._stack: ExitStack | None = None
        self._before: dict[str, Any] = {}
        self._around: dict[str, Callable[[], AbstractContextManager[Any]]] = {}

    @property
    def model(self) -> torch.nn.Module:
        """The user's own model object."""
        return self.target.model

    @property
    def active(self) -> bool:
        """Whether this plan is in force (not restored, and not hidden by a newer one)."""
        return self._stack is not None

    @property
    def device(self) -> torch.device:
        """Where the model lies now; batches belong there too."""
        import torch

        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

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
        return bool(self.target.memo.get("autocast_entered"))

    def autocast(self) -> AbstractContextManager[Any]:
        """What the forward pass belongs in: autocast of the plan's dtype; nothing once restored."""
        acting = self._acting
        acting.asked.add("autocast")
        if acting._stack is None:
            return nullcontext()
        acting.target.memo["autocast_entered"] = True
        return acting._around["precision"]()

    def sdpa(self) -> AbstractContextManager[Any]:
        """The plan's choice of attention kernel for one block; nothing once restored."""
        acting = self._acting
        return nullcontext() if acting._stack is None else acting._around["sdpa"]()

    @property
    def grad_scaler(self) -> torch.amp.GradScaler:
        """A GradScaler on the model's device; a disabled one passes everything through."""
        acting = self._acting
        acting.asked.add("grad_scaler")
        return acting._scaler

    @property
    def _acting(self) -> SpeedContext:
        """The context that its model is measured under at present, whichever the code knows."""
        return _STANDING_IN.get(id(self.model), self)

    @cached_property
    def _scaler(self) -> torch.amp.GradScaler:
        import torch

        return torch.amp.GradScaler(self.device.type, enabled=self.plan["grad_scaler"].active)

    @property
    def before(self) -> dict[str, Any]:
        """The flags and the state of model and optimizers as they were found, by name."""
        return dict(self._before)

    def changes(self) -> tuple[Change, ...]:
        """The flags and the state of model and optimizers, before and now, where they differ."""
        return flags.diff(self._before, observed(self.target))

    def restore(self) -> None:
        """Put everything back around the values. Calling it again does nothing.

        An interrupt waits until that is done.
        """
        if self.restored:
            return
        with interrupts.held_back():
            contexts = _contexts(self.model)
            on_top = contexts[-1] is self
            try:
                self._deactivate()
            finally:  # a part that can't be undone must not keep the rest from it
                self._finish()
                if on_top and not self._entered:
                    _finish_plain(contexts)
                if on_top and contexts:
                    contexts[-1]._activate()
        CHANGES.tell(self.model)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A prepared context, applied for the block; it keeps no record of what it changed.

        Every other context of the model stands for it meanwhile: a step that calls the one which
        `apply` made runs under the plan that is measured, and in a baseline under none.
        """
        key = id(self.model)
        around = _STANDING_IN.get(key)
        try:
            with interrupts.held_back():
                self._activate(observe=False)
                _STANDING_IN[key] = self
            yield
        finally:
            with interrupts.held_back():
                if around is None:
                    _STANDING_IN.pop(key, None)
                else:
                    _STANDING_IN[key] = around
                self._deactivate()

    def __enter__(self) -> SpeedContext:
        if self.restored:
            raise SpeedKitError("this context was restored: apply_speedups() makes a new one")
        self._entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if self.restored else "applied" if self.active else "waiting"
        on = [f"{d.name}={d.value}" for d in self.plan if d.active] or ["nothing to change"]
        return f"<SpeedContext {state}: {', '.join(on)}>"

    def _start(self) -> None:
        """Hide the plan that is in force, plan from the original state, and apply."""
        contexts = _contexts(self.model)
        hidden = contexts[-1] if contexts else None
        try:
            with interrupts.held_back():
                if hidden is not None:
                    hidden._deactivate()
                self._plan()
                self._activate()
                contexts.append(self)
                object.__setattr__(unwrapped(self.model), SLOT, contexts)
                _LIVE.add(self)
                _restore_all_at_exit()
        except BaseException:  # also an interrupt that was held back until all was applied
            with interrupts.held_back():
                self._withdraw(hidden)
            raise
        if hidden is not None and not hidden._entered:
            _finish_plain(contexts[:-2])  # they can't come back: `hidden` does not return to them
        CHANGES.tell(self.model)

    def _withdraw(self, hidden: SpeedContext | None) -> None:
        """As if it had never been applied."""
        self._deactivate()
        self._finish()
        if hidden is not None and not hidden.active:
            hidden._activate()

    def _plan(self) -> None:
        self.facts = Facts.read(self.model, self.target.optimizers)
        self.plan = plan(self.config, Hardware.current(), self.facts)

    def _activate(self, observe: bool = True) -> None:
        with ExitStack() as stack:
            if observe:
                self._before = observed(self.target)
            for decision in self.plan:
                if decision.active:
                    optimization = _optimization(decision.name)
                    stack.enter_context(optimization.applied(decision, self.target))
            self._around = {
                d.name: _optimization(d.name).around_forward(d, self.target) for d in self.plan
            }
            self._stack = stack.pop_all()

    def _deactivate(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _finish(self) -> None:
        """Take this context off its model for good."""
        self.restored = True
        contexts = _contexts(self.model)
        if self in contexts:
            contexts.remove(self)
        self.target.memo.pop("compiled_call", None)
        self.target.let_go()
        if not contexts:
            unwrapped(self.model).__dict__.pop(SLOT, None)


def _finish_plain(contexts: Sequence[SpeedContext]) -> None:
    """End the newest plans, down to the first that a `with` block returns to."""
    for context in [*contexts][::-1]:
        if context._entered:
            break
        context._finish()


class _Slot(list["SpeedContext"]):
    """The contexts on one model, the one in force last. Copies of the model carry none."""

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (type(None), ())


def _contexts(model: torch.nn.Module) -> _Slot:
    slot = unwrapped(model).__dict__.get(SLOT)
    return _Slot() if slot is None else slot


def _optimization(name: str) -> Optimization:
    return next(one for one in CATALOG if one.name == name)


def observed(target: Target) -> dict[str, Any]:
    """Every flag, and the state of model and optimizers that the catalog may change, by name."""
    seen = dict(flags.snapshot())
    for optimization in CATALOG:
        seen.update(optimization.observe(target))
    return seen


def _listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    listed = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in listed:
        if not is_optimizer(one):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(one).__name__}")
    return each_once(listed)
