"""Applying a plan to a model, and what is applied to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.plans.config import SpeedConfig, nothing
from speedkit_jupyter.plans.context import SpeedContext, contexts_on
from speedkit_jupyter.plans.context import hidden as hidden
from speedkit_jupyter.plans.context import hide as hide
from speedkit_jupyter.plans.context import show as show
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support import arguments, interrupts
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    import torch


@hide_internal_frames
def apply_speedups(
    model: torch.nn.Module,
    config: SpeedConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> tuple[torch.nn.Module, SpeedContext]:
    """Plan for this model on this machine and apply the plan, in place.

    Returns the same model object and its context, which holds neither model nor optimizers. A model
    that has a plan already is planned anew from its original state. Raises TypeError for arguments
    of the wrong kind; whatever is raised, nothing is left half applied. An interrupt on the very
    return leaves the plan to `restore_all()`.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"apply_speedups needs a torch.nn.Module, not {type(model).__name__}")
    if config is not None and not isinstance(config, SpeedConfig):
        raise ArgumentError("config must be a SpeedConfig: SpeedConfig.from_dict({...}) makes one")
    optimizers, context = _each(optimizer), None
    try:
        with interrupts.uninterrupted(), hidden(model):
            context = SpeedContext(model, SpeedConfig() if config is None else config, optimizers)
            context.put_in_force()
    except BaseException:  # also an interrupt that was held back until all was applied
        if context is not None:
            context.withdraw()
        raise
    return model, context


def autocast_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """Return `context.autocast()`."""
    arguments.of_kind("context", context, SpeedContext, optional=False)
    return context.autocast()


def sdp_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """Return `context.sdpa()`."""
    arguments.of_kind("context", context, SpeedContext, optional=False)
    return context.sdpa()


def prepare(
    model: torch.nn.Module,
    config: SpeedConfig | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    made: Sequence[OptimizerFacts] = (),
) -> SpeedContext:
    """Return a context that is planned and not applied, to be switched on and off by `in_force()`.

    Without a config the plan changes nothing. The model must be in its original state. Such
    optimizers as were `made` by what will run under it are met there, in the thread that enters.
    """
    return SpeedContext(model, nothing() if config is None else config, optimizers, tuple(made))


def applied_to(model: torch.nn.Module) -> SpeedContext | None:
    """Return the context whose plan is (or, inside `hidden`, would be) in force on the model."""
    return next(reversed(contexts_on(model)), None)


def in_force_or_none(models: Sequence[torch.nn.Module]) -> SpeedContext | None:
    """Return the context in force on the first model, or one of no plan, for code that asks one."""
    for model in models:
        return applied_to(model) or prepare(model, None)
    return None


def plan_applied_to(model: torch.nn.Module) -> Plan | None:
    """Return the plan that is applied to the model now."""
    context = applied_to(model)
    return None if context is None else context.own_plan


def _each(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    listed = list(optimizer) if isinstance(optimizer, Iterable) else optimizer
    return each_once(arguments.optimizers("optimizer", listed))
