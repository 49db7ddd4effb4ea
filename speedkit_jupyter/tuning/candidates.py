"""What is worth trying here: every value that the catalog offers for this model and machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speedkit_jupyter import optimizations
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.subject.variants import Variant, named, words
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.planning import plan

# One of these is enough to begin with.
LOWERING = frozenset(entry.name for entry in CATALOG if entry.lowers)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan by its parts: config values by optimization."""

    values: Mapping[str, Any]

    @property
    def costly(self) -> bool:
        """Whether it takes seconds before it runs."""
        return any(optimizations.named(name).costly for name in self.values)

    @property
    def name(self) -> str:
        """The words of a variant, joined by plus."""
        return "+".join(_word(name, value) for name, value in self.values.items()) or "baseline"

    def variant(self) -> Variant:
        """As the benchmark takes it."""
        return named(self.name, self.values) if self.values else Variant("baseline")

    def without(self, *names: str) -> Candidate:
        """The same with these optimizations left as they are."""
        return Candidate({n: value for n, value in self.values.items() if n not in names})

    def part(self, name: str) -> Candidate:
        """What it asks of one optimization, alone."""
        return self.without(*(key for key in self.values if key != name))

    def __add__(self, other: Candidate) -> Candidate:
        """Both; the other's value where they name the same optimization."""
        values = {**self.values, **other.values}
        order = [optimization.name for optimization in CATALOG if optimization.name in values]
        return Candidate({name: values[name] for name in order})


BASELINE = Candidate({})


def candidates(
    hardware: Hardware,
    facts: Facts,
    keep: Collection[str] = (),
    others: Sequence[Facts] = (),
    objective: str = "time",
) -> list[Candidate]:
    """Single changes, in the catalog's order; those that change nothing here are left out, and
    those of optimizations to `keep` as they are.

    With facts of `others` it is what changes something of any of these models.
    What changes the model's arithmetic is not among them: that has to be named. Where the
    objective is memory, what saves some for time is.
    """
    every = (facts, *others)
    singles = [
        Candidate({optimization.name: value})
        for optimization in CATALOG
        if optimization.effect is not Effect.CHANGES_MODEL and optimization.name not in keep
        for value in _each_once(
            value
            for facts_of_one in every
            for value in _values(optimization, hardware, facts_of_one, objective)
        )
    ]
    return [
        single
        for single in singles
        if any(_changes_something(single, hardware, facts_of_one) for facts_of_one in every)
    ]


def _values(
    optimization: Optimization, hardware: Hardware, facts: Facts, objective: str
) -> tuple[Any, ...]:
    values = optimization.candidates(hardware, facts)
    return (*values, *optimization.saving(hardware, facts)) if objective == "memory" else values


def _each_once(values: Iterable[Any]) -> list[Any]:
    """Also where they have no hash."""
    kept: list[Any] = []
    for value in values:
        if (type(value), value) not in [(type(earlier), earlier) for earlier in kept]:
            kept.append(value)
    return kept


def strongest(singles: Sequence[Candidate]) -> Candidate:
    """The combination that the machine suggests: all that may be joined, the first value of each.

    Without what is a choice among equals (how many threads, which attention kernel), without what
    means nothing beside what is there, and without a second lowering of precision.
    """
    whole = Candidate({})
    for single in singles:
        (name,) = single.values
        lowers_twice = name in LOWERING and LOWERING & whole.values.keys()
        joins = not optimizations.named(name).rivals and not lowers_twice
        if joins and name not in whole.values and means_something(whole + single):
            whole = whole + single
    return whole


def joined(plan: Candidate, single: Candidate) -> Candidate:
    """Both, without the parts of the plan that mean nothing beside it."""
    (name,) = single.values
    beside = optimizations.named(name).excludes
    idle = [n for n in plan.values if n in beside or name in optimizations.named(n).excludes]
    return plan.without(*idle) + single


def neighbours(plan: Candidate, singles: Sequence[Candidate]) -> list[Candidate]:
    """Return the plan with each single change that it does not have, what it excludes left out."""
    return [
        joined(plan, single)
        for single in singles
        if not single.values.items() <= plan.values.items()
    ]


def means_something(plan: Candidate) -> bool:
    """Whether each part does something beside the others."""
    return not any(optimizations.named(name).excludes & plan.values.keys() for name in plan.values)


def _changes_something(candidate: Candidate, hardware: Hardware, facts: Facts) -> bool:
    config = candidate.variant().config
    return config is not None and any(d.active for d in plan(config, hardware, facts))


def _word(name: str, value: Any) -> str:
    """The variant word for a value: `bf16`, `tf32:medium`, `compile:reduce-overhead`."""
    asked = _spelled_out(name, value)
    for word, values in words().items():
        if values.keys() == {name} and _spelled_out(name, values[name]) == asked:
            return word
    shown = _fields(name, value) if isinstance(value, Mapping) else value
    return name if shown is True else f"{name}:{shown}"


def _fields(name: str, value: Mapping[str, Any]) -> Any:
    """What no word names, by the fields that differ from their defaults: `without gelu`."""
    default = optimizations.named(name).Options().model_dump()
    first, *rest = default
    other = {
        field: value[field] for field in rest if value.get(field, default[field]) != default[field]
    }
    words = [
        field if v is True else f"without {field}" if v is False else str(v)
        for field, v in other.items()
    ]
    return "/".join(words) or value[first]


def _spelled_out(name: str, value: Any) -> Any:
    """All fields of a value, where the option has several: `compile` is its default mode too."""
    optimization = optimizations.named(name)
    if optimization.fields:
        return optimization.Options.model_validate(value)
    return type(value), value
