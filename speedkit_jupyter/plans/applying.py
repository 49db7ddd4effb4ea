"""Applying a plan to a model, and what is applied to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.plans.config import SpeedConfig, nothing
from speedkit_jupyter.plans.context import SpeedContext, contexts_on
from speedkit_jupyter.plans.leaving import surely
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support import arguments, interrupts
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import lets_go
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    import torch


@lets_go
def apply_speedups(
    model: torch.nn.Module,
    config: SpeedConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> tuple[torch.nn.Module, SpeedContext]:
    """Plan for this model on this machine and apply the plan, in place.

    Returns the same model object and its context. A model that has a plan already is planned
    anew from its original state. Raises TypeError for arguments of the wrong kind; whatever is
    raised, nothing is left half applied. An interrupt on the very return, when no line of this
    function runs any more and the caller has no context yet, leaves the plan to `restore_all()`.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"apply_speedups needs a torch.nn.Module, not {type(model).__name__}")
    if config is not None and not isinstance(config, SpeedConfig):
        raise ArgumentError("config must be a SpeedConfig: SpeedConfig.from_dict({...}) makes one")
    context = SpeedContext(model, SpeedConfig() if config is None else config, _each(optimizer))
    hidden: list[SpeedContext] = []
    try:
        return _started(context, hidden)
    except KeyboardInterrupt:  # it may have come on the way out, when all was in force
        interrupts.finished(partial(context._withdraw, hidden))
        raise


@interrupts.one_in_a_row
def _started(
    context: SpeedContext, hidden: list[SpeedContext]
) -> tuple[torch.nn.Module, SpeedContext]:
    return context._start(hidden)


def autocast_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """`context.autocast()`, as a function."""
    arguments.of_kind("context", context, SpeedContext, optional=False)
    return context.autocast()


def sdp_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """`context.sdpa()`, as a function."""
    arguments.of_kind("context", context, SpeedContext, optional=False)
    return context.sdpa()


def prepare(
    model: torch.nn.Module,
    config: SpeedConfig | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    made: Sequence[OptimizerFacts] = (),
) -> SpeedContext:
    """A context that is planned and not applied, to be switched on and off by `in_force()`.

    Without a config the plan changes nothing. The model must be in its original state. Such
    optimizers as were `made` by what will run under it are met there, in the thread that enters.
    """
    context = SpeedContext(model, nothing() if config is None else config, optimizers)
    context.target.search, context._prepared = False, True
    context.target.made = tuple(made)
    context._plan()
    return context


def applied_to(model: torch.nn.Module) -> SpeedContext | None:
    """The context whose plan is (or, inside `hidden`, would be) in force on the model."""
    contexts = contexts_on(model)
    return contexts[-1] if contexts else None


def in_force_or_none(models: Sequence[torch.nn.Module]) -> SpeedContext | None:
    """For code that asks a context: that of the plan in force on the first, or one of no plan."""
    for model in models:
        return applied_to(model) or prepare(model, None)
    return None


def hide(context: SpeedContext) -> None:
    """Take its plan away for a while."""
    with interrupts.undisturbed():
        context._deactivate()


def show(context: SpeedContext) -> None:
    """Its plan returns, unless it was restored or another one lies on its model by now."""
    with interrupts.undisturbed():
        if not context.active and applied_to(context.model) is context:
            context._activate()


def plan_applied_to(model: torch.nn.Module) -> Plan | None:
    """The plan that is applied to the model now."""
    contexts = contexts_on(model)
    return contexts[-1]._planned if contexts else None


@contextmanager
def hidden(model: torch.nn.Module) -> Iterator[None]:
    """The model in its original state for the block; the plan in force returns after it.

    Not so where it was restored or replaced meanwhile.
    """
    top = applied_to(model)

    def take_away() -> None:
        if top is not None:
            top.target.remember = True
            hide(top)

    def bring_back() -> None:
        if top is not None:
            show(top)
            top.target.forget()

    with surely(bring_back):  # also where an interrupt was held back while it was taken away
        interrupts.finished(take_away)
        yield


def _each(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    listed = list(optimizer) if isinstance(optimizer, Iterable) else optimizer
    return each_once(arguments.optimizers("optimizer", listed))
