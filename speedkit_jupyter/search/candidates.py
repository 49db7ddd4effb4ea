"""Plans to try: every value that the catalog offers here, joined and varied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from speedkit_jupyter import catalog as optimizations
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.planning import plan
from speedkit_jupyter.step.variants import Variant, named, words

# A plan begins with one of these at most.
LOWERING = frozenset(entry.name for entry in CATALOG if entry.lowers)
# Where it does something it is a part of every plan.
BESIDE = "malloc"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan by its parts: config values by optimization."""

    values: Mapping[str, Any]

    @property
    def costly(self) -> bool:
        """Whether it takes seconds before it runs."""
        return any(optimizations.named(name).costly for name in self.values)

    @cached_property
    def name(self) -> str:
        """The words of a variant, joined by plus."""
        return "+".join(_word(name, value) for name, value in self.values.items()) or "baseline"

    @property
    def is_consistent(self) -> bool:
        """Whether no part excludes another."""
        every = self.values.keys()
        return not any(optimizations.named(name).excludes & every for name in every)

    def variant(self) -> Variant:
        """Return the plan as the benchmark takes it."""
        return named(self.name, self.values) if self.values else Variant("baseline")

    def without(self, *names: str) -> Candidate:
        """Return the plan with these optimizations left as they are."""
        return Candidate({n: value for n, value in self.values.items() if n not in names})

    def part(self, name: str) -> Candidate:
        """Return what it asks of one optimization, alone."""
        return Candidate({name: self.values[name]})

    def without_each(self) -> list[Candidate]:
        """Return the plan without each of its parts, if it has several."""
        return [self.without(name) for name in self.values] if len(self.values) > 1 else []

    def joined(self, single: Candidate) -> Candidate:
        """Return both, without the parts of the plan that exclude the single one, or lower
        precision as it does.
        """
        (name,) = single.values
        beside = optimizations.named(name).excludes | (LOWERING if name in LOWERING else set())
        idle = [n for n in self.values if n in beside or name in optimizations.named(n).excludes]
        return self.without(*idle) + single

    def neighbours(self, singles: Sequence[Candidate]) -> list[Candidate]:
        """Return the plan without each of its parts, then with each single change it has not; for
        a compiled plan those of the uncompiled one, too.
        """
        new = [single for single in singles if not single.values.items() <= self.values.items()]
        near = [*self.without_each(), *map(self.joined, new)]
        costly = [name for name in self.values if optimizations.named(name).costly]
        return near + self.without(*costly).neighbours(singles) if costly else near

    def __add__(self, other: Candidate) -> Candidate:
        """Return both; the other's value where they name the same optimization."""
        values = {**self.values, **other.values}
        names = [entry.name for entry in CATALOG if entry.name in values]
        return Candidate({name: values[name] for name in names})


BASELINE = Candidate({})
# Compiles the whole model where the rule takes its repeated blocks.
WHOLE = Candidate({"compile": {"enabled": True, "scope": "model"}})


def candidates(
    hardware: Hardware,
    facts: Facts,
    keep: Collection[str] = (),
    others: Sequence[Facts] = (),
    objective: str = "time",
) -> list[Candidate]:
    """Return the single changes that do something to one of the models, in the catalog's order.

    `others` are the facts of further models; optimizations in `keep` are left out, as is what
    changes the results. For the `objective` memory, what saves some for time is offered too.
    """
    every, found = (facts, *others), dict[str, Candidate]()
    for entry in CATALOG:
        if entry.effect is Effect.CHANGES_MODEL or entry.name in keep:
            continue
        for one in every:
            values = [*entry.candidates(hardware, one)]
            values += entry.saving(hardware, one) if objective == "memory" else ()
            for single in (Candidate({entry.name: value}) for value in values):
                config = single.variant().config
                assert config is not None
                if any(d.active for facts in every for d in plan(config, hardware, facts)):
                    found.setdefault(single.name, single)
    return list(found.values())


def strongest(singles: Sequence[Candidate]) -> Candidate:
    """Return the combination that the machine suggests: the first value of all that may be joined.

    It has no choice among equals (how many threads, which attention kernel), and lowers precision
    once at most.
    """
    whole = BASELINE
    for single in singles:
        (name,) = single.values
        lowers_twice = name in LOWERING and LOWERING & whole.values.keys()
        is_choice = optimizations.named(name).rivals or name in whole.values
        if not is_choice and not lowers_twice and (whole + single).is_consistent:
            whole = whole + single
    return whole


def _word(name: str, value: Any) -> str:
    """Return the variant's word for a value: `bf16`, `tf32:medium`, `compile:reduce-overhead`."""
    entry = optimizations.named(name)

    def spelled_out(value: Any) -> Any:  # `compile` is its default mode, too
        return entry.Options.model_validate(value) if entry.fields else (type(value), value)

    for word, values in words().items():
        if values.keys() == {name} and spelled_out(values[name]) == spelled_out(value):
            return word
    if isinstance(value, Mapping):
        value = "/".join(f"{key}={one}" for key, one in value.items() if key != "enabled")
    return name if value is True else f"{name}:{value}"
