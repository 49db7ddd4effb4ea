"""`apply_speedups()` applies a plan to a model; `preview()` makes a plan and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.optimization import decided
from speedkit_jupyter.catalog.facts.model import Facts, OptimizerFacts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.config import Origin, SpeedConfig, from_word
from speedkit_jupyter.plans.context import MeasuredContext, SpeedContext, hidden
from speedkit_jupyter.plans.planning import Plan, plan
from speedkit_jupyter.plans.registry import contexts_of
from speedkit_jupyter.support import arguments, lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.wrappers import each_once, unwrapped
from speedkit_jupyter.torchglue import interrupts


@hide_internal_frames
def apply_speedups(
    model: torch.nn.Module,
    config: SpeedConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> tuple[torch.nn.Module, SpeedContext]:
    """Plan for this model on this machine and apply the plan, in place.

    The plan replaces an earlier plan of the model. After an error the model is unchanged. If Ctrl-C
    arrives just as the function returns, the plan stays in force until `restore_all()`.

    Args:
        model: The model.
        config: The options of the plan (default: all auto).
        optimizer: One or several optimizers of the model. Other optimizers in this process that
            hold the model's parameters are found when the plan is applied.

    Returns:
        The same model object, and a SpeedContext that keeps neither model nor optimizers alive.

    Raises:
        ArgumentError: An argument has the wrong type.
        ConfigError: SPEEDKIT_HARDWARE, or an option's environment variable, is invalid.
        SpeedKitError: An optimization can't be applied, or `compile.required` can't be met.

    Example::

        model, ctx = apply_speedups(model, optimizer=optimizer)
        train(model, optimizer)  # the loop stays as it is
        ctx.restore()
    """
    arguments.model("model must be", model)
    arguments.of_kind("config", config, SpeedConfig)
    given = [] if optimizer is None else optimizer
    listed = list(given) if isinstance(given, Iterable) else given
    optimizers, context = each_once(arguments.optimizers("optimizer", listed)), None
    try:
        with interrupts.uninterrupted(), hidden(model):
            context = SpeedContext(model, SpeedConfig() if config is None else config, optimizers)
            decision = context.own_plan["compile"]
            if decision.declined and context.config.request("compile").value.required:
                raise SpeedKitError(f"compile is required: {decision.why}")
            context.put_in_force()
    except BaseException:  # also an interrupt that was delayed until the plan was applied
        if context is not None:
            context.roll_back()
        raise
    return model, context


@hide_internal_frames
def autocast_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """Return `context.autocast()`, the context manager for the forward pass.

    Raises:
        ArgumentError: `context` is not a SpeedContext.
    """
    arguments.of_kind("context", context, SpeedContext, optional=False)
    return context.autocast()


@hide_internal_frames
def sdp_context(context: SpeedContext) -> AbstractContextManager[Any]:
    """Return `context.sdpa()`, the context manager that sets the plan's attention kernel.

    Raises:
        ArgumentError: `context` is not a SpeedContext.
    """
    arguments.of_kind("context", context, SpeedContext, optional=False)
    return context.sdpa()


def prepare(
    model: torch.nn.Module,
    config: SpeedConfig | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    made: Sequence[OptimizerFacts] = (),
) -> MeasuredContext:
    """Return a context for a measurement; without a config, its plan changes nothing.

    The model must be in its original state. `made` describes optimizers that measured code creates.
    """
    if config is None:
        config = SpeedConfig(Origin("baseline", [entry.name for entry in CATALOG])).alone()
    return MeasuredContext(model, config, optimizers, made)


def applied_to(model: torch.nn.Module) -> SpeedContext | None:
    """Return the model's newest context, in force or hidden; None if no plan is applied."""
    return next(reversed(contexts_of(model)), None)


def in_force_or_none(models: Sequence[torch.nn.Module]) -> SpeedContext | None:
    """Return the first model's context, or a context that changes nothing; None without models."""
    return (applied_to(models[0]) or prepare(models[0], None)) if models else None


# --- a plan that is not applied ---


@dataclass(frozen=True)
class Preview:
    """A plan that is not applied, and the model's newest context (or None).

    `words[name][word]` is the decision about optimization `name` if its option were `word`.
    """

    plan: Plan
    words: Mapping[str, Mapping[str, Decision]]
    applied: SpeedContext | None

    @property
    def pending(self) -> bool:
        """Return whether applying `plan` would change the active values."""
        active = {} if self.applied is None else self.applied.plan.active_values()
        return self.plan.active_values() != active


def preview(
    model: torch.nn.Module, config: SpeedConfig, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Preview:
    """Return the plan for the model's original state as a Preview. Change nothing."""
    applied = applied_to(model)
    facts = replace(Facts.read(model, optimizers), optimizers_later=True)
    if applied is not None:  # use current facts only for optimizers that are new to the plan
        pairs = zip(each_once(optimizers), facts.optimizers, strict=True)
        originals = tuple(applied.facts_of.get(one, its_facts) for one, its_facts in pairs)
        facts = replace(applied.facts, optimizers=originals)
    hardware = Hardware.current()
    return Preview(plan(config, hardware, facts), _words(config, hardware, facts), applied)


def _words(config: SpeedConfig, hardware: Hardware, facts: Facts) -> dict[str, dict[str, Decision]]:
    """Return decisions by optimization and option value; other options are as in `config`."""
    decisions: dict[str, dict[str, Decision]] = {}
    for optimization in CATALOG:
        name = optimization.name
        decisions[name] = {}
        for word in ("auto", *optimization.words):
            asked = config.changed(name, from_word(word, optimization.words)).request(name)
            decisions[name][word] = decided(optimization, asked, hardware, facts)
        decision = decided(optimization, config.request(name), hardware, facts)
        facts = optimization.facts_after(decision, facts)
    return decisions


# --- the loop around the model ---


def trained_by(model: torch.nn.Module, names: Mapping[str, Any]) -> str:
    """Return the library that runs the model's training loop, "Lightning" or "transformers", or "".

    It is recognized by a LightningModule that contains the model, or by the model's Trainer.
    """
    whole = unwrapped(model)
    for value in (model, *(value for name, value in list(names.items()) if name[:1] != "_")):
        libraries = {base.__name__: base.__module__ for base in type(value).__mro__}
        if "lightning" in str(libraries.get("LightningModule")):
            if any(part is whole for part in value.modules()):
                return "Lightning"
        elif str(libraries.get("Trainer")).startswith("transformers"):
            held = lookup.attributes_of(value).get("model")
            if held is not None and unwrapped(held) is whole:
                return "transformers"
    return ""
