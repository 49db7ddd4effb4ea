"""Candidate plans: the values that the catalog suggests, combined and varied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from speedkit_jupyter import catalog as optimizations
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.planning import plan
from speedkit_jupyter.step.variants import Variant, of_values, words

# Optimizations that lower precision; a plan has at most one.
LOWERING = frozenset(entry.name for entry in CATALOG if entry.lowers)
# This optimization, if it has an effect, is in every plan that races: toggling is slow and noisy.
ALWAYS = "malloc"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan; its `values` by optimization are called its parts."""

    values: Mapping[str, Any]

    @property
    def costly(self) -> bool:
        """Return whether the plan compiles code, so that its first step takes seconds."""
        return any(optimizations.named(name).costly for name in self.values)

    @cached_property
    def name(self) -> str:
        return "+".join(_word(name, value) for name, value in self.values.items()) or "baseline"

    def variant(self) -> Variant:
        return of_values(self.name, self.values) if self.values else Variant("baseline")

    @property
    def config(self) -> SpeedConfig:
        return cast(SpeedConfig, self.variant().config)

    def without(self, *names: str) -> Candidate:
        return Candidate({n: value for n, value in self.values.items() if n not in names})

    def part(self, name: str) -> Candidate:
        return Candidate({name: self.values[name]})

    def without_each(self) -> list[Candidate]:
        """Return the plans that lack one part; an empty list for fewer than two parts."""
        return [self.without(name) for name in self.values] if len(self.values) > 1 else []

    def joined(self, single: Candidate) -> Candidate:
        """Return the plan plus the part of `single`, minus parts that conflict with that part."""
        (name,) = single.values
        excluded = optimizations.named(name).excludes | (LOWERING if name in LOWERING else set())
        excluded |= {one for one in self.values if name in optimizations.named(one).excludes}
        return self.without(*excluded) + single

    def neighbours(self, singles: Sequence[Candidate]) -> list[Candidate]:
        """Return the plans that lack one part, then the plans with one new part of `singles`.

        For a compiled plan, also return the neighbors of the plan without compilation.
        """
        new = [single for single in singles if not single.values.items() <= self.values.items()]
        near = [*self.without_each(), *map(self.joined, new)]
        costly = [name for name in self.values if optimizations.named(name).costly]
        return near + self.without(*costly).neighbours(singles) if costly else near

    def __add__(self, other: Candidate) -> Candidate:
        """Return a plan with the parts of both plans; the other plan's values take precedence."""
        values = {**self.values, **other.values}
        return Candidate({one.name: values[one.name] for one in CATALOG if one.name in values})


BASELINE = Candidate({})
# This plan compiles the whole model, even if `scope: auto` would compile repeated blocks.
WHOLE = Candidate({"compile": {"enabled": True, "scope": "model"}})


def candidates(
    hardware: Hardware, every: Sequence[Facts], keep: Collection[str] = ()
) -> list[Candidate]:
    """Return the plans with one part that affects at least one model, in the catalog's order.

    Leave out optimizations that are in `keep`, change the model, or are superseded.
    """
    found: dict[str, Candidate] = {}
    for entry in CATALOG:
        if entry.effect is Effect.CHANGES_MODEL or entry.name in keep:
            continue
        for one in every:
            for single in (Candidate({entry.name: v}) for v in entry.candidates(hardware, one)):
                plans = (plan(single.config, hardware, facts) for facts in every)
                if any(decision.active for one in plans for decision in one):
                    found.setdefault(single.name, single)
    names = {name for single in found.values() for name in single.values}
    superseded = {one for name in names for one in optimizations.named(name).supersedes}
    return [one for one in found.values() if not superseded & one.values.keys()]


def first_plans(singles: Sequence[Candidate], steps_are_long: bool) -> list[Candidate]:
    """Return plans in racing order: a combination, its compiled forms, variations, single parts.

    The combination has the first value of each optimization that can be joined and doesn't compile.
    Optimizations without a generally best value, such as the thread count, are not in it.
    """
    cheap = [single for single in singles if not single.costly]
    costly = [single for single in singles if single.costly]
    start = BASELINE
    for single in cheap:
        (name,) = single.values
        is_choice = optimizations.named(name).rivals or name in start.values
        if not is_choice and start.joined(single).values.keys() > start.values.keys():
            start = start + single
    compiled = [start.joined(single) for single in costly]  # on GPUs also with CUDA graphs
    alone = [start.part(name) for name in start.values]
    # Long steps leave time for few plans, so plans with as many parts as `start` come first. For
    # short steps single parts come first, because a proof also tries the plan without each part.
    near = sorted(start.neighbours(cheap), key=lambda plan: len(plan.values) != len(start.values))
    rest = [*near, *alone] if steps_are_long else [*alone, *near]
    return [start, *compiled, *rest, *cheap, *costly]


def _word(name: str, value: Any) -> str:
    """Return the name of a part, such as `bf16`, `tf32:medium` or `compile:reduce-overhead`."""
    entry = optimizations.named(name)

    def spelled_out(value: Any) -> Any:  # adds default fields: `compile` implies its default mode
        return entry.Options.model_validate(value) if entry.fields else (type(value), value)

    for word, values in words().items():
        if values.keys() == {name} and spelled_out(values[name]) == spelled_out(value):
            return word
    if isinstance(value, Mapping):
        value = "/".join(f"{key}={one}" for key, one in value.items() if key != "enabled")
    return name if value is True else f"{name}:{value}"
