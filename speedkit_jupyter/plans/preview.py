"""What a config would change, found without applying anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.optimization import decided
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext, observed
from speedkit_jupyter.plans.planning import Plan, plan
from speedkit_jupyter.plans.sources import from_word
from speedkit_jupyter.support.wrappers import each_once


@dataclass(frozen=True)
class Preview:
    """A plan, and flags and state of model and optimizers originally, now and if it were applied.

    `words` holds each optimization's decision for every word of its option.
    """

    plan: Plan
    before: Mapping[str, Any]
    now: Mapping[str, Any]
    after: Mapping[str, Any]
    words: Mapping[str, Mapping[str, Decision]]
    applied: SpeedContext | None

    @property
    def pending(self) -> bool:
        """Whether applying would decide otherwise than what is in force."""
        if self.applied is None:
            return any(decision.active for decision in self.plan)
        return self.plan.active_values() != self.applied.plan.active_values()

    def rows(self) -> list[tuple[str, Any, Any, Any]]:
        """Return name, before, now and after, of what is not the same in all three."""
        every = [(name, self.before[name], self.now[name], self.after[name]) for name in self.now]
        return [row for row in every if not row[1] == row[2] == row[3]]


def preview(
    model: torch.nn.Module, config: SpeedConfig, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Preview:
    """Plan from the model's original state, as applying would; touches nothing."""
    applied = applied_to(model)
    target = Target(model, optimizers)
    facts = replace(Facts.read(model, optimizers), optimizers_later=True)
    before = now = observed(target)
    if applied is not None:
        target = replace(target, memo=applied.target.memo)  # autocast is part of what is observed
        now = observed(target)
        before = now | applied.before
        # The facts before the plan in force; of optimizers unknown to it, those of now.
        pairs = zip(each_once(optimizers), facts.optimizers, strict=True)
        originals = tuple(applied.facts_of.get(one, its_facts) for one, its_facts in pairs)
        facts = replace(applied.facts, optimizers=originals)
    hardware = Hardware.current()
    planned = plan(config, hardware, facts)
    view = Preview(planned, before, now, now, _words(config, hardware, facts), applied)
    members = () if applied is None else applied.target.optimizers
    later = any(all(optimizer is not member for member in members) for optimizer in optimizers)
    if applied is not None and not view.pending and not later:
        return view
    return replace(view, after=before | _expected(planned, target, replace(facts, flags=before)))


def _expected(planned: Plan, target: Target, facts: Facts) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for optimization, decision in zip(CATALOG, planned, strict=True):
        if decision.active:
            values |= optimization.expected(decision, target, facts)
        facts = optimization.facts_after(decision, facts)
    return {name: value for name, value in values.items() if name in facts.flags}


def _words(config: SpeedConfig, hardware: Hardware, facts: Facts) -> dict[str, dict[str, Decision]]:
    """Return what each optimization decides for each of its words, all else as in the config."""
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
