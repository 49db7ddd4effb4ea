"""What is worth trying here, every value that the catalog offers, and what the parts are worth."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speedkit_jupyter import optimizations
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import ratio_of
from speedkit_jupyter.measure.results.statistics import PRECISE, SAME, Ratio, bonferroni_share
from speedkit_jupyter.measure.subject.variants import Variant, named, words
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.planning import plan

# One of these is enough to begin with.
LOWERING = frozenset(entry.name for entry in CATALOG if entry.lowers)
# A gain below this is not worth a change. Compiling has to bring it over the best plan without it,
# since it takes seconds at every start.
WORTH_IT = 1.02
# What seems to bring so much is no idle part, however few the rounds are that say it.
MUCH = 1.05


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
        """Return the plan as the benchmark takes it."""
        return named(self.name, self.values) if self.values else Variant("baseline")

    def without(self, *names: str) -> Candidate:
        """Return the plan with these optimizations left as they are."""
        return Candidate({n: value for n, value in self.values.items() if n not in names})

    def part(self, name: str) -> Candidate:
        """Return what it asks of one optimization, alone."""
        return self.without(*(key for key in self.values if key != name))

    def __add__(self, other: Candidate) -> Candidate:
        """Return both; the other's value where they name the same optimization."""
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
    """Return the single changes that do something to one of the models, in the catalog's order.

    `others` are the facts of further models; optimizations in `keep` are left out, as is what
    changes the results. Where the `objective` is memory, what saves some for time is offered too.
    """
    every, found = (facts, *others), dict[str, Candidate]()
    for entry in CATALOG:
        if entry.effect is Effect.CHANGES_MODEL or entry.name in keep:
            continue
        for one in every:
            values = [*entry.candidates(hardware, one)]
            values += entry.saving(hardware, one) if objective == "memory" else ()
            for value in values:
                single = Candidate({entry.name: value})
                if any(_changes_something(single, hardware, facts) for facts in every):
                    found.setdefault(single.name, single)
    return list(found.values())


def strongest(singles: Sequence[Candidate]) -> Candidate:
    """Return the combination that the machine suggests: the first value of all that may be joined.

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
    """Return both, without the parts of the plan that mean nothing beside it."""
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
    """Return the variant's word for a value: `bf16`, `tf32:medium`, `compile:reduce-overhead`."""
    asked = _spelled_out(name, value)
    for word, values in words().items():
        if values.keys() == {name} and _spelled_out(name, values[name]) == asked:
            return word
    if not isinstance(value, Mapping):
        return name if value is True else f"{name}:{value}"
    default = optimizations.named(name).Options().model_dump()
    first, *rest = default
    other = {
        field: value[field] for field in rest if value.get(field, default[field]) != default[field]
    }
    fields = [
        f if v is True else f"without {f}" if v is False else str(v) for f, v in other.items()
    ]
    return f"{name}:{'/'.join(fields) or value[first]}"


def _spelled_out(name: str, value: Any) -> Any:
    """Return all fields of a value, since `compile` is its default mode too."""
    optimization = optimizations.named(name)
    if optimization.fields:
        return optimization.Options.model_validate(value)
    return type(value), value


# What the parts of a plan are worth.


@dataclass(frozen=True)
class Part:
    """One optimization of a plan. `ratio` is how many times as fast the plan is with it as without
    it; None where that was not measured.
    """

    name: str
    word: str
    ratio: Ratio | None

    @property
    def is_proven(self) -> bool:
        """Whether leaving it out costs something, and enough for what it costs itself."""
        return (
            self.ratio is not None and self.ratio.low > 1 and self.ratio.median >= least(self.name)
        )

    @property
    def is_clear(self) -> bool:
        """Whether more rounds would change nothing: proven, worth too little, or measured well."""
        ratio = self.ratio
        if ratio is None or self.is_proven:
            return True
        return ratio.high < least(self.name) or ratio.is_precise(PRECISE)

    @property
    def is_idle(self) -> bool:
        """Whether it is measured, not proven, and does not seem to bring much either."""
        return self.ratio is not None and not self.is_proven and self.ratio.median < MUCH


def least(name: str) -> float:
    """Return what an optimization has to bring: more where it lowers precision or costs seconds."""
    return WORTH_IT if name in LOWERING or optimizations.named(name).costly else 1 + SAME


def pays(candidate: Candidate, gains: Mapping[str, float], others: Sequence[Candidate]) -> bool:
    """Return whether it leads each plan that lacks some of its parts by what these have to bring.

    `gains` are how many times better each plan looks, by its name.
    """
    return all(
        gains[candidate.name]
        > gains[plan.name] * max(map(least, candidate.values.keys() - plan.values))
        for plan in others
        if plan.values.items() < candidate.values.items()
    )


def without_each(whole: Candidate) -> list[Candidate]:
    """Return the whole without each of its parts: first those that need proof the most."""

    def order(name: str) -> tuple[bool, bool]:
        return name not in LOWERING, not optimizations.named(name).costly

    return [
        whole.without(name) for name in sorted(whole.values, key=order) if len(whole.values) > 1
    ]


def parts_of(whole: Candidate, comparison: Comparison) -> list[Part]:
    """Return each part of the plan, by the rounds that have the plan with and without it."""
    error = bonferroni_share(comparison.error, 2 * len(whole.values))
    records = {record.name: record for record in comparison.records if not record.failure}
    after, parts = records.get(whole.name), []
    for name in whole.values:
        before = records.get(whole.without(name).name)
        ratio = ratio_of(before, after, error) if before and after else None
        parts.append(Part(name, whole.part(name).name, ratio))
    return parts
